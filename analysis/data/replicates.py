"""Recorded replicates: the outcomes of one configuration with many seeds, used to plan studies.

`replicates.json` in this folder is made from the baselines of the shipped studies (`make replicates`). An entry applies
only to studies whose baseline has exactly the recorded configuration: changing the estimator, the learning rate, or the
number of groups or steps changes the noise of runs by a factor of up to fifteen. Nothing is pooled: where no entry
applies, the noise is unknown before the runs. The other arms of a study may be noisier than its baseline.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import find_study_folders, load
from trainable.files.json_values import parse_json
from trainable.files.paths import read_bytes, write_text
from trainable.runs.study_record import ENDED_STATUSES, StudyRecord

REPLICATES_PATH = Path(__file__).parent / "replicates.json"
MIN_REPLICATES = 20
"""With fewer runs, the interval of a variance spans more than a factor of three."""


class Replicates(NamedTuple):
    """Outcomes of one configuration, one per seed.

    config_hash: identifies the configuration. column: the outcome, a column of `trials`. study, arm: the source; other
    studies may have the same configuration. values: of the seeds 0, 1, 2, ...
    """

    config_hash: str
    column: str
    study: str
    arm: str
    values: tuple[float, ...]


@cache
def read_replicates(path: Path = REPLICATES_PATH) -> tuple[Replicates, ...]:
    """Read all recorded replicates."""
    return tuple(Replicates(**{**entry, "values": tuple(entry["values"])}) for entry in parse_json(read_bytes(path)))


def write_replicates(replicates: Iterable[Replicates], path: Path = REPLICATES_PATH) -> None:
    """Write replicates, sorted, one entry per line."""
    lines = [json.dumps(entry._asdict()) for entry in sorted(replicates, key=lambda entry: (entry.study, entry.arm))]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def find_recorded_values(study: StudyRecord, column: str) -> tuple[float, ...]:
    """Find the recorded outcomes of a study's baseline; empty if there are none. study: content of study.json."""
    config_hash = _find_baseline_hash(study)
    return next(
        (entry.values for entry in read_replicates() if (entry.config_hash, entry.column) == (config_hash, column)), ()
    )


def _find_baseline_hash(study: StudyRecord) -> str:
    runs = (run for run in study.runs if run.arm == study.baseline)
    return next((run.config_hash for run in runs), "")


def make_replicates(frames: StudyFrames) -> Replicates:
    """Collect the replicates of a study's baseline. ValueError if it has fewer than `MIN_REPLICATES` scored runs."""
    (study,), (family,) = frames.studies, frames.families
    column, baseline = family.primary_column, study.baseline
    runs = frames.runs[(frames.runs["arm"] == baseline) & frames.runs["status"].isin(ENDED_STATUSES)]
    values = [row[column] for row in to_records(runs.sort_values("seed")) if not pd.isna(row[column])]
    if len(values) < MIN_REPLICATES:
        raise ValueError(
            f"The baseline of {study.name} has {len(values)} scored runs, and {MIN_REPLICATES} are needed: run the "
            f"study with --seeds {MIN_REPLICATES} first."
        )
    rounded_values = tuple(round(value, 6) for value in values)
    return Replicates(_find_baseline_hash(study), column, study.name, baseline, rounded_values)


def main(folders: Sequence[str]) -> None:
    """Record the baselines of the studies in `folders`, keeping the entries of other configurations.

    A baseline whose runs all end at the same number, such as an error of 0, tells nothing about noise and is left out.
    """
    replicates = {(entry.config_hash, entry.column): entry for entry in read_replicates()}
    for folder in folders:
        for path in find_study_folders(Path(folder)):
            entry = make_replicates(load(path))
            if len(set(entry.values)) > 1:
                replicates[entry.config_hash, entry.column] = entry
            else:
                print(f"{entry.study}: all {len(entry.values)} runs end at {entry.values[0]:g}; nothing is recorded")
    write_replicates(replicates.values())


if __name__ == "__main__":
    main(sys.argv[1:])
