"""Read results folders and report on them, without torch and without Ray.

Example: `analysis.load(DIR).trials` has one row per run.
"""

from analysis.data.frames import StudyFrames, diff_frames
from analysis.data.load import find_study_folders, read_study
from analysis.notebook.frames import load

__all__ = ["StudyFrames", "diff_frames", "find_study_folders", "load", "read_study"]
