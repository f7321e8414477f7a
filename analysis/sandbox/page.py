"""The report of a study of the update-rule sandbox: what its template shows, and the tables beside it."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED, SEEDS_FOR_SEEDS, arms, runs_of
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, records
from analysis.html.page import settings_rows
from analysis.published.cells import POOLED
from analysis.published.reproduction import reproduction, tally
from analysis.published.update_rule_sandbox import SOURCE
from analysis.sandbox import contrasts, tables
from analysis.sweep import findings
from analysis.sweep.verdicts import LEVEL, p_value, signed, stops, unfinished
from trainable.sandbox.measure.records import TRIAL_COLUMNS

NEAR_CHANCE = 0.02
COLLAPSED = 0.5
_MEANINGS = {column.name: f"{column.meaning} ({column.unit})" for column in TRIAL_COLUMNS}
_TOKEN_TASKS = {"token_reversal", "masked_reversal"}


def tables_beside(frames: StudyFrames) -> Iterable[tuple[str, pd.DataFrame]]:
    """Tables to write beside the report, by name: what the page shows, and the curves behind its figures."""
    yield "arm_numbers", tables.arm_numbers(frames)
    yield "differences", tables.differences(frames)
    if contrasts.declared(frames.studies[0]):
        yield "contrasts", contrasts.contrasts(frames)
        yield "contrast_pairs", contrasts.pairs(frames)
    cells = reproduction(frames)
    if len(cells):
        yield "reproduction", cells
    for panel in tables.panels(frames):
        yield f"mean_{panel.column}", tables.means(frames, panel.column)


def context(frames: StudyFrames) -> Row:
    """Everything that the template shows beside figures, by name; all numbers come from the tables."""
    compared, held = tables.differences(frames), beside_published(frames)
    return {
        **held,
        **contrasted(frames),
        "study": frames.studies[0],
        "headline": headline(frames, compared),
        "statuses": findings.statuses(frames.trials),
        "arms": tables.statuses(frames),
        "numbers": _by_column(tables.beside(tables.arm_numbers(frames), [*held["cells"], *held["pooled"]]), compared),
        "notes": notes(frames),
        "seconds": _seconds(frames),
        "runs": findings.run_list(frames),
        "arm_settings": findings.arm_settings(frames),
        "settings": settings_rows(frames.studies[0]),
        "has_rows": bool(tables.panels(frames)),
    }


def beside_published(frames: StudyFrames) -> Row:
    """Published cells of the studies in `frames` beside ours, those that are only listed, and what was expected."""
    cells = reproduction(frames)
    return {
        "cells": records(cells[cells["kind"] != POOLED]),
        "pooled": records(cells[cells["kind"] == POOLED]),
        "reasons": _reasons(records(cells)),
        "tally": tally(cells),
        "source": SOURCE,
    }


def contrasted(frames: StudyFrames) -> Row:
    """The declared contrasts: how many, what is said of them, and by column their rows and those of their pairs."""
    table, singles = contrasts.contrasts(frames), contrasts.pairs(frames)
    by_column = [
        {
            "column": column,
            "meaning": _MEANINGS[column],
            "why": contrasts.COLUMNS[column],
            "rows": records(table[table["column"] == column]),
            "pairs": records(singles[singles["column"] == column]),
        }
        for column in dict.fromkeys(table["column"])
    ]
    unequal = singles[singles["first_steps"] != singles["second_steps"]].drop_duplicates(["first", "second"])
    return {
        "declared": len(contrasts.declared(frames.studies[0])),
        "contrasts": by_column,
        "contrast_lines": contrasts.sentences(table),
        "unequal_pairs": records(unequal[(unequal["first_steps"] != "") & (unequal["second_steps"] != "")]),
    }


def index(frames: StudyFrames) -> Row:
    """What an index says of a study: headline, and test error of each arm with what became of its difference."""
    compared = tables.differences(frames)
    numbers = tables.arm_numbers(frames)
    against = {row["arm"]: row for row in records(compared[compared["column"] == "final_test_error"])}
    rows = [
        {"arm": row["arm"], "number": f"{row['mean']:.4f}", "outcome": "", "verdict": _said(against.get(row["arm"]))}
        for row in records(numbers[numbers["column"] == "final_test_error"])
    ]
    return {"headline": headline(frames, compared), "number": "test error", "arms": rows}


def _said(row: Row | None) -> str:
    """The difference of an arm to the baseline in words; a dash for the baseline itself, and for what is not tested."""
    if row is None or np.isnan(row["p_holm"]):
        return "–"
    word = "no difference resolved" if row["p_holm"] >= LEVEL else "lower" if row["difference"] < 0 else "higher"
    return f"{word}: {signed(row['difference'], 4)} against the baseline, Holm {p_value(row['p_holm'])}"


def _by_column(rows: list[Row], compared: pd.DataFrame) -> list[Row]:
    """The numbers of all arms by column, each with its difference to the baseline, or none."""
    against = {(row["arm"], row["column"]): row for row in records(compared)}
    names = list(dict.fromkeys(row["column"] for row in rows))
    return [
        {
            "column": name,
            "meaning": _MEANINGS[name],
            "rows": [{**row, "against": against.get((row["arm"], name))} for row in rows if row["column"] == name],
        }
        for name in names
    ]


def _reasons(cells: list[Row]) -> list[Row]:
    """Why cells were expected to differ, or left open: each reason of a study once, with its arms."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell["why"]:
            found.setdefault((cell["study"], cell["expected"], cell["why"]), []).append(cell["arm"])
    return [
        {"study": study, "expected": expected, "why": why, "arms": ", ".join(dict.fromkeys(named))}
        for (study, expected, why), named in found.items()
    ]


