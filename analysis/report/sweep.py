"""The report of a study that fine-tunes a language model: of one axis, of a grid, or of a search.

To show another column over training, add a `Curve` to `SUCCESS_CURVES` or `SIGNAL_CURVES`.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import altair as alt
import numpy as np
import pandas as pd

from analysis.charts import curves as charts
from analysis.charts.chart import make_arm_colors
from analysis.charts.dose import draw_dose_response
from analysis.data.episodes import format_turns, read_episodes_of_run
from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.grid import layout
from analysis.report import common
from analysis.report.common import format_p
from analysis.report.fork import FORK
from analysis.report.gradients import GRADIENTS
from analysis.report.grid import EDGE, FACTORS, GRID, describe_factors
from analysis.report.pages import list_consistency
from analysis.report.results import SweepResults
from analysis.report.search import SEARCH
from analysis.report.section import (
    VERDICT_COLUMNS,
    Figure,
    Heading,
    Listing,
    Report,
    Section,
    Table,
    TableColumn,
    count_of,
    format_count,
    format_duration,
    name,
    number,
    text,
)
from analysis.sweep import findings, series, tables, time_course
from analysis.sweep.collapse import compute_survival, describe_signal_problems
from analysis.sweep.symptoms import PERMUTATION_SEED, describe_order, summarize_order
from analysis.sweep.verdicts import (
    explain_open,
    format_fraction,
    format_interval,
    format_number,
    format_signed,
    format_signed_number,
)
from trainable.config.aliases import shorten_setting
from trainable.files.json_values import DamageWarning
from trainable.files.paths import LINE_CHARACTERS, escape_controls
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.history import COLLAPSE_DEFINITION

MAX_OPEN_ARMS = 40
"""With more arms, the verdicts are folded."""


def _make_verdict_tables(results: SweepResults) -> Iterator[Table]:
    late = results.late_name.replace("of the last", "of the\nlast")
    columns = [
        name("arm"),
        TableColumn("verdict", lambda row: row["outcome"], "verdict"),
        number(f"success, {late}", "late_val_success", format_fraction, ("late_low", "late_high")),
        TableColumn("minus the\nbaseline", _format_difference, "number"),
        number("Holm p", "p_holm", format_p),
        number("success at the\nlast validation", "final_val_success", format_fraction),
        common.STATUS_COUNTS,
        text("notes", "notes"),
    ]
    is_folded = len(results.arms) > MAX_OPEN_ARMS
    fold = f"Verdicts of all {len(results.arms)} arms" if is_folded else ""
    yield Table(columns, results.arms, fold=fold, note=explain_open(results.arms, "arms"))


def _format_difference(row: Row) -> str:
    if row["is_baseline"]:
        return "baseline"
    bounds = [format_interval(row[f"{key}_low"], row[f"{key}_high"]) for key in ("difference", "levels")]
    return "\n".join(filter(None, [format_signed(row["difference"]), *bounds]))


def _explain_verdicts(results: SweepResults) -> str:
    if not results.arms:
        return ""
    return (
        f"Arms differ in `{results.study.axis.setting or 'several settings'}`. They are compared by sampled success "
        "on the validation levels, averaged over the last four validations; this outcome was chosen before the study "
        "ran. Brackets are 95 % intervals for other seeds; a difference has a second one, for other seeds and other "
        "levels of the same kind. They are not corrected for the number of arms. "
        f"{findings.describe_interval_basis(results.summary)} Verdicts are about these levels: better or worse if the "
        f"difference is resolved, equal if it is shown to be smaller than {format_number(results.arms[0]['margin'])}, "
        "no effect if every row equals the baseline's, else open."
    ).replace("  ", " ")


VERDICTS: Section[SweepResults] = Section(
    "verdicts",
    "Verdict for each arm",
    sentences=lambda results: [findings.format_headline(results.summary, describe_signal_problems(results.arm_frames))],
    tables=_make_verdict_tables,
    explanation=_explain_verdicts,
    when=lambda results: not results.search,
    concludes=True,
)
CAVEATS: Section[SweepResults] = Section(
    "caveats",
    "Limits of this report",
    sentences=lambda results: findings.list_caveats(results.arm_frames, results.summary),
    is_warning=True,
)


def _make_collapse_table(results: SweepResults) -> Iterator[Table]:
    yield Table(
        [
            name("arm"),
            count_of("collapsed", "collapsed", "runs"),
            text("at steps", "collapse_steps"),
            number("mean steps\nwithout", "mean_steps"),
            number("minus the\nbaseline", "difference", format_signed_number),
            number("Holm p", "p_holm", format_p),
            text("why no interval", "note"),
        ],
        [] if results.grid else to_records(results.collapse_times),
    )


COLLAPSE: Section[SweepResults] = Section(
    "collapse",
    "Which runs collapsed",
    sentences=lambda results: [
        f"{findings.describe_collapses(results.collapses)} {COLLAPSE_DEFINITION * results.has_collapse}".strip()
    ],
    figures=(
        Figure(
            "survival",
            "Fraction of runs that have not collapsed (Kaplan-Meier estimate). A run that failed or was interrupted "
            "counts up to its last step.",
            lambda results: table if (table := compute_survival(results.line_frames))["collapsed"].any() else None,
            lambda table, results: charts.draw_survival(table, results.line_colors),
        ),
    ),
    tables=lambda results: _make_collapse_table(results) if results.has_collapse else (),
    explanation="A secondary outcome: how many of the planned steps pass without a collapse, on average. Differences "
    "are over common seeds. p comes from a permutation test that exchanges arms within each seed, and is corrected "
    "with Holm's method.",
    files=lambda results: {} if results.grid else {"collapse": results.collapse_times},
    concludes=True,
)


def _select_collapse_onsets(results: SweepResults) -> pd.DataFrame | None:
    onsets = results.onsets[results.onsets["is_collapse"].astype(bool)]
    return onsets if onsets["onset"].notna().any() else None


def _make_order_table(results: SweepResults) -> Iterator[Table]:
    has_onset = _select_collapse_onsets(results) is not None
    yield Table(
        [
            name("symptom", "label"),
            count_of("changed in", "changed", "runs"),
            count_of("stayed well:\nchanged in", "well_changed", "well_runs"),
            number("was first in", "first", str),
            number("median\nonset", "median_onset"),
            number("before\nsuccess", "earlier", str),
            number("after", "later", str),
            number("not\nknown", "undecided", str),
            number("lead\n(steps)", "lead", format_signed_number),
            number("corrected p", "p_adjusted", format_p),
        ],
        to_records(summarize_order(results.onsets)) if has_onset else [],
    )


ORDER: Section[SweepResults] = Section(
    "order",
    "What changed before a collapse",
    sentences=lambda results: describe_order(results.onsets),
    figures=(
        Figure(
            "onsets",
            "When each symptom began: a point with its 95 % interval for every run that collapsed, and a bar at the "
            "median over runs. Symptoms that did not change are left out.",
            _select_collapse_onsets,
            lambda table, results: charts.draw_onsets(table, results.arm_colors),
        ),
    ),
    tables=_make_order_table,
    explanation="Each symptom is compared with the success of the training episodes. A change counts if p is at most "
    '.05, corrected for all symptoms and runs. Runs that did not collapse "stayed well". A symptom was first if the '
    "interval of its onset ends before all other intervals begin. It was before or after success if the two intervals "
    "do not overlap. The lead is the median over the runs in which both changed, with a 95 % interval if there are at "
    "least 6; its p comes from a sign test. `python -m tune_study explain` shows a run with its episodes.",
    files=lambda results: {"onsets": results.onsets} if len(results.onsets) else {},
    when=lambda results: results.has_collapse,
)


def _make_dose_caption(results: SweepResults) -> str:
    basis = findings.describe_interval_basis(results.dose_response)
    return (
        f"Success at the end of training, {'with' if basis else 'without'} 95 % intervals. Dashed line: sampled "
        "success before training. Dotted line: greedy success before training. Vermilion cross: a rule stopped all "
        f"scored runs of the arm as failures. Vermilion edge: a rule stopped some of them. {basis}"
    ).strip()


DOSE_RESPONSE: Section[SweepResults] = Section(
    "dose-response",
    lambda results: f"Success against {results.study.axis.setting or 'the axis'}",
    sentences=lambda results: [
        findings.describe_trend(
            tables.compute_trend(results.frames, np.random.default_rng(PERMUTATION_SEED)),
            results.dose_response,
            results.study.axis.setting,
        )
    ],
    figures=(
        Figure(
            "dose_response",
            _make_dose_caption,
            lambda results: results.dose_response if results.dose_response["success"].notna().any() else None,
            lambda table, results: draw_dose_response(
                table, tables.make_run_outcomes(results.frames), results.arm_colors, results.study.axis.setting
            ),
        ),
    ),
    when=lambda results: results.is_axis,
)


@dataclass(frozen=True)
class Curve:
    """A figure of one step column over training, with a line per run."""

    name: str
    column: str
    """A step column."""
    label: str
    """Of the y axis, with a unit."""
    caption: str
    carry_forward: bool = False
    """Whether a stopped run keeps its last value in a mean over runs."""
    is_uninformative: Callable[[SweepResults], bool] = lambda results: False
    """Returns True if the column has nothing to show in this study, so that the figure is left out."""


def _has_no_trees(results: SweepResults) -> bool:
    return bool(results.frames.steps["val_children"].isna().all())


def _keeps_every_group(results: SweepResults) -> bool:
    return bool((results.frames.steps["kept_ratio"].dropna() == 1).all())


VALIDATION_CURVE = Curve(
    "validation_curves",
    "val_success",
    "validation success (fraction)",
    "Sampled validation success of every run.",
    carry_forward=True,
)
SUCCESS_CURVES = (
    VALIDATION_CURVE,
    Curve(
        "val_reward",
        "val_reward",
        "mean reward of a validation (reward)",
        "Mean reward of the trees of each sampled validation. A tree succeeds if its reward is at least .9.",
        is_uninformative=_has_no_trees,
    ),
    Curve(
        "val_children",
        "val_children",
        "children per tree (children)",
        "Mean number of children that the code of a root asked, in each sampled validation.",
        is_uninformative=_has_no_trees,
    ),
)
SIGNAL_CURVES = (
    Curve(
        "reward_std",
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of the rewards in a group, averaged over groups. Near zero, rewards carry no signal.",
    ),
    Curve("entropy", "entropy", "entropy (nats per token)", "Entropy of the sampling policy, averaged over tokens."),
    Curve(
        "val_kl",
        "val_kl_to_reference",
        "KL to the reference (nats per token)",
        "k3 estimate of the KL to the reference (the policy before training, or the model at model.reference_path) "
        "over the tokens of each validation, at most 10 per token. Arms without a KL term have it too.",
    ),
    Curve(
        "reference_kl",
        "kl_to_reference",
        "KL to the reference (nats)",
        "k3 estimate of the KL to the reference at the trained tokens before each update, for every form of the loss.",
        is_uninformative=lambda results: not results.grid,
    ),
    Curve(
        "kept_groups",
        "groups_kept",
        "groups trained on (groups)",
        "Number of collected groups that the filter kept.",
        is_uninformative=_keeps_every_group,
    ),
    Curve(
        "retrieval",
        "collapse_trajectory_retrieval_accuracy",
        "retrieval, all turns (fraction)",
        "Fraction of sampled thoughts that the policy finds more likely after their own prompt than after every other "
        "prompt. If it falls to chance (`collapse_trajectory_retrieval_chance_level`) while entropy stays high, "
        "thoughts vary without depending on the level.",
    ),
    Curve(
        "retrieval_first_turn",
        "collapse_first_turn_retrieval_accuracy",
        "retrieval, first turns (fraction)",
        "The same for the thoughts of first turns.",
    ),
)
CURVES = (*SUCCESS_CURVES, *SIGNAL_CURVES)


def _make_curve_figure(curve: Curve) -> Figure[SweepResults]:
    """Declare the figure of `curve`: one panel, or the panels of a grid with a line per run."""

    def make_tables(results: SweepResults) -> tuple[pd.DataFrame, pd.DataFrame] | None:
        is_left_out = (results.search and curve is not VALIDATION_CURVE) or curve.is_uninformative(results)
        if results.frames.trials.empty or is_left_out:
            return None
        if results.grid:
            runs = layout.make_panel_curves(results.frames, results.grid, results.members, curve.column)
            means = pd.DataFrame(columns=["arm", "step", "value"])
        else:
            runs = series.make_curves(results.frames, curve.column)
            means = series.compute_mean_curves(runs, carry_forward=curve.carry_forward)
        return (runs, means) if len(runs) else None

    def make_caption(results: SweepResults) -> str:
        # Only the first figure of a page explains lines and marks.
        if curve is not VALIDATION_CURVE:
            return curve.caption
        lines = "Thin lines are runs. A thick line is the mean of an arm, in which a stopped run keeps its last value."
        if results.grid:
            x, y = (shorten_setting(setting) for setting in (results.grid.x, results.grid.y))
            lines = f"Each line is a run: its color shows {x}, its dashes show {y}."
        return (
            f"{curve.caption} {lines} Step 0 is the policy before training. A run that a rule stopped ends in a cross, "
            "any other incomplete run in a ring."
        )

    def draw(curves: tuple[pd.DataFrame, pd.DataFrame], results: SweepResults) -> alt.TopLevelMixin:
        if not results.grid:
            return charts.draw_curves(*curves, results.arm_colors, curve.label)
        grid = results.grid
        colors = make_arm_colors([grid.format_factor(grid.x, value) for value in grid.factor_values[grid.x]])
        return charts.draw_curves(*curves, colors, curve.label, dash="dash", panel="panel")

    return Figure(
        curve.name,
        make_caption,
        make_tables,
        draw,
        lambda curves, results: "" if results.grid else findings.describe_curves(curves[0], curve.label),
    )


LEARNING_CURVES: Section[SweepResults] = Section(
    "curves", "Learning curves", figures=tuple(map(_make_curve_figure, SUCCESS_CURVES))
)


def _make_learning_table(results: SweepResults) -> Iterator[Table]:
    yield Table(
        [
            name("arm"),
            number("sampled,\nbefore", "base_val_success", format_fraction),
            number("after", "late_val_success", format_fraction),
            number("gain", "gain", format_signed),
            number("greedy,\nbefore", "base_val_greedy_success", format_fraction),
            number("after", "final_val_greedy_success", format_fraction),
            number("gain", "gain_greedy", format_signed),
            number("unseen\nlevels", "final_val_success_unseen", format_fraction),
            number("test,\nsampled", "test_success", format_fraction),
            number("test,\ngreedy", "test_greedy_success", format_fraction),
            number("mean of\ncurve", "mean_val_success", format_fraction),
            number("peak\n(biased)", "peak_val_success", format_fraction),
        ],
        results.arms,
        fold=results.fold(f"Success before and after, all {len(results.arms)} arms"),
    )


LEARNING: Section[SweepResults] = Section(
    "learning",
    "Before and after training",
    tables=_make_learning_table,
    explanation="Means over scored runs. The test levels are evaluated once, at the end of a run, and nothing is tuned "
    "on them. Unseen levels are validation levels that equal no training level of the run, not even mirrored. "
    "Sampled success after training is the mean of the last four validations. The mean of the curve is over all steps. "
    "If sampled success rises and greedy success does not, the policy may only sample more often the replies that it "
    "already preferred.",
)


def _make_time_table(results: SweepResults) -> Iterator[Table]:
    # A row without a number says only why.
    rows = to_records(results.learning_curves)
    yield Table(
        [
            name("arm"),
            TableColumn("cost", lambda row: time_course.COSTS[row["cost"]]),
            number("seeds", "seeds", str),
            number("ceiling", "ceiling", format_fraction),
            number("minus the\nbaseline", "ceiling_difference", format_signed),
            number("Holm p", "p_ceiling_holm", format_p),
            number("midpoint", "midpoint"),
            number("divided by\nthe baseline", "midpoint_ratio"),
            number("Holm p", "p_midpoint_holm", format_p),
            text("why not", "refusal"),
        ],
        rows,
        fold=f"Ceiling and midpoint of each arm, {len(rows)} rows",
    )


TIME: Section[SweepResults] = Section(
    "time",
    "Ceiling and speed",
    tables=_make_time_table,
    explanation="Secondary outcomes. A sigmoid is fitted to the validations of each arm. Its ceiling is the success "
    "that it approaches, and shows how much is learned in the end. Its midpoint is the cost at which half of the gain "
    "is reached, and shows how fast. Intervals are over seeds and need at least five. p is corrected over all rows of "
    "this table together.",
    files=lambda results: {"learning_curves": results.learning_curves},
    when=lambda results: not results.grid,
)


def _make_secondary_table(results: SweepResults) -> Iterator[Table]:
    (family,) = results.frames.families
    table = tables.compare_outcomes(results.frames, () if results.grid else family.secondary_columns)
    rows = to_records(table.dropna(subset="difference"))
    yield Table(
        [
            name("arm"),
            TableColumn("outcome", lambda row: findings.SECONDARY_LABELS[row["column"]]),
            number("minus the\nbaseline", "difference", format_signed),
            number("Holm p", "p_holm", format_p),
        ],
        rows,
        fold=results.fold(f"Differences from the baseline, {len(rows)} rows"),
    )


SECONDARY: Section[SweepResults] = Section(
    "secondary",
    "Secondary outcomes",
    tables=_make_secondary_table,
    explanation="They were declared before the study ran and support the verdicts. p is corrected over all rows of "
    "this table together.",
)


def _make_stop_table(results: SweepResults) -> Iterator[Table]:
    trials = results.arm_frames.trials
    stopped = to_records(trials[trials["status"] == "early_stopped"])
    yield Table(
        [
            name("arm"),
            number("seed", "seed", str),
            text("rule", "stop_rule"),
            number("step", "stop_step", str),
            number("value", "stop_value"),
            number("threshold", "stop_threshold"),
            number("last success", "final_val_success", format_fraction),
            text("run", "run_id"),
        ],
        stopped,
        fold=results.fold(f"All stopped runs: {len(stopped)}"),
    )


def _describe_stops(results: SweepResults) -> Iterator[str]:
    trials = results.frames.trials
    if not (trials["status"] == "early_stopped").any():
        yield "No rule stopped a run."
    if len(trials) and _keeps_every_group(results):
        yield "Every group was used for training in every step: the filter removed none."


STOPS: Section[SweepResults] = Section(
    "stops",
    "Collapse and stops",
    sentences=_describe_stops,
    figures=tuple(map(_make_curve_figure, SIGNAL_CURVES)),
    tables=_make_stop_table,
)


MAX_EXAMPLE_ARMS = 12
"""A study with more arms has no examples in its report; the command `transcripts` prints them."""
_MAX_CHARACTERS = 8_000
"""Maximum length of an episode on the page, since large models may write long ones."""


def _list_examples(results: SweepResults) -> Iterator[Listing]:
    """List a solved and a failed episode of the first and of the last validation of each arm's smallest seed."""
    frames = results.frames
    if results.grid or results.search or not frames.folders or len(frames.runs_by_arm) > MAX_EXAMPLE_ARMS:
        return
    for arm, runs in frames.runs_by_arm.items():
        run = runs.loc[runs["seed"].idxmin()]
        with warnings.catch_warnings():  # damaged lines were reported when the frames were loaded
            warnings.simplefilter("ignore", DamageWarning)
            episodes = read_episodes_of_run(frames.folders[0], run["run_id"])
        # Read in reverse, the first of equal episodes is kept.
        chosen = {(row.step, row.success): row for row in reversed(episodes) if not row.is_trained}
        steps = sorted({step for step, _ in chosen})
        keys = [(step, success) for step in dict.fromkeys((*steps[:1], *steps[-1:])) for success in (True, False)]
        shown = [chosen[key] for key in keys if key in chosen]
        names = ", ".join(f"{'solved' if row.success else 'failed'} after step {row.step}" for row in shown)
        if shown:
            yield Listing(f"Arm {arm}, seed {run['seed']}: {names}", "\n\n".join(map(_format_example, shown)))


