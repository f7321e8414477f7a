"""The sentences of a report, generated from its tables."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.data import compare
from analysis.data.frames import StudyFrames, list_differing_settings, to_records
from analysis.stats.estimates import Estimate
from analysis.sweep.verdicts import (
    MIN_REGIME_RUNS,
    count_nouns,
    format_number,
    format_p_value,
    format_signed,
    format_status,
    join_arms,
)
from trainable.config.setting_types import flatten_settings
from trainable.runs.history import MASTERED_SUCCESS
from trainable.runs.records import STATUSES
from trainable.runs.study_record import OPEN_STATUSES, StudyRecord

MAX_LISTED_ARMS = 5
"""With more arms, a sentence gives the number of the others."""
MAX_LINE_LENGTH = 120
"""A longer list of arms is replaced by their number, as in a grid with long names."""
MAX_LISTED_STEPS = 6
"""With more steps, a sentence gives the first and the last."""
OUTCOME_LABELS = {
    "better": "higher for",
    "worse": "lower for",
    "equal": "equal within {margin} for",
    "no effect": "the same in every row (no effect in these runs) for",
    "open": "not resolved (open) for",
}
_NO_VERDICT_LABELS = {
    "no comparison": "Not compared",
    "no verdict": "No scored run",
    "failed regime": "Failed regime, stopped by a rule",
}


def format_headline(summary: pd.DataFrame, signal_problems: Sequence[str] = ()) -> str:
    """How the arms compare with the baseline, over which runs. `describe_collapses` says which of them collapsed.

    summary: from `tables.summarize_arms`. signal_problems: from `collapse.describe_signal_problems`; they come first.
    """
    if summary.empty:
        return "No run is recorded."
    baseline = summary["baseline"].iloc[0]
    if baseline not in set(summary["arm"]):
        return " ".join(signal_problems) or (
            f"{count_nouns(len(summary), 'arm')} and no baseline arm, so nothing is compared."
        )
    sentences = list(signal_problems)
    compared = summary[summary["outcome"].isin(OUTCOME_LABELS)]
    if len(compared):
        sentences.append(
            f"Compared with baseline {baseline} over {format_seed_range(compared['seeds'])}, success at the end is "
            f"{group_arms(compared, compared['outcome'], OUTCOME_LABELS)}."
        )
    for outcome, label in _NO_VERDICT_LABELS.items():
        if arms := summary.loc[summary["outcome"] == outcome, "arm"].to_list():
            sentences.append(f"{label}: {_format_arms(arms)}.")
    # Few runs condemn no setting: their number is said instead.
    for count, rows in summary[summary["outcome"] == "stopped"].groupby("failed_stops"):
        sentences.append(f"Stopped in {count} of {count_nouns(count, 'run')}: {_format_arms(rows['arm'].to_list())}.")
    return " ".join(sentences) or f"Arm {baseline} alone: nothing is compared."


def group_arms(rows: pd.DataFrame, verdicts: "pd.Series[str]", labels: Mapping[str, str]) -> str:
    """The arms of a table by verdict: `higher for arm 0.03 and open for arms 0.1, 0.3`.

    rows: with arm and margin. labels: text by verdict, in order, in which {margin} is replaced.
    """
    margin = format_number(float(rows["margin"].iloc[0]))
    return join_words(
        [
            f"{label.format(margin=margin)} {_format_arms(arms)}"
            for verdict, label in labels.items()
            if (arms := rows.loc[verdicts == verdict, "arm"].to_list())
        ]
    )


def describe_collapses(collapses: pd.DataFrame) -> str:
    """Which arms collapsed, in how many runs and when, and which did not; empty without a scored run.

    Where no run collapsed, the study cannot show that a setting protects from collapse. collapses: from
    `collapse.count_collapses`.

    Example: `Arm 0 collapsed in 3 of 3 runs, at steps 20, 25 and 38 (seeds 1, 0, 2); no run of arms 0.1, 0.3
    collapsed.`
    """
    collapsed, stable_arms = collapses[collapses["collapsed"] > 0], collapses.loc[collapses["collapsed"] == 0, "arm"]
    if collapses.empty:
        return ""
    if collapsed.empty:
        return "No run collapsed, so this study cannot tell whether an arm protects from collapse."
    if len(collapsed) > MAX_LISTED_ARMS:
        steps = sorted(step for arm_steps in collapsed["steps"] for step in arm_steps)
        clauses = [
            f"{collapsed['collapsed'].sum()} of {collapses['runs'].sum()} runs collapsed, in {len(collapsed)} of "
            f"{len(collapses)} arms, {_format_steps(steps)}"
        ]
    else:
        clauses = [
            f"{'arm' if index else 'Arm'} {row['arm']}{'' if index else ' collapsed'} in {row['collapsed']} of "
            f"{count_nouns(row['runs'], 'run')}, {_format_steps(row['steps'], row['seeds'])}"
            for index, row in enumerate(to_records(collapsed))
        ]
    if len(stable_arms):
        clauses.append(f"no run of {_format_arms(stable_arms.to_list())} collapsed")
    return "; ".join(clauses) + "."


def _format_steps(steps: Sequence[float], seeds: Sequence[int] = ()) -> str:
    """`at step 20 (seed 2)`, `at steps 20, 25 and 38 (seeds 1, 0, 2)`, or `at steps 20 to 38` if there are many.

    steps: ascending. seeds: of the runs, in the same order; empty where they are not to be named.
    """
    texts = [f"{step:g}" for step in steps]
    if len(texts) > MAX_LISTED_STEPS:
        return f"at steps {texts[0]} to {texts[-1]}" if texts[0] != texts[-1] else f"at step {texts[0]}"
    plural = "s" if len(texts) > 1 else ""
    names = f" (seed{plural} {', '.join(map(str, seeds))})" if seeds else ""
    return f"at step{plural} {join_words(texts)}{names}"


def join_words(texts: Sequence[str]) -> str:
    """Join words as a list in a sentence: `a, b and c`."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def format_seed_range(counts: "pd.Series[int]") -> str:
    """`1 seed`, `3 seeds`, or `3 to 5 seeds` if the counts differ."""
    low, high = int(counts.min()), int(counts.max())
    return count_nouns(low, "seed") if low == high else f"{low} to {high} seeds"


