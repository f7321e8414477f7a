"""Detectors that other tools ship, and rules that papers propose, as rules on the rows of a run.

Every rule was read in the source that its entry names, and is written anew. A detector's alarm is its first alarm of
any kind that the tool sends by default, so where a tool warns before it is sure, the warning counts.

Not here, because no column has what they read: rlwatch's dip test (rewards of single episodes), rl-doctor's
`reward_composition` (terms of a reward), truncated replies and one-sided clip fractions.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.stats.estimates import Floats
from analysis.sweep import log_checks
from analysis.sweep.log_checks import Measures, Numbers, get_series
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import BASELINE_STEPS, AlarmRule
from trainable.runs.stop_rules import RULES, History, find_alarm

MEASURES: Mapping[str, tuple[str, ...]] = {
    # Token mean of the sampling policy. The two-stage rule reads that of the next token before training, for which the
    # first step stands, and then that of the worst token.
    "entropy": ("entropy",),
    # The tools read what a trainer logs at each step. Runs without a reference pass measure the KL in validations only.
    "kl": ("kl_to_reference", "val_kl_to_reference"),
    # rlwatch reads the spread over a batch, and that of its advantages. Ours is the mean spread within groups, which is
    # that of the advantages of GRPO before they are divided by it.
    "reward_std": ("reward_std",),
    "reward": ("train_reward",),
    "eval_score": ("val_success",),
    "eval_score_before": ("base_val_success",),
    "zero_spread": ("zero_std_fraction", "zero_std_groups"),
    "groups_kept": ("groups_kept",),
    "grad_norm": ("actor_grad_norm",),
    # A loss that is not finite is not written: its optimizer step is skipped and counted.
    "nonfinite_updates": ("nonfinite_updates",),
    "clip_fraction": ("pg_clipfrac",),
    "response_length": ("train_response_tokens",),
    "first_turn_mi": ("collapse_first_turn_mi_estimate",),
    "trajectory_mi": ("collapse_trajectory_mi_estimate",),
}
"""What a detector reads -> our columns that stand for it: the first one that the run has measured."""
THRESHOLD_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors by which thresholds are made stricter: high ones are multiplied by them, low ones divided."""
COUNT_FACTORS = (0.25, 0.5, 1.0)
"""Factors of windows and warm-ups, since those of most tools are made for longer runs than a laptop's."""


class Detector(NamedTuple):
    """A published rule that announces that training breaks."""

    name: str
    source: str
    rule: str
    """Its text, with its numbers as fields: `entropy < {low:.3g}`."""
    measures: tuple[str, ...]
    """Keys of `MEASURES` that it needs."""
    find: Callable[[Measures, Numbers], float | None]
    """Finds the step of its alarm in the measures of a run, with its numbers."""
    lows: Numbers = MappingProxyType({})
    """Numbers at or below which it fires. They and the next two have the values of the source."""
    highs: Numbers = MappingProxyType({})
    """Numbers at or above which it fires."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Windows and warm-ups, in measurements."""
    is_published: bool = True
    """Whether the source has these numbers; otherwise they only center the search for better ones."""

    @property
    def text(self) -> str:
        """Its name and its rule with its numbers."""
        return f"{self.name}: " + self.rule.format_map({**self.lows, **self.highs, **self.counts})

    def find_step(self, measures: Measures) -> float | None:
        """Find the step of its alarm in the measures of a run; None without one."""
        return self.find(measures, {**self.lows, **self.highs, **self.counts})

    def scale(self, threshold_factor: float, count_factor: float) -> "Detector":
        """Scale its numbers, so that a threshold factor above 1 makes it fire later, and a count factor below 1 sooner.

        Counts are rounded, and at least 1.
        """
        return self._replace(
            lows={name: value / threshold_factor for name, value in self.lows.items()},
            highs={name: value * threshold_factor for name, value in self.highs.items()},
            counts={name: max(1, round(value * count_factor)) for name, value in self.counts.items()},
        )


def list_variants() -> list[Detector]:
    """List every detector with every factor, each different rule once."""
    scaled = (
        detector.scale(threshold_factor, count_factor)
        for detector in DETECTORS
        for threshold_factor in THRESHOLD_FACTORS
        for count_factor in COUNT_FACTORS
    )
    return list({detector.text: detector for detector in scaled}.values())


def make_measures(rows: pd.DataFrame) -> dict[str, Floats]:
    """Collect the measures of a run, and `step`: arrays (rows,) with NaN where a measure is missing.

    rows: of one run, by ascending step. Measures without a value are left out.
    """
    table = rows.copy(deep=False)
    if "zero_std_groups" in table:
        table["zero_std_groups"] = table["zero_std_groups"] / table["groups"]
    measures = {"step": table["step"].to_numpy(dtype=float)}
    for name, columns in MEASURES.items():
        for column in columns:
            if column in table and table[column].notna().any():
                measures[name] = table[column].to_numpy(dtype=float)
                break
    return measures