def _format_example(episode: RecordedEpisode) -> str:
    text = escape_controls("\n".join(format_turns(episode)), allowed=LINE_CHARACTERS)
    half = _MAX_CHARACTERS // 2
    if (num_left_out := len(text) - 2 * half) > 0:
        # A tree ends with its answer and the evidence.
        text = f"{text[:half]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[-half:]}"
    title = f"After step {episode.step}, level {episode.level}: {episode.stop_reason}"
    return f"{title}, score {format_number(episode.score)}\n\n{text}"


EXAMPLES: Section[SweepResults] = Section(
    "examples",
    "What the policy did",
    tables=_list_examples,
    explanation="For the first seed of each arm: a solved and a failed validation episode, before training and at the "
    "end, if one was recorded. Lines with | show what the policy saw, lines with > what it wrote. Rewards include "
    "the penalty for an invalid reply. `python -m tune_study transcripts` prints all recorded validation episodes; "
    "with `--trained`, the episodes that runs trained on.",
)


def _make_budget_tables(results: SweepResults) -> Iterator[Table]:
    yield Table(
        [
            name("arm"),
            *(number(label, key, _choose_format(key)) for key, label in series.BUDGETS.items()),
            number("groups kept", "kept_ratio", format_fraction),
        ],
        results.arms,
        fold=results.fold(f"Budgets of all {len(results.arms)} arms"),
        note="Means over scored runs. Run time covers training and validation, and depends on the load of the machine.",
    )
    table = series.compare_at_equal_budget(results.arm_frames)
    amounts = dict(zip(table["budget"], table["amount"], strict=True))
    yield Table(
        [
            name("arm"),
            *(
                number(f"at {_choose_format(key)(amounts[key])}\n{label}", key, format_fraction)
                for key, label in series.BUDGETS.items()
                if key in amounts
            ),
        ],
        [
            {"arm": arm, **dict(zip(rows["budget"], rows["success"], strict=True))}
            for arm, rows in table.groupby("arm", sort=False)
        ],
        title="Success at equal budgets",
        fold=results.fold("All arms at equal budgets"),
        note="Sampled validation success at the smallest amount of each budget that a completed run used, interpolated "
        "between validations. A stopped run keeps its last value.",
    )


