"""Read: a folder on disk to an answer, without torch and without Ray.

Example: `analysis.load(DIR).trials` has one row per run.
"""

from analysis.data.frames import StudyFrames, diff_frames
from analysis.data.load import load, read_study, find_study_folders

__all__ = ["StudyFrames", "load", "read_study", "diff_frames", "find_study_folders"]
