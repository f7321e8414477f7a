"""The files that say what a study is and how its runs stand: study.json, run.json and status.json.

Each has its one definition here, for the driver that writes it and for everything that reads it. A value of another
type than was written counts as damage; keys that this version does not know are ignored, so that it reads the files of
a newer one. A folder may come from somebody else, so every text and list has a limit, far above any that is written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainable.config.aliases import flatten_settings
from trainable.config.run_config import format_validation_error
from trainable.config.setting_types import format_value, require
from trainable.files.control_characters import is_printable
from trainable.files.json_values import DamagedFileError, read_json, read_object, write_object
from trainable.runs.records import STATUSES

STUDY_FILE, RUN_FILE, STATUS_FILE = "study.json", "run.json", "status.json"

SCHEMA = 2
"""By this number a version recognizes files that it cannot read. It increases when a file changes so that an earlier
version cannot read it."""

MAX_RUNS = 10_000
"""Runs that a study may have. More would exceed what Ray Tune schedules, and what can be read at once."""

_MAX_NAME_BYTES = 255
"""Bytes that the name of a folder may have."""

CENSORED = "censored"
"""The status of a run that a search stopped, or did not start, because others did better. Its rows end like those of an
interrupted one, and say nothing of what it would have reached."""
ENDED_STATUSES = ("completed", "early_stopped", CENSORED)
"""Statuses of runs that are never run again."""
OPEN_STATUSES = ("waiting", "running")
"""Statuses of runs that have not ended, while a driver runs their study. No other run has one of them."""

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
    """Whether `text` can be a run_id, which names a folder. Plans and readers of study.json ask this function.

    It has no slash and no leading dot, so that it cannot name a folder outside the study's, and is printable.
    """
    is_name = text != "" and not text.startswith(".") and "/" not in text and is_printable(text)
    return is_name and len(text.encode()) <= _MAX_NAME_BYTES


def find_schema_problem(folder: object, schema: object) -> str:
    """Why this version cannot read the folder of a study; empty if it can.

    folder: results/<run>, as it was typed. schema: that of its study.json.
    """
    if schema == SCHEMA:
        return ""
    return (
        f"{folder} has files of schema {schema!r}, and this version reads schema {SCHEMA}. Read them with the version "
        f"that wrote them (`versions` and `git` in study.json), or run the study again with another --output"
    )


def _check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, if each can be a value in a table. Raises ValueError otherwise."""
    for name, value in flatten_settings(settings).items():
        is_value = value is None or isinstance(value, bool | float | str | list) or type(value) is int
        if not is_value or (type(value) is int and abs(value) >= 2**63):
            raise ValueError(f"the setting {name} is no number, text or list")
    return settings


def check_wandb_project(text: str) -> str:
    """`text`, if W&B takes it as the name of a project or if it is empty. Raises ValueError otherwise."""
    if len(text) > 128 or {*text} & {*"/\\#?%:"} or not is_printable(text):
        raise ValueError(
            f"{format_value(text)} is no project of W&B: a name has at most 128 characters, and none of / \\ # ? % :"
        )
    return text


WandbMode = Literal["offline", "online", "off"]
"""offline writes W&B runs to disk, and online sends every row."""
RunId = Annotated[str, require(is_run_id, "it is no name of a folder")]
Settings = Annotated[dict[str, Any], AfterValidator(_check_settings)]
Time = Annotated[str, require(lambda text: datetime.fromisoformat(text).tzinfo is not None, "it has no time zone")]
_ALL_STATUSES = (*STATUSES, *OPEN_STATUSES)


def find_total_steps(settings: Mapping[str, Any]) -> int | None:
    """The planned number of training steps of nested settings; None if they do not contain a valid one."""
    steps = flatten_settings(settings).get("trainer.total_training_steps")
    return steps if type(steps) is int and 0 < steps < 2**31 else None


