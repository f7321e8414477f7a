"""The comparison of studies, its page, and its sentences for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.charts.curves import draw_intervals
from analysis.comparison import tables
from analysis.data.compare import label_arm, list_arms
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.report.common import format_p
from analysis.report.page import draw_sections, render_page, view_sections, write_page
from analysis.report.section import Figure, Heading, Section, Table, TableColumn, name, number, text
from analysis.sweep import findings
from analysis.sweep.verdicts import count_nouns, format_fraction, format_number, format_p_value, format_signed
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
        compared = {self.reference: self.arms["arm"], **dict(list(self.arms.groupby("study")["other_arm"]))}
        remaining = {
            label: [arm for arm in list_arms(frames) if arm not in set(compared.get(label, ()))]
            for label, frames in self.studies.items()
        }
        return {label: arms for label, arms in remaining.items() if arms}

    def describe(self) -> list[str]:
        """One sentence per other study: in which arms it is better, worse, equal or open. One more if seeds differ."""
        sentences = []
        for label in list(self.studies)[1:]:  # B against A, 6 arms in common: worse in 0.3; equal in 0, 0.01.
            rows = self.arms[self.arms["study"] == label]
            names = {verdict: rows.loc[rows["verdict"] == verdict, "other_arm"] for verdict in VERDICTS}
            clauses = "; ".join(f"{verdict} in {', '.join(arms)}" for verdict, arms in names.items() if len(arms))
            sentences.append(f"{label} against {self.reference}, {count_nouns(len(rows), 'arm')} in common: {clauses}.")
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
    """Compare all studies with the first one; see `Comparison`, and `tables.compare_arms` for the errors."""
    settings = tables.compare_settings({label: frames.studies[0] for label, frames in studies.items()})
    return Comparison(studies, folders, tables.compare_arms(studies), settings)


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison to `path` and return it."""
    figures = draw_sections(SECTIONS, comparison, with_charts=True)
    heading = Heading("", f"Comparison of {len(comparison.studies)} studies", lead=comparison.describe())
    return write_page(path, render_page(heading, view_sections(SECTIONS, comparison, figures)))


def _make_arm_table(comparison: Comparison) -> Iterator[Table]:
    reference = comparison.reference
    yield Table(
        [
            TableColumn("arm", lambda row: " = ".join(dict.fromkeys((row["arm"], row["other_arm"]))), "name"),
            TableColumn("verdict", _format_verdict, "verdict"),
            text("study", "study"),
            number(reference, "reference", format_fraction),
            number("other", "other", format_fraction),
            number("difference", "difference", format_signed),
            number("Holm p", "p_holm", format_p),
            TableColumn(f"stopped runs,\n{reference} and other", _format_stops, "number"),
            text("basis", "basis"),
        ],
        to_records(comparison.arms),
    )


def _format_verdict(row: Row) -> str:
    if row["verdict"] != "equal":
        return str(row["verdict"])
    return f"equal\nwithin {format_number(row['margin'])}, Holm {format_p_value(row['p_equal_holm'])}"


def _format_stops(row: Row) -> str:
    return f"{row['reference_stopped']} of {row['reference_runs']}, {row['other_stopped']} of {row['other_runs']}"


def _explain_arms(comparison: Comparison) -> str:
    outcome = comparison.outcome
    return (
        f"`{outcome.name}` is the {outcome.meaning}. The table has its mean over the runs of each study, and the "
        f"other study minus {comparison.reference}. Runs of the same seed are paired. Brackets are 95 % intervals "
        "with the noise of all arms of all studies as far as none stands out, not corrected for the number of arms; "
        "p-values are corrected with Holm's method over all rows. The other study is **better** or **worse**, "
        "**equal** within the margin, equal in every row (**no effect**), or the difference is **open**."
    )


def _make_study_table(comparison: Comparison) -> Iterator[Table]:
    headings = ("name", "preset", "seeds", "statuses", "commit", "folder")
    columns = [name("study", "label"), *(text(heading, heading) for heading in headings)]
    yield Table(columns, comparison.describe_studies())


def _make_settings_table(comparison: Comparison) -> Iterator[Table]:
    # An empty text is a setting that a study lacks.
    quoted = comparison.settings.map(lambda value: f"`{value}`" if value else "–")
    yield Table([name("setting", "setting"), *(text(label, label) for label in comparison.studies)], to_records(quoted))


SECTIONS: tuple[Section[Comparison], ...] = (
    Section(
        "arms",
        "Arms in common",
        figures=(
            Figure(
                "differences",
                "The study of the label minus the first one, with 95 % intervals over seeds. The gray band is the "
                "margin within which arms count as equal.",
                lambda comparison: comparison.arms.assign(
                    name=[label_arm(row.study, row.other_arm) for row in comparison.arms.itertuples()]
                ),
                lambda table, comparison: draw_intervals(
                    table,
                    f"{comparison.outcome.name}, other study minus the first",
                    margin=float(table["margin"].iloc[0]),
                ),
            ),
        ),
        tables=_make_arm_table,
        explanation=_explain_arms,
    ),
    Section(
        "others",
        "Arms of one study alone",
        sentences=lambda comparison: [
            f"Only in {label}: {', '.join(names)}." for label, names in comparison.other_arms.items()
        ],
    ),
    Section("studies", "Studies", tables=_make_study_table),
    Section(
        "settings",
        "Settings that differ",
        sentences=lambda comparison: (
            [] if len(comparison.settings) else ["The settings that the arms of each study share are the same."]
        ),
        tables=_make_settings_table,
    ),
)
