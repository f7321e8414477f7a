"""Writes the report of a study as one self-contained HTML file, and an index of several studies."""

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.data.compare import require_single_study
from analysis.data.contrasts import read_contrasts
from analysis.data.frames import StudyFrames, concat_studies, to_records
from analysis.data.load import find_study_folders, load
from analysis.gradients import tables as gradients
from analysis.grid import layout
from analysis.grid import page as grid_page
from analysis.grid.factors import make_factor_context
from analysis.html.charts import make_script
from analysis.html.figures import Gallery, RenderedFigure
from analysis.html.page import (
    add_contents,
    list_commands,
    list_sources,
    make_environment,
    make_settings_rows,
    write_page,
)
from analysis.report import figures
from analysis.report.processes import compute_beside
from analysis.report.results import SweepResults
from analysis.search import page as search_page
from analysis.sweep import findings, series, tables, time_course, verdicts
from analysis.sweep.collapse import COLLAPSE_DEFINITION, count_collapses, describe_signal_problems, find_run_ends
from analysis.sweep.contrasts import compute_contrasts, compute_pair_differences, make_contrast_context
from analysis.sweep.examples import choose_examples
from analysis.sweep.plots import save_figure
from analysis.sweep.symptoms import PERMUTATION_SEED, describe_order, summarize_order
from trainable.files.paths import atomic_write, make_folder
from trainable.files.step_phase import STEP_PHASE

_ARM_COLUMNS = {"arm", "baseline", "first", "second"}
"""Columns of the tables beside the page that name arms."""


class Conclusion(NamedTuple):
    """The results of a study in words."""

    headline: str
    """How the arms compare with the baseline."""
    arms: tuple[str, ...]
    """One line per arm (arm, outcome, verdict)."""
    collapse: str
    """Which arms collapsed; empty for a family without collapse."""
    factors: tuple[str, ...] = ()
    """For a grid of declared factors, which of them matters more."""


def write_report(folder: Path | str, *, live: bool = False) -> Path:
    """Write report.html and figures/*.png into a results/<run> folder, and return the path of the report.

    The page needs no network. A script makes some figures interactive; without it they are pictures. The family of the
    study selects the page. Some tables are also written as figures/*.csv. live: the process of the study
    is still running, so keep the status "running".
    """
    return write_frames_report(load(folder, live=live), Path(folder))


def conclude(frames: StudyFrames) -> Conclusion:
    """The headline, the verdicts and the collapses of the report, for the terminal: with arms as `--arm` takes them."""
    if require_single_study(frames).studies[0].search:
        return _conclude_search(frames)
    index_entry = _get_page(frames).make_index_entry(frames)
    lines = (f"{row['arm']}: {index_entry['number']} {row['number']}; {row['verdict']}" for row in index_entry["arms"])
    factors = make_factor_context(frames)
    sentences = tuple(factors["sentences"]) if factors else ()
    study = frames.studies[0]
    remarks = (findings.describe_short_runs(study), findings.describe_confirmation(study), index_entry["headline"])
    # The definition, because statuses beside the sentence name only what a rule stopped.
    collapse = (index_entry["collapse"], index_entry["collapse_definition"])
    return Conclusion(" ".join(filter(None, remarks)), tuple(lines), " ".join(filter(None, collapse)), sentences)


def _conclude_search(frames: StudyFrames) -> Conclusion:
    """The best point of a search, and the importances of its settings instead of a verdict for each of many points."""
    results = search_page.SearchResults(frames)
    lines = tuple(
        f"{entry.name}: {entry.value:.2f} of the importance [{entry.low:.2f}, {entry.high:.2f}]"
        for entry in results.importances
    )
    remarks = (findings.describe_short_runs(frames.studies[0]), search_page.describe_search(results))
    return Conclusion(" ".join(filter(None, remarks)), lines, collapse="")


