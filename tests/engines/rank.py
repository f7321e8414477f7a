"""One rank of a small run: trains from a state, or from the start, and writes what it has. `python -m` starts it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import QUIET_SETTINGS
from trainable.backend.world import SINGLE_PROCESS, connect, disconnect
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint


def train(folder: Path, rank: int, size: int, steps: int, overrides: dict[str, Any], start: Path | None) -> None:
    """`size` 0 is plain torch. Rank 0 writes rows, gradient analyses and the state below `folder`."""
    torch.set_num_threads(1)
    world = connect(rank, size, folder / "meeting") if size else SINGLE_PROCESS
    trainer = PPOTrainer(make_small_config(**{**QUIET_SETTINGS, **overrides}), world, DIAGNOSTICS)
    if start is not None:
        trainer.load_state(*read_checkpoint(start))
    made = [trainer.step() for _ in range(steps)]
    tensors, values = trainer.get_state()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps([step.row for step in made]))
        (folder / "gradients.json").write_text(json.dumps([line for step in made for line in step.gradients]))
        write_checkpoint(folder / "state", tensors, values)
    disconnect(folder / "meeting")


if __name__ == "__main__":
    place, number, count, length, given, begin = sys.argv[1:]
    train(Path(place), int(number), int(count), int(length), json.loads(given), Path(begin) if begin else None)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo outlive the group now and then, and the interpreter's end would abort for them
