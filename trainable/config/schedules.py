"""Schedules and controllers of settings: values that change with the step of a run.

A schedule is written in place of a number, as `linear(0.1, 0@60)`: 0.1 in step 1, then in a straight line to 0 in step
60, and 0 afterwards. Steps are counted from the start of the run, so a longer run has the same values in its first
steps. A controller, such as `target_entropy(0.2)`, changes a coefficient after each step by what the step measured.
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

SCHEDULABLE_SETTINGS = (
    "actor.lr",
    "critic.lr",
    "actor.kl_loss_coef",
    "algorithm.kl_ctrl.kl_coef",
    "actor.entropy_coeff",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.clip_ratio_c",
    "critic.cliprange_value",
    "actor.tpo_eta",
    "rollout.temperature",
    "filter.rollout_filter_value",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.high_level_gamma",
)
"""The settings of a language model that may have a schedule: numbers that a trainer reads anew in each step."""

INTERPOLATIONS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda progress: progress,
        # SGDR (Loshchilov and Hutter 2017, arXiv:1608.03983), as in torch.optim.lr_scheduler.CosineAnnealingLR.
        "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
        "steps": lambda progress: 0.0,
    }
)
"""For each kind of schedule, the fraction of the way to the next value, as a function of the fraction of the steps."""


class ControllerKind(NamedTuple):
    """A rule by which a coefficient of the loss follows a measured quantity."""

    setting: str
    """The coefficient."""
    defaults: Mapping[str, float]
    """The numbers after the target: their names, and their values if they are left out."""
    form: str
    """What may be written, with an example."""


CONTROLLERS: Mapping[str, ControllerKind] = MappingProxyType(
    {
        # The defaults are those of TRL's GRPOConfig.
        "target_entropy": ControllerKind(
            "actor.entropy_coeff",
            {"delta": 0.005, "min": 0.0, "max": 1.0},
            "target_entropy(TARGET, DELTA, MIN, MAX) with TARGET, DELTA and MAX above 0 and 0 <= MIN <= MAX, such as "
            "target_entropy(0.2, 0.005, 0, 1)",
        ),
        "target_kl": ControllerKind(
            "actor.kl_loss_coef",
            {"start": 0.001, "horizon": 10_000.0},
            "target_kl(TARGET, START, HORIZON) with numbers above 0, such as target_kl(0.1, 0.001, 10000)",
        ),
    }
)
"""The controllers, whose rules are `losses.adapt_entropy_coef` and `losses.adapt_kl_coef`."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_POINT = rf"{_NUMBER} ?@ ?[0-9]{{1,6}}"
_FORM = re.compile(rf"({'|'.join(INTERPOLATIONS)}) ?\( ?({_NUMBER}) ?((?:, ?{_POINT} ?)+)\)")
_CONTROLLER_FORM = re.compile(rf"({'|'.join(CONTROLLERS)}) ?\( ?({_NUMBER}(?: ?, ?{_NUMBER})*) ?\)")
_BEGINNING = re.compile(rf"\s*(?:{'|'.join((*INTERPOLATIONS, *CONTROLLERS))})\s*\(")


class Schedule(NamedTuple):
    """A value for each step: given at some steps, interpolated between them, and constant after the last one."""

    kind: str
    """One of `INTERPOLATIONS`."""
    points: tuple[tuple[int, float], ...]
    """Steps with their values, in order. The first step is 1."""

    @property
    def text(self) -> str:
        """The schedule as `parse_schedule` reads it."""
        (_, first_value), *later_points = self.points
        later_texts = (f", {_format_number(value)}@{step}" for step, value in later_points)
        return f"{self.kind}({_format_number(first_value)}{''.join(later_texts)})"

    @property
    def checked_steps(self) -> tuple[int, ...]:
        """The steps whose values are within bounds, and whole, only if all values are.

        Values between two points are between theirs. They are whole if the first one after each point is: a line has
        equal increments, and the cosine of pi / n is a fraction only for n up to 3 (Niven's theorem).
        """
        return tuple(sorted({step + delay for step, _ in self.points for delay in (0, 1)}))

    def compute_value(self, step: int) -> float:
        """Compute the value in training step `step`, counted from 1; before the first step, the value of step 1.

        Between points (s, a) and (t, b) it is a + (b - a) f((step - s) / (t - s)), where f is the interpolation: the
        identity, (1 - cos(pi x)) / 2, or 0.

        Source: torch.optim.lr_scheduler, LinearLR, CosineAnnealingLR and MultiStepLR with factors of the first value.
        Degenerate case: points of one value give exactly that value in every step.

        Example:
            >>> schedule = parse_schedule("linear(1, 0@5)")
            >>> [schedule.compute_value(step) for step in (1, 2, 4, 5, 90)]
            [1.0, 0.75, 0.25, 0.0, 0.0]
        """
        for (start, value), (end, next_value) in pairwise(self.points):
            if step < end:
                fraction = INTERPOLATIONS[self.kind](max(0, step - start) / (end - start))
                return value + (next_value - value) * fraction
        return self.points[-1][1]


