"""Sections of studies whose arms form a grid: factors, the edge of a dose, and heat maps."""

from collections.abc import Iterator

import pandas as pd

from analysis.charts.grid import draw_edges, draw_heat_maps
from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.grid import factors, layout
from analysis.grid.layout import MEASURES, Measure
from analysis.report.common import format_p
from analysis.report.results import SweepResults
from analysis.report.section import Figure, Section, Table, TableColumn, count_of, name, number, text
from analysis.sweep.verdicts import (
    count_nouns,
    format_fraction,
    format_number,
    format_signed_2,
    format_status,
    is_missing,
)
from trainable.config.aliases import shorten_setting
from trainable.runs.history import COLLAPSE_DEFINITION


def _get_factor_grid(results: SweepResults) -> factors.FactorGrid:
    assert results.factor_grid is not None, "the section needs one"
    return results.factor_grid


def _make_factor_tables(results: SweepResults) -> Iterator[Table]:
    grid = _get_factor_grid(results)

    def format_means(row: Row) -> str:
        return "; ".join(f"{entry['value']}: {format_fraction(entry['mean'])}" for entry in row["means"])

    columns = [name("factor", "factor"), number("spread", "spread", format_fraction)]
    yield Table([*columns, TableColumn("mean by value", format_means)], factors.list_factors(grid))


def _explain_factors(results: SweepResults) -> str:
    (family,) = results.frames.families
    return (
        f"The mean by value averages `{family.primary_column}` over all arms with this value, and "
        f"over {count_nouns(len(_get_factor_grid(results).outcomes), 'seed')} with a scored run of every arm. The "
        "spread is the standard deviation of these means, corrected for noise; it depends on the values that were "
        "chosen. The declared contrasts are the main effects (each value minus the first one) and the interactions "
        "(half the difference between the effects of one factor at two values of the other)."
    )


FACTORS: Section[SweepResults] = Section(
    "factors",
    "Which factor matters more",
    sentences=lambda results: map(factors.describe_comparison, factors.compare_factors(_get_factor_grid(results))),
    tables=_make_factor_tables,
    explanation=_explain_factors,
    when=lambda results: results.factor_grid is not None,
    concludes=True,
)


def _make_edge_tables(results: SweepResults) -> Iterator[Table]:
    yield Table(
        [
            name("line", "line"),
            count_of("collapsed", "collapsed", "runs"),
            number("edge", "edge"),
            TableColumn("interval", lambda row: row["method"] or "–"),
            TableColumn(
                "safe band",
                lambda row: "–" if is_missing(row["safe_low"]) else f"{row['safe_low']:.3g} to {row['safe_high']:.3g}",
                "number",
            ),
            number("decades", "safe_decades"),
            number("at most", "safe_decades_max"),
            number("collapse at its\nupper end, at most", "collapse_bound", format_fraction),
            text("what restricts it", "note"),
        ],
        to_records(results.edge_tables["edge"]),
    )
    yield Table(
        [
            name("contrast", "contrast"),
            number("collapsed", "collapsed", str),
            number("of the\nreference", "reference_collapsed", str),
            TableColumn("doses x\nseeds", lambda row: f"{row['doses']} x {row['seeds']}", "number"),
            number("shift of the\nedge (decades)", "shift", format_signed_2),
            number("p", "p", format_p),
            text("what restricts it", "note"),
        ],
        to_records(results.edge_tables["edge_shifts"]),
        title="How far the edge moves",
        note="A shift is the edge of the first line minus the edge of the second, at common doses and seeds: +1 means "
        "that the first line tolerates ten times the dose. Both edges are fitted with the same slope. p comes from "
        "exchanging the collapses of the two lines within each seed, so with three seeds it is at least .25.",
    )


def _explain_edges(results: SweepResults) -> str:
    margin = format_number(results.arms[0]["margin"]) if results.arms else "the margin"
    return (
        f"The dose is `{results.study.axis.dose}`; the arms of a line have all other settings in common. "
        f"{COLLAPSE_DEFINITION} The edge is the dose at which half of the runs of a line collapse. Brackets are 95 % "
        "intervals from the profile likelihood of a logistic curve over log10 of the dose, fitted with Firth's "
        "penalty; a dash means that the runs do not bound the number on that side. If all runs collapsed from some "
        "dose on, and none at a lower dose, every edge between the two doses around this change fits equally well. The "
        "table then shows their midpoint, with an exact interval that assumes only that collapse does not become rarer "
        "with the dose. Runs count as independent. The safe band goes from the lowest to the highest dose at which no "
        "run collapsed and "
        f"mean success is within {margin} of the line's best. Its ends are known only up to the next dose: the next "
        "column has its largest possible width, or a dash if the band reaches the end of the grid. The last number is "
        "the largest probability of collapse that the runs at its upper end do not exclude."
    )


EDGE: Section[SweepResults] = Section(
    "edge",
    "Where training breaks",
    figures=(
        Figure(
            "edge",
            "Top: fraction of runs that collapsed at each dose, with Wilson's 95 % intervals. Middle: the edge of each "
            "line with its 95 % interval, which ends in an arrow where the runs do not bound it; the wide bar is the "
            "safe band. Bottom: mean success at the end.",
            lambda results: results.edge_tables,
            lambda tables, results: draw_edges(
                tables["edge_doses"], tables["edge"], shorten_setting(results.study.axis.dose)
            ),
        ),
    ),
    tables=_make_edge_tables,
    explanation=_explain_edges,
    files=lambda results: results.edge_tables,
    when=lambda results: bool(results.edge_tables),
)


