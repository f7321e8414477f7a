"""Check the requirements of studies of trees: a sandbox for code, the questions, and the judge."""

from collections.abc import Iterator

from sandboxes.trees.repl.judge import make_judge
from sandboxes.trees.repl.papers import make_papers
from sandboxes.trees.repl.process import find_obstacle
from tune_study.placement.resources import GameRequirements
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan


def check_papers(plan: StudyPlan) -> None:
    """Raise PlanError if no code can be confined here, or if the questions or the judge of an arm are wrong."""
    if obstacle := find_obstacle():
        raise PlanError(obstacle)
    for papers in (config.env.papers for config in plan.ppo_configs if config.env.kind.has_trees):
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


REQUIREMENTS = GameRequirements(check_papers, describe_judge)
