"""Types of single settings: named bounds, choices and parsers, such as of alarms on a column of the rows."""

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from trainable.algo.names import KL_KINDS, LOSS_AGG_MODES
from trainable.config.choices import EXACT_KL
from trainable.files.paths import escape_controls, is_printable

Setting = TypeVar("Setting")
_COMMON_MARKER = "common"
Common = Annotated[Setting, _COMMON_MARKER]
"""The type of a setting that a user changes often: `python -m tune_study settings` lists it without --all."""


def is_common(field: FieldInfo) -> bool:
    """Check whether the field was declared `Common`."""
    return _COMMON_MARKER in field.metadata


SECRET_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential", re.IGNORECASE)
"""Matches the name of a setting or variable whose value nobody else should read."""
OutsideKind = Literal["host", "variable", "file", "model", "program"]


@dataclass(frozen=True)
class Outside:
    """Marks a setting that names something outside of a study's folder, with its kind.

    host: an address that is contacted. variable: an environment variable. file: a local file or folder. model: a local
    folder, or a name that is looked up in the local cache of the hub. program: what is executed, and where it writes.
    If a study's folder comes from somebody else, its values of such settings are ignored
    (`tune_study.folder.origin`).
    """

    kind: OutsideKind


KLKind = Literal[(*KL_KINDS, EXACT_KL, *(f"{kind}+" for kind in KL_KINDS))]  # type: ignore[valid-type]
"""A KL estimator from sampled tokens, the exact KL, or (with `+`) an estimator's value with the gradient of k2."""
PromptStyle = Literal["full", "compact", "plain"]
"""full: a prompt in plain language for any model. compact: only the words that a shipped tiny policy knows. plain: the
state and nothing else, and the whole reply is the action, without tags: for data sets."""
LossAggMode = Literal[LOSS_AGG_MODES]  # type: ignore[valid-type]


def require(is_valid: Callable[[Any], object], problem: str) -> AfterValidator:
    """Make a validator that raises ValueError with `problem` unless `is_valid` accepts the value."""

    def check(value: Setting) -> Setting:
        if not is_valid(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def is_pattern(text: str | None) -> bool:
    """Check whether a text is a regular expression."""
    try:
        return bool(re.compile(text or ""))
    except re.error:
        return False


Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PowerOfTwo = Annotated[
    float,
    Field(ge=1, le=2.0**60),
    require(lambda number: math.frexp(number)[0] == 0.5, "must be a power of two, such as 65536"),
]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Patience = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]
"""Seconds to wait, at most a year, since operating systems cannot wait much longer."""
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
MAX_INTEGER = 2**31 - 1
MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest float32, about 3.4e+38."""
MIN_FLOAT = 2.0**-126
"""The smallest normal float32, about 1.2e-38. Smaller numbers lose digits, and some GPU kernels flush them to 0."""
MAX_LEVELS = 1_000_000
"""Maximum number of distinct levels of one kind (such as training) in a run."""
MAX_EPISODES = 1_000_000
"""Maximum number of episodes in memory at once, in a training step, a validation or an analysis.

A million short episodes take dozens of gigabytes, so a larger number is a typo that would only run out of memory.
"""


def _sum_groups(value: object) -> object:
    """Sum a list of group counts: the published documents write n_groups=[8], with one entry per environment."""
    if isinstance(value, list | tuple) and value and all(isinstance(entry, int) for entry in value):
        return sum(value)
    return value


SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Precision = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(lambda value: SHORT_DTYPES.get(value, value) if isinstance(value, str) else value),
]
"""A dtype, by its name or, as other trainers write it, its short name."""
GroupCount = Annotated[int, BeforeValidator(_sum_groups), Field(ge=1, le=MAX_LEVELS)]


def reject_episodes(groups_name: str, groups: int, size_name: str, size: int) -> dict[str, bool]:
    """Check whether `groups` groups of `size` rollouts exceed MAX_EPISODES; maps the reason to show to the answer."""
    return {
        f"{size_name}={size}: {groups_name}={groups} groups of that size are {groups * size} episodes at once, but "
        f"must be at most {MAX_EPISODES}": groups * size > MAX_EPISODES
    }


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a transformer block, in the order of their application."""


def _parse_layers(value: object) -> object:
    """Parse `all-linear` or a list of layer names. Return the names in the order of LINEAR_LAYERS, each once.

    The fixed order gives equal choices the same hash.
    """
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if names in (["all-linear"], ("all-linear",)):
        return "all-linear"
    if not isinstance(names, list | tuple) or not names or not set(map(str, names)) <= set(LINEAR_LAYERS):
        raise ValueError(f"must be all-linear, or a list of some of {', '.join(LINEAR_LAYERS)}")
    return tuple(name for name in LINEAR_LAYERS if name in names)


LoraTargets = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_parse_layers)]


ParseNull = BeforeValidator(
    lambda value: None if isinstance(value, str) and value.strip().lower() in ("null", "none") else value
)
"""Reads the texts `null` and `none` (in any case) as None, since a command line passes only text."""


LocalPath = Annotated[
    str,
    Field(max_length=1024),
    require(lambda path: path.strip() and is_printable(path), "must not be empty or contain control characters"),
]
"""A path, which may name folders and is written to logs."""


def is_loopback(host: str | None) -> bool:
    """Check whether a host is this machine: localhost, or an address in the loopback range.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost.example.org")
    (True, False)
    """
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    return False


