"""Report of an update-rule study: the context of its template, and the tables that are written with it."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, has_added_seeds, list_arms, select_runs
from analysis.data.contrasts import read_contrasts
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.html.page import list_commands, list_sources, make_settings_rows
from analysis.search.page import find_search
from analysis.search.page import make_context as make_search_context
from analysis.search.page import make_tables as make_search_tables
from analysis.sweep import contrasts, findings
from analysis.sweep.verdicts import (
    NO_EFFECT,
    describe_stops,
    describe_unfinished,
    format_holm,
    format_interval,
    format_signed,
)
from sandboxes.toys.published.cells import POOLED
from sandboxes.toys.published.reproduction import compare_to_published, describe_sources, summarize_verdicts
from sandboxes.toys.report import tables

CHANCE_TOLERANCE = 0.02  # a mean error that is less than this below chance is noted too
COLLAPSE_THRESHOLD = 0.5  # fraction of separators above which a run counts as collapsed; a correct reply has none
_TOKEN_TASKS = {"token_reversal", "masked_reversal"}


def make_tables(frames: StudyFrames) -> Iterable[tuple[str, pd.DataFrame]]:
    """Tables to write with the report, by name: those that the page shows, and the curves of its figures."""
    yield "arm_statistics", tables.compute_arm_statistics(frames)
    yield "differences", tables.compute_differences(frames)
    if read_contrasts(frames.studies[0]):
        yield "contrasts", contrasts.compute_contrasts(frames)
        yield "contrast_pairs", contrasts.compute_pair_differences(frames)
    search = find_search(frames)
    if search:
        yield from make_search_tables(search)
    cells = compare_to_published(frames)
    if len(cells):
        yield "reproduction", cells
    for panel in tables.select_panels(frames):
        yield f"mean_{panel.column}", tables.compute_mean_curves(frames, panel.column)


def make_context(frames: StudyFrames) -> Row:
    """Everything that the template shows except figures, by name; all numbers come from the tables."""
    differences, published = tables.compute_differences(frames), make_published_context(frames)
    search = find_search(frames)
    (family,) = frames.families
    return {
        **published,
        **contrasts.make_contrast_context(frames),
        "study": frames.studies[0],
        "search": make_search_context(search) if search else None,
        "confirmation": findings.describe_confirmation(frames.studies[0]),
        "short_study": findings.describe_short_runs(frames.studies[0]),
        "headline": format_headline(frames, differences),
        "statuses": findings.format_status_counts(frames.trials),
        "arms": tables.count_statuses(frames),
        "numbers": _group_by_column(
            tables.add_published(tables.compute_arm_statistics(frames), [*published["cells"], *published["pooled"]]),
            differences,
            {column.name: f"{column.meaning} ({column.unit})" for column in family.trial_columns},
        ),
        "description": tables.get_description(frames),
        "notes": make_notes(frames),
        "seconds": _sum_trial_seconds(frames),
        "runs": to_records(frames.trials),
        "arm_settings": findings.list_arm_settings(frames),
        "settings": make_settings_rows(frames.studies[0]),
        "commands": list_commands(frames.studies[0]),
        "sources": list_sources(frames.studies[0]),
        "has_rows": bool(tables.select_panels(frames)),
    }


def make_published_context(frames: StudyFrames) -> Row:
    """Published numbers of the studies in `frames` and ours: tested cells, pooled cells, and the expectations."""
    cells = compare_to_published(frames)
    return {
        "cells": to_records(cells[cells["kind"] != POOLED]),
        "pooled": to_records(cells[cells["kind"] == POOLED]),
        "rationales": _group_rationales(to_records(cells)),
        "verdict_summary": summarize_verdicts(cells),
        "source": describe_sources(frames),
    }


def make_index_entry(frames: StudyFrames) -> Row:
    """Entry of a study in an index: headline, and the primary outcome of each arm with its verdict."""
    differences = tables.compute_differences(frames)
    arm_statistics = tables.compute_arm_statistics(frames)
    error_differences = {row["arm"]: row for row in to_records(_select_primary(frames, differences))}
    rows = [
        {
            "arm": row["arm"],
            "number": "–" if np.isnan(row["mean"]) else f"{row['mean']:.4f}",
            "outcome": error_differences[row["arm"]]["verdict"] if row["arm"] in error_differences else "",
            "verdict": _format_difference(error_differences.get(row["arm"])),
        }
        for row in to_records(_select_primary(frames, arm_statistics))
    ]
    return {
        "headline": format_headline(frames, differences),
        "collapse": "",
        "collapse_definition": "",
        "number": tables.get_description(frames).number,
        "arms": rows,
    }


def _select_primary(frames: StudyFrames, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table with a `column` that are about the primary outcome."""
    (family,) = frames.families
    return table[table["column"] == family.primary_column]


