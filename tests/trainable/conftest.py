from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.scripted import make_random_model
from tests.fakes.trials import UninterruptedRun, clean_up_trials, start_trial
from trainable.tiny.recipe import make_shape, write_model


@pytest.fixture(autouse=True, scope="session")
def _use_one_thread() -> None:
    """As a trial trains; sums do not depend on the machine's cores then."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny shape with random weights, in the hub's format."""
    folder: Path = tmp_path_factory.mktemp("random-model")
    write_model(make_random_model(make_shape(), std=0.1), folder)
    return folder


@pytest.fixture(autouse=True)
def _clean_up_after_test() -> Iterator[None]:
    yield
    clean_up_trials()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedRun:
    """A whole run of three steps; kept checkpoints after the second and the last."""
    folder = tmp_path_factory.mktemp("straight")
    trainable = start_trial(folder, trainer__save_freq=2)
    return folder, [trainable.step() for _ in range(3)]
