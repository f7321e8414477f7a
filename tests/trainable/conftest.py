from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.scripted import random_model
from tests.fakes.trials import Straight, ended, started
from trainable.tiny.recipe import tiny_shape, write_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """As a trial trains; sums do not depend on the machine's cores then."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the tiny shape with random weights, in the hub's format."""
    folder: Path = tmp_path_factory.mktemp("random-model")
    write_model(random_model(tiny_shape(), spread=0.1), folder)
    return folder


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    ended()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """A whole run of three steps; kept checkpoints after the second and the last."""
    folder = tmp_path_factory.mktemp("straight")
    trainable = started(folder, trainer__save_freq=2)
    return folder, [trainable.step() for _ in range(3)]
