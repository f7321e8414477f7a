"""Compare all frames of studies."""

from pathlib import Path

import pandas as pd

from analysis import diff_frames
from analysis.data.frames import FRAME_NAMES, StudyFrames, cast_frame
from analysis.data.load import load
from analysis.data.schemas import get_schemas


def diff_all_frames(a: StudyFrames, b: StudyFrames) -> list[str]:
    return [line for name in FRAME_NAMES for line in diff_frames(getattr(a, name), getattr(b, name))]


def check_parquet(folder: Path) -> None:
    """Check that the tables of a study have the rows and types of its files."""
    frames = load(folder)
    frames.write_parquet(folder)
    for name, schema in get_schemas(frames.studies[0].family).items():
        table, frame = cast_frame(pd.read_parquet(folder / f"{name}.parquet"), schema), getattr(frames, name)
        assert diff_frames(table, frame) == []
        assert table.dtypes.equals(frame.dtypes)