def _format_arms(arms: Sequence[str]) -> str:
    """`arm 0.1`, `arms 0.1, 0.3`, or the first arms with the number of the others."""
    shown, num_others = join_arms(arms[:MAX_LISTED_ARMS]), len(arms) - MAX_LISTED_ARMS
    if len(arms) > 1 and len(shown) > MAX_LINE_LENGTH:
        return f"{len(arms)} arms"
    others = f" and {count_nouns(num_others, 'other')}" if num_others > 0 else ""
    return f"arm{'s' if len(arms) > 1 else ''} {shown}{others}"


def describe_interval_basis(table: pd.DataFrame) -> str:
    """A sentence on what the intervals of the arms are over; empty without an interval.

    table: of `tables.make_dose_response` or `tables.summarize_arms`.
    """
    bases = [basis for basis in table["basis"].unique() if basis]
    return f"Intervals are {'; or '.join(bases)}." if bases else ""


def format_status_counts(trials: pd.DataFrame) -> str:
    """Counts of runs by status: `6 runs: 5 completed, 1 early stopped`."""
    counts = trials["status"].value_counts()
    order = [*STATUSES, *OPEN_STATUSES]
    count_texts = [f"{counts[status]} {format_status(status)}" for status in order if status in counts]
    return f"{count_nouns(len(trials), 'run')}: {', '.join(count_texts)}" if count_texts else "no run"


def describe_trend(trend: Estimate, dose_response: pd.DataFrame, setting: str = "") -> str:
    """The trend of success over the ordered axis in words.

    dose_response: from `tables.make_dose_response`. setting: the dotted setting of the axis. Empty if arms are words.
    """
    if np.isnan(trend.value):
        if dose_response.empty or dose_response["is_word"].all():
            return ""
        return "A trend needs at least three scored runs, at two or more values of the axis, with different success."
    axis = setting or "the axis"
    verb = "fall" if trend.value < 0 else "rise"
    # The direction is a result only if chance alone would rarely produce it.
    is_resolved = trend.p < compare.SIGNIFICANCE_LEVEL
    claim = f"Success tends to {verb} as {axis} grows" if is_resolved else f"Success has no clear trend over {axis}"
    return (
        f"{claim} (rank correlation {format_signed(trend.value, decimals=2)}, {format_p_value(trend.p)} over {trend.n} "
        "runs)."
        f"{' Arms named by words are left out.' if dose_response['is_word'].any() else ''}"
        f"{' A stopped run counts with its last value.' if dose_response['early_stopped'].any() else ''}"
    )


