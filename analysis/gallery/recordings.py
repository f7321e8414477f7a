"""Recordings: the results of a study in four small files, which are read without the folders of its runs.

`python -m analysis.gallery.recordings RUN NAME` records the study in a results/<run> folder. With `--outcomes` it
leaves out most columns of steps, and levels, for a study of which only outcomes are read.
"""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from analysis.data.frames import (
    CONFIG_PREFIX,
    FRAME_NAMES,
    StudyFrames,
    cast_frame,
    list_differing_settings,
    make_empty_frame,
)
from analysis.data.load import read_study
from analysis.data.schemas import get_family, get_schemas
from trainable.config.command_lines import quote_argument, split_words
from trainable.files.json_values import format_object
from trainable.files.paths import atomic_write
from trainable.runs.study_record import STUDY_FILE, StudyRecord, read_record

RECORDINGS = Path(__file__).with_name("recordings")
"""The folder of the recordings that ship with the package, each in a folder of its own."""

_LEFT_OUT = re.compile(
    r"seconds_|mfu_|scheduled_|peak_flops|tokens_per_second|total_"
    r"|collapse_(?!(first_turn|trajectory)_(mi_estimate|retrieval_accuracy)$)"
)
"""Columns of steps that a recording leaves out: times, constants, and what the other columns give."""
_CURVE_COLUMNS = ("trial_id", "run_id", "arm", "seed", "step", "cpu_seconds_step", "train_reward", "val_success")
"""Columns of steps that a recording of outcomes keeps: its cost, and what tells whether runs are equal."""
_PLACES = re.compile(r"\0--(output|wandb)[\0=][^\0]*")
"""Matches the options that say where results go, among the words of a command, which NUL separates here."""


def make_portable(command: str) -> str:
    """Drop the options of a command that say where its results go, and what is above a folder of results in `out`."""
    words = _PLACES.sub("", "\0".join(split_words(command))).split("\0")
    return " ".join(quote_argument(re.sub(r"^.*/results/", "out/results/", word)) for word in words)


def write_recording(frames: StudyFrames, folder: Path, only_outcomes: bool = False) -> int:
    """Record a single study in `folder`, and return the size of its files in bytes.

    Measures of steps have the precision of float32. Settings that all runs share are in study.json alone.
    only_outcomes: leave out levels, and of the steps all but their cost, rewards and validations.
    """
    (study,) = frames.studies
    command = make_portable(study.command)
    # A recording tells no folder and no time of the machine that made it.
    study = replace(study, command=command, recorded=command, starts=(), looks=())
    if Path(study.model).is_absolute():
        name = Path(study.model).name
        settings = {**study.settings, "model": {**study.settings["model"], "path": name}}
        study = replace(study, model=name, settings=settings)
    constant_columns = {name for name in frames.trials if str(name).startswith(CONFIG_PREFIX)} - {
        f"{CONFIG_PREFIX}{name}" for name in list_differing_settings(frames.trials)
    }
    tables = {
        "trials": frames.trials.drop(columns=[*constant_columns, "trial_id", "started_at", "ended_at"]),
        "steps": frames.steps[
            [name for name in frames.steps if (name in _CURVE_COLUMNS if only_outcomes else not _LEFT_OUT.match(name))]
        ],
        **({} if only_outcomes else {"levels": frames.levels}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*FRAME_NAMES} - {*tables}:  # of an earlier recording
        (folder / f"{name}.parquet").unlink(missing_ok=True)
    with atomic_write(folder / STUDY_FILE) as temp_path:
        temp_path.write_text(format_object(asdict(study)), encoding="utf-8")
    for name, table in tables.items():
        table = table.dropna(axis=1, how="all")
        measures = list(table.select_dtypes("float64")) if name == "steps" else []
        others = [column for column in table if column not in measures]
        with atomic_write(folder / f"{name}.parquet") as temp_path:
            table.astype(dict.fromkeys(measures, "float32")).to_parquet(
                temp_path,
                index=False,
                compression="zstd",
                compression_level=19,
                use_dictionary=others,
                use_byte_stream_split=measures,
            )
    return sum(path.stat().st_size for path in folder.iterdir())


def read_recording(name: str | Path) -> StudyFrames:
    """Read a recording: the name of one that ships with the package, or a folder.

    Example:
        >>> read_recording("remedies").trials.groupby("arm")["late_val_success"].mean()  # doctest: +SKIP
    """
    folder = RECORDINGS / name
    study = read_record(StudyRecord, folder)
    schemas = get_schemas(get_family(study).name)
    frames = {
        kind: cast_frame(pd.read_parquet(path), schemas[kind]) if path.exists() else make_empty_frame(kind)
        for kind in FRAME_NAMES
        for path in [folder / f"{kind}.parquet"]
    }
    return StudyFrames(**frames, study=study)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--outcomes"]
    if len(words) != 2:
        sys.exit("Type the study to record and a name: python -m analysis.gallery.recordings out/results/RUN NAME")
    size = write_recording(read_study(words[0]), RECORDINGS / words[1], "--outcomes" in sys.argv)
    print(f"{RECORDINGS / words[1]}: {size:,} bytes")