def _format_difference(row: Row | None) -> str:
    """An arm's difference from the baseline in words; a dash for the baseline itself, and if it was not tested."""
    if row is None:
        return "–"
    if row["verdict"] == "no comparison":
        return "no comparison: this arm or the baseline has no scored run with a value"
    if row["equal_rows"]:
        return f"{NO_EFFECT}: every row equals the baseline's"
    if np.isnan(row["p"]):
        return f"{row['verdict']}: {format_signed(row['difference'], 4)} against the baseline, without an interval"
    p_value = row["p_equal_holm"] if row["verdict"] == "equal" else row["p_holm"]
    interval_text = format_interval(row["difference_low"], row["difference_high"], 4)
    difference_text = f"{format_signed(row['difference'], 4)} {interval_text}".rstrip()
    return f"{row['verdict']}: {difference_text} against the baseline, {format_holm(p_value)}"


def _group_by_column(rows: list[Row], differences: pd.DataFrame, meanings: Mapping[str, str]) -> list[Row]:
    """The numbers of all arms by column, each with its row of `differences`, or None for the baseline."""
    difference_by_arm = {(row["arm"], row["column"]): row for row in to_records(differences)}
    return [
        {
            "column": name,
            "meaning": meanings[name],
            "rows": [
                {**row, "comparison": difference_by_arm.get((row["arm"], name))}
                for row in rows
                if row["column"] == name
            ],
        }
        for name in dict.fromkeys(row["column"] for row in rows)
    ]


def _group_rationales(cells: list[Row]) -> list[Row]:
    """The rationales of expected verdicts. Each rationale of a study occurs once, with all of its arms."""
    arms_by_rationale: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell["rationale"]:
            key = (cell["study"], cell["expected_verdict"], cell["rationale"])
            arms_by_rationale.setdefault(key, []).append(cell["arm"])
    return [
        {
            "study": study,
            "expected_verdict": expected_verdict,
            "rationale": rationale,
            "arms": ", ".join(dict.fromkeys(arm_names)),
        }
        for (study, expected_verdict, rationale), arm_names in arms_by_rationale.items()
    ]


def format_headline(frames: StudyFrames, differences: pd.DataFrame) -> str:
    """One line that groups the arms by how their primary outcome compares with the baseline's."""
    if frames.trials.empty:
        return "No run is recorded."
    error_rows = _select_primary(frames, differences)
    baseline, arm_count = frames.studies[0].baseline, len(list_arms(frames))
    # `--arms` may select arms without the baseline.
    baseline_text = f"baseline {baseline}" if baseline in list_arms(frames) else "no baseline among them"
    sentences = [f"{arm_count} arm{'s' if arm_count > 1 else ''}, {baseline_text}."]
    compared = error_rows[error_rows["n"] > 0]
    if len(compared):
        (family,) = frames.families
        turned = {} if family.is_higher_better else {"better": "lower for", "worse": "higher for"}
        groups = findings.group_arms(compared, compared["verdict"], {**findings.OUTCOME_LABELS, **turned})
        sentences.append(
            f"Over {findings.format_range(compared['n'])} seed{'s' if compared['n'].max() > 1 else ''}, "
            f"{tables.get_description(frames).outcome} compared with it is {groups}."
        )
    missing = error_rows.loc[error_rows["n"] == 0, "arm"]
    sentences += [f"Not compared: {', '.join(missing)}."] if len(missing) else []
    return " ".join(sentences)


