"""The environment variables of a study's processes."""

import os

import pytest

from tune_study.tune.run import prepare_environment

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of GPUs is set; whatever a test sets is removed after it."""
    for name in ("CUDA_VISIBLE_DEVICES", *ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "")  # so that the variable is restored even if it was not set
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("clean_environment")
def test_gpus_are_those_of_the_study_and_their_memory_grows_in_segments() -> None:
    prepare_environment(("2", "GPU-7f"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-7f"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_settings_of_the_allocator_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    prepare_environment(("0",))
    values = {variable: os.environ[variable] for variable in ALLOCATOR_VARIABLES if variable in os.environ}
    assert values == {name: "max_split_size_mb:512"}


@pytest.mark.usefixtures("clean_environment")
def test_without_a_gpu_nothing_of_gpus_is_set() -> None:
    prepare_environment(())
    assert not {"CUDA_VISIBLE_DEVICES", *ALLOCATOR_VARIABLES} & os.environ.keys()
