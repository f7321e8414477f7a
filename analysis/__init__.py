"""Read: a folder on disk to an answer, without torch and without Ray.

Example: `analysis.load(DIR).trials` has one row per run.
"""

from analysis.data.frames import StudyFrames, same_rows
from analysis.data.load import load, read_run, study_folders

__all__ = ["StudyFrames", "load", "read_run", "same_rows", "study_folders"]
