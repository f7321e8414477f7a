"""Train one rank of a small run, from a checkpoint or from the start, and write its results (run with `python -m`)."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import QUIET_SETTINGS
from trainable.backend.world import SINGLE_PROCESS, connect, disconnect
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint


def train(folder: Path, rank: int, size: int, steps: int, overrides: dict[str, Any], start: Path | None) -> None:
    """Train `size` ranks, or plain torch if `size` is 0. Rank 0 writes rows, gradients and the state below `folder`."""
    torch.set_num_threads(1)
    world = connect(rank, size, folder / "meeting") if size else SINGLE_PROCESS
    trainer = PPOTrainer(make_small_config(**{**QUIET_SETTINGS, **overrides}), world, DIAGNOSTICS)
    if start is not None:
        trainer.load_state(*read_checkpoint(start))
    results = [trainer.step() for _ in range(steps)]
    tensors, values = trainer.get_state()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps([step.row for step in results]))
        (folder / "gradients.json").write_text(json.dumps([line for step in results for line in step.gradients]))
        write_checkpoint(folder / "state", tensors, values)
    disconnect(folder / "meeting")


if __name__ == "__main__":
    folder, rank, size, steps, overrides, start = sys.argv[1:]
    train(Path(folder), int(rank), int(size), int(steps), json.loads(overrides), Path(start) if start else None)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo sometimes outlive the group, and then the interpreter would abort at its end
