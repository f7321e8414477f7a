"""Read a study from its folder: `analysis.data.load(DIR).trials`."""

from analysis.data.frames import StudyFrames, same_rows
from analysis.data.load import load, read_run, study_folders

__all__ = ["StudyFrames", "load", "read_run", "same_rows", "study_folders"]
