"""The environment variables of a study's processes."""

import os

import pytest

from tune_study.tune.local_ray import prepare_environment


@pytest.mark.parametrize(("gpus", "expected"), [(("2", "GPU-7f"), "2,GPU-7f"), ((), None)])
def test_gpus_are_those_of_the_study(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that the variable is restored even if it was not set
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    prepare_environment(gpus)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