class Controller(NamedTuple):
    """A coefficient that the trainer adapts after each step, to steer the entropy or the KL towards a target."""

    kind: str
    """A key of `CONTROLLERS`."""
    target: float
    """In nats per token."""
    numbers: Mapping[str, float]
    """The further numbers by name, as in `ControllerKind.defaults`."""

    @property
    def text(self) -> str:
        """The controller as `parse_controller` reads it."""
        return f"{self.kind}({', '.join(map(_format_number, (self.target, *self.numbers.values())))})"

    @property
    def checked_steps(self) -> tuple[int, ...]:
        """The only step whose value is known before the run."""
        return (1,)

    def compute_value(self, step: int) -> float:
        """Return the value in step 1, for every step: a bonus starts at 0, since no entropy has been measured."""
        return self.numbers.get("start", 0.0)


def _format_number(value: float) -> str:
    return repr(value).removesuffix(".0")


def is_schedule(value: object) -> bool:
    """Check whether a setting's value is meant as a schedule or controller."""
    return isinstance(value, str) and _BEGINNING.match(value) is not None


def is_controller(text: str) -> bool:
    """Check whether the text of a schedule or controller is one of a controller."""
    return text.partition("(")[0].strip() in CONTROLLERS


def parse_controller(text: str, setting: str) -> Controller:
    """Parse `target_entropy(...)` or `target_kl(...)`, or raise ValueError if numbers or setting are wrong.

    Example:
        >>> parse_controller("target_kl(0.1, 0.01)", "actor.kl_loss_coef").text
        'target_kl(0.1, 0.01, 10000)'
    """
    kind_name = text.partition("(")[0].strip()
    kind, match = CONTROLLERS[kind_name], _CONTROLLER_FORM.fullmatch(" ".join(text.split()))
    if setting != kind.setting:
        raise ValueError(f"{kind_name} is for {kind.setting} only")
    target, *later_numbers = map(float, match[2].split(",")) if match else [0.0]
    numbers = {**kind.defaults, **dict(zip(kind.defaults, later_numbers, strict=False))}
    are_positive = all(0 < number < math.inf for number in (target, *(numbers | {"min": 1}).values()))
    is_ordered = 0 <= numbers.get("min", 0) <= numbers.get("max", 1)
    if not (are_positive and is_ordered) or len(later_numbers) > len(numbers):
        raise ValueError(f"must be {kind.form}")
    return Controller(kind_name, target, numbers)


def parse_schedule(text: str) -> Schedule:
    """Parse `linear(VALUE, VALUE@STEP, ...)`, or `cosine` or `steps`. Raise ValueError if the text is no schedule.

    Example:
        >>> parse_schedule("steps(0.1, 0.01@20, 0@40)").points
        ((1, 0.1), (20, 0.01), (40, 0.0))
    """
    match = _FORM.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(
            "must be the value of step 1, then values with their steps, such as linear(0.1, 0@60), cosine(0.1, 0@60) "
            "or steps(0.1, 0.01@20, 0@40)"
        )
    kind, first_value, later_points = match.groups()
    pairs = (point.split("@") for point in later_points.strip(" ,").split(","))
    points = ((1, float(first_value)), *((int(step), float(value)) for value, step in pairs))
    if any(step >= next_step for (step, _), (next_step, _) in pairwise(points)):
        raise ValueError("must have increasing steps from 2 on, since the first value is for step 1")
    return Schedule(kind, points)


def split_values(text: str) -> tuple[str, ...]:
    """Split text at its commas, but not within the parentheses of schedules, and strip blanks.

    >>> split_values("0, linear(0.1, 0@60)")
    ('0', 'linear(0.1, 0@60)')
    """
    return tuple(value.strip() for value in re.split(r",(?![^()]*\))", text))


def shorten_schedule(value: str) -> str:
    """Write a schedule without blanks, commas and parentheses, for file names. Return other values unchanged.

    >>> shorten_schedule("linear(0.1, 0@60)")
    'linear-0.1-0@60'
    """
    if not is_schedule(value):
        return value
    return re.sub(r"[\s,()]+", "-", value.strip()).strip("-")
