"""Families of studies. A family declares everything about one kind of run in one object.

Objects that need torch, pandas or Ray are named as "module:NAME" and imported on use (`pkgutil.resolve_name`), so that
plans, reports and runs import only what they need.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from trainable.config.base_config import BaseRunConfig
from trainable.config.games import Game
from trainable.config.run_config import RunConfig
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
    "imported": "search_spaces.language_model.family:IMPORTED",
    "command": "search_spaces.command_study:COMMAND",
}
"""Maps the name of a family in study.json to its `Family`."""


@cache
def get_family(name: str) -> "Family":
    """Import the family of this name, a key of `FAMILIES`. Raises KeyError for other names."""
    family: Family = resolve_name(FAMILIES[name])
    return family


def list_families() -> list["Family"]:
    """Import all families."""
    return [get_family(name) for name in FAMILIES]


@dataclass(frozen=True)
class Preset:
    """The scale at which a study runs."""

    settings: Settings
    """Settings that it changes."""
    n_seeds: int
    """Default number of seeds per arm."""
    variant_of: str = ""
    """The preset of which this is a variant, or empty. Studies have the same axis values and settings under both."""
    small_gpu_settings: Settings = field(default_factory=dict)
    """Further settings for GPUs on which runs would not fit otherwise. They change results."""
    own_scale: Settings = field(default_factory=dict)
    """Settings that override those that studies fix, except the settings in which their arms differ."""


class DisplayColumn(NamedTuple):
    """A column that is shown while a run trains."""

    column: str
    """Name of the column in the rows of metrics.jsonl."""
    name: str
    """Heading of the column in the table, and name of the field in a log line."""
    format_spec: str
    """Format of the numbers, as in Python's `format`."""
    fallback_column: str = ""
    """The column to show until this one has a value, or empty."""


class OutcomeColumn(NamedTuple):
    """A column of `analysis.load(...).trials` by which arms are compared."""

    column: str
    margin: float | None = None
    """The difference within which two arms count as equal, or None for the default of its unit."""
    contrast: str = ""
    """Why declared contrasts are estimated in this column, for the report. Empty if they are not."""
    is_common: bool = False
    """Whether every study of the family has it. Otherwise, some runs have no value."""
    is_compared: bool = True
    """Whether arms are compared by it, or only the pairs of declared contrasts."""