SECONDARY_LABELS = {
    "mean_val_success": "mean of the validation curve",
    "final_val_greedy_success": "greedy success at the end",
    "test_success": "success on test levels, sampled",
    "test_greedy_success": "success on test levels, greedy",
}


def list_caveats(frames: StudyFrames, summary: pd.DataFrame) -> list[str]:
    """The limits of the report, for the runs that this study has."""
    return [
        _describe_seeds(frames, summary),
        *describe_looks(frames.studies[0]),
        *_describe_changes(frames.studies[0]),
        _describe_levels(frames),
        *_list_scoring_caveats(frames, summary),
        *_list_mismatch_caveats(frames),
        *_list_comparison_caveats(summary),
        "The peak of a validation curve is the best of many noisy validations, so it is biased upward. No verdict uses "
        "it.",
        "No run was repeated with the same seed, so the report does not show how much two executions of one run "
        "differ. Times depend on the load of the machine.",
    ]


def _describe_changes(study: StudyRecord) -> Iterator[str]:
    """That the runs were made longer when they had ended, or the file of the study changed after its start."""
    earlier_steps, steps = study.earlier_steps, study.total_steps
    if earlier_steps and steps is not None:
        yield (
            f"The runs were planned with {' and then '.join(f'{number:,}' for number in earlier_steps)} training steps "
            f"and made longer, to {steps:,}, when results could be seen. Verdicts are about step {steps:,}; they are "
            "not corrected for the earlier chance to reach one."
        )
    if count := len(study.earlier_declarations):
        yield (
            f"The file that declares this study was changed {_count_times(count)} after the study had started; all "
            "versions are at the end of this page. Baseline, contrasts and margins come from the first version."
        )


def _count_times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def describe_looks(study: StudyRecord) -> list[str]:
    """How often a study with added seeds was looked at, and what follows; none if its seeds were fixed."""
    if not compare.has_added_seeds(study):
        return []
    looks = study.looks
    numbers = ", ".join(str(look.seeds) for look in looks)
    seeds_text = f", with up to {numbers} seeds per arm" if looks else ""
    planned_text = (
        f"Seeds are added to open arms, up to {study.max_seeds} per arm."
        if study.max_seeds is not None
        else "Seeds were added after a look: more were run than planned."
    )
    return [
        f"{planned_text} The results were looked at {_count_times(len(looks))}{seeds_text}. Verdicts use a test that "
        "keeps its error rate over all looks together. It is weaker than a test that fixes the number of seeds before "
        "the first run, so adding seeds to a small study can undo a verdict. All other intervals and p-values, such "
        "as for a trend, assume a fixed number of seeds."
    ]


MAX_MARGIN_SHARE = 0.2
"""From this share of the baseline's success on, the margin of equality is said to be large."""
DEFAULT_MISMATCH_LIMIT = 0.05
"""Nats per token, where study.json has no rollout.logprob_tolerance."""


def _list_mismatch_caveats(frames: StudyFrames) -> Iterator[str]:
    """That the sampler and the trainer of some runs differed over sampled tokens, if they did."""
    limit = (frames.studies[0].settings.get("rollout") or {}).get("logprob_tolerance", DEFAULT_MISMATCH_LIMIT)
    large = frames.steps[frames.steps["engine_mismatch_mean"] > limit]
    for worst in to_records(large.nlargest(1, "engine_mismatch_mean")):
        yield (
            f"In {large['run_id'].nunique()} of {len(frames.trials)} runs the log-probs of sampler and trainer "
            f"differed by more than {format_number(limit)} nats per sampled token in some step, by up to "
            f"{format_number(worst['engine_mismatch_mean'])}, in arm {worst['arm']}, seed {worst['seed']}, step "
            f"{worst['step']}. These runs sampled from a policy that was not quite the trained one, which may explain "
            "some of their results."
        )