def find_streak(
    measures: Measures,
    numbers: Numbers,
    measure: str,
    transform: Callable[[Floats, Numbers], Floats] | None = None,
    is_relative: bool = False,
) -> float | None:
    """Find when `window` transformed measurements in a row are above `high` or below `low`, from the `warmup`-th on."""
    steps, values = get_series(measures, measure)
    if transform:
        values = transform(values, numbers)
    is_upper = "high" in numbers
    threshold, start = numbers["high" if is_upper else "low"], int(numbers.get("warmup", 1)) - 1
    rule = AlarmRule(measure, threshold, is_relative, is_upper, int(numbers.get("window", 1)))
    decision = find_alarm(steps[start:], values[start:], rule)
    return decision.step if decision else None


def standardize_by_previous(values: Floats, numbers: Numbers) -> Floats:
    """Divide the distance to the mean of the previous `history` - 1 values (n,) by their deviation (ddof 0)."""
    previous = pd.Series(values).shift(1).rolling(int(numbers["history"]) - 1, min_periods=1)
    return np.array((values - previous.mean()) / previous.std(ddof=0).clip(lower=1e-8))


def standardize_by_first(values: Floats, numbers: Numbers) -> Floats:
    """As `standardize_by_previous` of all values, until the first `history` values are known and replace them."""
    history = int(numbers["history"])
    scores = standardize_by_previous(values, {"history": history})
    if len(values) >= history:
        first = values[:history]
        scores[history - 1 :] = (values[history - 1 :] - first.mean()) / max(first.std(), 1e-8)
    return scores


def divide_by_previous(values: Floats, numbers: Numbers) -> Floats:
    """Divide each value (n,) by the mean of the previous `history` - 1 values."""
    previous = pd.Series(values).shift(1).rolling(int(numbers["history"]) - 1, min_periods=1)
    return np.array(values / previous.mean().clip(lower=1e-8))


def divide_variances_by_first(values: Floats, numbers: Numbers) -> Floats:
    """Divide the square of each value (n,) by the mean square of the first `baseline` values."""
    squares = values**2
    return squares / max(squares[: int(numbers["baseline"])].mean(), 1e-8)


def find_drift(measures: Measures, numbers: Numbers) -> float | None:
    """Find when the reward has risen, or fallen, `window` times in a row and by at least `high` in total.

    The first difference that counts is the one to the `warmup`-th measurement.
    """
    steps, values = get_series(measures, "reward")
    count, direction, start_value = 0, 0.0, 0.0
    for place in range(max(1, int(numbers["warmup"]) - 1), len(values)):
        sign = float(np.sign(values[place] - values[place - 1]))
        if sign != direction:
            count, direction, start_value = 0, sign, values[place - 1]
        count += 1
        if sign and count >= numbers["window"] and abs(values[place] - start_value) >= numbers["high"]:
            return float(steps[place])
    return None


def find_low_start(measures: Measures, numbers: Numbers) -> float | None:
    """Find the first step, if entropy is below `low` there."""
    steps, values = get_series(measures, "entropy")
    return float(steps[0]) if values[0] < numbers["low"] else None


def find_early_drop(measures: Measures, numbers: Numbers) -> float | None:
    """Find when entropy is below `low` times its value at step `start`, up to step `end`."""
    steps, values = get_series(measures, "entropy")
    is_early = (steps >= numbers["start"]) & (steps <= numbers["end"])
    drops = steps[is_early][values[is_early] < numbers["low"] * values[is_early][:1]]
    return float(drops[0]) if len(drops) else None


def find_declines(measures: Measures, numbers: Numbers) -> float | None:
    """Find when the evaluation has been lower than the one before it `window` times in a row."""
    steps, values = get_series(measures, "eval_score")
    rule = AlarmRule("eval_score", 0.0, is_relative=False, is_upper=False, window=int(numbers["window"]))
    decision = find_alarm(steps[1:], np.diff(values), rule)
    return decision.step if decision else None


def find_low_evaluation(measures: Measures, numbers: Numbers) -> float | None:
    """Find the first evaluation below `low` times the best one so far, that before training included."""
    steps, values = get_series(measures, "eval_score")
    scores = np.append(get_series(measures, "eval_score_before")[1], values)
    lows = steps[values < numbers["low"] * np.maximum.accumulate(scores)[-len(values) :]]
    return float(lows[0]) if len(lows) else None


