"""The comparison of studies: the settings in which they differ, the arms that they share, its page and sentences."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.charts.curves import draw_intervals
from analysis.data.compare import (
    add_adjusted_p_values,
    collect_joint_outcomes,
    compare_with_baseline,
    get_margin,
    label_arm,
    list_arms,
    require_single_study,
    select_runs,
)
from analysis.data.frames import StudyFrames, to_records
from analysis.data.run_files import flatten_config
from analysis.data.schemas import Row
from analysis.report.common import format_p
from analysis.report.page import render_page, view_sections, write_page
from analysis.report.section import Figure, Heading, Section, Table, TableColumn, name, number, text
from analysis.sweep import findings
from analysis.sweep.verdicts import (
    count_nouns,
    format_fraction,
    format_number,
    format_p_value,
    format_signed,
    name_verdict,
)
from trainable.runs.records import Column
from trainable.runs.study_record import StudyRecord

VERDICTS = ("better", "worse", "equal", "no effect", "open", "no comparison")
"""In the order in which a sentence names them."""
_SIDES = ("reference", "other")


@dataclass(frozen=True)
class Comparison:
    """Several studies and what their comparison shows."""

    studies: Mapping[str, StudyFrames]
    """The frames of one study each, by label. The first one is the reference."""
    folders: Mapping[str, str]
    """Where each study is, as it was typed, by label."""
    arms: pd.DataFrame
    """The result of `compare_arms`."""
    settings: pd.DataFrame
    """The result of `compare_settings`."""

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
                "The studies have different seeds. Means are over the seeds of each study. Differences are over the "
                "common seeds if there are at least two, otherwise over all seeds of both."
            )
        return sentences

    def describe_studies(self) -> list[Row]:
        """One row per study: label, name, folder, preset, seeds, statuses of its runs, and commit."""
        return [
            {
                "label": label,
                "name": study.name,
                "folder": self.folders[label],
                "preset": study.preset,
                "seeds": findings.format_seeds(sorted(set(frames.trials["seed"]))),
                "statuses": findings.format_status_counts(frames.trials),
                "commit": (study.git.commit if study.git else "")[:7],
            }
            for label, frames in self.studies.items()
            for study in frames.studies
        ]


def compare(studies: Mapping[str, StudyFrames], folders: Mapping[str, str]) -> Comparison:
    """Compare all studies with the first one; see `Comparison`, and `compare_arms` for the errors."""
    settings = compare_settings({label: frames.studies[0] for label, frames in studies.items()})
    return Comparison(studies, folders, compare_arms(studies), settings)


def compare_settings(studies: Mapping[str, StudyRecord]) -> pd.DataFrame:
    """List the settings that are not the same in all studies: a row each, with its value in every study as JSON.

    Compares the settings that all arms of a study share, and its preset. A study that lacks a setting has empty text.
    The row is left out if all other studies have the default, since the study then does what the default does, or comes
    from a version without this setting.
    """
    values = {label: {"preset": study.preset, **flatten_config(study.settings)} for label, study in studies.items()}
    defaults = {label: flatten_config(study.defaults) for label, study in studies.items()}
    rows = []
    for setting in dict.fromkeys(key for settings in values.values() for key in settings):
        texts = {label: json.dumps(own[setting]) if setting in own else "" for label, own in values.items()}
        # NaN, for a missing default, equals no value.
        owners = [
            (own[setting], defaults[label].get(setting, math.nan)) for label, own in values.items() if setting in own
        ]
        is_new = len(owners) < len(values) and all(value == default for value, default in owners)
        if len(set(texts.values())) > 1 and not is_new:
            rows.append({"setting": setting, **texts})
    return pd.DataFrame(rows, columns=["setting", *values])


def find_common_arms(reference: StudyFrames, other: StudyFrames) -> list[tuple[str, str]]:
    """Pair the arms that two studies share, by name.

    Within one axis, arms are shared if their values are equal: `0.1` is `0.10`. Between different axes, such as `kl`
    and `top-p`, arms are shared if their runs have the same settings.
    """
    is_same_axis = reference.studies[0].axis.setting == other.studies[0].axis.setting

    def get_key(frames: StudyFrames, arm: str) -> str | float:
        run = select_runs(frames, arm).iloc[0]
        if not is_same_axis:
            return str(run["config_hash"])
        return arm if math.isnan(run["axis_value"]) else float(run["axis_value"])

    others = {key: arm for arm in list_arms(other) if (key := get_key(other, arm)) != ""}
    keys = {arm: get_key(reference, arm) for arm in list_arms(reference)}
    return [(arm, others[key]) for arm, key in keys.items() if key in others]


def compare_arms(studies: Mapping[str, StudyFrames]) -> pd.DataFrame:
    """Compare the arms that the first study shares with each other study: a row per pair, other minus first.

    * study: label of the other study; arm, other_arm: name of the arm in the first study and in the other.
    * reference, other: mean outcome in the first study and in the other; reference_runs, other_runs: number of scored
      runs; reference_stopped, other_stopped: how many of these a rule stopped.
    * The columns of a test, with the noise estimated from all arms of all studies. Runs of the same seed are paired.
      p_holm and p_equal_holm are corrected over all rows. verdict: `better` or `worse` refers to the other study.

    Raises ValueError if the studies are of different families, so that outcomes are not comparable, or share no arm.
    """
    (reference_label, reference), *others = studies.items()
    families = {require_single_study(frames).families[0].name: label for label, frames in studies.items()}
    if len(families) > 1:
        described = ", ".join(f"{label} is of the family {name}" for name, label in families.items())
        raise ValueError(f"These studies have different outcomes ({described}): compare studies of one family.")
    (family,) = reference.families
    column = family.primary_column
    pairs = [
        (label, arm, other_arm) for label, frames in others for arm, other_arm in find_common_arms(reference, frames)
    ]
    if not pairs:
        raise ValueError(
            "These studies have no arm in common: studies of the same axis are compared at equal values, studies of "
            "different axes at arms with equal settings."
        )
    outcomes = collect_joint_outcomes(studies, column, len(pairs))
    margin = get_margin(reference.studies[0], column)
    rows: list[Row] = []
    for label, arm, other_arm in pairs:
        names = (label_arm(label, other_arm), label_arm(reference_label, arm))
        row: Row = {"study": label, "arm": arm, "other_arm": other_arm}
        sides = ((reference, arm, names[1]), (studies[label], other_arm, names[0]))
        for side, (frames, side_arm, full_name) in zip(_SIDES, sides, strict=True):
            runs, values = select_runs(frames, side_arm, scored_only=True), outcomes.get_values(full_name)
            row[side], row[f"{side}_runs"] = float(values.mean()) if len(values) else math.nan, len(runs)
            row[f"{side}_stopped"] = int((runs["status"] == "early_stopped").sum())
        rows.append(row | {"column": column, **compare_with_baseline(outcomes, *names, margin)})
    table = add_adjusted_p_values(pd.DataFrame(rows), column)
    return table.assign(verdict=[name_verdict(row, family) for row in to_records(table)])


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison to `path` and return it."""
    heading = Heading("", f"Comparison of {len(comparison.studies)} studies", lead=comparison.describe())
    return write_page(path, render_page(heading, view_sections(SECTIONS, comparison, with_charts=True)))


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
            TableColumn(
                f"stopped runs,\n{reference} and other",
                lambda row: ", ".join(f"{row[f'{side}_stopped']} of {row[f'{side}_runs']}" for side in _SIDES),
                "number",
            ),
            text("basis", "basis"),
        ],
        to_records(comparison.arms),
    )


def _format_verdict(row: Row) -> str:
    if row["verdict"] != "equal":
        return str(row["verdict"])
    return f"equal\nwithin {format_number(row['margin'])}, Holm {format_p_value(row['p_equal_holm'])}"


def _explain_arms(comparison: Comparison) -> str:
    outcome = comparison.outcome
    return (
        f"`{outcome.name}` is the {outcome.meaning}. The table has its mean over the runs of each study, and the "
        f"difference: the other study minus {comparison.reference}. Runs of the same seed are paired. Brackets are "
        "95 % intervals, not corrected for the number of arms; their noise is estimated from all arms of all studies, "
        "unless one stands out. p-values are corrected with Holm's method over all rows. The other study is **better** "
        "or **worse**, **equal** within the margin, equal in every row (**no effect**), or the difference is **open**."
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
                "Each labeled study minus the first one, with 95 % intervals over seeds. The gray band is the margin "
                "within which arms count as equal.",
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
            []
            if len(comparison.settings)
            else ["The settings that all arms of a study share are the same in every study."]
        ),
        tables=_make_settings_table,
    ),
)