def compute_chance_error(frames: StudyFrames) -> float | None:
    """Test error of random content tokens, 1 - 1/V for a vocabulary of V; None if the study has no single such value.

    A study has one if every task scores single tokens, all arms have the same vocabulary, and rewards are not binary
    (with a binary reward, the error is that of whole sequences).
    """
    columns = ("config/task", "config/vocab_size", "config/binary_reward")
    if frames.trials.empty or any(name not in frames.trials for name in columns):
        return None
    tasks, vocab_sizes, binary_settings = (set(frames.trials[name].dropna()) for name in columns)
    if not tasks <= _TOKEN_TASKS or len(vocab_sizes) != 1 or binary_settings != {False}:
        return None
    return 1 - 1 / int(vocab_sizes.pop())


def make_notes(frames: StudyFrames) -> list[str]:
    """Warnings for a reader of the numbers: few seeds, stops, collapse, errors at chance, equal arms."""
    lines = [*_make_seed_notes(frames), *findings.describe_looks(frames.studies[0]), *_make_ending_notes(frames)]
    chance_error = compute_chance_error(frames)
    for arm in list_arms(frames):
        # Only scored runs: the last row of a failed run is no final number, and its notes would be about an early
        # state.
        runs = select_runs(frames, arm, scored_only=True)
        if tables.SEPARATOR_COLUMN in runs:  # a task of sequences
            collapsed_runs = runs[runs[tables.SEPARATOR_COLUMN] > COLLAPSE_THRESHOLD]
            if len(collapsed_runs):
                lines.append(
                    f"{arm}: in {len(collapsed_runs)} of {len(runs)} runs (seed "
                    f"{', '.join(map(str, collapsed_runs['seed']))}) more than half of the greedily decoded tokens are "
                    "separators, which are never correct. The error of these runs is that of a collapse onto one token."
                )
        if chance_error is not None and len(runs):
            mean_error = float(runs["final_test_error"].mean())
            if mean_error >= chance_error - CHANCE_TOLERANCE:
                lines.append(
                    f"{arm}: the mean test error of {mean_error:.3f} is no better than that of random content tokens "
                    f"({chance_error:.2f}). On average, the policy has learned at most to avoid separators."
                )
        steps = frames.steps[frames.steps["run_id"].isin(runs["run_id"])]
        # Only update rules have a filter.
        kept_fractions = steps["kept_frac"].dropna() if "kept_frac" in steps else pd.Series(dtype=float)
        if len(kept_fractions) and (kept_fractions == 0).all():
            lines.append(
                f"{arm}: its filter kept nothing of any logged batch, so the policy may still have its initial weights."
            )
    lines += [
        f"{a} and {b} end with equal numbers in every seed: in this study they are the same algorithm."
        for a, b in tables.find_equal_arms(frames)
    ]
    return lines


def _make_seed_notes(frames: StudyFrames) -> list[str]:
    seed_count = frames.trials.loc[frames.trials["status"].isin(SCORED_STATUSES), "seed"].nunique()
    if seed_count == 0:
        return ["No run was completed or stopped by a rule, so nothing is compared."]
    if seed_count == 1:
        return ["1 seed: there is no standard error. Another seed may give another result."]
    advice = " For a claim, five are the usual minimum, and ten are better." if seed_count < 5 else ""
    noise_text = "" if has_added_seeds(frames.studies[0]) else ", with the noise of all arms as far as none stands out"
    return [
        f"{seed_count} seeds: intervals are over seeds{noise_text}, and the band of a curve is one standard "
        f"error.{advice}"
    ]


def _make_ending_notes(frames: StudyFrames) -> list[str]:
    """Runs that a rule stopped, and runs that failed, were interrupted or never ran."""
    lines = []
    for arm in list_arms(frames):
        stop_text = describe_stops(select_runs(frames, arm, scored_only=True))
        unfinished_text = describe_unfinished(select_runs(frames, arm))
        lines += [f"{arm}: {stop_text}; a stopped run counts with its last row."] if stop_text else []
        lines += [f"{arm}, not counted: {unfinished_text}."] if unfinished_text else []
    return lines


def _sum_trial_seconds(frames: StudyFrames) -> float:
    """Run time of all trials. The runs of a trial share its time, so each trial counts as its longest run."""
    if frames.steps.empty:
        return float("nan")
    run_seconds = frames.steps.groupby("run_id")["seconds_total"].max()
    trial_ids = frames.trials.set_index("run_id")["trial_id"]
    return float(run_seconds.groupby(trial_ids.reindex(run_seconds.index)).max().sum())
