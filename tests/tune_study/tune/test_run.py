"""The environment variables of a study's processes."""

import os

import pytest

from tune_study.tune.run import prepare_environment


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of GPUs is set; whatever a test sets is removed after it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that the variable is restored even if it was not set
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("clean_environment")
def test_gpus_are_those_of_the_study() -> None:
    prepare_environment(("2", "GPU-7f"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-7f"


@pytest.mark.usefixtures("clean_environment")
def test_without_a_gpu_nothing_of_gpus_is_set() -> None:
    prepare_environment(())
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
