"""Swapping to host memory changes no number, and no pass reads a tensor that is on the host."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import has_same_weights, run_steps
from trainable.backend.host_swap import HostSwap
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer

CPU = torch.device("cpu")
IN_TORCH = {"rollout__name": "torch", "model__compiled_passes": False}
KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1}
ONE_GROUP = {"env__env_groups": 1, "filter__rollout_filter_include_zero": True}
VARIANTS: dict[str, dict[str, object]] = {
    "critic and reference": {**KL, **ONE_GROUP},
    "shared trunk": {"critic__shared_trunk": True},
    "adapters": {**KL, "model__lora_rank": 4},
    "target policies": {
        "actor__policy_loss": "tpo",
        "algorithm__adv_estimator": "group_skill",
        "actor__ppo_micro_batch_size_per_gpu": 4,
    },
    "gradient analysis": {
        "trainer__gradient_analysis_mode": True,
        "trainer__gradient_analysis_every": 1,
        **KL,
        "actor__kl_loss_type": "full",
    },
    "compiled": {"rollout__name": "compiled", "model__compiled_passes": True},
}
MAIN_VARIANTS = ("critic and reference", "compiled")
"""Those that CI runs."""


class HostReads(TorchDispatchMode):
    """Raises an error if an operation reads the storage of a tensor that is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, Any] = {}
        self.is_moving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_moving:
            for value in tree_leaves((args, kwargs)):
                is_tensor = isinstance(value, torch.Tensor) and value.numel()
                if is_tensor and value.untyped_storage().data_ptr() in self.buffers:
                    raise AssertionError(f"{func} reads a tensor that is on the host")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    """A mode that knows which buffers hold a tensor's data at any time."""
    mode = HostReads()

    def watch(method: Any, is_out: bool) -> Any:
        def call(swap: HostSwap) -> None:
            mode.is_moving = True
            try:
                method(swap)
            finally:
                mode.is_moving = False
            for buffer in swap._buffers.values():
                address = buffer.untyped_storage().data_ptr()
                if is_out:
                    mode.buffers[address] = buffer
                else:
                    mode.buffers.pop(address, None)

        return call

    monkeypatch.setattr(HostSwap, "_move_in", watch(HostSwap._move_in, is_out=False))
    monkeypatch.setattr(HostSwap, "_move_out", watch(HostSwap._move_out, is_out=True))
    return mode


def make_trainer(swaps: bool, **settings: object) -> PPOTrainer:
    common_settings = {
        **IN_TORCH,
        "trainer__swap_to_host": swaps,
        "trainer__val_before_train": False,
        "env__val_env_groups": 4,
        "env__test_env_groups": 0,
    }
    config = make_small_config(**{**common_settings, **settings})
    return PPOTrainer(config, diagnostics=DIAGNOSTICS)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in MAIN_VARIANTS else pytest.mark.slow) for name in VARIANTS]
)
def test_swapping_changes_no_number(name: str, host_reads: HostReads) -> None:
    plain_trainer = make_trainer(False, **VARIANTS[name])
    plain_rows = run_steps(plain_trainer, 2)
    with host_reads:
        trainer = make_trainer(True, **VARIANTS[name])
        rows = run_steps(trainer, 2)
    assert rows == plain_rows
    assert host_reads.buffers
    assert has_same_weights(trainer, plain_trainer)


def test_values_survive_an_error_in_an_update() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    swap = HostSwap(lambda: [weight], CPU)

    def update() -> None:
        with swap.load(has_changed=True), torch.no_grad():
            weight.add_(1)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        update()
    assert weight.tolist() == [2, 2, 2]
    with swap.load(has_changed=False):
        assert weight.tolist() == [2, 2, 2]


def test_only_the_outermost_context_moves_and_only_changes_are_copied_back() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    swap = HostSwap(lambda: [weight], CPU)
    host_address = weight.data_ptr()
    with swap.load(has_changed=False):
        address = weight.data_ptr()
        with swap.load(has_changed=True), torch.no_grad():
            weight += 1
        assert weight.data_ptr() == address != host_address
    assert weight.data_ptr() == host_address
    assert weight.tolist() == [2, 2, 2]
    weight = torch.nn.Parameter(torch.ones(3))
    swap = HostSwap(lambda: [weight], CPU)
    with swap.load(has_changed=False), torch.no_grad():
        weight += 1
    assert weight.tolist() == [1, 1, 1]


def test_a_buffer_ends_with_its_tensor() -> None:
    tensors = [torch.ones(3)]
    swap = HostSwap(lambda: tensors, CPU)
    tensors[0] = torch.zeros(3)  # as when an optimizer loads a state
    with swap.load(has_changed=True):
        pass
    assert len(swap._buffers) == 1
