from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.scripted import make_random_model
from tests.fakes.trials import UninterruptedRun, clean_up_trials, start_trial
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.recipe import write_model


@pytest.fixture(autouse=True, scope="session")
def _use_one_thread() -> None:
    """Use one thread, as a trial does, so that sums do not depend on the number of cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny shape with random weights, in the format of the hub."""
    folder: Path = tmp_path_factory.mktemp("random-model")
    write_model(make_random_model(SOKOBAN_TINY.make_shape(), std=0.1), folder, SOKOBAN_TINY.pieces)
    return folder


@pytest.fixture(autouse=True)
def _clean_up_after_test() -> Iterator[None]:
    yield
    clean_up_trials()


@pytest.fixture(scope="session")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRun:
    """An uninterrupted run of three steps, with saved checkpoints after the second and the last step."""
    folder = tmp_path_factory.mktemp("straight")
    trainable = start_trial(folder, trainer__save_freq=2)
    return folder, [trainable.step() for _ in range(3)]
