"""Checkpoints damaged in every way a disk or a kill can: each must be refused, none half-read."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trainable.runs.checkpoint import TENSORS_FILE, VALUES_FILE, CheckpointError, read_checkpoint, write_checkpoint
from trainable.runs.run_files import CHECKSUMS_FILE

FILES = (TENSORS_FILE, VALUES_FILE, CHECKSUMS_FILE)
KINDS = ("cut", "bit", "byte", "zeros", "missing", "empty", "longer", "swapped", "folder")


def write_small(folder: Path) -> None:
    """A checkpoint of about a kilobyte, so that every byte of it can be damaged."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "actor/weight": torch.randn(4, 6, generator=generator),
        "actor_optimizer/0/exp_avg": torch.randn(4, 6, generator=generator),
        "actor_optimizer/0/step": torch.tensor(3.0),
    }
    write_checkpoint(folder, tensors, {"step": 3, "kl_coef": 0.001, "totals": {"env_steps": 12}})


def is_refused(folder: Path) -> bool:
    """Whether reading the checkpoint says, and names the folder, that it cannot be used."""
    try:
        read_checkpoint(folder)
    except CheckpointError as error:
        return str(folder) in str(error)
    return False


def every_cut(folder: Path) -> Iterator[str]:
    """Damage a small checkpoint by cutting each file at each byte, one after the other; what was done, each time."""
    yield from _each_byte(folder, lambda data, at: data[:at], "cut")


def every_flip(folder: Path, dice: random.Random) -> Iterator[str]:
    """Likewise with one random bit of each byte turned."""
    yield from _each_byte(folder, lambda data, at: _with(data, at, data[at] ^ 1 << dice.randrange(8)), "bit")


def _each_byte(folder: Path, change: Callable[[bytes, int], bytes], what: str) -> Iterator[str]:
    for name in FILES:
        path = folder / name
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(change(whole, at))
            yield f"{what} of {name} at byte {at}"
        path.write_bytes(whole)


def _with(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def damage(folder: Path, kind: str, dice: random.Random) -> bool:
    """Damage one random file of a checkpoint in the given way; False where that left it as it was."""
    path = folder / dice.choice(FILES)
    whole = path.read_bytes()
    at = dice.randrange(len(whole))
    if kind in ("missing", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return True
    if kind == "swapped":
        other = folder / dice.choice([name for name in FILES if name != path.name])
        theirs = other.read_bytes()
        other.write_bytes(whole)
        path.write_bytes(theirs)
        return True
    length = dice.randint(1, 4096)
    changed = {
        "cut": whole[:at],
        "bit": _with(whole, at, whole[at] ^ 1 << dice.randrange(8)),
        "byte": _with(whole, at, dice.randrange(256)),
        "zeros": whole[:at] + bytes(len(whole[at : at + length])) + whole[at + length :],
        "empty": b"",
        "longer": whole + dice.randbytes(length),
    }[kind]
    path.write_bytes(changed)
    return changed != whole


def check_damage(source: Path, count: int, seed: int, scratch: Path) -> tuple[Counter[str], list[str]]:
    """Damage `count` copies of a real checkpoint at random: how many of each kind, and those that were not refused."""
    dice, done, missed = random.Random(seed), Counter[str](), []
    while done.total() < count:
        shutil.copytree(source, scratch)
        kind = dice.choice(KINDS)
        if damage(scratch, kind, dice):
            done[kind] += 1
            if not is_refused(scratch):
                missed.append(f"{kind}, number {done.total()}")
        shutil.rmtree(scratch)
    return done, missed
