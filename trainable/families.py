"""A family of studies: everything that is said of one kind of run, as one object, and the list of all families.

What needs torch, pandas or Ray is named as "module:NAME" and imported where it is used (`pkgutil.resolve_name`), so
that a plan, a report and a run each import only their own part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from trainable.config.base_config import BaseRunConfig
from trainable.config.games import Game
from trainable.config.run_config import RunConfig, list_outside_settings
from trainable.runs.records import Column
from trainable.runs.study_record import Dimension

Settings = Mapping[str, object]
"""Values by the dotted name of a setting of a family's configuration."""

FAMILIES: Mapping[str, str] = {
    "ppo": "search_spaces.language_model.family:PPO",
    "update_rules": "sandboxes.update_rules.family:UPDATE_RULES",
    "distillation": "sandboxes.distillation.family:DISTILLATION",
    "gradient_variance": "sandboxes.distillation.family:GRADIENT_VARIANCE",
    "vector_rewards": "sandboxes.vector_rewards.study:VECTOR_REWARDS",
    "pedagogy": "sandboxes.pedagogy.study:PEDAGOGY",
}
"""Name of a family in study.json -> where its `Family` is declared."""


@cache
def get_family(name: str) -> "Family":
    """The family of this name, a key of `FAMILIES`. Raises KeyError for another."""
    family: Family = resolve_name(FAMILIES[name])
    return family


def list_families() -> list["Family"]:
    """All families."""
    return [get_family(name) for name in FAMILIES]


@dataclass(frozen=True)
class Preset:
    """The scale at which a study runs."""

    settings: Settings
    """Settings that it changes."""
    n_seeds: int
    """Default number of seeds per arm."""
    variant_of: str = ""
    """Another preset, of which it is a variant: the studies then have the axis values and the settings that they have
    under that preset. Empty if it is none."""
    uses_gpus: bool = False
    """Whether its runs are meant for GPUs."""
    small_gpu_settings: Settings = field(default_factory=dict)
    """Further settings for GPUs on which the runs do not fit without them. They change results."""


class DisplayColumn(NamedTuple):
    """A column that is shown while a run trains."""

    column: str
    """Name of the column in the rows of metrics.jsonl."""
    name: str
    """Heading of the column in the table, and name of the field in a log line."""
    format_spec: str
    """Format of the numbers, as in Python's `format`."""
    fallback_column: str = ""
    """The column to show until this one has a value; empty if there is none."""


class OutcomeColumn(NamedTuple):
    """A column of `analysis.load(...).trials` by which arms are compared."""

    column: str
    margin: float | None = None
    """The difference within which two arms count as equal; None for that of its unit."""
    contrast: str = ""
    """Why declared contrasts are estimated in it, for the report; empty: they are not."""
    is_common: bool = False
    """Whether every study of the family has it; otherwise some runs have no value."""
    is_compared: bool = True
    """Whether arms are compared by it, or only the pairs of declared contrasts."""


class Remark(NamedTuple):
    """A remark about a configuration with which a run has nothing to learn, or cannot learn it."""

    applies: Callable[[Any], bool]
    """Function of a configuration of the family's class that returns whether the remark holds."""
    sentence: str
    """What happens and why. Settings in braces, such as {c.actor.lr}, are filled in."""


