"""Recorded replicates: the outcomes of one arm with many seeds, from which a study with few seeds learns its noise.

`replicates.json` in this folder is made from the baselines of the shipped studies (`make replicates`). An entry applies
to every study with the same environment, preset, outcome and number of steps, since the runs of such a study differ
from those recorded in one or a few settings only. That is an assumption: an arm may be noisier than the recorded one.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.data.families import get_family
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import find_study_folders, load
from trainable.files.json_values import read_json
from trainable.files.paths import write_text
from trainable.runs.run_ends import ENDED_STATUSES

REPLICATES_PATH = Path(__file__).parent / "replicates.json"
MIN_REPLICATES = 20
"""With fewer runs, the interval of a variance is wider than a factor of three."""


class ReplicateKey(NamedTuple):
    """What studies must have in common to share their noise.

    environment: of a language model the environment that it acts in, in the sandbox the task. preset: of the study.
    column: the outcome, a column of `trials`. steps: planned training steps.
    """

    environment: str
    preset: str
    column: str
    steps: int


class Replicates(NamedTuple):
    """Outcomes of one arm of one study, one per seed.

    key: see `ReplicateKey`. study, arm: where they come from. values: of the seeds 0, 1, 2, ...
    """

    key: ReplicateKey
    study: str
    arm: str
    values: tuple[float, ...]


@cache
def read_replicates(path: Path = REPLICATES_PATH) -> tuple[Replicates, ...]:
    """Read all recorded replicates; none if there is no file."""
    if not path.is_file():
        return ()
    return tuple(
        Replicates(ReplicateKey(**entry["key"]), entry["study"], entry["arm"], tuple(entry["values"]))
        for entry in read_json(path)
    )


def write_replicates(replicates: Iterable[Replicates], path: Path = REPLICATES_PATH) -> None:
    """Write replicates, sorted, with one line per entry."""
    lines = [
        json.dumps({"key": entry.key._asdict(), "study": entry.study, "arm": entry.arm, "values": entry.values})
        for entry in sorted(replicates)
    ]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def make_key(study: Mapping[str, Any], column: str) -> ReplicateKey:
    """The key of an outcome of a study. study: content of study.json."""
    settings = study.get("settings", {})
    steps = settings.get("trainer", {}).get("total_training_steps", 0)
    return ReplicateKey(get_family(study).get_environment(settings), study.get("preset", ""), column, steps)


def find_replicates(study: Mapping[str, Any], column: str) -> list[Replicates]:
    """The recorded replicates that apply to an outcome of a study, each only once. study: content of study.json.

    Several studies may have the same baseline, and then the same runs: they are evidence of one arm.
    """
    key = make_key(study, column)
    return list({entry.values: entry for entry in read_replicates() if entry.key == key}.values())


def make_replicates(frames: StudyFrames) -> Replicates:
    """The replicates of a study's baseline arm. ValueError if it has fewer than `MIN_REPLICATES` scored runs."""
    (study,), (family,) = frames.studies, frames.families
    column, baseline = family.primary_column, study.get("baseline") or ""
    runs = frames.runs[(frames.runs["arm"] == baseline) & frames.runs["status"].isin(ENDED_STATUSES)]
    values = [row[column] for row in to_records(runs.sort_values("seed")) if not pd.isna(row[column])]
    if len(values) < MIN_REPLICATES:
        raise ValueError(
            f"The baseline of {study['name']} has {len(values)} scored runs, and {MIN_REPLICATES} are needed: run the "
            f"study with --seeds {MIN_REPLICATES} first."
        )
    return Replicates(make_key(study, column), study["name"], baseline, tuple(round(value, 6) for value in values))


def main(folders: Sequence[str]) -> None:
    """Record the baselines of the studies in `folders`. Entries of other studies stay.

    A baseline that ends at the same number in every run, such as an error of 0, says nothing of noise and is left out.
    """
    replicates = {(entry.key, entry.study): entry for entry in read_replicates()}
    for folder in folders:
        for path in find_study_folders(Path(folder)):
            entry = make_replicates(load(path))
            if len(set(entry.values)) > 1:
                replicates[entry.key, entry.study] = entry
            else:
                print(f"{entry.study}: all {len(entry.values)} runs end at {entry.values[0]:g}; nothing is recorded")
    write_replicates(replicates.values())


if __name__ == "__main__":
    main(sys.argv[1:])