def _describe_seeds(frames: StudyFrames, summary: pd.DataFrame) -> str:
    scored_runs = frames.trials[frames.trials["status"].isin(compare.SCORED_STATUSES)]
    num_seeds = scored_runs["seed"].nunique()
    # The baseline may have more seeds than all other arms.
    compared_runs = scored_runs[scored_runs["arm"] != frames.studies[0].baseline]
    num_compared_seeds = compared_runs["seed"].nunique() if len(compared_runs) else num_seeds
    if num_seeds == 0:
        return "No run completed or was stopped by a rule, so nothing is compared."
    seeds_text = count_nouns(num_seeds, "seed")
    if not (summary["se"] > 0).any():
        return (
            f"{seeds_text}: nothing shows how much runs of one setting differ, so no difference has an interval. Add "
            "seeds: repeat the command of this study with --seeds 3 --extend."
        )
    if num_compared_seeds == 1 < num_seeds:
        return (
            f"1 seed per arm and {num_seeds} of the baseline: the noise is estimated from the baseline's runs, and "
            "from recorded runs if there are any. If an arm is noisier, its interval is too narrow."
        )
    if num_seeds == 1:
        return (
            "1 seed: the noise is estimated from recorded runs of a similar arm. If the runs of this study are "
            "noisier, its intervals are too narrow. Outcomes without recorded runs have no interval."
        )
    text = (
        f"{seeds_text}: the noise of a run is estimated from all arms together. An arm's noise is never taken to be "
        "smaller than the spread of its own runs or the sampling error of its evaluation."
    )
    noise = compare.collect_outcomes(frames, "late_val_success").noise
    if noise.unpaired and noise.paired:
        unpaired, paired = (format_number(math.sqrt(pool.variance)) for pool in (noise.unpaired, noise.paired))
        text += (
            f" The standard deviation of a run is {unpaired}, or {paired} without the effect of its seed on all arms."
        )
    return text


def _describe_levels(frames: StudyFrames) -> str:
    levels = frames.levels[frames.levels["split"] == "val"]
    if levels.empty:
        return "The outcomes of single levels are missing, so the noise of the evaluation is not known."
    num_levels, num_classes = levels["level"].nunique(), levels["cluster"].nunique()
    text = f"All arms were validated on the same {num_levels} levels."
    if (levels.groupby(["run_id", "step", "mode"])["level"].nunique() < num_levels).any():
        text = f"Runs were validated on different sets of levels, {num_levels} in all."
    elif num_classes < num_levels:  # each run numbers the classes of its own levels
        text += (
            f" {num_classes} of them are distinct: the game counts some levels as equal, such as mirrored boards. "
            "Means count a level as often as it occurs. Intervals for other levels count equal levels as one draw."
        )
    return f"{text} The results do not apply to levels of another kind or size."


def _list_scoring_caveats(frames: StudyFrames, summary: pd.DataFrame) -> Iterator[str]:
    rows, statuses = to_records(summary), frames.trials["status"]
    for row in rows:
        if row["is_baseline"] and row["margin"] > MAX_MARGIN_SHARE * row["late_val_success"] > 0:
            share = 100 * row["margin"] / row["late_val_success"]
            yield (
                f"The margin of {format_number(row['margin'])} is {share:.0f} % of the baseline's success, so arms "
                "that are called equal may differ by that much."
            )
    if any(row["early_stopped"] for row in rows):
        yield (
            "A stopped run keeps the value of its last validation up to the planned end. An arm is a failed regime if "
            f"all of its runs, at least {MIN_REGIME_RUNS}, were stopped; a stop at a success of {MASTERED_SUCCESS} or "
            "more is no failure. The notes of a verdict say whether it would change if stopped runs were scored 0 or "
            "left out."
        )
    if count := int((~statuses.isin(compare.SCORED_STATUSES)).sum()):
        yield f"{count} of {len(statuses)} runs neither completed nor were stopped by a rule; they are not scored."
    # Below 1 % of dropped groups, the budgets of the arms are nearly equal anyway.
    if any(row["kept_ratio"] < 0.99 for row in rows):
        yield (
            "The filter dropped groups, and arms that keep fewer groups make fewer optimizer steps on fewer tokens. "
            "Compare arms at equal budgets before calling one more efficient."
        )


def _list_comparison_caveats(summary: pd.DataFrame) -> Iterator[str]:
    if len(summary) and (num_comparisons := int(summary["p"].notna().sum())):
        yield (
            f"{count_nouns(num_comparisons, 'comparison')} with the baseline: p-values are corrected with Holm's "
            "method within this study, separately for differences and for equality within the margin. Intervals are "
            "not corrected: each covers the difference of its own arm only. Secondary outcomes, contrasts, times "
            "to collapse, learning curves, symptoms and the test of the trend are corrected separately: each of these "
            "groups has a false positive in about 5 % of the studies in which nothing has an effect."
        )