def _choose_format(budget: str) -> Callable[[float], str]:
    return format_duration if budget == "seconds_total" else format_count


BUDGETS: Section[SweepResults] = Section(
    "budgets",
    "Budgets",
    tables=_make_budget_tables,
    explanation="A filter changes how many groups a run trains on, and thus its optimizer steps and tokens. A stopped "
    "run used less of every budget.",
)


CONSISTENCY: Section[SweepResults] = Section(
    "agreement", "Consistency of equal runs", sentences=lambda results: list_consistency(results.arm_frames)
)
_LAST_SUCCESS = number("success", "final_val_success", format_fraction)
RUNS: Section[SweepResults] = Section(
    "runs", "All runs", tables=lambda results: common.make_runs_table(results.arm_frames, [_LAST_SUCCESS])
)


def _make_reproduction_tables(results: SweepResults) -> Iterator[Table | Listing]:
    study, grid = results.study, results.grid
    reason = f" ({study.preset_reason})" if study.preset_reason else ""
    values = "; ".join(describe_factors(grid)) if grid else f"`{study.axis.setting}`: {', '.join(study.axis.values)}"
    facts = {
        "preset": f"{study.preset or '–'}{reason}",
        "model": study.model or "–",
        "axis": values,
        "stop rules": f"{', '.join(study.stop_rules) or 'none'}; `early_stop` below has their thresholds",
    }
    yield from common.make_reproduction_tables(results, facts)


