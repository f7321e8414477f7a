"""The smoke grid, with one KL loss and with three."""

import pytest

from analysis.data.frames import StudyFrames
from analysis.data.load import load
from tests.fakes.grid_folders import ALL_TYPES, ONE_TYPE, write_grid


@pytest.fixture(scope="package")
def one_loss_frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """The 68 arms of one KL loss."""
    return load(write_grid(tmp_path_factory.mktemp("one"), ONE_TYPE, levels=20))


@pytest.fixture(scope="package")
def three_loss_frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """The 164 arms of three KL losses."""
    return load(write_grid(tmp_path_factory.mktemp("three"), ALL_TYPES, levels=20))
