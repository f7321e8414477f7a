"""Check the requirements of studies of trees: a sandbox for code and its memory, the questions, and the judge."""

from collections.abc import Iterator

from sandboxes.trees.repl.judge import make_judge
from sandboxes.trees.repl.papers import make_papers
from sandboxes.trees.repl.process import find_obstacle
from trainable.config.run_config import RunConfig
from tune_study.host import machine_checks
from tune_study.placement.resources import GameRequirements
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan

_MIN_MIB = 128
"""Minimum of env.papers.execution_mib."""


def check_papers(plan: StudyPlan) -> None:
    """Raise PlanError if no code can be confined here, or if the questions or the judge of an arm are wrong."""
    if obstacle := find_obstacle():
        raise PlanError(obstacle)
    for config in _list_tree_configs(plan):
        papers = config.env.papers
        try:
            make_papers(papers)
        except ValueError as error:
            raise PlanError(f"--set env.papers.file={papers.file}: {error}") from None
        if papers.score == "judge" and (obstacle := make_judge(papers).find_obstacle()):
            raise PlanError(f"{obstacle} Or type --set env.papers.score=char_f1, which needs no judge.")


def describe_judge(plan: StudyPlan) -> Iterator[str]:
    """Describe what is sent to the judge, if there is one."""
    papers = plan.ppo_config.env.papers
    if papers.score == "judge":
        sent_text = f"Questions, passages, answers and the key in {papers.judge_key_variable}"
        yield f"{sent_text} are sent to the judge at {papers.judge_url}."


def explain_repl_shortage(plan: StudyPlan) -> str:
    """Explain why the REPLs of one tree cannot use all their memory here, and what to type; empty if they can."""
    available_mib = machine_checks.measure_available_memory() >> 20
    for config in _list_tree_configs(plan):
        papers = config.env.papers
        # The root's, and one per child of a call.
        size, num_repls = papers.execution_mib, 1 + min(papers.max_children_per_call, papers.max_children)
        if num_repls * size > available_mib:
            return (
                f"DOES NOT FIT: a tree has up to {num_repls} REPLs of {size} MiB, and {available_mib} MiB are "
                f"available: type --set env.papers.execution_mib={max(available_mib // num_repls, _MIN_MIB)}, or --set "
                f"env.papers.max_children_per_call=1."
            )
    return ""


def _list_tree_configs(plan: StudyPlan) -> list[RunConfig]:
    return [config for config in plan.ppo_configs if config.env.kind.has_trees]


REQUIREMENTS = GameRequirements(check_papers, describe_judge, explain_repl_shortage)