def find_stop(measures: Measures, numbers: Numbers, rule: str) -> float | None:
    """Find when a published stop rule of `stop_rules.RULES` fires, with numbers named as in `EarlyStopConfig`."""
    steps = tuple(map(int, measures["step"]))
    columns = (measures.get(name) for name in ("reward_std", "groups_kept", "eval_score"))
    lists = (
        [None] * len(steps) if values is None else [None if np.isnan(value) else float(value) for value in values]
        for values in columns
    )
    decision = RULES[rule](History(steps, *map(tuple, lists)), EarlyStopConfig.model_validate(dict(numbers)))
    return decision.step if decision else None


def find_check(measures: Measures, numbers: Numbers, check: Callable[[Measures, Numbers], bool]) -> float | None:
    """Find the first step at which a check of all rows so far fires: at each `every`-th row, from `rows` rows on."""
    steps, every = measures["step"], int(numbers["every"])
    for count in range(every, len(steps) + 1, every):
        if count >= numbers["rows"] and check({name: values[:count] for name, values in measures.items()}, numbers):
            return float(steps[count - 1])
    return None


_RAGEN = "mll-lab-nu/RAGEN 20daedc, early stopping of its agent trainer"
_RLWATCH = "rlwatch 0.5.1 (PyPI), detectors.py and config.py"
_RL_DOCTOR = "rldoctor 0.2.0 (PyPI), detectors/ and live.py"
_TWO_STAGE = "Aphale & Liu 2026, arXiv 2606.18487; numbers as two summaries of the paper quote them"
_RAGEN_2 = "RAGEN-2, arXiv 2604.06268, which has no threshold"
_EVAL_STOP = "EvalStop, arXiv 2606.04145; its number of declines was not found"
_Z_SCORES = {"history": 100, "warmup": 20}


def _make_live_check(
    name: str,
    rule: str,
    measures: tuple[str, ...],
    check: Callable[[Measures, Numbers], bool],
    lows: Numbers = MappingProxyType({}),
    highs: Numbers = MappingProxyType({}),
) -> Detector:
    """Make a detector of rl-doctor: a check that its live monitor repeats."""
    text = f"{rule}; at each {{every}}-th row from {{rows}} rows on"
    find = partial(find_check, check=check)
    return Detector(f"rl-doctor {name}", _RL_DOCTOR, text, measures, find, lows, highs, {"every": 25, "rows": 60})


