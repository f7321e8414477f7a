"""Compare all frames of studies."""

from pathlib import Path

from analysis import diff_frames
from analysis.data.frames import FRAME_NAMES, StudyFrames
from analysis.data.load import load, read_study


def diff_all_frames(a: StudyFrames, b: StudyFrames) -> list[str]:
    return [line for name in FRAME_NAMES for line in diff_frames(getattr(a, name), getattr(b, name))]


def check_parquet(folder: Path) -> None:
    """Check that the tables of a study have the rows and types of its files, and are read in their place."""
    frames = read_study(folder)
    frames.steps["seconds_total"] = -1.0  # marks the tables
    frames.write_parquet(folder)
    loaded = load(folder)
    assert (loaded.steps["seconds_total"] == -1).all()
    assert diff_all_frames(frames, loaded) == []
    assert all(getattr(loaded, name).dtypes.equals(getattr(frames, name).dtypes) for name in FRAME_NAMES)
