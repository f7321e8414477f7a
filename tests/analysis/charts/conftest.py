"""A study with every kind of run, and the colors of its arms."""

import pytest

from analysis.charts.chart import make_arm_colors
from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STOP = ("low_validation_success", 0.002, 0.01)
ARMS = ("0", "0.1", "0.3", "nofilter")


@pytest.fixture(scope="package")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    runs = [
        *(FakeRun("0", seed, steps=10) for seed in (0, 1)),
        FakeRun("0.1", steps=6, status="interrupted"),
        FakeRun("0.3", steps=5, status="early_stopped", success=(0.35, 0.0), stop=STOP),
        FakeRun("nofilter", steps=10),
    ]
    return read_study(write_study(tmp_path_factory.mktemp("study"), runs, FakeStudy(levels=40, total_steps=10)))


@pytest.fixture(scope="package")
def colors() -> dict[str, str]:
    return make_arm_colors(ARMS, ["nofilter"])
