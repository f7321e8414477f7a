"""The files that describe a study and the status of its runs: study.json, run.json and status.json.

Both the driver that writes them and all code that reads them use these definitions. Values of a wrong type count as
damage. Unknown keys are ignored, so that files of newer versions can be read. A folder may come from somebody else, so
every text and list has a limit, far above all that is ever written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainable.config.run_config import format_validation_error
from trainable.config.setting_types import flatten_settings, format_value, require
from trainable.files.json_values import DamagedFileError, read_object, write_object
from trainable.files.paths import is_printable
from trainable.runs.records import STATUSES

STUDY_FILE, RUN_FILE, STATUS_FILE = "study.json", "run.json", "status.json"

SCHEMA = 2
"""Version of the format of the files. It increases when earlier versions can no longer read them."""

MAX_RUNS = 10_000
"""Maximum number of runs of a study. Ray Tune could not schedule more, and they could not be read at once."""

_MAX_NAME_BYTES = 255
"""Maximum length of a folder's name, in bytes."""

CENSORED = "censored"
"""The status of a run that a search stopped, or did not start, because others did better. Its rows end as if it were
interrupted, and do not tell what it would have reached."""
ENDED_STATUSES = ("completed", "early_stopped", CENSORED)
"""Statuses of runs that are never run again."""
OPEN_STATUSES = ("waiting", "running")
"""Statuses of runs that have not ended, used only while a driver runs their study."""

MAX_SEEDS = 401
"""Maximum number of seeds per arm: RunConfig accepts the seeds 0 to 400."""

_STRICT = ConfigDict(strict=True)