LOW_EVALUATION = Detector(
    "first low evaluation",
    "the definition of a collapse, without its second evaluation: what an early alarm should beat",
    "eval_score < {low:.3g} x its best so far",
    ("eval_score", "eval_score_before"),
    find_low_evaluation,
    lows={"low": 0.5},
)
DETECTORS: tuple[Detector, ...] = (
    LOW_EVALUATION,
    Detector(
        "RAGEN reward_variance_collapse",
        _RAGEN,
        "reward_std < {variance_ratio:.3g} x its first {variance_baseline_steps} steps, {variance_window} in a row",
        ("reward_std",),
        partial(find_stop, rule="reward_variance_collapse"),
        lows={"variance_ratio": 0.1},
        counts={"variance_window": 10, "variance_baseline_steps": 10},
    ),
    Detector(
        "RAGEN empty_filtered_steps",
        _RAGEN,
        "the filter keeps no group, {empty_stop_steps} in a row",
        ("groups_kept",),
        partial(find_stop, rule="empty_filtered_steps"),
        counts={"empty_stop_steps": 5},
    ),
    Detector(
        "RAGEN low_validation_success",
        _RAGEN,
        "eval_score < {success_threshold:.3g}, {success_patience} in a row",
        ("eval_score",),
        partial(find_stop, rule="low_validation_success"),
        lows={"success_threshold": 0.01},
        counts={"success_patience": 5},
    ),
    *(
        Detector(
            f"RAGEN-2 mutual information, {label}",
            _RAGEN_2,
            f"{measure} < {{low:.3g}} x its first {BASELINE_STEPS} steps, {{window}} in a row",
            (measure,),
            partial(find_streak, measure=measure, is_relative=True),
            lows={"low": 0.8},
            counts={"window": 4},
            is_published=False,
        )
        for label, measure in (("first turns", "first_turn_mi"), ("all turns", "trajectory_mi"))
    ),
    Detector(
        "rlwatch entropy_collapse",
        _RLWATCH,
        "entropy < {low:.3g}, {window} in a row from the {warmup}-th on",  # a warning; 50 in a row are critical
        ("entropy",),
        partial(find_streak, measure="entropy"),
        lows={"low": 1.0},
        counts={"window": 25, "warmup": 20},
    ),
    Detector(
        "rlwatch kl_explosion",
        _RLWATCH,
        "kl > the mean of the previous (below {history}) + {high:.3g} standard deviations, from the {warmup}-th on",
        ("kl",),
        partial(find_streak, measure="kl", transform=standardize_by_previous),
        highs={"high": 3.0},
        counts=_Z_SCORES,
    ),
    Detector(
        "rlwatch reward_hacking",
        _RLWATCH,
        "reward_std^2 > {high:.3g} x its first {baseline}, from the {warmup}-th on",
        ("reward_std",),
        partial(find_streak, measure="reward_std", transform=divide_variances_by_first),
        highs={"high": 3.0},
        counts={"baseline": 20, "warmup": 50},
    ),
    Detector(
        "rlwatch advantage_variance",
        _RLWATCH,
        "reward_std > {high:.3g} x the mean of the previous (below {history}), from the {warmup}-th on",
        ("reward_std",),
        partial(find_streak, measure="reward_std", transform=divide_by_previous),
        highs={"high": 3.0},
        counts=_Z_SCORES,
    ),
    Detector(
        "rlwatch loss_nan",
        _RLWATCH,
        "nonfinite_updates > 0",
        ("nonfinite_updates",),
        partial(find_streak, measure="nonfinite_updates"),
        highs={"high": 0.0},
    ),
    Detector(
        "rlwatch gradient_norm_spike",
        _RLWATCH,
        "grad_norm > the mean of the first {history} + {high:.3g} standard deviations (of the previous until there are "
        "so many), from the {warmup}-th on",
        ("grad_norm",),
        partial(find_streak, measure="grad_norm", transform=standardize_by_first),
        highs={"high": 3.0},
        counts=_Z_SCORES,
    ),
    Detector(
        "rlwatch reward_mean_drift",
        _RLWATCH,
        "reward rises, or falls, {window} times in a row and by {high:.3g} in total, from the {warmup}-th on",
        ("reward",),
        find_drift,
        highs={"high": 0.1},
        counts={"window": 50, "warmup": 50},
    ),
    _make_live_check(
        "advantage_collapse",
        "median zero_spread of the last quarter >= {high:.3g}",
        ("zero_spread",),
        partial(log_checks.has_high_median, measure="zero_spread"),
        highs={"high": 0.5},
    ),
    _make_live_check(
        "entropy_collapse",
        "entropy <= {low:.3g} x its first tenth, or its trend gets there soon",
        ("entropy",),
        log_checks.is_entropy_exhausted,
        lows={"low": 0.1},
    ),
    _make_live_check(
        "reward_hacking",
        "reward rises while eval_score does not and is {high:.3g} deviations behind, or falls; or their ranks are "
        "opposite",
        ("reward", "eval_score"),
        log_checks.has_diverging_reward,
        highs={"high": 0.15},
    ),
    _make_live_check(
        "length_pathology",
        "response_length grows by {high:.3g}, with a rank correlation to reward of {correlation:.3g}, and eval_score "
        "by less than a quarter of that",
        ("response_length", "reward", "eval_score"),
        log_checks.has_length_hacking,
        highs={"high": 0.5, "correlation": 0.6},
    ),
    _make_live_check(
        "clip_saturation",
        "median clip_fraction of the last quarter >= {high:.3g}",
        ("clip_fraction",),
        partial(log_checks.has_high_median, measure="clip_fraction"),
        highs={"high": 0.2},
    ),
    _make_live_check(
        "kl_drift",
        "kl >= {very_high:.3g}, or >= {high:.3g} and accelerating, or always <= {low:.3g}",
        ("kl",),
        log_checks.is_kl_drifting,
        lows={"low": 1e-4},
        highs={"high": 0.5, "very_high": 2.0},
    ),
    _make_live_check(
        "gradient_pathology",
        "grad_norm is 0 in {zeros:.3g} of the rows, or <= {low:.3g} x its first tenth, or has 3 spikes above "
        "{sigmas:.3g} deviations and {ratio:.3g} x its median",
        ("grad_norm",),
        log_checks.has_sick_gradients,
        lows={"low": 0.05},
        highs={"zeros": 0.4, "sigmas": 8.0, "ratio": 3.0},
    ),
    _make_live_check(
        "plateau",
        "eval_score (with fewer than 12, reward) falls or moves less than {low:.3g} deviations, best {high:.3g} of the "
        "steps ago",
        ("reward",),
        log_checks.has_plateau,
        lows={"low": 1.0},
        highs={"high": 0.3},
    ),
    Detector(
        "two-stage entropy, before training",
        _TWO_STAGE,
        "entropy of the first step < {low:.3g}",
        ("entropy",),
        find_low_start,
        lows={"low": 0.18},
    ),
    Detector(
        "two-stage entropy, early training",
        _TWO_STAGE,
        "entropy < {low:.3g} x that of step {start}, up to step {end}",
        ("entropy",),
        find_early_drop,
        lows={"low": 0.5},
        counts={"start": 10, "end": 150},
    ),
    Detector(
        "EvalStop",
        _EVAL_STOP,
        "eval_score falls {window} times in a row",
        ("eval_score",),
        find_declines,
        counts={"window": 4},
        is_published=False,
    ),
)
"""All detectors, in the order of a report."""
