"""The page of a comparison of studies, its figure, and its sentence for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.comparison import tables
from analysis.data.compare import label_arm, list_arms
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.html.page import make_environment, render_svg, write_page
from analysis.sweep import findings
from analysis.sweep.plots import STYLE, TEXT_COLOR
from analysis.sweep.verdicts import count_nouns
from trainable.runs.records import Column

VERDICTS = ("better", "worse", "equal", "no effect", "open", "no comparison")
"""In the order in which a sentence names them."""


@dataclass(frozen=True)
class Comparison:
    """Several studies and what their comparison shows."""

    studies: Mapping[str, StudyFrames]
    """The frames of one study each, by label. The first one is the reference."""
    folders: Mapping[str, str]
    """Where each study is, as it was typed, by label."""
    arms: pd.DataFrame
    """The result of `tables.compare_arms`."""
    settings: pd.DataFrame
    """The result of `tables.compare_settings`."""

    @property
    def reference(self) -> str:
        """Label of the first study."""
        return next(iter(self.studies))

    @property
    def outcome(self) -> Column:
        """The column of `trials` that is compared."""
        (family,) = self.studies[self.reference].families
        return next(column for column in family.trial_columns if column.name == family.primary_column)

    @property
    def other_arms(self) -> Mapping[str, Sequence[str]]:
        """The arms that are not compared, by label. Studies without any are left out."""
        remaining = {}
        for label, frames in self.studies.items():
            is_reference = label == self.reference
            compared = self.arms["arm"] if is_reference else self.arms.loc[self.arms["study"] == label, "other_arm"]
            remaining[label] = [arm for arm in list_arms(frames) if arm not in set(compared)]
        return {label: arms for label, arms in remaining.items() if arms}

    def describe(self) -> list[str]:
        """One sentence per other study: in which arms it is better, worse, equal or open. One more if seeds differ."""
        sentences = []
        for label in list(self.studies)[1:]:  # B against A, 6 arms in common: worse in 0.3; equal in 0, 0.01.
            rows = self.arms[self.arms["study"] == label]
            names = {verdict: rows.loc[rows["verdict"] == verdict, "other_arm"].to_list() for verdict in VERDICTS}
            clauses = [f"{verdict} in {', '.join(arms)}" for verdict, arms in names.items() if arms]
            count = count_nouns(len(rows), "arm")
            sentences.append(f"{label} against {self.reference}, {count} in common: {'; '.join(clauses)}.")
        seeds = {frozenset(frames.trials["seed"]) for frames in self.studies.values()}
        if len(seeds) > 1:
            sentences.append(
                "The studies have different seeds: means are over those of each study, and differences over the seeds "
                "in common if there are at least two, or else over all seeds of both."
            )
        return sentences

    def describe_studies(self) -> list[Row]:
        """One row per study: label, name, folder, preset, seeds, statuses of its runs, and commit."""
        return [
            {
                "label": label,
                "name": study.name,
                "folder": self.folders[label],
                "question": study.question,
                "preset": study.preset,
                "seeds": findings.format_seeds(sorted(set(frames.trials["seed"]))),
                "statuses": findings.format_status_counts(frames.trials),
                "commit": (study.git.commit if study.git else "")[:7],
            }
            for label, frames in self.studies.items()
            for study in frames.studies
        ]


def compare(studies: Mapping[str, StudyFrames], folders: Mapping[str, str]) -> Comparison:
    """Compare all studies with the first one.

    Args:
        studies: the frames of one study each, by label.
        folders: where each study is, by label.

    Raises:
        ValueError: the studies are of different families, or have no arm in common (see `tables.compare_arms`).
    """
    settings = tables.compare_settings({label: frames.studies[0] for label, frames in studies.items()})
    return Comparison(studies, folders, tables.compare_arms(studies), settings)


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison to `path` and return it. The page needs no network and no script."""
    outcome = comparison.outcome
    page = (
        make_environment()
        .get_template("comparison.html.j2")
        .render(
            studies=comparison.describe_studies(),
            reference=comparison.reference,
            outcome=outcome,
            sentences=comparison.describe(),
            figure=render_svg("differences", draw_differences(comparison.arms, outcome.name)),
            arms=to_records(comparison.arms),
            settings=to_records(comparison.settings),
            other_arms=comparison.other_arms,
        )
    )
    return write_page(path, page)


def draw_differences(table: pd.DataFrame, label: str) -> Figure:
    """One row per compared arm: the difference with its interval, a dashed line at 0, and a band of the margin.

    Args:
        table: the result of `compare_arms`.
        label: name of the outcome, for the horizontal axis.
    """
    names = [label_arm(row.study, row.other_arm) for row in table.itertuples()]
    heights = [-float(index) for index in range(len(names))]
    margin = float(table["margin"].iloc[0])
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(7.2, 1.0 + 0.36 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(-margin, margin, color="#eeeeee", zorder=0)
        axes.axvline(0, color="#888888", linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        axes.hlines(heights, table["difference_low"], table["difference_high"], color=TEXT_COLOR, linewidth=2, zorder=3)
        axes.scatter(table["difference"], heights, s=30, color=TEXT_COLOR, zorder=4)
        axes.set_yticks(heights, names)
        axes.set_ylim(-len(names) + 0.4, 0.6)
        axes.set_xlabel(f"{label}, other study minus the first")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    return figure