def _check_endpoint(url: str) -> str:
    """Return `url`. Raise ValueError unless it is safe to send texts and keys to: over TLS, or on this machine.

    Studies write the address to files, so it must have no component that could contain a password or a key.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        raise ValueError("must begin with https:// and a host, such as https://api.openai.com/v1")
    if parts.username is not None or parts.password is not None or "?" in url or "#" in url or "@" in url:
        raise ValueError("must have no user, password, query or fragment: studies write it to files")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError("must begin with https:// unless it is this machine, such as http://127.0.0.1:8000/v1")
    return url


Endpoint = Annotated[str, Field(max_length=1024), AfterValidator(_check_endpoint)]
"""The address of an API over HTTP."""


KeyVariable = Annotated[
    str,
    require(
        lambda name: re.fullmatch(r"[A-Z0-9_]+_API_KEY|TUNE_STUDY_[A-Z0-9_]+", name, re.ASCII),
        "must end in _API_KEY, such as OPENAI_API_KEY, or begin with TUNE_STUDY_",
    ),
]
"""The name of an environment variable with an API key. Restricted, so that no other secret can be sent instead."""


BASELINE_STEPS = 10
"""Relative thresholds are multiples of the mean over this many first steps. Source: the published stop rule."""
ALARM_COLUMNS = (
    "reward_std",
    "zero_std_groups",
    "entropy",
    "val_kl_to_reference",
    "pg_clipfrac",
    "actor_grad_norm",
    "critic_grad_norm",
    "explained_variance",
    "train_invalid_turns",
    "train_response_tokens",
    "collapse_trajectory_retrieval_accuracy",
    "collapse_trajectory_mi_estimate",
    "train_success",
)
"""The columns that an alarm can watch."""
MAX_ALARM_WINDOW = 1000
_ALARM_PATTERN = re.compile(
    r"(?P<column>\w+) ?(?P<comparison>[<>]) ?(?P<threshold>[-+]?(?:\d+\.?|\d*\.\d+)(?:e[-+]?\d+)?)"
    rf"(?P<relative> ?x(?: its first {BASELINE_STEPS} steps)?)?"
    r"(?:, ?(?P<window>\d{1,4}) times in a row)?"
)


class AlarmRule(NamedTuple):
    """A threshold on a column of the rows."""

    column: str
    """One of `ALARM_COLUMNS`."""
    threshold: float
    """In the unit of the column, or as a multiple of its mean over the first `BASELINE_STEPS` steps."""
    is_relative: bool
    """Whether the threshold is such a multiple."""
    is_upper: bool
    """Whether the rule fires above the threshold; otherwise below."""
    window: int
    """Number of consecutive measurements that must all be beyond the threshold."""

    @property
    def text(self) -> str:
        """The rule as `parse_alarm_rule` reads it: `reward_std < 0.5 x its first 10 steps, 3 times in a row`."""
        comparison = ">" if self.is_upper else "<"
        unit = f" x its first {BASELINE_STEPS} steps" if self.is_relative else ""
        repeat = "" if self.window == 1 else f", {self.window} times in a row"
        return f"{self.column} {comparison} {self.threshold:g}{unit}{repeat}"


def parse_alarm_rule(text: str) -> AlarmRule:
    """Parse the text of a rule. The words after `x` are optional. Raise ValueError if the text is no rule.

    Example:
        >>> parse_alarm_rule("reward_std < 0.5 x, 3 times in a row")
        AlarmRule(column='reward_std', threshold=0.5, is_relative=True, is_upper=False, window=3)
    """
    match = _ALARM_PATTERN.fullmatch(" ".join(text.split()))
    if match is None or not abs(threshold := float(match["threshold"])) <= MAX_FLOAT:
        raise ValueError(
            'must look like "reward_std < 0.5 x its first 10 steps, 3 times in a row": a column, < or >, a number, '
            "with `x` for a multiple of the mean of the first steps, and how often in a row"
        )
    if match["column"] not in ALARM_COLUMNS:
        raise ValueError(f"no alarm watches {match['column']}: choose from {', '.join(ALARM_COLUMNS)}")
    window = int(match["window"] or 1)
    if not 1 <= window <= MAX_ALARM_WINDOW:
        raise ValueError(f"{window} times in a row: must be 1 to {MAX_ALARM_WINDOW}")
    return AlarmRule(match["column"], threshold, match["relative"] is not None, match["comparison"] == ">", window)


def _normalize_alarm(text: str) -> str:
    """Normalize the text of a rule, so that equal rules have the same hash. Empty, none and null become empty."""
    return "" if text.strip().lower() in ("", "none", "null") else parse_alarm_rule(text).text


AlarmText = Annotated[str, Field(max_length=200), AfterValidator(_normalize_alarm)]


def format_value(value: object, max_length: int = 80) -> str:
    """Format `value` for a message: on one line, without control characters, truncated to `max_length` characters."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # a number with thousands of digits, or lists nested too deeply
        return f"<{type(value).__name__} too long to show>"
    short_text = text if len(text) <= max_length else f"{text[:max_length]}..."
    return escape_controls(short_text)


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into one dict with dotted names.

    >>> flatten_settings({"seed": 0, "actor": {"lr": 1e-4}})
    {'seed': 0, 'actor.lr': 0.0001}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
