"""The report of a study that fine-tunes a language model: of one axis, of a grid, or of a search.

To show another column over training, add a `Curve` to `SUCCESS_CURVES` or `SIGNAL_CURVES`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.charts import curves as charts
from analysis.charts.chart import make_arm_colors
from analysis.charts.dose import draw_dose_response
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.grid import layout
from analysis.report.common import (
    CONTRASTS,
    STATUS_COUNTS,
    format_p,
    list_command_sentences,
    list_remarks,
    make_reproduction_tables,
    make_runs_table,
)
from analysis.report.gradients import GRADIENTS
from analysis.report.grid import EDGE, FACTORS, GRID_SECTIONS, describe_factors, describe_panel_curves
from analysis.report.pages import CONSISTENCY_SENTENCE, list_consistency
from analysis.report.results import SweepResults
from analysis.report.search import SEARCH, SEARCH_FIGURES
from analysis.report.section import (
    Figure,
    Heading,
    Listing,
    Report,
    Section,
    Table,
    TableColumn,
    format_count,
    format_duration,
    format_range,
    name,
    number,
    text,
)
from analysis.sweep import findings, series, tables, time_course
from analysis.sweep.collapse import COLLAPSE_DEFINITION, compute_survival, describe_signal_problems
from analysis.sweep.examples import choose_examples
from analysis.sweep.symptoms import PERMUTATION_SEED, describe_order, summarize_order
from analysis.sweep.verdicts import format_fraction, format_number, format_signed, format_signed_number
from trainable.config.aliases import shorten_setting

MAX_OPEN_ARMS = 12
"""With more arms, the verdicts of a grid are folded, a table per panel."""


# ---------------------------------------------------------------------- verdicts


def _list_headline(results: SweepResults) -> Iterator[str]:
    yield findings.format_headline(results.summary, describe_signal_problems(results.arm_frames))


def _make_verdict_tables(results: SweepResults) -> Iterator[Table]:
    columns = _make_verdict_columns(results)
    if not results.grid or len(results.arms) <= MAX_OPEN_ARMS:
        yield Table(columns, results.arms)
        return
    home_rows = results.members[results.members["home"]]
    for panel in layout.list_panels(results.grid, results.members)["panel"]:
        points = home_rows[home_rows["panel"] == panel].sort_values([results.grid.y, results.grid.x])
        names = {results.labels.get(arm, arm) for arm in points["arm"]}
        rows = [row for row in results.arms if row["arm"] in names]
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in Counter(row["outcome"] for row in rows).items())
        # A panel may have only shared runs, whose verdicts are listed in their home panel.
        yield Table(columns, rows, fold=f"**{panel}**: {len(rows)} arm{'s' * (len(rows) > 1)}; {outcomes}")


def _make_verdict_columns(results: SweepResults) -> list[TableColumn]:
    num_late = findings.count_late_validations(results.study)
    late = "the last validation" if num_late == 1 else f"mean of the\nlast {num_late} validations"
    return [
        name("arm"),
        TableColumn("verdict", lambda row: row["outcome"], "verdict"),
        number(f"success, {late}", "late_val_success", format_fraction, ("late_low", "late_high")),
        TableColumn("minus the\nbaseline", _format_difference, "number"),
        number("Holm p", "p_holm", format_p),
        number("success at the\nlast validation", "final_val_success", format_fraction),
        STATUS_COUNTS,
        text("notes", "notes"),
    ]


def _format_difference(row: Row) -> str:
    if row["is_baseline"]:
        return "baseline"
    bounds = [
        format_range(row, low, high, format_signed)
        for low, high in (("difference_low", "difference_high"), ("levels_low", "levels_high"))
    ]
    return "\n".join(filter(None, [format_signed(row["difference"]), *bounds]))


def _explain_verdicts(results: SweepResults) -> str:
    if not results.arms:
        return ""
    basis = findings.describe_interval_basis(results.summary)
    intervals = f" Intervals are {basis}." if basis else ""
    return (
        f"Arms differ in `{results.study.axis.setting or 'several settings'}`. They are compared by sampled success "
        "on the validation levels, the mean of the last four validations; this was chosen before the study ran. "
        "Brackets are 95 % intervals that allow for other seeds. A difference has two: the second also allows for "
        f"other levels of the same kind. None is corrected for the number of arms.{intervals} Verdicts are about "
        "these levels. Arms are better or worse if the difference is resolved, equal if it is shown to be smaller "
        f"than {format_number(results.arms[0]['margin'])}, without an effect if every row equals the baseline's, and "
        "open otherwise."
    )


VERDICTS: Section[SweepResults] = Section(
    "verdicts",
    "Verdict for each arm",
    sentences=_list_headline,
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


# ---------------------------------------------------------------------- collapse


def _make_survival_table(results: SweepResults) -> pd.DataFrame | None:
    table = compute_survival(results.line_frames)
    return table if (table["collapsed"] > 0).any() else None


def _make_collapse_table(results: SweepResults) -> Iterator[Table]:
    yield Table(
        [
            name("arm"),
            TableColumn("collapsed", lambda row: f"{row['collapsed']} of {row['runs']}", "number"),
            text("at steps", "collapse_steps"),
            number("mean steps\nwithout", "mean_steps"),
            number("minus the\nbaseline", "difference", format_signed_number, ("difference_low", "difference_high")),
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
            "Fraction of runs that have not collapsed, by training step (Kaplan-Meier estimate). A run that failed or "
            "was interrupted counts up to its last step.",
            _make_survival_table,
            lambda table, results: charts.draw_survival(table, results.line_colors),
            lambda table, results: findings.describe_survivors(table),
        ),
    ),
    tables=lambda results: _make_collapse_table(results) if results.has_collapse else (),
    explanation="A secondary outcome. Mean steps are those without collapse, of the planned ones. Differences are over "
    "common seeds. p is from a permutation test that exchanges arms within each seed, corrected with Holm's method.",
    files=lambda results: {} if results.grid else {"collapse": results.collapse_times},
    concludes=True,
)


def _select_collapse_onsets(results: SweepResults) -> pd.DataFrame | None:
    onsets = results.onsets
    onsets = onsets[onsets["is_collapse"].astype(bool)]
    return onsets if onsets["onset"].notna().any() else None


def _make_order_table(results: SweepResults) -> Iterator[Table]:
    if _select_collapse_onsets(results) is None:
        return
    yield Table(
        [
            name("symptom", "label"),
            TableColumn("changed in", lambda row: f"{row['changed']} of {row['runs']}", "number"),
            TableColumn(
                "stayed well:\nchanged in", lambda row: f"{row['well_changed']} of {row['well_runs']}", "number"
            ),
            number("was first in", "first", str),
            number("median\nonset", "median_onset"),
            number("before\nsuccess", "earlier", str),
            number("after", "later", str),
            number("not\nknown", "undecided", str),
            number("lead\n(steps)", "lead", format_signed_number, ("lead_low", "lead_high")),
            number("Holm p", "p_adjusted", format_p),
        ],
        to_records(summarize_order(results.onsets)),
    )


ORDER: Section[SweepResults] = Section(
    "order",
    "What changed before a collapse",
    sentences=lambda results: describe_order(results.onsets),
    figures=(
        Figure(
            "onsets",
            "When each symptom began, in every run that collapsed. A point is the onset of the change, a thin line its "
            "95 % interval, and a bar the median over runs. Symptoms without a change are left out.",
            _select_collapse_onsets,
            lambda table, results: charts.draw_onsets(table, results.arm_colors),
        ),
    ),
    tables=_make_order_table,
    explanation="Each symptom is compared with the success of the training episodes, which is measured in every step "
    "as "
    'well. A change counts if p is at most .05, corrected for all symptoms and runs; "stayed well" counts the same in '
    "runs that did not collapse. A symptom was first if the interval of its onset ends before those of all others "
    "begin, and before or after success if both intervals are apart. Lead: by how many steps the estimated onset was "
    "earlier, as the median over the runs in which both changed, with a 95 % interval from 6 runs on. p is from a sign "
    "test, corrected for the number of symptoms. To see a run with its episodes, type `python -m tune_study explain` "
    "with the folder of this study.",
    files=lambda results: {"onsets": results.onsets} if len(results.onsets) else {},
    when=lambda results: results.has_collapse,
)


# ---------------------------------------------------------------------- the axis


def _make_dose_caption(results: SweepResults) -> str:
    table = results.dose_response
    basis = findings.describe_interval_basis(table)
    intervals = f"with 95 % intervals ({basis})" if basis else "without intervals"
    stops = (
        " A vermilion cross means that a rule stopped all scored runs of the arm as failures, and a vermilion edge "
        "that it stopped some of them."
        if table["early_stopped"].any()
        else ""
    )
    measured = table.notna().any()
    marks = [
        f"Circles show sampled validation success at the end of training, {intervals}",
        *["triangles greedy validation success"] * bool(measured["greedy"]),
        *["squares sampled success on the test levels"] * bool(measured["test"]),
    ]
    lines = [*["dashed sampled"] * bool(measured["base"]), *["dotted greedy"] * bool(measured["base_greedy"])]
    lines_text = f" Horizontal lines show the policy before training: {', '.join(lines)}." if lines else ""
    return f"{', '.join(marks[:-1])}{', and ' if len(marks) > 1 else ''}{marks[-1]}.{stops}{lines_text}"


def _describe_trend(results: SweepResults) -> Iterator[str]:
    trend, page_p_value = tables.compute_trend(results.frames, np.random.default_rng(PERMUTATION_SEED))
    yield findings.describe_trend(trend, page_p_value, results.dose_response, results.study.axis.setting)


DOSE_RESPONSE: Section[SweepResults] = Section(
    "dose-response",
    lambda results: f"Success against {results.study.axis.setting or 'the axis'}",
    sentences=_describe_trend,
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


# ---------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """A figure of one step column over training, with a line per run."""

    name: str
    column: str
    """A step column."""
    label: str
    """Of the y axis, with a unit."""
    caption: str
    explains_marks: bool = False
    """Whether the caption explains lines and marks. Only the first figure of a page does."""
    carry_forward: bool = False
    """Whether a stopped run keeps its last value in a mean over runs."""
    is_uninformative: Callable[[StudyFrames], bool] = lambda frames: False
    """Returns True if the column has nothing to show in these frames, so that the figure is left out."""
    only_in_grids: bool = False
    """Leave the figure out of one-axis reports."""


def _has_no_trees(frames: StudyFrames) -> bool:
    return bool(frames.steps["val_children"].isna().all())


VALIDATION_CURVE = Curve(
    "validation_curves",
    "val_success",
    "validation success (fraction)",
    "Sampled validation success of every run.",
    explains_marks=True,
    carry_forward=True,
)
SUCCESS_CURVES = (
    VALIDATION_CURVE,
    Curve(
        "val_reward",
        "val_reward",
        "mean reward of a validation (reward)",
        "Mean reward of the trees of each sampled validation. A tree succeeds from a reward of .9 on.",
        is_uninformative=_has_no_trees,
    ),
    Curve(
        "val_children",
        "val_children",
        "children per tree (children)",
        "Mean number of children that the code of a root asked in each sampled validation.",
        is_uninformative=_has_no_trees,
    ),
)
SIGNAL_CURVES = (
    Curve(
        "reward_std",
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of the rewards in a group, averaged over groups. Near zero, all rollouts of a group get "
        "the same reward, so rewards carry no signal.",
    ),
    Curve(
        "entropy",
        "entropy",
        "entropy (nats per token)",
        "Entropy of the sampling policy, averaged over tokens.",
    ),
    Curve(
        "val_kl",
        "val_kl_to_reference",
        "KL to the reference (nats per token)",
        "KL to the reference over the sampled tokens of each validation, also in arms without a KL term. The reference "
        "is the policy before training, or the model at model.reference_path. It is the k3 estimate, at most 10 per "
        "token.",
    ),
    Curve(
        "reference_kl",
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference at the trained tokens, before each update. It is the k3 estimate, whatever the form of "
        "the loss. Runs without a reference pass have no curve.",
        only_in_grids=True,
    ),
    Curve(
        "kept_groups",
        "groups_kept",
        "groups trained on (groups)",
        "Number of collected groups that the filter kept.",
        is_uninformative=lambda frames: bool((frames.steps["kept_ratio"].dropna() == 1).all()),
    ),
)
CURVES = (*SUCCESS_CURVES, *SIGNAL_CURVES)


def _make_curve_figure(curve: Curve) -> Figure[SweepResults]:
    """Declare the figure of `curve`: one panel, or the panels of a grid with a line per run."""

    def make_tables(results: SweepResults) -> tuple[pd.DataFrame, pd.DataFrame] | None:
        is_left_out = (curve.only_in_grids and not results.grid) or (results.search and curve is not VALIDATION_CURVE)
        if results.frames.trials.empty or is_left_out or curve.is_uninformative(results.frames):
            return None
        if results.grid:
            runs = layout.make_panel_curves(results.frames, results.grid, results.members, curve.column)
            means = pd.DataFrame(columns=["arm", "step", "value"])
        else:
            runs = series.make_curves(results.frames, curve.column)
            means = series.compute_mean_curves(runs, carry_forward=curve.carry_forward)
        return (runs, means) if len(runs) else None

    def make_caption(results: SweepResults) -> str:
        lines = "Thin lines are single runs, and a thick line is their mean"
        if results.grid:
            x, y = (shorten_setting(setting) for setting in (results.grid.x, results.grid.y))
            lines = f"A line is a run: its color shows {x}, and its dashes {y}."
        stops = "" if results.grid else ", in which a stopped run keeps its last value."
        marks = (
            f" {lines}{stops} Step 0 is the policy before training. A cross marks the end of a run that a rule "
            "stopped, and a ring the end of any other incomplete run."
        )
        return curve.caption + marks * curve.explains_marks

    return Figure(
        curve.name,
        make_caption,
        make_tables,
        lambda curves, results: (
            charts.draw_curves(
                curves[0],
                curves[1],
                make_arm_colors(results.grid.list_labels(results.grid.x)),
                curve.label,
                dash="dash",
                panel="panel",
            )
            if results.grid
            else charts.draw_curves(curves[0], curves[1], results.arm_colors, curve.label)
        ),
        lambda curves, results: (
            describe_panel_curves(curves[0], curve.label)
            if results.grid
            else findings.describe_curves(curves[0], curve.label)
        ),
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
            number("gain", "gain", format_signed, ("gain_low", "gain_high")),
            number("greedy,\nbefore", "base_val_greedy_success", format_fraction),
            number("after", "final_val_greedy_success", format_fraction),
            number("gain", "gain_greedy", format_signed, ("gain_greedy_low", "gain_greedy_high")),
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
    sentences=lambda results: [
        line for row in results.arms if row["is_baseline"] for line in findings.describe_learning(row)
    ],
    tables=_make_learning_table,
    explanation="Numbers are means over scored runs. The test levels are evaluated once, at the end of a run, and "
    "nothing is tuned on them. Unseen levels are the validation levels that the game counts as equal to no training "
    "level of the run, as it does mirrored boards. Sampled success after training is the mean of the last four "
    "validations. The mean of the curve is the mean height of the validation curve over all steps.",
)


def _make_time_tables(results: SweepResults) -> Iterator[Table]:
    if results.grid:
        return
    if not results.has_collapse:
        yield from _make_collapse_table(results)
    # A row without a number says only why.
    rows = to_records(results.learning_curves)
    yield Table(
        [
            name("arm"),
            TableColumn("cost", lambda row: time_course.COSTS[row["cost"]]),
            number("seeds", "seeds", str),
            number("ceiling", "ceiling", format_fraction, ("ceiling_low", "ceiling_high")),
            number(
                "minus the\nbaseline",
                "ceiling_difference",
                format_signed,
                ("ceiling_difference_low", "ceiling_difference_high"),
            ),
            number("Holm p", "p_ceiling_holm", format_p),
            number("midpoint", "midpoint", format_number, ("midpoint_low", "midpoint_high")),
            number(
                "divided by\nthe baseline",
                "midpoint_ratio",
                format_number,
                ("midpoint_ratio_low", "midpoint_ratio_high"),
            ),
            number("Holm p", "p_midpoint_holm", format_p),
            text("why not", "refusal"),
        ],
        rows,
        fold=f"Ceiling and midpoint of each arm, {len(rows)} rows",
    )


TIME: Section[SweepResults] = Section(
    "time",
    lambda results: "Ceiling and speed" if results.has_collapse else "Time to collapse, ceiling and speed",
    tables=_make_time_tables,
    explanation="Secondary outcomes. A sigmoid is fitted to the validations of each arm: the ceiling is the success "
    "that it approaches, and the midpoint the cost of half of its gain. A setting that moves the ceiling changes what "
    "is learned in the end; one that moves the midpoint changes how fast. Intervals are over seeds, from five on. p "
    "is corrected over all rows of this table together.",
    files=lambda results: {} if results.grid else {"learning_curves": results.learning_curves},
)


def _make_secondary_table(results: SweepResults) -> Iterator[Table]:
    rows = [] if results.grid else to_records(tables.compare_secondary(results.frames))
    yield Table(
        [
            name("arm"),
            TableColumn("outcome", lambda row: findings.SECONDARY_LABELS[row["column"]]),
            number("minus the\nbaseline", "difference", format_signed, ("difference_low", "difference_high")),
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


# ---------------------------------------------------------------------- stops and signal


def _make_stop_tables(results: SweepResults) -> Iterator[Table]:
    trials = results.arm_frames.trials
    stopped = to_records(trials[trials["status"] == "early_stopped"])
    if stopped:
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
        yield Table(
            [
                name("arm"),
                TableColumn(
                    "stopped",
                    lambda row: f"{row['failed_stops']} of {row['early_stopped'] + row['completed']}",
                    "number",
                ),
                number("fraction stopped", "stopped_fraction", format_fraction, ("stopped_low", "stopped_high")),
                number("success as scored:\nlast value kept", "late_val_success", format_fraction),
                number("stopped runs\nscored 0", "late_stopped_as_zero", format_fraction),
                number("stopped runs\nleft out", "late_survivors", format_fraction),
                number("stops against\nthe baseline,\nHolm p", "p_stopped_holm", format_p),
            ],
            results.arms,
            fold=results.fold("Stopped runs of each arm, scored in three ways"),
            note="The fraction stopped is of the scored runs, with Wilson's 95 % interval; a stop at a success of 0.9 "
            "or more is no failure and does not count. Fisher's exact test compares it with the baseline's, corrected "
            "for the number of arms.",
        )
    yield Table(
        [
            name("panel" if results.grid else "arm"),
            number("groups\nper step", "groups"),
            number("groups kept,\nfirst quarter", "kept_first_quarter"),
            number("last quarter", "kept_last_quarter"),
            number("with reward std 0,\nfirst quarter", "zero_std_first_quarter"),
            number("last quarter", "zero_std_last_quarter"),
        ],
        to_records(series.count_kept_groups(results.line_frames)),
    )


def _describe_stops(results: SweepResults) -> Iterator[str]:
    frames = results.frames
    if not (frames.trials["status"] == "early_stopped").any():
        yield "No rule stopped a run."
    if len(frames.trials) and CURVES[-1].is_uninformative(frames):
        yield "Every group was used for training in every step: the filter removed none."


STOPS: Section[SweepResults] = Section(
    "stops",
    "Collapse and stops",
    sentences=_describe_stops,
    figures=tuple(map(_make_curve_figure, SIGNAL_CURVES)),
    tables=_make_stop_tables,
)


def _make_arm_lines(results: SweepResults) -> pd.DataFrame | None:
    table = series.make_arm_lines(results.line_frames)
    return table if len(table) and not results.search else None


RETRIEVAL: Section[SweepResults] = Section(
    "retrieval",
    "Do thoughts still depend on their prompt?",
    figures=(
        Figure(
            "retrieval",
            "Retrieval is the fraction of sampled thoughts that the policy finds more likely after their own prompt "
            "than after every other prompt. The dashed line shows the fraction that guessing would reach. Each arm is "
            "one line, the mean of its runs. If entropy stays high while retrieval falls to guessing, thoughts vary "
            "but no longer depend on the level.",
            _make_arm_lines,
            lambda table, results: charts.draw_arm_lines(table, results.line_colors),
            lambda table, results: findings.describe_retrieval(table),
        ),
    ),
)


# ---------------------------------------------------------------------- episodes, costs, runs


def _list_examples(results: SweepResults) -> Iterator[Listing]:
    for arm in [] if results.grid or results.search else choose_examples(results.frames):
        names = ", ".join(str(episode["name"]) for episode in arm.episodes)
        text = "\n\n".join(
            f"{episode['title']}: {episode['stop_reason']}, score "
            f"{format_number(episode['score'])}\n\n{episode['text']}"
            for episode in arm.episodes
        )
        yield Listing(f"Arm {arm.arm}, seed {arm.seed}: {names}", text)


EXAMPLES: Section[SweepResults] = Section(
    "examples",
    "What the policy did",
    tables=_list_examples,
    explanation="Of the first seed of each arm: a solved and a failed validation episode before training and at the "
    "end, where one was recorded; and from the last training step the episodes with the largest and the smallest "
    "advantage. Lines with | are what the policy saw, lines with > what it wrote. Rewards are those "
    "used for training: they include the penalty of an invalid reply, which the policy is not shown. "
    "`python -m tune_study transcripts` with the folder of this study prints all recorded episodes of validations, and "
    "with `--trained` those that were trained on.",
)


def _make_budget_tables(results: SweepResults) -> Iterator[Table]:
    count = len(results.arms)
    yield Table(
        [
            name("arm"),
            *(number(label, key, _choose_format(key)) for key, label in series.BUDGETS.items()),
            number("groups kept", "kept_ratio", format_fraction),
        ],
        results.arms,
        fold=results.fold(f"Budgets of all {count} arms"),
        note="Means over the scored runs of an arm. Run time covers training and validation, and depends on the load "
        "of the machine.",
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
        note="Sampled validation success after the same amount of one budget: the smallest amount that a completed run "
        "used. Success is interpolated between validations. A stopped run keeps its last value.",
    )


def _choose_format(budget: str) -> Callable[[float], str]:
    return format_duration if budget == "seconds_total" else format_count


BUDGETS: Section[SweepResults] = Section(
    "budgets",
    "Budgets",
    tables=_make_budget_tables,
    explanation="A filter changes the number of groups that a run trains on, and thus its optimizer steps and tokens. "
    "A run that a rule stopped used less of every budget.",
)


def _list_consistency(results: SweepResults) -> list[str]:
    lines = list_consistency(results.arm_frames)
    return [CONSISTENCY_SENTENCE, *lines] if lines else []


CONSISTENCY: Section[SweepResults] = Section("agreement", "Consistency of equal runs", sentences=_list_consistency)
RUNS: Section[SweepResults] = Section(
    "runs",
    "All runs",
    tables=lambda results: make_runs_table(
        results.arm_frames, [number("success", "final_val_success", format_fraction)]
    ),
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
        **{f"{row['split']} levels": _describe_levels(row) for row in findings.summarize_levels(results.frames)},
    }
    yield from make_reproduction_tables(results, facts)


def _describe_levels(row: Mapping[str, Any]) -> str:
    different = (
        "all different"
        if row["classes"] == row["levels"]
        else f"{row['classes']} different: levels that the game counts as equal count once"
    )
    return f"{row['levels']} levels, seeds {row['first']} to {row['last']}, {different}; {row['modes']}"


REPRODUCTION: Section[SweepResults] = Section(
    "reproduce", "Reproduce", sentences=list_command_sentences, tables=_make_reproduction_tables
)


def _make_heading(results: SweepResults) -> Heading:
    study, frames = results.study, results.frames
    games = ", ".join(findings.list_games(frames))
    statuses = findings.format_status_counts(frames.trials)
    return Heading(
        f"Study **{study.name}** · {study.model} plays {games} · preset {study.preset or '–'} · {statuses}",
        study.question or study.name,
        list_remarks(frames),
    )


SWEEP_REPORT: Report[SweepResults] = Report(
    SweepResults,
    _make_heading,
    (
        VERDICTS,
        SEARCH,
        SEARCH_FIGURES,
        COLLAPSE,
        FACTORS,
        DOSE_RESPONSE,
        LEARNING_CURVES,
        EDGE,
        *GRID_SECTIONS,
        CONTRASTS,
        ORDER,
        CAVEATS,
        LEARNING,
        TIME,
        SECONDARY,
        STOPS,
        RETRIEVAL,
        GRADIENTS,
        EXAMPLES,
        BUDGETS,
        CONSISTENCY,
        RUNS,
        REPRODUCTION,
    ),
    lambda results: (
        results.summary[["arm", "outcome"]]
        if not results.search and len(results.summary)
        else pd.DataFrame(columns=["arm", "outcome"])
    ),
)
"""The report of a study that fine-tunes a language model: of one axis, of a grid, or of a search."""