def summarize_runs(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    """How each run of a study ended, by run_id: status, reason, collapsed and verdict, for a record outside of it.

    collapsed is missing where runs do not collapse (`collapse.find_run_ends`). verdict is that of the arm, `baseline`
    for the baseline, and missing in a search.
    """
    study = require_single_study(frames).studies[0]
    arms = [] if study.search else _get_page(frames).make_index_entry(frames)["arms"]
    verdicts = {row["arm"]: "baseline" if row["arm"] == study.baseline else row["outcome"] for row in arms}
    (family,) = frames.families
    ends = find_run_ends(frames) if family.is_fine_tuning else pd.DataFrame(columns=["run_id", "is_collapse"])
    collapses = dict(zip(ends["run_id"], ends["is_collapse"], strict=True))
    summaries = {}
    for run in to_records(frames.runs):
        summary = {"status": run["status"], "reason": run["reason"]}
        summary |= {"collapsed": bool(collapses[run["run_id"]])} if run["run_id"] in collapses else {}
        summary |= {"verdict": verdicts[run["arm"]]} if verdicts.get(run["arm"]) else {}
        summaries[run["run_id"]] = summary
    return summaries


def list_open_arms(frames: StudyFrames) -> list[str]:
    """The arms whose difference from the baseline is neither resolved nor equal within the margin."""
    return [row["arm"] for row in _get_page(frames).make_index_entry(frames)["arms"] if row["outcome"] == "open"]


def write_frames_report(frames: StudyFrames, folder: Path, *, with_pictures: bool = True) -> Path:
    """`write_report` for a study that is already loaded.

    Tables beside the page have the arms of the frames, so that both can be joined. with_pictures: whether the figures
    of the page are also written as PNG files, which takes a fifth of the time. Where `compute_beside` can, it draws the
    figures in a process of their own.
    """
    page = _get_page(frames)
    arms = {label: arm for arm, label in layout.make_axis_labels(frames).items()}
    results = page.make_results(layout.name_arms(frames))
    figures_folder = make_folder(folder, "figures")
    with compute_beside(partial(_draw_page, page.make_gallery(results), with_pictures)) as get_figures:
        STEP_PHASE.enter("statistics")
        for name, table in page.make_tables(results):
            with atomic_write(figures_folder / f"{name}.csv") as temp_path:
                table.replace(dict.fromkeys(_ARM_COLUMNS & set(table), arms)).to_csv(temp_path, index=False)
        context = page.make_context(results)
        STEP_PHASE.enter("figures")
        rendered_figures, pictures = get_figures()
    for name, picture in pictures.items():
        with atomic_write(figures_folder / f"{name}.png") as temp_path:
            temp_path.write_bytes(picture)
    return write_page(folder / "report.html", _render(page, context, rendered_figures))


def _draw_page(gallery: Gallery[Any], with_pictures: bool) -> tuple[list[RenderedFigure], dict[str, bytes]]:
    """Draw the figures of a page, and with `with_pictures` make a PNG file of each."""
    drawn_figures = gallery.draw()
    pictures = {name: _make_picture(figure) for name, figure in drawn_figures.items()} if with_pictures else {}
    return gallery.render(drawn_figures), pictures


def _make_picture(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # The least compression: a tenth more bytes, and a seventh less time.
    save_figure(figure, buffer, dpi=150, format="png", pil_kwargs={"compress_level": 1})
    # save_figure has computed the layout. The page shows the same figure, so keep this layout and compute no other.
    figure.set_layout_engine("none")
    return buffer.getvalue()


def draw_figures(frames: StudyFrames, names: Collection[str] | None = None) -> dict[str, Figure]:
    """Draw every figure for which the study has data: {name: figure}.

    names: of the figures to draw; None: all. Raises ValueError if the report of such a study has no figure of that
    name.

    Example:
        >>> def save_dose_response(frames, path):
        ...     draw_figures(frames, ["dose_response"])["dose_response"].savefig(path)
    """
    page = _get_page(frames)
    gallery = page.make_gallery(page.make_results(layout.name_arms(frames)))
    if names is None:
        return gallery.draw()
    known_names = [figure.name for figure in gallery.figures]
    # Without a run there are no figures, whatever they are called.
    if known_names and (isinstance(names, str) or not set(names) <= set(known_names)):
        raise ValueError(f"names is {names!r}, and may have {', '.join(known_names)}.")
    return gallery.select(names).draw()


def render_page(frames: StudyFrames, drawn_figures: Mapping[str, Figure], with_charts: bool = True) -> str:
    """The report of a study as HTML, with `drawn_figures` (from `draw_figures`) in their sections.

    with_charts: whether figures are interactive where they can be, by a script in the page.
    """
    page = _get_page(frames)
    results = page.make_results(layout.name_arms(frames))
    rendered_figures = page.make_gallery(results).select(drawn_figures).render(drawn_figures, with_charts)
    return _render(page, page.make_context(results), rendered_figures)


def _render(page: "Page", context: Mapping[str, Any], rendered_figures: Sequence[RenderedFigure]) -> str:
    script = make_script() if any(figure.chart for figure in rendered_figures) else None
    template = make_environment().get_template(page.template)
    return add_contents(template.render(context, figures=rendered_figures, script=script))


def _get_page(frames: StudyFrames) -> "Page":
    (family,) = frames.families
    page: Page = resolve_name(family.report)
    return page


def write_index(output: Path | str) -> Path:
    """Write <output>/index.html, with links to the reports of all studies below `output`; return its path.

    Runs with equal configuration and seed are compared across studies. Published numbers of update rules are compared
    with all studies together, with one Holm correction over all cells.
    """
    output = Path(output)
    folders = find_study_folders(output)
    study_frames = [load(folder) for folder in folders]
    studies = [
        {
            "study": frames.studies[0],
            "statuses": findings.format_status_counts(frames.trials),
            "short_study": findings.describe_short_runs(frames.studies[0]),
            "link": (folder / "report.html").relative_to(output).as_posix(),
            **_get_page(frames).make_index_entry(layout.name_arms(frames)),
        }
        for folder, frames in zip(folders, study_frames, strict=True)
    ]
    frames = concat_studies(study_frames)
    consistency = to_records(series.check_consistency(frames))
    index_contexts = {resolve_name(family.report).make_index_context for family in frames.families}
    published = next((context for make_context in index_contexts if (context := make_context(frames))), None)
    template = make_environment().get_template("index.html.j2")
    page = template.render(studies=studies, consistency=consistency, published=published)
    return write_page(output / "index.html", page)


def _make_index_entry(frames: StudyFrames) -> dict[str, Any]:
    """The index entry of a study: headline, collapses, and number and verdict of each arm."""
    summary = tables.summarize_arms(frames)
    arms = [{**row, "number": verdicts.format_fraction(row["late_val_success"])} for row in to_records(summary)]
    collapses = count_collapses(frames)
    return {
        "headline": findings.format_headline(summary, describe_signal_problems(frames)),
        "collapse": findings.describe_collapses(collapses),
        "collapse_definition": COLLAPSE_DEFINITION if collapses["collapsed"].any() else "",
        "number": "success",
        "arms": arms,
    }


def _make_sweep_tables(results: SweepResults) -> Iterable[tuple[str, pd.DataFrame]]:
    yield from results.edge_tables.items()
    if results.grid:
        yield from grid_page.make_tables(results.frames, results.grid)
    else:
        yield "collapse", results.collapse_times
        yield "learning_curves", results.learning_curves
    if results.search:
        yield from search_page.make_tables(results.search)
    if len(results.onsets):
        yield "onsets", results.onsets
    if read_contrasts(results.frames.studies[0]):
        yield "contrasts", compute_contrasts(results.frames)
        yield "contrast_pairs", compute_pair_differences(results.frames)


def make_report_context(results: SweepResults) -> dict[str, Any]:
    """The template context of a report, without figures. All numbers come from the tables.

    The arms of a grid are named by their points. The table of kept groups has one row per panel of the grid, because a
    row per point would be too many.
    """
    grid, original_frames = results.grid, results.frames
    frames = original_frames
    if grid:
        frames = layout.rename_arms(frames, layout.make_arm_labels(frames, grid))
    summary = tables.summarize_arms(frames)
    arms = to_records(summary)
    if results.search:  # the seeds that are left of a censored point are those that did well
        arms = [row for row in arms if row["arm"] in set(results.search.complete_points["arm"])]
    collapses = count_collapses(frames)
    examples = [] if grid or results.search else choose_examples(original_frames)
    trend, page_p_value = tables.compute_trend(frames, np.random.default_rng(PERMUTATION_SEED))
    return {
        "study": frames.studies[0],
        **make_contrast_context(original_frames),
        "factors": make_factor_context(original_frames),
        "grid": grid_page.make_context(original_frames, grid, arms, PERMUTATION_SEED) if grid else None,
        "edge": {name: to_records(table) for name, table in results.edge_tables.items()},
        "search": search_page.make_context(results.search) if results.search else None,
        "dose": frames.studies[0].axis.dose,
        "arms": arms,
        "confirmation": findings.describe_confirmation(frames.studies[0]),
        "short_study": findings.describe_short_runs(frames.studies[0]),
        "headline": findings.format_headline(summary, describe_signal_problems(frames)),
        "collapse_sentence": findings.describe_collapses(collapses),
        "collapse_definition": COLLAPSE_DEFINITION,
        "has_collapse": bool((collapses["collapsed"] > 0).any()),
        "collapse": [] if grid else to_records(results.collapse_times),
        "curves": [] if grid else to_records(results.learning_curves),
        "costs": time_course.COSTS,
        "order": to_records(summarize_order(results.onsets)),
        "order_sentences": describe_order(results.onsets),
        "secondary": [] if grid else to_records(tables.compare_secondary(frames)),
        "secondary_labels": findings.SECONDARY_LABELS,
        "statuses": findings.format_status_counts(frames.trials),
        "trend": findings.describe_trend(
            trend,
            page_p_value,
            tables.make_dose_response(frames),
            frames.studies[0].axis.setting,
        ),
        "learning": [line for row in arms if row["is_baseline"] for line in findings.describe_learning(row)],
        "caveats": findings.list_caveats(frames, summary),
        "stopped_runs": to_records(frames.trials[frames.trials["status"] == "early_stopped"]),
        "kept_groups": to_records(
            series.count_kept_groups(grid_page.group_arms_by_panel(original_frames, grid) if grid else frames)
        ),
        "budgets": _make_budget_rows(frames),
        "consistency": to_records(series.check_consistency(frames)),
        **_make_gradient_tables(frames),
        "runs": to_records(frames.trials),
        "settings": make_settings_rows(frames.studies[0]),
        "commands": list_commands(frames.studies[0]),
        "sources": list_sources(frames.studies[0]),
        "games": findings.list_games(frames),
        "examples": examples,
        "has_trained_examples": any(episode["is_trained"] for arm in examples for episode in arm.episodes),
        "arm_settings": [] if grid else findings.list_arm_settings(frames),
        "level_sets": findings.summarize_levels(frames),
        "budget_names": series.BUDGETS,
    }


def _make_gradient_tables(frames: StudyFrames) -> dict[str, list[dict[str, Any]]]:
    """Tables of the analyses that the figures show: trends per arm, whole batches, and empty batches."""
    generator = np.random.default_rng(PERMUTATION_SEED)
    lines = gradients.select_report_lines(frames.gradients)
    signal_table = gradients.make_signal_table(lines)
    empty_rows = frames.gradients[frames.gradients["empty_after_filter"] > 0]
    return {
        "gradient_trends": [
            row for step, rows in lines.groupby("step") for row in _make_trend_rows(rows, step, generator)
        ],
        "gradient_batches": to_records(signal_table[signal_table["bucket"] == gradients.WHOLE_BATCH]),
        "gradient_empty": to_records(empty_rows[["run_id", "source", "step"]]),
    }


def _make_trend_rows(rows: pd.DataFrame, step: Any, generator: np.random.Generator) -> list[dict[str, Any]]:
    """The trends of mean_norm at one step, each with the trend of the signal in the columns `..._of_signal`."""
    trends = gradients.summarize_trends(rows, generator, ("mean_norm", "signal")).assign(step=step)
    names = ["study", "arm", "source", "prefilter", "component"]
    signal = trends.loc[trends["measure"] == "signal", [*names, "rho", "rho_low", "rho_high", "p"]]
    norm = trends[trends["measure"] == "mean_norm"]
    return to_records(norm.merge(signal, on=names, how="left", suffixes=("", "_of_signal")))


def _make_budget_rows(frames: StudyFrames) -> list[dict[str, Any]]:
    """Success at equal budgets: first a row of amounts (arm ""), then one row {"arm", budget: success, ...} per arm.

    The template needs the amounts for its column heads and the rows for its body.
    """
    table = series.compare_at_equal_budget(frames)
    if table.empty:
        return []
    amounts = {"arm": "", **dict(zip(table["budget"], table["amount"], strict=True))}
    rows = table.groupby("arm", sort=False)
    return [
        amounts,
        *({"arm": arm, **dict(zip(arm_rows["budget"], arm_rows["success"], strict=True))} for arm, arm_rows in rows),
    ]


@dataclass(frozen=True)
class Page:
    """The report of one family."""

    make_results: Callable[[StudyFrames], Any]
    """What the other functions need, from the frames of a study; computed once per report."""
    template: str
    """Name of the template."""
    make_context: Callable[[Any], dict[str, Any]]
    """The template context, without figures."""
    make_gallery: Callable[[Any], Gallery[Any]]
    """The figures."""
    make_tables: Callable[[Any], Iterable[tuple[str, pd.DataFrame]]]
    """The tables that are also written as figures/*.csv, with their names."""
    make_index_entry: Callable[[StudyFrames], dict[str, Any]]
    """The entry of a study in an index."""
    make_index_context: Callable[[StudyFrames], dict[str, Any] | None] = lambda frames: None
    """Published numbers beside those of all studies of an index; None if the family has none."""


SWEEP_PAGE = Page(
    SweepResults, "report.html.j2", make_report_context, figures.make_gallery, _make_sweep_tables, _make_index_entry
)
"""The report of a study that fine-tunes a language model."""