REPRODUCTION: Section[SweepResults] = Section(
    "reproduce", "Reproduce", sentences=common.list_command_sentences, tables=_make_reproduction_tables
)


def _make_heading(results: SweepResults) -> Heading:
    study, frames = results.study, results.frames
    games = ", ".join(findings.list_games(frames))
    statuses = findings.format_status_counts(frames.trials)
    return Heading(
        f"Study **{study.name}** · {study.model} plays {games} · preset {study.preset or '–'} · {statuses}",
        study.question or study.name,
        common.list_remarks(frames),
    )


_RESULTS = (VERDICTS, SEARCH, FORK, COLLAPSE, FACTORS, DOSE_RESPONSE, LEARNING_CURVES, EDGE, GRID)
_DETAILS = (common.CONTRASTS, ORDER, CAVEATS, LEARNING, TIME, SECONDARY, STOPS, GRADIENTS)
_RECORDS = (EXAMPLES, BUDGETS, CONSISTENCY, RUNS, REPRODUCTION)
SWEEP_REPORT: Report[SweepResults] = Report(
    SweepResults,
    _make_heading,
    (*_RESULTS, *_DETAILS, *_RECORDS),
    lambda results: results.summary.iloc[: 0 if results.search else None].reindex(columns=VERDICT_COLUMNS),
)
"""The report of a study that fine-tunes a language model: of one axis, of a grid, or of a search."""