@dataclass(frozen=True)
class Family:
    """Studies that share a trainer, a type of configuration, and tables."""

    name: str
    """Name of the family in study.json and in the tables."""
    config_class: type[BaseRunConfig]
    """Configuration of a run."""
    trainable: str
    """The tune.Trainable for these configurations, as "module:CLASS"."""
    presets: Mapping[str, Preset]
    make_template_values: Callable[[Any], dict[str, str]]
    """Function of a configuration that returns the values that name templates may use."""

    # What a run writes, and how it is read.
    step_columns: tuple[Column, ...]
    """Measurements in each row."""
    trial_columns: tuple[Column, ...]
    """Columns of `trials`, in order, in addition to names, axis and settings."""
    outcomes: tuple[OutcomeColumn, ...]
    """The first is the primary outcome, which gives the verdicts; the others support it and are adjusted together."""
    is_higher_better: bool
    """Whether a larger primary outcome is a better one."""
    summarize: str
    """Function, as "module:NAME", that computes `steps_done` and the trial columns that no file contains. Its arguments
    are the rows of a run, sorted by step, and the step up to which the run keeps its last values (None: the step of its
    last row)."""
    report: str
    """The `analysis.report.section.Report` of a study, as "module:NAME"."""
    get_environment: Callable[[Mapping[str, Any]], str]
    """Function of the settings of study.json that returns what the policy acts in."""
    progress_columns: tuple[DisplayColumn, ...]
    """Columns of the progress table. The first is the primary metric, which `status` shows too."""
    log_columns: tuple[DisplayColumn, ...]
    """Columns of the line that each step writes to the log of its run. Standard output gets some of these lines when it
    is not a terminal."""
    description: str = ""
    """What the report of toy studies says of the family, as "module:NAME"."""
    own_prefixes: tuple[str, ...] = ()
    """How columns may begin that are no `step_columns`, the measures of a game of the user."""

    # What a run needs.
    get_model_path: Callable[[Any], str | None] = lambda config: None
    """Function of a configuration that returns the path or hub id of the model that a run loads and trains, or None if
    the run builds its own model."""
    estimate_bytes: Callable[[Any, int], tuple[int, int]] | None = None
    """Function of the configuration and of the parameter count of the loaded model that returns two sizes in bytes:
    that of a checkpoint, and that of a row together with everything derived from the row. None if the shape of the
    model determines both."""
    estimate_step_seconds: Callable[[Any], float | None] | None = None
    """Function of the configuration that returns the seconds of a training step of one run on a core, evaluations
    included, as measured; None for a task that was not. None if the model determines it."""
    has_batched_seeds: bool = False
    """Whether one trial trains all seeds of an arm together, each as a separate run."""

    # What can be typed.
    name_suffix: str = ""
    """Template that is appended to the names of a study and of its runs if the study has no published names."""
    games: Mapping[str, Game] = field(default_factory=dict)
    """The games that --env selects, by name; empty if the runs play none."""
    search_space: tuple[Dimension, ...] = ()
    """What `search` changes unless it is told otherwise; empty if that always has to be typed."""
    part_checks: Mapping[str, str] = field(default_factory=dict)
    """By setting that names a part of the user, the function that tries the part, as "module:NAME". Those of the
    settings of a language model are in `trainable.part_checks`."""
    remarks: str = ""
    """The remarks about its configurations, a tuple of `Remark` as "module:NAME"; empty if there are none."""

    def __post_init__(self) -> None:
        if self.estimate_bytes is None and not self.is_fine_tuning:
            # The sizes of a language model follow from its config.json; those of any other model only the family knows.
            raise ValueError(
                f"The family {self.name} sets no `estimate_bytes`. Only a family whose config_class is RunConfig may "
                "leave it out: set estimate_bytes=FUNCTION."
            )

    @property
    def is_fine_tuning(self) -> bool:
        """Whether the runs fine-tune the language model of `get_model_path`, on GPUs if there are any: their rows are
        training steps with symptoms, stop rules and gradient analyses."""
        return issubclass(self.config_class, RunConfig)

    def make_game_settings(self, game: str, preset: str) -> dict[str, object]:
        """The settings that come with a game under a preset. Raise KeyError for a game that does not exist."""
        presets = self.games[game].presets
        name = preset if preset in presets else self.presets[preset].variant_of
        return {"env.name": game, **self.games[game].settings, **presets.get(name, {})}

    @property
    def model_settings(self) -> tuple[str, ...]:
        """The settings that name a model, which may be a local folder."""
        return list_outside_settings(self.config_class, "model")

    @property
    def path_settings(self) -> tuple[str, ...]:
        """The settings that name a local file or folder, if they are set."""
        return list_outside_settings(self.config_class, "file")

    @property
    def primary_metric(self) -> str:
        """The column of rows that says how good a run is."""
        return self.progress_columns[0].column

    @property
    def primary_column(self) -> str:
        """The trial column that answers a study's question."""
        return self.outcomes[0].column

    @property
    def secondary_columns(self) -> tuple[str, ...]:
        """The trial columns that are compared in addition, all of them adjusted together."""
        return tuple(outcome.column for outcome in self.outcomes[1:] if outcome.is_compared)

    @property
    def margins(self) -> dict[str, float]:
        """By outcome, the difference within which two arms count as equal, where the family sets one."""
        return {outcome.column: outcome.margin for outcome in self.outcomes if outcome.margin is not None}

    @property
    def contrasted_columns(self) -> dict[str, str]:
        """The trial columns of which declared contrasts are estimated, each with the reason."""
        return {outcome.column: outcome.contrast for outcome in self.outcomes if outcome.contrast}

    @property
    def common_columns(self) -> tuple[str, ...]:
        """Those that every study has."""
        return tuple(outcome.column for outcome in self.outcomes if outcome.is_common)
