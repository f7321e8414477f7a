"""Check and describe the file of a data set that a study plays as a game."""

from collections.abc import Iterator

from trainable.config.run_config import RunConfig
from trainable.envs.games.dataset import FIRST_TRAINING_SEED, DataSet
from trainable.envs.games.make import make_environment
from tune_study.placement.resources import GameRequirements
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan


def check_data_files(plan: StudyPlan) -> None:
    """Raise PlanError if the file of an arm cannot be used, or if its seeds would mix training with validation."""
    for config, game in _list_games(plan):
        env = config.env
        try:
            num_rows = len(game.rows.sets["validation"])
        except ValueError as error:
            raise PlanError(f"--set env.dataset.file={env.dataset.file}: {error}") from None
        if env.val_env_groups > num_rows:
            raise PlanError(
                f"{env.dataset.file} has {num_rows} rows for validation, and env.val_env_groups={env.val_env_groups}: "
                f"type --set env.val_env_groups={num_rows}, or less."
            )
        if env.seed_train < FIRST_TRAINING_SEED or env.seed_val + env.val_env_groups > FIRST_TRAINING_SEED:
            raise PlanError(
                f"env.seed_train={env.seed_train} or env.seed_val={env.seed_val} does not fit a data set, whose "
                f"validation rows have the seeds below {FIRST_TRAINING_SEED}: leave them at 10000 and 123."
            )


def describe_data_files(plan: StudyPlan) -> Iterator[str]:
    """Describe how many rows each set has, and how many rows repeat a prompt."""
    for game in {game.file: game for _, game in _list_games(plan)}.values():
        rows = game.rows
        counts = ", ".join(f"{len(rows.sets[name])} {name}" for name in ("training", "validation", "test"))
        twins = f"; {rows.num_twins} rows repeat an earlier prompt and are left out" if rows.num_twins else ""
        yield f"Data: {game.file} has {counts} rows, by the hash of the prompt{twins}"


def _list_games(plan: StudyPlan) -> Iterator[tuple[RunConfig, DataSet]]:
    for config in plan.ppo_configs:
        game = make_environment(config.env)
        if isinstance(game, DataSet):
            yield config, game


REQUIREMENTS = GameRequirements(check_data_files, describe_data_files)
