"""Sections that reports of several families share: runs, declared contrasts, settings, and how to reproduce a study."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.charts.curves import draw_intervals
from analysis.data.compare import has_added_seeds
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.report.section import Figure, Listing, Section, Table, TableColumn, count_of, name, number, text
from analysis.search.points import COMPLETE, make_points
from analysis.sweep import findings
from analysis.sweep.contrasts import compute_contrasts, compute_pair_differences, read_contrasts
from analysis.sweep.verdicts import (
    count_nouns,
    explain_open,
    format_p_value,
    format_signed_4,
    format_status,
    is_missing,
)
from trainable.config.setting_types import flatten_settings
from trainable.runs.records import STATUSES
from trainable.runs.study_record import OPEN_STATUSES, Search, StudyRecord


@dataclass(frozen=True)
class StudyResults:
    """A study, and results that several sections share: computed at their first use and then kept."""

    frames: StudyFrames
    has_labels: bool = True
    """Whether the arms of a grid are named by their points, and not as `--arm` takes them."""

    @property
    def study(self) -> StudyRecord:
        """The content of study.json."""
        return self.frames.studies[0]

    @property
    def search(self) -> Search | None:
        """The search whose points are the arms; None in a study of arms that were chosen beforehand."""
        return self.study.search if self.study.points else None

    @cached_property
    def points(self) -> pd.DataFrame:
        """From `make_points`: one row per point of a search."""
        return make_points(self.frames)

    @property
    def complete_points(self) -> pd.DataFrame:
        """The points with an outcome."""
        return self.points[self.points["state"] == COMPLETE]

    @cached_property
    def contrasts(self) -> pd.DataFrame:
        """From `compute_contrasts`: one row per declared contrast and column."""
        return compute_contrasts(self.frames)

    @cached_property
    def contrast_pairs(self) -> pd.DataFrame:
        """From `compute_pair_differences`."""
        return compute_pair_differences(self.frames)


def list_remarks(frames: StudyFrames) -> list[str]:
    """List what a reader must know before any number: that a study is recorded, a confirmation, a fork, or short."""
    study = frames.studies[0]
    recorded = "This recorded study comes with tune_study: nothing was trained on this machine."
    remarks = findings.describe_confirmation(study), findings.describe_fork(study), findings.describe_short_runs(study)
    return [*filter(None, [recorded if study.recorded else "", *remarks])]


def count_statuses(row: Row) -> str:
    """List the statuses of the runs of an arm for a column of kind `status`."""
    statuses = (*STATUSES, *OPEN_STATUSES)
    return "\n".join(f"{status} {row[status]} {format_status(status)}" for status in statuses if row.get(status))


STATUS_COUNTS = TableColumn("runs", count_statuses, "status")
STATUS = TableColumn("status", lambda run: f"{run['status']} {format_status(run['status'])}", "status")


def format_p(value: float) -> str:
    """Format a p-value for a column whose heading says what it is."""
    return format_p_value(value).removeprefix("p ")


def make_runs_table(frames: StudyFrames, columns: Iterable[TableColumn]) -> Iterator[Table]:
    """Make the table of all runs, folded. columns: of the numbers of a run."""
    trials = frames.trials
    yield Table(
        [
            name("arm"),
            number("seed", "seed", str),
            STATUS,
            count_of("steps", "steps_done", "steps_total"),
            *columns,
            text("reason", "reason"),
            text("run", "run_id"),
        ],
        to_records(trials),
        fold=f"All {len(trials)} runs",
    )


def _make_contrast_figure(results: StudyResults) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    (family,) = results.frames.families
    table, pairs = (
        rows[rows["column"] == family.primary_column].rename(columns={"contrast": "name"})
        for rows in (results.contrasts, results.contrast_pairs)
    )
    return (table, pairs) if table["difference"].notna().any() else None


def _make_contrast_tables(results: StudyResults) -> Iterator[Table]:
    (family,) = results.frames.families
    columns = {column.name: column for column in family.trial_columns}
    contrasts = results.contrasts
    for key in dict.fromkeys(contrasts["column"]):
        rank = "" if key == family.primary_column else " (secondary)"
        rows = to_records(contrasts[contrasts["column"] == key])
        yield Table(
            [
                name("contrast", "contrast"),
                TableColumn("verdict", format_verdict, "verdict"),
                number("first minus\nsecond", "difference", format_signed_4),
                number("Holm p", "p_holm", format_p),
                number("seeds", "seeds", str),
                TableColumn("pairs", _format_pairs, "number"),
                TableColumn("not counted, or stopped", _format_run_notes),
            ],
            rows,
            title=f"`{key}`{rank}",
            caption=f"{columns[key].meaning} ({columns[key].unit}). Chosen because {family.contrasted_columns[key]}.",
            note=explain_open(rows, "contrasts"),
        )


def format_verdict(row: Row) -> str:
    """Format a verdict, with its margin and its p-value if it is equal."""
    margin = f"\nwithin {row['margin']:g}, {format_p_value(row['p_equal_holm'])}" if row["verdict"] == "equal" else ""
    return f"{row['verdict']}{margin}"


def _format_pairs(row: Row) -> str:
    return f"{row['pairs']}" if row["pairs_used"] == row["pairs"] else f"{row['pairs_used']} of {row['pairs']}"


def _format_run_notes(row: Row) -> str:
    stopped = f"stopped by a rule, counted with the last row: {row['early_stopped_runs']}"
    return "; ".join(filter(None, [row["excluded_runs"], stopped if row["early_stopped_runs"] else ""]))


def format_ordinary(value: float, column: str) -> str:
    """Format a number of a family without fractions alone: a step, an age, or a number with four decimals."""
    if is_missing(value):
        return "–"
    digits = 1 if column.startswith("first_step") else 2 if column.endswith("_age") else 4
    return f"{value:.{digits}f}".replace("-", "−")


def _list_contrast_sentences(results: StudyResults) -> Iterator[str]:
    contrasts, pairs = results.contrasts, results.contrast_pairs
    if contrasts.empty:
        yield f"{count_nouns(len(read_contrasts(results.study)), 'contrast')}; no run has a number for them yet."
    is_known = (pairs["first_steps"] != "") & (pairs["second_steps"] != "")
    unequal = pairs[is_known & (pairs["first_steps"] != pairs["second_steps"])].drop_duplicates(["first", "second"])
    if len(unequal):
        listing = "; ".join(
            f"{row['first']} ({row['first_steps']} steps) and {row['second']} ({row['second_steps']})"
            for row in to_records(unequal)
        )
        yield (
            "The arms of these pairs train for different numbers of steps, so means over their runs cover different "
            f"stretches of training: {listing}."
        )


def _explain_contrasts(results: StudyResults) -> str:
    (family,) = results.frames.families
    basis = (
        "Brackets are 95 % intervals over seeds. They are valid at every look, for all contrasts together."
        if has_added_seeds(results.study)
        else "Brackets are 95 % intervals over seeds. Their noise is estimated from all arms, unless one stands out. "
        "They are not corrected for the number of contrasts."
    )
    return (
        "A contrast is a list of pairs of arms that differ in one thing, declared before any run. For each seed, first "
        f"minus second is averaged over the pairs; the contrast is the mean over seeds. {basis} The intervals "
        f"hold for other seeds of these pairs, not for other pairs. `{family.primary_column}` is the primary outcome. "
        "Its verdict is **better** or **worse** for the first arm, **equal** within the margin, or **no effect** if "
        "the runs of every pair have the same rows. Otherwise it is **open**: the difference may be as large as the "
        "end of the interval that is farther from 0. Its p-values are corrected with Holm's method over the contrasts. "
        "The other columns are secondary: neither sign is better, and their p-values are corrected together."
    )


CONTRASTS: Section[StudyResults] = Section(
    "contrasts",
    "Declared contrasts",
    when=lambda results: bool(read_contrasts(results.study)),
    sentences=_list_contrast_sentences,
    figures=(
        Figure(
            "contrasts",
            "Differences of the declared contrasts. A point is the mean over the pairs of a contrast, with its 95 % "
            "interval over seeds. A ring is one pair. Left of the dashed line, the first arm is lower.",
            _make_contrast_figure,
            lambda table, results: draw_intervals(
                table[0], f"{results.frames.families[0].primary_column}, first minus second", pairs=table[1]
            ),
        ),
    ),
    tables=_make_contrast_tables,
    explanation=_explain_contrasts,
    files=lambda results: {"contrasts": results.contrasts, "contrast_pairs": results.contrast_pairs},
)


def make_reproduction_tables(results: StudyResults, facts: Mapping[str, str]) -> Iterator[Table | Listing]:
    """Make the tables of what was run: commands, facts, settings and files of the study's user.

    facts: further rows, by name.
    """
    study = results.study
    extra_seeds = "".join(f"; {arm} also {', '.join(map(str, seeds))}" for arm, seeds in study.extra_seeds.items())
    changes = "with uncommitted changes" if study.git and study.git.dirty else "no uncommitted change"
    rows = {
        "started": study.created_at or "–",
        "baseline": study.baseline or "–",
        "seeds": f"{', '.join(map(str, study.seeds))}{extra_seeds}",
        **facts,
        "code": f"commit `{study.git.commit}`, {changes}" if study.git else "not from a git checkout",
        "versions": ", ".join(f"{package} {version}" for package, version in study.versions.items()),
    }
    yield Table(
        [name("fact", "fact"), text("value", "value")], [{"fact": key, "value": value} for key, value in rows.items()]
    )
    arms = list(dict.fromkeys(results.frames.trials["arm"]))
    differing = findings.list_arm_settings(results.frames)
    yield Table(
        [
            TableColumn("setting", lambda row: f"`{row['setting']}`", "name"),
            *(TableColumn(arm, lambda row, place=place: row["values"][place]) for place, arm in enumerate(arms)),  # type: ignore[misc]
        ],
        differing if len(arms) <= MAX_SETTING_ARMS else [],
        fold=f"Settings in which arms differ: {len(differing)}",
    )
    settings = make_settings_rows(study)
    yield Table(
        [
            TableColumn("setting", lambda row: f"`{row['name']}`", "name"),
            TableColumn("value", lambda row: f"`{row['value']}`"),
            TableColumn("default", lambda row: {None: "–", False: "same"}.get(row["changed"], f"`{row['default']}`")),
        ],
        settings,
        fold=f"All {len(settings)} settings, before the arms change them",
        note="Marked settings differ from the default."
        if study.defaults
        else "The defaults are not recorded in study.json, so no setting is marked.",
        get_class=lambda row: "changed" if row["changed"] else "",
    )
    files = [
        *([("Study", study.declaration)] if study.declaration else []),
        *(("Study, earlier version", file) for file in study.earlier_declarations),
        *(("Parts", file) for file in study.code),
    ]
    for title, file in files:
        yield Listing(f"{title}: `{file.path or 'declared in Python'}`, SHA-256 `{file.sha256}`", file.text)


MAX_SETTING_ARMS = 40
"""With more arms, a column for each would make the table of settings too wide to read."""


def make_settings_rows(study: StudyRecord) -> list[dict[str, Any]]:
    """List every setting of a study: name, value and default as JSON, and whether it was changed from the default.

    Defaults come from `defaults` in study.json. If that is missing, `changed` is None, since nothing is known.
    """
    settings, defaults = map(flatten_settings, (study.settings, study.defaults))
    return [
        {
            "name": setting,
            "value": json.dumps(value),
            "default": json.dumps(defaults.get(setting)),
            "changed": defaults.get(setting) != value if defaults else None,
        }
        for setting, value in settings.items()
    ]


def list_commands(study: StudyRecord) -> list[str]:
    """List the commands that started a study, in their order and each once: several if arms or seeds were added.

    Those that only resumed it are left out. A folder of an earlier version has the last one only.
    """
    # The program is `python -m tune_study`, or the installed `tune-study`.
    is_resume = re.compile(r"(python -m tune_study|tune-study) resume\b").match
    commands = [start.command for start in study.starts if start.command and not is_resume(start.command)]
    return [*dict.fromkeys(commands or filter(None, [study.command]))]


def list_command_sentences(results: StudyResults) -> list[str]:
    """List the commands of a study as sentences of its last section."""
    return [f"`{command}`" for command in list_commands(results.study)] or ["The command is not recorded."]
