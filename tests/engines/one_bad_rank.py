"""One of two ranks. If a gradient is not finite on one rank, no rank steps, and both make the next step."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.backend.meter import Meter
from trainable.backend.world import connect, disconnect
from trainable.backend.zero import ZeroBackend
from trainable.config.sections import OptimConfig, TrainerConfig
from trainable.models.qwen2 import Qwen2


def check(rank: int, stage: int, rendezvous_file: Path) -> None:
    """Check that both ranks skip one step and make the next."""
    torch.set_num_threads(1)
    world = connect(rank, 2, rendezvous_file)
    local_model = make_random_model(make_qwen2_shape())
    backend = ZeroBackend(
        "optimizer", {"actor": local_model}, [1e-3], OptimConfig(), TrainerConfig(zero_stage=stage), world
    )
    check_gathered_weights(backend, local_model, stage)
    model, tokens = backend.networks["actor"], torch.arange(6)[None]
    assert isinstance(model, Qwen2)

    def compute_loss(factor: float) -> Tensor:
        hidden = model.model.compute_hidden_states(tokens, torch.arange(6))
        total: Tensor = factor * model.lm_head(hidden).sum()
        return total

    old_state, meter = backend.state_dict(), Meter()
    for factor, steps, skipped in ((float("nan"), 1, 1), (1.0, 2, 1)):
        backend.backward(lambda factor=factor: compute_loss(factor if rank else 1.0), True)  # type: ignore[misc]
        backend.step(meter, "norm")
        assert (meter.optimizer_steps, meter.skipped_steps) == (steps, skipped)
        assert backend.find_nonfinite_weights() == []
        new_state = backend.state_dict()
        changed_names = [name for name, value in old_state.items() if not torch.equal(new_state[name], value)]
        assert bool(changed_names) == (skipped < steps and rank == 0), changed_names  # rank 0 keeps the state
    disconnect(rendezvous_file)


def check_gathered_weights(backend: ZeroBackend, model: Qwen2, stage: int) -> None:
    """Check that the local model has all of its weights within `gather_weights`, and in stage 3 only there."""
    expected_weights = make_random_model(make_qwen2_shape()).state_dict()
    for _ in range(2):
        assert all((weight.numel() == 0) == (stage == 3) for weight in model.parameters())
        with backend.gather_weights(), backend.gather_weights():
            assert all(torch.equal(value, expected_weights[name]) for name, value in model.state_dict().items())


if __name__ == "__main__":
    check(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[1]) / "meeting")