def headline(frames: StudyFrames, compared: pd.DataFrame) -> str:
    """The arms by how their test error at the end compares with the baseline's, in one line."""
    if frames.trials.empty:
        return "No run is recorded."
    found = compared[compared["column"] == "final_test_error"]
    baseline = str(frames.studies[0].get("baseline", ""))
    here = baseline in arms(frames)
    number = len(arms(frames))
    compared_with = f"baseline {baseline}" if here else "no baseline among them"
    over = "; ".join(dict.fromkeys(found["basis"]))
    names = [f"{number} arm{'s' if number > 1 else ''}, {compared_with}."]
    names += [f"Compared with it: {over}."] if over else []
    resolved = found["p_holm"] < LEVEL
    for words, rows in (
        ("Lower test error than it at the end", found[resolved & (found["difference"] < 0)]),
        ("Higher", found[resolved & (found["difference"] > 0)]),
        ("No difference resolved", found[~resolved & found["p"].notna()]),
        ("Without a comparison", found[found["p"].isna()]),
    ):
        names += [f"{words}: {', '.join(rows['arm'])}."] if len(rows) else []
    return " ".join(names)


def chance(frames: StudyFrames) -> float | None:
    """Test error of content tokens drawn at random, 1 - 1/V, where the tasks count single tokens; else None."""
    names = ("config/task", "config/vocab_size", "config/binary_reward")
    if frames.trials.empty or any(name not in frames.trials for name in names):
        return None
    task, vocabulary, binary = (set(frames.trials[name].dropna()) for name in names)
    if not task <= _TOKEN_TASKS or len(vocabulary) != 1 or binary != {False}:
        return None
    return 1 - 1 / int(vocabulary.pop())


def notes(frames: StudyFrames) -> list[str]:
    """What a reader must know before the numbers: seeds, stops, collapse, chance, arms that coincide."""
    found = [*_about_seeds(frames), *_about_endings(frames)]
    for arm in arms(frames):
        runs = runs_of(frames, arm, scored=True)
        found += [*_about_collapse(arm, runs), *_about_chance(arm, runs, chance(frames))]
        kept = frames.steps.loc[frames.steps["run_id"].isin(runs["run_id"]), "kept_frac"].dropna()
        if len(kept) and (kept == 0).all():
            found.append(f"{arm}: its filter kept nothing of any logged batch, so that its weights may be the first.")
    found += [f"{a} and {b} end with equal numbers in every seed: here they are one algorithm."
              for a, b in tables.equal_arms(frames)]  # fmt: skip
    return found


def _about_seeds(frames: StudyFrames) -> list[str]:
    seeds = frames.trials.loc[frames.trials["status"].isin(SCORED), "seed"].nunique()
    if seeds == 0:
        return ["No run ended by the protocol, so nothing is compared."]
    if seeds < SEEDS_FOR_SEEDS:
        missing = "no standard error and no interval" if seeds == 1 else "intervals need three"
        return [f"{seeds} seed{'s' if seeds > 1 else ''}: {missing}; another seed may turn out differently."]
    weak = " Five are the usual least for a claim, ten are better." if seeds < 5 else ""
    return [f"{seeds} seeds: intervals are Student's t over seeds; a band in a figure is a standard error.{weak}"]


def _about_endings(frames: StudyFrames) -> list[str]:
    """Runs that a rule stopped, and runs that did not end by the protocol."""
    found = []
    for arm in arms(frames):
        stopped, odd = stops(runs_of(frames, arm, scored=True)), unfinished(runs_of(frames, arm))
        found += [f"{arm}: {stopped}; a stopped run counts with its last row."] if stopped else []
        found += [f"{arm}, not counted: {odd}."] if odd else []
    return found


def _about_collapse(arm: str, runs: pd.DataFrame) -> list[str]:
    collapsed = runs[runs[tables.SEPARATORS] > COLLAPSED]
    if collapsed.empty:
        return []
    seeds = ", ".join(map(str, collapsed["seed"]))
    return [
        f"{arm}: in {len(collapsed)} of {len(runs)} runs (seed {seeds}) more than half of the greedily decoded tokens "
        "are separators, which are never right: the error there is that of a collapse onto one token."
    ]


def _about_chance(arm: str, runs: pd.DataFrame, level: float | None) -> list[str]:
    error = float(runs["final_test_error"].mean()) if len(runs) else np.nan
    if level is None or not error >= level - NEAR_CHANCE:
        return []
    return [
        f"{arm}: a test error of {error:.3f} is at or above that of random content tokens ({level:.2f}): no more is "
        "learned, in the mean, than to leave separators out."
    ]


def _seconds(frames: StudyFrames) -> float:
    """Run time of all trials, each counted once: the longest of the runs that it carried."""
    if frames.steps.empty:
        return float("nan")
    ends = frames.steps.groupby("run_id")["seconds_total"].max()
    trial = frames.trials.set_index("run_id")["trial_id"]
    return float(ends.groupby(trial.reindex(ends.index)).max().sum())