class Remark(NamedTuple):
    """A remark about configurations with which a run has nothing to learn, or cannot learn."""

    applies: Callable[[Any], bool]
    """Called with a configuration of the family's class. Returns whether the remark applies."""
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
    """The tune.Trainable for these configurations, as "module:CLASS". Empty for runs that were trained elsewhere."""
    presets: Mapping[str, Preset]
    make_template_values: Callable[[Any], dict[str, str]]
    """Called with a configuration. Returns the values that name templates may use."""

    # Outputs of a run, and how they are read.
    step_columns: tuple[Column, ...]
    """Measurements in each row."""
    trial_columns: tuple[Column, ...]
    """Columns of `trials`, in order, in addition to names, axis and settings."""
    outcomes: tuple[OutcomeColumn, ...]
    """The first is the primary outcome, which decides verdicts. The others support it and are adjusted together."""
    is_higher_better: bool
    """Whether larger values of the primary outcome are better."""
    summarize: str
    """Function, as "module:NAME", that computes `steps_done` and the trial columns that no file contains. Called with
    the rows of a run, sorted by step, the step up to which the run keeps its last values (None: the step of its
    last row), and the trial columns."""
    report: str
    """The `analysis.report.section.Report` of a study, as "module:NAME"."""
    get_environment: Callable[[Mapping[str, Any]], str]
    """Called with the settings of study.json. Returns the name of the environment in which the policy acts."""
    progress_columns: tuple[DisplayColumn, ...]
    """Columns of the progress table. The first is the primary metric, which `status` shows, too."""
    log_columns: tuple[DisplayColumn, ...]
    """Columns of the line that each step writes to the log of its run. Some of these lines also go to standard output,
    if it is not a terminal."""
    description: Any = None
    """For toy studies, the `sandboxes.toys.study.Description` that their report reads."""
    has_symptoms: bool = False
    """Whether rows are steps of fine-tuning, of which the reading commands know symptoms, alarms and collapses."""
    own_prefixes: tuple[str, ...] = ()
    """Prefixes of columns that are not in `step_columns`: the measures of plug-in games, or of other trainers."""
    max_own_columns: int = 32
    """Maximum number of such columns."""

    # Requirements of a run.
    get_model_path: Callable[[Any], str | None] = lambda config: None
    """Called with a configuration. Returns the path or hub id of the model that a run loads and trains, or None if the
    run builds its model."""
    estimate_bytes: Callable[[Any, int], tuple[int, int]] | None = None
    """Called with a configuration and the parameter count of the loaded model. Returns the bytes of a checkpoint, and
    the bytes of a row with everything derived from it. None if the shape of the model determines both."""
    estimate_step_seconds: Callable[[Any], float | None] | None = None
    """Called with a configuration. Returns the measured seconds of a training step of one run on one core, including
    evaluations, or None for a task that was not measured. None if the model determines it."""
    format_command: Callable[[Any], str] = lambda config: ""
    """Called with a configuration. Returns the command that trains a run, for the plan; empty if no command does."""
    describe: Callable[[Any], Iterable[str]] = lambda config: ()
    """Called with a configuration. Returns further lines of the plan."""
    explain_obstacle: Callable[[Any], str] = lambda config: ""
    """Called with a configuration. Returns in a sentence why a run cannot start on this machine; empty if it can."""
    has_batched_seeds: bool = False
    """Whether one trial trains all seeds of an arm together, each as a separate run."""

    # Names that can be typed.
    name_suffix: str = ""
    """Template that is appended to the names of a study and of its runs if the study has no published names."""
    games: Mapping[str, Game] = field(default_factory=dict)
    """The games that --env selects, by name. Empty if runs play no games."""
    search_space: tuple[Dimension, ...] = ()
    """The default space of `search`, or empty if it must always be typed."""
    part_checks: Mapping[str, str] = field(default_factory=dict)
    """For each setting that names a plug-in, the function that tries it, as "module:NAME". For the settings of a
    language model, see `trainable.part_checks`."""
    remarks: str = ""
    """A tuple of `Remark` about configurations, as "module:NAME", or empty."""

    @property
    def is_fine_tuning(self) -> bool:
        """Whether our trainer fine-tunes the language model of `get_model_path`, on GPUs if there are any."""
        return issubclass(self.config_class, RunConfig)

    def make_game_settings(self, game: str, preset: str) -> dict[str, object]:
        """Collect the settings that a game changes under a preset. Raise KeyError if the game does not exist."""
        presets = self.games[game].presets
        name = preset if preset in presets else self.presets[preset].variant_of
        return {"env.name": game, **self.games[game].settings, **presets.get(name, {})}

    @property
    def primary_metric(self) -> str:
        """The column of rows that measures how good a run is."""
        return self.progress_columns[0].column

    @property
    def primary_column(self) -> str:
        """The trial column that answers a study's question."""
        return self.outcomes[0].column

    @property
    def secondary_columns(self) -> tuple[str, ...]:
        """The other trial columns that are compared, adjusted together."""
        return tuple(outcome.column for outcome in self.outcomes[1:] if outcome.is_compared)

    @property
    def margins(self) -> dict[str, float]:
        """For each outcome with a margin, the difference within which two arms count as equal."""
        return {outcome.column: outcome.margin for outcome in self.outcomes if outcome.margin is not None}

    @property
    def contrasted_columns(self) -> dict[str, str]:
        """The trial columns for which declared contrasts are estimated, with the reason."""
        return {outcome.column: outcome.contrast for outcome in self.outcomes if outcome.contrast}

    @property
    def common_columns(self) -> tuple[str, ...]:
        """The outcome columns that every study has."""
        return tuple(outcome.column for outcome in self.outcomes if outcome.is_common)