def list_games(frames: StudyFrames) -> list[str]:
    """The games that the arms of a study play, in the order of the arms; of the user's games also the file."""
    (study,), (family,) = compare.require_single_study(frames).studies, frames.families
    column = "config/env.name"
    names = frames.trials[column].dropna().unique() if column in frames.trials else []
    games = [str(name) for name in names] or [family.get_environment(study.settings)]
    own_games = (re.fullmatch(r"(.+\.py):(\w+)(?:#\w+)?", game) for game in games)
    return [match.expand(r"\2 (\1)") if match else game for game, match in zip(games, own_games, strict=True)]


def list_arm_settings(frames: StudyFrames) -> list[dict[str, Any]]:
    """The settings in which runs differ, without seeds, each with its value in every arm."""
    by_arm = frames.trials.groupby("arm", sort=False)
    return [
        {"setting": name, "values": [str(rows[f"config/{name}"].iloc[0]) for _, rows in by_arm]}
        for name in list_differing_settings(frames.trials)
    ]


def describe_curves(table: pd.DataFrame, name: str) -> str:
    """The first values of a column, and between which arms the last ones lie; empty without a scored run.

    The value of an arm is the mean over its scored runs, each at its own last step. table: from `series.make_curves`.
    name: what the values are, with their unit.
    """
    scored_rows = table[table["status"].isin(compare.SCORED_STATUSES)]
    if scored_rows.empty:
        return ""
    runs = scored_rows.groupby(["arm", "run_id"], sort=False)["value"]
    firsts, lasts = (values.groupby("arm", sort=False).mean() for values in (runs.first(), runs.last()))
    low, high = format_number(firsts.min()), format_number(firsts.max())
    first = f"{low}{' in every arm' * (len(firsts) > 1)}" if low == high else f"between {low} and {high}"
    low, high = format_number(lasts.min()), format_number(lasts.max())
    last = f"between {low} ({lasts.idxmin()}) and {high} ({lasts.idxmax()})"
    if low == high:
        last = f"{low}{' in every arm' * (len(lasts) > 1)}"
    return f"{name[0].upper()}{name[1:]}: {first} at first; {last} at the end."


def describe_confirmation(study: StudyRecord) -> str:
    """What a study confirms, and with which seeds, as a sentence; empty for a study that confirms none."""
    confirms = study.confirms
    if not confirms:
        return ""
    arms = [arm for arm in study.axis.values if arm != study.baseline]
    return (
        f"Confirmation of {join_arms(arms)} against {study.baseline} in {confirms.run}, with seeds "
        f"{format_seeds(study.seeds)}. The arm was chosen by seeds {format_seeds(confirms.seeds)} of that study, not "
        "by the runs below."
    )


def describe_fork(study: StudyRecord) -> str:
    """Which runs a fork continues, as a sentence; empty for other studies."""
    if not (forks := study.forks):
        return ""
    return (
        f"Fork of arm {forks.arm} of {forks.run}, seeds {format_seeds(study.seeds)}: the rows up to the step in the "
        "name of an arm are those of that study."
    )


def count_validations(study: StudyRecord) -> int:
    """Count the planned validations after step 0; 0 if their number is not known."""
    steps, test_freq = study.total_steps, flatten_settings(study.settings).get("trainer.test_freq")
    if steps is None or type(test_freq) is not int:
        return 0
    return math.ceil(steps / test_freq) if test_freq > 0 else 1


SHORT_SHARE = 0.5
"""A study is called short if it was planned with less than this share of the training steps of its preset."""


def describe_short_runs(study: StudyRecord) -> str:
    """That a study was planned with far fewer steps than its preset has, as a sentence; empty if it was not."""
    steps, preset_steps = study.total_steps, study.preset_steps
    if steps is None or preset_steps is None or steps >= SHORT_SHARE * preset_steps:
        return ""
    return (
        f"A short study: {steps:,} training step{'' if steps == 1 else 's'} instead of the {preset_steps:,} of preset "
        f"{study.preset}, so it may not show what longer runs do."
    )


def format_seeds(seeds: Sequence[int]) -> str:
    """Seeds as text, with stretches as one: `0 to 4, 7`.

    >>> format_seeds([0, 1, 2, 7])
    '0 to 2, 7'
    """
    firsts = [seed for previous, seed in zip([None, *seeds], seeds, strict=False) if previous != seed - 1]
    lasts = [seed for seed, following in zip(seeds, [*seeds[1:], None], strict=True) if following != seed + 1]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True))
