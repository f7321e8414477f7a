"""Tables and figures of a study as one HTML file that opens anywhere, and an index of several."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.data.compare import single
from analysis.data.frames import StudyFrames, records, together
from analysis.data.load import load, study_folders
from analysis.gradients import tables as gradients
from analysis.grid import layout
from analysis.grid import page as grid_page
from analysis.html.figures import Gallery
from analysis.html.page import environment, settings_rows, write_page
from analysis.report import figures
from analysis.sandbox import figures as sandbox_figures
from analysis.sandbox import page as sandbox_report
from analysis.sweep import findings, series, tables, verdicts
from trainable.runs.links import make_folder, whole_file

PERMUTATION_SEED = 0

BUDGET_NAMES = {
    "total_optimizer_steps": "optimizer steps",
    "total_env_steps": "environment steps",
    "total_sampled_tokens": "sampled tokens",
    "total_trained_tokens": "trained tokens",
    "seconds_total": "run time",
}


class Conclusion(NamedTuple):
    """What a study came to in words: its headline, and one line per arm (arm, outcome, verdict)."""

    headline: str
    arms: tuple[str, ...]


def write_report(folder: Path | str, *, live: bool = False) -> Path:
    """Write report.html and figures/*.png into a results/<run> folder; returns the report's path.

    The page needs no network and no script, and is that of the study's family (`PAGES`). Tables beside it are written
    as figures/*.csv. live: the study's process still runs, so "running" is kept as a status.
    """
    return write_report_of(load(folder, live=live), Path(folder))


def conclude(frames: StudyFrames) -> Conclusion:
    """The headline and the verdicts of a study's report, for a terminal."""
    index = _page_of(frames).index(frames)
    lines = (f"{row['arm']}: {index['number']} {row['number']}; {row['verdict']}" for row in index["arms"])
    return Conclusion(index["headline"], tuple(lines))


def write_report_of(frames: StudyFrames, folder: Path) -> Path:
    """`write_report` for a study that is loaded already."""
    drawn = draw_figures(frames)
    pictures = make_folder(folder, "figures")
    for name, figure in drawn.items():
        with whole_file(pictures / f"{name}.png") as beside:
            figure.savefig(beside, dpi=150, format="png")
        figure.set_layout_engine("none")  # laid out once; the page's copy is the same figure
    for name, table in _page_of(frames).tables(frames):
        with whole_file(pictures / f"{name}.csv") as beside:
            table.to_csv(beside, index=False)
    return write_page(folder / "report.html", render_page(frames, drawn))


def draw_figures(frames: StudyFrames) -> dict[str, Figure]:
    """Every figure that the study has something to show in, by name."""
    return _page_of(frames).gallery(frames).draw()


def render_page(frames: StudyFrames, drawn: Mapping[str, Figure]) -> str:
    """The report of a study as HTML, with the figures in `drawn` (see `draw_figures`) where they are declared to be."""
    page = _page_of(frames)
    shown = page.gallery(frames).show(drawn)
    return environment().get_template(page.template).render(page.context(frames), figures=shown)


def _page_of(frames: StudyFrames) -> "Page":
    (family,) = single(frames).families
    if family.name not in PAGES:
        raise ValueError(f"no report is declared for the family {family.name}: analysis.report.pages.PAGES has none.")
    return PAGES[family.name]


def write_index(output: Path | str) -> Path:
    """Write <output>/index.html: a link to the report of every study below, and equal runs held against each other.

    Published numbers of update rules are laid beside those of all studies together, with one correction over all cells.
    """
    output = Path(output)
    folders = study_folders(output)
    parts = [load(folder) for folder in folders]
    studies = [
        {
            "study": frames.studies[0],
            "statuses": findings.statuses(frames.trials),
            "link": (folder / "report.html").relative_to(output).as_posix(),
            **_page_of(frames).index(frames),
        }
        for folder, frames in zip(folders, parts, strict=True)
    ]
    frames = together(parts)
    agreement = records(series.consistency(frames))
    held = sandbox_report.beside_published(frames)
    page = environment().get_template("index.html.j2").render(studies=studies, agreement=agreement, **held)
    return write_page(output / "index.html", page)


def _index(frames: StudyFrames) -> dict[str, Any]:
    """What the index says of a study: headline, and number and verdict of each arm."""
    summary = tables.arm_summary(frames)
    arms = [{**row, "number": verdicts.share(row["final_val_success"])} for row in records(summary)]
    return {"headline": findings.headline(summary), "number": "success", "arms": arms}


def _grid_tables(frames: StudyFrames) -> Iterable[tuple[str, pd.DataFrame]]:
    found = layout.find(frames)
    return grid_page.tables(frames, found) if found else ()


def report_context(frames: StudyFrames) -> dict[str, Any]:
    """Everything that the template shows beside figures, by name; all numbers come from the tables.

    The arms of a grid are called by their points, and where an arm has no room of its own, by their panels.
    """
    found, recorded = layout.find(frames), frames
    if found:
        frames = layout.renamed(frames, layout.arm_labels(frames, found))
    summary = tables.arm_summary(frames)
    arms = records(summary)
    trend, page = tables.trend(frames, np.random.default_rng(PERMUTATION_SEED))
    return {
        "study": frames.studies[0],
        "grid": grid_page.context(recorded, found, arms, PERMUTATION_SEED) if found else None,
        "arms": arms,
        "headline": findings.headline(summary),
        "statuses": findings.statuses(frames.trials),
        "trend": findings.trend_sentence(trend, page),
        "learning": [line for row in arms if row["is_baseline"] for line in findings.learning_sentences(row)],
        "caveats": findings.caveats(frames, summary),
        "stopped": [run for run in findings.run_list(frames) if run["status"] == "early_stopped"],
        "kept": records(series.kept_groups(grid_page.by_panel(recorded, found) if found else frames)),
        "budgets": _budget_rows(frames),
        "agreement": records(series.consistency(frames)),
        **_gradient_tables(frames),
        "runs": findings.run_list(frames),
        "settings": settings_rows(frames.studies[0]),
        "arm_settings": [] if found else findings.arm_settings(frames),
        "level_sets": findings.level_sets(frames),
        "budget_names": BUDGET_NAMES,
    }


def _gradient_tables(frames: StudyFrames) -> dict[str, list[dict[str, Any]]]:
    """The trends of every arm and the whole batches of the analyses that the figures show; and the empty batches."""
    generator = np.random.default_rng(PERMUTATION_SEED)
    lines = gradients.report_lines(frames.gradients)
    shown = gradients.trusted(lines)
    empty = frames.gradients[frames.gradients["empty_after_filter"] > 0]
    return {
        "gradient_trends": [row for step, rows in lines.groupby("step") for row in _trend_rows(rows, step, generator)],
        "gradient_batches": records(shown[shown["bucket"] == gradients.WHOLE]),
        "gradient_empty": records(empty[["run_id", "source", "step"]]),
    }


def _trend_rows(rows: pd.DataFrame, step: Any, generator: np.random.Generator) -> list[dict[str, Any]]:
    """The trends at one step: of mean_norm, and beside it those of signal, which have no ratio."""
    found = gradients.trend_summary(rows, generator, ("mean_norm", "signal")).assign(step=step)
    names = ["study", "arm", "source", "prefilter", "component"]
    signal = found.loc[found["measure"] == "signal", [*names, "rho", "rho_low", "rho_high", "p"]]
    norm = found[found["measure"] == "mean_norm"]
    return records(norm.merge(signal, on=names, how="left", suffixes=("", "_of_signal")))


def _budget_rows(frames: StudyFrames) -> list[dict[str, Any]]:
    """Equal budgets, a row an arm: {"arm", budget: success, ...}, preceded by the row of amounts (arm "")."""
    table = series.equal_budget(frames)
    if table.empty:
        return []
    amounts = {"arm": "", **dict(zip(table["budget"], table["amount"], strict=True))}
    rows = table.groupby("arm", sort=False)
    return [amounts, *({"arm": arm, **dict(zip(each["budget"], each["success"], strict=True))} for arm, each in rows)]


@dataclass(frozen=True)
class Page:
    """The report of one family: template, what it shows, figures, the tables beside it, its part of an index."""

    template: str
    context: Callable[[StudyFrames], dict[str, Any]]
    gallery: Callable[[StudyFrames], Gallery[Any]]
    tables: Callable[[StudyFrames], Iterable[tuple[str, pd.DataFrame]]]
    index: Callable[[StudyFrames], dict[str, Any]]


PAGES: dict[str, Page] = {
    "ppo": Page("report.html.j2", report_context, figures.gallery, _grid_tables, _index),
    "update_rules": Page(
        "sandbox.html.j2",
        sandbox_report.context,
        sandbox_figures.gallery,
        sandbox_report.tables_beside,
        sandbox_report.index,
    ),
}
"""By the name of a family (`analysis.data.families.FAMILIES`)."""