def describe_factors(grid: layout.Grid) -> list[str]:
    """List the factors of a grid with their values: x, y, and those of the panels."""
    return [
        f"{shorten_setting(setting)} (`{setting}`: {', '.join(map(layout.label_value, grid.factor_values[setting]))})"
        for setting in (grid.x, grid.y, *grid.panels)
    ]


def _describe_grid(results: SweepResults) -> Iterator[str]:
    yield f"{count_nouns(len(results.arms), 'arm')} over {', '.join(describe_factors(results.known_grid))}."
    num_shared = results.members.loc[results.members["shared"], "run_id"].nunique()
    if num_shared:
        verbs = ("appears", "counts") if num_shared == 1 else ("appear", "count")
        yield f"{count_nouns(num_shared, 'run')} with KL 0 {verbs[0]} in the panels of every loss but {verbs[1]} once."
    if "kl" in results.known_grid.factor_values.get("actor.kl_loss_type", ()):
        yield (
            "In theory, k1 (kl_loss_type=kl) used as a loss does not anchor the policy to the reference: its gradient "
            "is the gradient of log pi at the sampled tokens, which does not contain the reference and has expectation "
            "0 on policy. The heat map of the KL to the reference shows what happened in these runs."
        )
    if "algorithm.zero_task_advantage" in results.known_grid.factor_values:
        yield (
            "With `algorithm.zero_task_advantage`, only the entropy bonus and the KL loss move the policy, while the "
            "critic still learns: what also changes in those panels is due to regularization."
        )


def make_heat_map_table(results: SweepResults, measure: str) -> pd.DataFrame | None:
    """Make the table of a heat map, a row per cell in the order of panels, with its text; None without a number.

    Columns: panel, x and y (texts, as ordered categories), value, std, low, high, runs, scored, stopped and lines.
    """
    if results.grid is None or results.cells[measure].isna().all():
        return None
    cells = results.cells
    panels, _ = layout.arrange_panels(results.known_grid, results.members)
    names = {"panel": (cells["panel"], panels)} | {
        axis: (cells[axis].map(layout.label_value), list(map(layout.label_value, sorted(cells[axis].unique()))))
        for axis in ("x", "y")
    }
    table = pd.DataFrame({key: pd.Categorical(values, order, ordered=True) for key, (values, order) in names.items()})
    columns = ["state", "early_stopped", "scored", "runs", measure]
    return table.assign(
        value=cells[measure],
        **{end: cells[f"{measure}_{end}"] for end in ("std", "low", "high")},
        **cells[["runs", "scored"]],
        stopped=cells["early_stopped"],
        lines=[format_cell(*cell) for cell in cells[columns].itertuples(index=False)],
    ).sort_values(["panel", "y", "x"], ignore_index=True)


def format_cell(state: str, num_stopped: int, num_scored: int, num_runs: int, value: float) -> list[str]:
    """Return the lines of a cell: its mean, or the status of its runs if none is scored.

    A prefix `×` means that a rule stopped all runs, and `×1/3` that it stopped one of three. A second line `2 of 3`
    means that only two of three runs are scored.
    """
    if not num_scored:
        return format_status(state).split()
    cross = "" if not num_stopped else "× " if num_stopped == num_runs else f"×{num_stopped}/{num_runs} "
    mean = "–" if is_missing(value) else format_short(value)
    return [cross + mean, *([] if num_scored == num_runs else [f"{num_scored} of {num_runs}"])]


def format_short(value: float) -> str:
    """Format a number with two to three digits that fits into a cell: .53 for 0.53, 1.24, 12.3, 4.1e-4."""
    if value == 0:
        return "0"
    if abs(value) < 0.0095:
        return f"{value:.1e}".replace("e-0", "e-")
    digits = f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"
    return digits.replace("0.", ".", 1) if abs(value) < 1 else digits


def _make_heat_map(measure: Measure) -> Figure[SweepResults]:
    return Figure(
        f"grid_{measure.name}",
        lambda results: measure.caption.format(late=results.late_name),
        lambda results: make_heat_map_table(results, measure.name),
        lambda table, results: draw_heat_maps(
            table,
            measure.label,
            (shorten_setting(results.known_grid.x), shorten_setting(results.known_grid.y)),
            columns=layout.arrange_panels(results.known_grid, results.members)[1],
            domain=measure.domain,
            is_log=measure.is_log,
        ),
    )


GRID: Section[SweepResults] = Section(
    "grid",
    "The grid",
    sentences=_describe_grid,
    figures=tuple(map(_make_heat_map, MEASURES)),
    explanation="Each cell is the mean over its scored runs. All panels share one color scale. A vermilion frame and a "
    "cross mark cells with runs that a rule stopped as failures; these runs count with their last number. A cell with "
    "a dashed frame has no number: it shows the status of its runs, or a dash if they did not measure the quantity. A "
    "point without a cell is not part of the study. "
    "`figures/grid_cells.csv` has every number, with its runs and their standard deviation.",
    files=lambda results: {
        "grid_cells": results.cells.rename(columns={"x": results.known_grid.x, "y": results.known_grid.y})
    },
    when=lambda results: results.grid is not None,
)
