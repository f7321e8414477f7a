"""One of two ranks, of which one makes a gradient that is not finite: no rank steps, and the next step is made."""

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


def check(rank: int, stage: int, meeting: Path) -> None:
    """AssertionError unless both ranks skip a step and make the next one."""
    torch.set_num_threads(1)
    world = connect(rank, 2, meeting)
    own = make_random_model(make_qwen2_shape())
    backend = ZeroBackend("optimizer", {"actor": own}, [1e-3], OptimConfig(), TrainerConfig(zero_stage=stage), world)
    check_whole(backend, own, stage)
    model, tokens = backend.networks["actor"], torch.arange(6)[None]
    assert isinstance(model, Qwen2)

    def loss(factor: float) -> Tensor:
        hidden = model.model.compute_hidden_states(tokens, torch.arange(6))
        found: Tensor = factor * model.lm_head(hidden).sum()
        return found

    before, meter = backend.state_dict(), Meter()
    for factor, steps, skipped in ((float("nan"), 1, 1), (1.0, 2, 1)):
        backend.backward(lambda factor=factor: loss(factor if rank else 1.0), True)  # type: ignore[misc]
        backend.step(meter, "norm")
        assert (meter.optimizer_steps, meter.skipped_steps) == (steps, skipped)
        assert backend.find_nonfinite_weights() == []
        after = backend.state_dict()
        changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
        assert bool(changed) == (skipped < steps and rank == 0), changed  # rank 0 keeps the state
    disconnect(meeting)


def check_whole(backend: ZeroBackend, own: Qwen2, stage: int) -> None:
    """AssertionError unless the run's own network has all of its weights within `whole`, and in stage 3 there alone."""
    wanted = make_random_model(make_qwen2_shape()).state_dict()
    for _ in range(2):
        assert all((weight.numel() == 0) == (stage == 3) for weight in own.parameters())
        with backend.gather_weights(), backend.gather_weights():
            assert all(torch.equal(value, wanted[name]) for name, value in own.state_dict().items())


if __name__ == "__main__":
    check(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[1]) / "meeting")
