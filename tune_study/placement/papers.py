"""Check what a study of trees of rollouts needs: a sandbox for code, its questions, and its judge."""

from collections.abc import Iterable

from trainable.config.run_config import RunConfig
from tune_study.plan.errors import PlanError


def check_papers(configs: Iterable[RunConfig]) -> None:
    """Raise PlanError if no code can be confined here, or if the questions or the judge of a configuration are wrong.

    Configurations of games without trees are not checked.
    """
    sections = [config.env for config in configs if config.env.kind.has_trees]
    for env in {section.model_dump_json(): section for section in sections}.values():
        # They import NumPy and Arrow, which no other plan needs.
        from trainable.envs.games.make import make_papers
        from trainable.envs.repl.judge import make_judge
        from trainable.envs.repl.process import find_obstacle

        if obstacle := find_obstacle():
            raise PlanError(obstacle)
        try:
            make_papers(env.papers)
        except ValueError as error:
            raise PlanError(f"--set env.papers.file={env.papers.file}: {error}") from None
        if env.papers.score == "judge" and (obstacle := make_judge(env.papers).find_obstacle()):
            raise PlanError(f"{obstacle} Or type --set env.papers.score=char_f1, which needs no judge.")
