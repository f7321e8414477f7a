"""The environment of a run's process: the GPUs that it sees, and torch's allocator."""

import pytest

from trainable.backend.gpus import ALLOCATOR_SETTINGS, ALLOCATOR_VARIABLES, take_gpus

HIDES_NOTHING = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("environ", [{}, HIDES_NOTHING, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}])
@pytest.mark.parametrize(("ids", "visible"), [([3], "3"), (["GPU-7f", "GPU-a"], "GPU-7f,GPU-a")])
def test_a_process_sees_the_gpus_that_ray_gave_it(environ: dict[str, str], ids: list[int | str], visible: str) -> None:
    environ = dict(environ)
    take_gpus(ids, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == visible
    assert environ[ALLOCATOR_VARIABLES[0]] == ALLOCATOR_SETTINGS


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_settings_of_the_allocator_stay(name: str) -> None:
    environ = {name: "max_split_size_mb:512"}
    take_gpus([0], environ)
    assert environ == {name: "max_split_size_mb:512", "CUDA_VISIBLE_DEVICES": "0"}
    # Without a GPU, nothing is set.
    environ = {}
    take_gpus([], environ)
    assert environ == {}