@dataclass(frozen=True, config=_STRICT)
class AxisRecord:
    """The axis of a study, and the arms that it has. See `search_spaces.declaration.study.Axis`."""

    setting: Text = ""
    option: Text = ""
    values: Arms = ()
    dose: Text = ""
    factors: tuple[Text, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class RunEntry:
    """Names of a run, and paths of its files below the output folder: an entry of `runs` in study.json."""

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
    """status.json: how a run stands."""

    run_id: Text
    status: Annotated[str, require(_ALL_STATUSES.__contains__, f"it is none of {', '.join(_ALL_STATUSES)}")]
    """One of `STATUSES`; while a driver runs the study, also one of `OPEN_STATUSES`. A run that waits to be continued
    keeps all other fields of its earlier status."""
    reason: Text = ""
    """Why the run has this status, as a sentence."""
    failure_class: Text = ""
    """Kind of the failure (see `trainable.runs.failures`); empty unless the run has failed, and not been continued
    since."""
    stop_rule: Text = ""
    stop_value: FiniteFloat | None = None
    stop_threshold: FiniteFloat | None = None
    stop_step: Count | None = None
    trial_id: Text = ""
    """Id of the run's last Tune trial."""
    started_at: Time | None = None
    ended_at: Time | None = None
    """First start and last end, ISO 8601 in UTC; None before them."""

    @property
    def display_text(self) -> str:
        """The status for display, such as `completed` or `failed (out of memory)`."""
        is_classified = self.failure_class and self.status not in OPEN_STATUSES
        return f"{self.status} ({self.failure_class})" if is_classified else self.status


@dataclass(frozen=True, config=_STRICT)
class SourceFile:
    """A file that a user wrote for the study: its path as it was typed, and its text."""

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
    """Where a start of a study logs to W&B. project: project in W&B; empty for the one that the study declares."""

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
    """A comparison that was declared before the runs. needs_all_pairs: whether it means nothing over some of them."""

    name: Text
    pairs: tuple[tuple[Text, Text], ...]
    needs_all_pairs: bool = False


@dataclass(frozen=True, config=_STRICT)
class Look:
    """A look at the results: ended runs, the most seeds of an arm, and the steps of the study at that time."""

    at: Text
    runs: Count
    seeds: Count
    steps: Positive | None = None


@dataclass(frozen=True, config=_STRICT)
class ConfirmedStudy:
    """The study whose arm a confirmation runs again.

    seeds: those with which it had runs when the confirmation began. None of them is used again.
    """

    run: Text
    seeds: Seeds


@dataclass(frozen=True, config=_STRICT)
class Dimension:
    """One setting that a search changes: over an interval, or over a few values.

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
    """`low` and `high`: ends of the interval; both 0 if the setting has `values`."""
    is_log: bool = False
    """Whether the interval is searched on a logarithmic scale."""
    is_relative: bool = False
    """Whether `low` and `high` are multiples of the value that the preset gives the setting. Learning rates that suit a
    tiny model and a large one have no interval in common."""
    is_integer: bool = False
    """Whether only whole numbers are tried."""
    values: Arms = ()
    """The values to choose from, as they are typed; empty for an interval."""
    condition: tuple[Text, Text] | tuple[()] = ()
    """(setting, value): the setting is changed only at points at which an earlier dimension has this value, as the mass
    of a filter has no meaning for another filter; empty if it is always changed."""

    @property
    def name(self) -> str:
        """The name of the dimension: its setting, and its condition, since a setting may have one per condition."""
        return f"{self.setting} if {'='.join(self.condition)}" if self.condition else self.setting


def _check_space(space: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    """`space`, if a sampler can draw from each dimension. Raises ValueError otherwise."""
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
"""What a search can look for."""


@dataclass(frozen=True, config=_STRICT)
class Search:
    """What a search looks for, and where."""

    space: Annotated[tuple[Dimension, ...], Field(min_length=1, max_length=1000), AfterValidator(_check_space)]
    """The settings that it changes."""
    objectives: Annotated[
        tuple[str, ...], require(OBJECTIVES.__contains__, "it is neither success nor success and cost")
    ]
    """`success` (the primary outcome of the study), and `cost` (tokens) if points are to be cheap as well."""
    num_points: Annotated[int, Field(ge=1, le=MAX_RUNS)]
    """Number of points to try, with the default."""
    points_per_round: Annotated[int, Field(ge=1, le=MAX_RUNS)] = 4
    """Number of points that are drawn from the same results, and run at once if there is room."""
    seed: Count = 0
    """Seed of the draws."""
    confirm_seeds: Annotated[int, Field(ge=0, le=MAX_SEEDS)] = 5
    """Number of fresh seeds with which the best point is compared with the default at the end; 0 for none."""
    grace_steps: Positive | None = None
    """The first step at which runs are compared by successive halving; None if every run trains all its steps."""


@dataclass(frozen=True, config=_STRICT)
class StudyRecord:
    """study.json: what was asked, with which settings and code, and its runs."""

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
    """The value of each setting where nothing is said."""
    schema: int = 0
    """Version 0.1 wrote none."""
    question: Text = ""
    run: Text = ""
    family: Text = "ppo"
    model: Text = ""
    preset_reason: Text = ""
    preset_steps: Positive | None = None
    """Steps of the preset at the first start."""
    baseline: Annotated[Text, BeforeValidator(lambda value: value or "")] = ""
    """The arm that the others are compared with; empty if there is none."""
    outcomes: tuple[Text, ...] = ()
    margins: dict[Text, FiniteFloat] = Field(default_factory=dict)
    contrasts: tuple[DeclaredContrast, ...] = ()
    """Margins and contrasts are those of the first start: what is changed after a look at results tests nothing."""
    extra_seeds: dict[Text, Seeds] = Field(default_factory=dict)
    """By arm, the seeds that it has beyond `seeds`."""
    planned_seeds: Positive | None = None
    planned_baseline_seeds: Positive | None = None
    """Seeds of an arm and of the baseline at the first start."""
    max_seeds: Annotated[int, Field(ge=1, le=MAX_SEEDS)] | None = None
    looks: tuple[Look, ...] = ()
    earlier_steps: Annotated[tuple[Positive, ...], Field(max_length=1000)] = ()
    stop_rules: tuple[Text, ...] = ()
    storage: Text | None = None
    confirms: ConfirmedStudy | None = None
    search: Search | None = None
    points: Annotated[dict[Text, dict[Text, Text]], Field(max_length=MAX_RUNS)] = Field(default_factory=dict)
    """The points of a search: by arm, texts by setting."""
    declaration: SourceFile | None = None
    earlier_declarations: Annotated[tuple[SourceFile, ...], Field(max_length=1000)] = ()
    code: tuple[SourceFile, ...] = ()
    command: Text = ""
    """The command that makes all runs of the study."""
    created_at: Text = ""
    versions: dict[Text, Text] = Field(default_factory=dict)
    git: Git | None = None
    """Versions of packages and state of the sources at the first start."""
    starts: tuple[Start, ...] = ()
    recorded: Text = ""
    """The command of the study that comes with the package, which nobody typed."""

    @property
    def total_steps(self) -> int | None:
        """The planned training steps of a run; arms may have others."""
        return find_total_steps(self.settings)


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
        FileNotFoundError, NotADirectoryError: there is none.
        UnsafePathError: it is a link, or no regular file.
        DamagedFileError: it is damaged, incomplete, or of another schema.
    """
    path = folder / _FILES[kind]
    try:
        content = read_object(path)
        # As JSON, in which a tuple is a list.
        record: _Record = _ADAPTERS[kind].validate_json(json.dumps(content), strict=True)
    except DamagedFileError as error:
        problem = _find_schema_problem(path) or f"{error}{_ADVICE if kind is StudyRecord else ''}"
    except ValidationError as error:
        missing = [str(entry["loc"][0]) for entry in error.errors() if entry["type"] == "missing"]
        problem = _find_schema_problem(path) or (
            f"{path} is incomplete: it lacks {', '.join(missing)}"
            if len(missing) == error.error_count()
            else f"{path} is damaged, or from another version: {format_validation_error(error).rstrip('.')}"
        )
    else:
        problem = find_schema_problem(folder, record.schema) if isinstance(record, StudyRecord) else ""
        if not problem:
            return record
    raise DamagedFileError(problem)


def _find_schema_problem(path: Path) -> str:
    """Whether a study.json that cannot be read is of another schema, in words: others had other checksums, or none."""
    try:
        content = read_json(path) if path.name == STUDY_FILE else None
    except (OSError, DamagedFileError):
        return ""
    return find_schema_problem(path.parent, content.get("schema", 0)) if isinstance(content, dict) else ""


def find_record(kind: type[_Record], folder: Path) -> _Record | None:
    """Read the file like `read_record`; None if there is none that can be read."""
    try:
        return read_record(kind, folder)
    except (OSError, DamagedFileError):
        return None


def write_record(folder: Path, record: StudyRecord | RunRecord | StatusRecord) -> None:
    """Write the file of a record atomically."""
    write_object(folder / _FILES[type(record)], asdict(record))