Text = Annotated[str, Field(max_length=100_000)]
SourceText = Annotated[str, Field(max_length=1_000_000)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
Seeds = Annotated[tuple[Count, ...], Field(max_length=MAX_RUNS)]
Arms = Annotated[tuple[Text, ...], Field(max_length=MAX_RUNS)]


def is_run_id(text: str) -> bool:
    """Check whether `text` can be a run_id, which names a folder. Plans and readers of study.json use this function.

    It must be printable, without slashes or a leading dot, so that it cannot name a folder outside the study's.
    """
    is_name = text != "" and not text.startswith(".") and "/" not in text and is_printable(text)
    return is_name and len(text.encode()) <= _MAX_NAME_BYTES


def _check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings`. Raise ValueError unless each can be a value in a table."""
    for name, value in flatten_settings(settings).items():
        if not isinstance(value, int | float | str | list | None) or (type(value) is int and abs(value) >= 2**63):
            raise ValueError(f"the setting {name} is no number, text or list")
    return settings


def check_wandb_project(text: str) -> str:
    """Return `text`. Raise ValueError unless it is empty or a valid name of a W&B project."""
    if len(text) > 128 or {*text} & {*"/\\#?%:"} or not is_printable(text):
        raise ValueError(
            f"{format_value(text)} is no project of W&B: a name has at most 128 characters, and none of / \\ # ? % :"
        )
    return text


WandbMode = Literal["offline", "online", "off"]
"""offline writes W&B runs to disk, and online sends every row."""
RunId = Annotated[str, require(is_run_id, "it is no name of a folder")]
Settings = Annotated[dict[str, Any], AfterValidator(_check_settings)]
Schema = Annotated[
    int,
    require(
        SCHEMA.__eq__,
        f"this version reads schema {SCHEMA}: use the version that wrote it (`versions` and `git` in the file), or run "
        "the study again with another --output",
    ),
]
Time = Annotated[str, require(lambda text: datetime.fromisoformat(text).tzinfo is not None, "it has no time zone")]
_ALL_STATUSES = (*STATUSES, *OPEN_STATUSES)


def find_total_steps(settings: Mapping[str, Any]) -> int | None:
    """Find the planned number of training steps in nested settings. None if they do not contain a valid number."""
    steps = flatten_settings(settings).get("trainer.total_training_steps")
    return steps if type(steps) is int and 0 < steps < 2**31 else None


@dataclass(frozen=True, config=_STRICT)
class AxisRecord:
    """The axis of a study, and its arms. See `search_spaces.declaration.study.Axis`."""

    setting: Text = ""
    option: Text = ""
    values: Arms = ()
    dose: Text = ""
    factors: tuple[Text, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class RunEntry:
    """An entry of `runs` in study.json: names of a run, and paths of its files below the output folder."""

    run_id: RunId
    arm: Text = ""
    seed: Count = 0
    study: Text = ""
    label: Text = ""
    experiment_name: Text = ""
    config_hash: Text = ""
    log: Text = ""
    checkpoints: Text = ""


@dataclass(frozen=True, config=_STRICT)
class RunRecord(RunEntry):
    """run.json: the names of a run, and its settings."""

    config: Settings = Field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class StatusRecord:
    """status.json: the status of a run."""

    run_id: Text
    status: Annotated[str, require(_ALL_STATUSES.__contains__, f"it is none of {', '.join(_ALL_STATUSES)}")]
    """One of `STATUSES`, or of `OPEN_STATUSES` while a driver runs the study. A run that waits to be continued keeps
    all other fields of its earlier status."""
    reason: Text = ""
    """Why the run has this status, as a sentence."""
    failure_class: Text = ""
    """Kind of the failure (see `trainable.runs.failures`). Empty unless the run failed and was not continued since."""
    stop_rule: Text = ""
    stop_value: FiniteFloat | None = None
    stop_threshold: FiniteFloat | None = None
    stop_step: Count | None = None
    trial_id: Text = ""
    """Id of the run's last Tune trial."""
    started_at: Time | None = None
    ended_at: Time | None = None
    """Times of the first start and the last end, in ISO 8601 and UTC, or None before these."""

    @property
    def display_text(self) -> str:
        """The status for display, such as `completed` or `failed (out of memory)`."""
        is_classified = self.failure_class and self.status not in OPEN_STATUSES
        return f"{self.status} ({self.failure_class})" if is_classified else self.status


@dataclass(frozen=True, config=_STRICT)
class SourceFile:
    """A file that a user wrote for the study: its path as typed, and its text."""

    path: Text
    sha256: Text
    text: SourceText


@dataclass(frozen=True, config=_STRICT)
class Git:
    """The commit of the sources, and whether they differed from it."""

    commit: Text
    dirty: bool = False


@dataclass(frozen=True, config=_STRICT)
class WandbTarget:
    """Where a start of a study logs to W&B. project: name of the project, or empty for the project of the study."""

    mode: WandbMode = "off"
    project: Annotated[Text, AfterValidator(check_wandb_project)] = ""


@dataclass(frozen=True, config=_STRICT)
class Start:
    """One start of a study. declaration: SHA-256 of the file that declared it."""

    versions: dict[Text, Text]
    git: Git | None = None
    at: Text = ""
    command: Text = ""
    declaration: Text | None = None
    wandb: WandbTarget | None = None


@dataclass(frozen=True, config=_STRICT)
class DeclaredContrast:
    """A comparison that was declared before the runs. needs_all_pairs: whether it is meaningless without all pairs."""

    name: Text
    pairs: tuple[tuple[Text, Text], ...]
    needs_all_pairs: bool = False


@dataclass(frozen=True, config=_STRICT)
class Look:
    """A look at the results: the numbers of ended runs, seeds (of the arm with most) and steps at that time."""

    at: Text
    runs: Count
    seeds: Count
    steps: Positive | None = None


@dataclass(frozen=True, config=_STRICT)
class ConfirmedStudy:
    """The study from which a confirmation runs an arm again."""

    run: Text
    seeds: Seeds
    """The seeds that the study had used when the confirmation began. None of them is used again."""


AS_BEFORE = "as-before"
"""The name of the arms of a fork that continue with the same settings."""


def name_fork_arm(remedy: str, step: int) -> str:
    """Name the arm of a fork that continues with a remedy, or `AS_BEFORE`, after `step`."""
    return f"{remedy}-from-{step}"


def _check_parents(entries: tuple[RunEntry, ...]) -> tuple[RunEntry, ...]:
    """Return `entries`. Raise ValueError if checkpoints of a run are not below the folder of its study."""
    for entry in entries:
        if not all(map(is_run_id, entry.checkpoints.split("/"))):
            raise ValueError(f"{format_value(entry.checkpoints)} is no path below a folder")
    return entries


@dataclass(frozen=True, config=_STRICT)
class ForkedStudy:
    """The study whose runs of one arm a fork continues, and from which steps."""

    run: Text
    folder: RunId
    """The name of its folder, which is beside that of the fork."""
    arm: Text
    parents: Annotated[tuple[RunEntry, ...], Field(max_length=MAX_RUNS), AfterValidator(_check_parents)]
    """Its runs of this arm, one per seed of the fork."""
    steps: Annotated[dict[Text, Positive], Field(max_length=MAX_RUNS)]
    """By arm of the fork, the step after which it continues."""

    def get_remedy(self, arm: str) -> str:
        """Return the name of the remedy of an arm of the fork, or `AS_BEFORE`."""
        return arm.removesuffix(name_fork_arm("", self.steps[arm]))


@dataclass(frozen=True, config=_STRICT)
class Dimension:
    """A setting that a search varies: over an interval, or over a few values.

    Example:
        >>> Dimension("actor.lr", 0.1, 10, is_log=True, is_relative=True).name
        'actor.lr'
        >>> Dimension("actor.kl_loss_coef", 1e-3, 1, is_log=True, condition=("actor.use_kl_loss", "True")).name
        'actor.kl_loss_coef if actor.use_kl_loss=True'
    """

    setting: Text
    """The dotted setting."""
    low: FiniteFloat = 0.0
    high: FiniteFloat = 0.0
    """`low` and `high`: ends of the interval, both 0 if the setting has `values`."""
    is_log: bool = False
    """Whether the interval is searched on a logarithmic scale."""
    is_relative: bool = False
    """Whether `low` and `high` are multiples of the preset's value. Learning rates, for example, need different
    intervals for tiny and for large models."""
    is_integer: bool = False
    """Whether only whole numbers are tried."""
    values: Arms = ()
    """The values to choose from, as typed. Empty for an interval."""
    condition: tuple[Text, Text] | tuple[()] = ()
    """(setting, value): the setting is varied only at points where an earlier dimension has this value, since, for
    example, the mass of one filter is meaningless for others. Empty if it is always varied."""

    @property
    def name(self) -> str:
        """The setting and its condition, since a setting may have one dimension per condition."""
        return f"{self.setting} if {'='.join(self.condition)}" if self.condition else self.setting


def _check_space(space: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    """Return `space`. Raise ValueError unless a sampler can draw from each dimension."""
    if len({dimension.name for dimension in space}) < len(space):
        raise ValueError("two dimensions have one name")
    for dimension in space:
        low, high = dimension.low, dimension.high
        is_valid = low < high and (low > 0 or not dimension.is_log)
        if dimension.is_integer:
            is_valid &= max(-low, high) < 2**53 and low.is_integer() and high.is_integer()
        if dimension.values:
            is_valid = len({*dimension.values}) == len(dimension.values)
        if not is_valid:
            raise ValueError(f"{format_value(dimension.name)} is neither an interval nor a choice of different values")
    return space


OBJECTIVES = (("success",), ("success", "cost"))
"""The possible objectives of a search."""


@dataclass(frozen=True, config=_STRICT)
class Search:
    """The objectives of a search, and its space."""

    space: Annotated[tuple[Dimension, ...], Field(min_length=1, max_length=1000), AfterValidator(_check_space)]
    """The settings that it varies."""
    objectives: Annotated[
        tuple[str, ...], require(OBJECTIVES.__contains__, "it is neither success nor success and cost")
    ]
    """`success` (the primary outcome of the study), and `cost` (tokens) to prefer cheap points, too."""
    num_points: Annotated[int, Field(ge=1, le=MAX_RUNS)]
    """Number of points to try, including the default."""
    points_per_round: Annotated[int, Field(ge=1, le=MAX_RUNS)] = 4
    """Number of points that are drawn from the same results, and run in parallel if there is room."""
    seed: Count = 0
    """Seed of the draws."""
    confirm_seeds: Annotated[int, Field(ge=0, le=MAX_SEEDS)] = 5
    """Number of fresh seeds for comparing the best point with the default at the end, or 0."""
    grace_steps: Positive | None = None
    """The first step at which successive halving compares runs, or None if every run trains all its steps."""


@dataclass(frozen=True, config=_STRICT)
class StudyRecord:
    """study.json: the question of the study, its settings, its code and its runs."""

    name: Text
    preset: Text
    axis: AxisRecord
    seeds: Seeds
    runs: Annotated[tuple[RunEntry, ...], Field(max_length=MAX_RUNS)]
    settings: Annotated[
        Settings,
        require(
            lambda settings: not settings or find_total_steps(settings) is not None,
            "trainer.total_training_steps is no whole number above 0",
        ),
    ]
    """The settings that all arms share, nested."""
    defaults: Settings = Field(default_factory=dict)
    """The default of each setting."""
    schema: Schema = SCHEMA
    question: Text = ""
    run: Text = ""
    family: Text = "ppo"
    model: Text = ""
    preset_reason: Text = ""
    preset_steps: Positive | None = None
    """Steps of the preset at the first start."""
    baseline: Annotated[Text, BeforeValidator(lambda value: value or "")] = ""
    """The arm with which the others are compared, or empty."""
    outcomes: tuple[Text, ...] = ()
    margins: dict[Text, FiniteFloat] = Field(default_factory=dict)
    contrasts: tuple[DeclaredContrast, ...] = ()
    """Margins and contrasts as of the first start: changing them after a look at results would invalidate tests."""
    extra_seeds: dict[Text, Seeds] = Field(default_factory=dict)
    """By arm, its seeds beyond `seeds`."""
    planned_seeds: Positive | None = None
    planned_baseline_seeds: Positive | None = None
    """Numbers of seeds of an arm and of the baseline at the first start."""
    max_seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] | None = None
    looks: tuple[Look, ...] = ()
    earlier_steps: Annotated[tuple[Positive, ...], Field(max_length=1000)] = ()
    stop_rules: tuple[Text, ...] = ()
    storage: Text | None = None
    confirms: ConfirmedStudy | None = None
    forks: ForkedStudy | None = None
    search: Search | None = None
    points: Annotated[dict[Text, dict[Text, Text]], Field(max_length=MAX_RUNS)] = Field(default_factory=dict)
    """The points of a search, or the arms of a fork: values as texts, by arm and setting."""
    declaration: SourceFile | None = None
    earlier_declarations: Annotated[tuple[SourceFile, ...], Field(max_length=1000)] = ()
    code: tuple[SourceFile, ...] = ()
    command: Text = ""
    """The command that makes all runs of the study."""
    created_at: Text = ""
    versions: dict[Text, Text] = Field(default_factory=dict)
    git: Git | None = None
    """Versions of packages, and state of the sources, at the first start."""
    starts: tuple[Start, ...] = ()
    recorded: Text = ""
    """The command of a study that ships with the package, which nobody typed."""

    @property
    def total_steps(self) -> int | None:
        """The planned training steps of a run. Arms may override them."""
        return find_total_steps(self.settings)

    def get_fork_step(self, arm: str) -> int:
        """Return the step after which the runs of an arm begin to differ from those that they fork; 0 if from none."""
        return 0 if self.forks is None else self.forks.steps.get(arm, 0)


_ADVICE = (
    ". It is always written in one piece, so another program or a disk error changed it: restore it from a copy, or "
    "remove it and type the `run` command of the study again, which continues its runs"
)

_FILES: Mapping[type, str] = {StudyRecord: STUDY_FILE, RunRecord: RUN_FILE, StatusRecord: STATUS_FILE}
_ADAPTERS: Mapping[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _FILES}
_Record = TypeVar("_Record", StudyRecord, RunRecord, StatusRecord)


def read_record(kind: type[_Record], folder: Path) -> _Record:
    """Read study.json in results/<run>, or run.json or status.json in the folder of a run.

    Raises:
        FileNotFoundError, NotADirectoryError: if it does not exist.
        UnsafePathError: if it is a link.
        DamagedFileError: if it is damaged, incomplete, or of another schema.
    """
    path = folder / _FILES[kind]
    try:
        content = read_object(path)
        # Validated as JSON, where tuples are lists.
        record: _Record = _ADAPTERS[kind].validate_json(json.dumps(content), strict=True)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}{_ADVICE if kind is StudyRecord else ''}") from None
    except ValidationError as error:
        missing = [str(entry["loc"][0]) for entry in error.errors() if entry["type"] == "missing"]
        raise DamagedFileError(
            f"{path} is incomplete: it lacks {', '.join(missing)}"
            if len(missing) == error.error_count()
            else f"{path} is damaged, or from another version: {format_validation_error(error).rstrip('.')}"
        ) from None
    return record


def find_record(kind: type[_Record], folder: Path) -> _Record | None:
    """Read the file like `read_record`, or return None if it cannot be read."""
    try:
        return read_record(kind, folder)
    except (OSError, DamagedFileError):
        return None


def write_record(folder: Path, record: StudyRecord | RunRecord | StatusRecord) -> None:
    """Write the file of a record atomically."""
    write_object(folder / _FILES[type(record)], asdict(record))
