"""Read a study from its folder: `analysis.load(DIR).trials`."""

from analysis.frames import StudyFrames, same_rows
from analysis.load import load, read_run, study_folders

__all__ = ["StudyFrames", "load", "read_run", "same_rows", "study_folders"]
