"""Checkpoints that are damaged as a disk or a kill can damage them: each must be refused, and none partly read."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trainable.runs.checkpoint import TENSORS_FILE, VALUES_FILE, read_checkpoint, write_checkpoint
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import CHECKSUMS_FILE

FILES = (TENSORS_FILE, VALUES_FILE, CHECKSUMS_FILE)
DAMAGE_KINDS = ("cut", "bit", "byte", "zeros", "missing", "empty", "longer", "swapped", "folder")


def write_small_checkpoint(folder: Path) -> None:
    """Write a checkpoint of about a kilobyte, so that every byte of it can be damaged."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "actor/weight": torch.randn(4, 6, generator=generator),
        "actor_optimizer/0/exp_avg": torch.randn(4, 6, generator=generator),
        "actor_optimizer/0/step": torch.tensor(3.0),
    }
    write_checkpoint(folder, tensors, {"step": 3, "kl_coef": 0.001, "totals": {"env_steps": 12}})


def is_refused(folder: Path) -> bool:
    """Return whether reading the checkpoint raises an error that names its folder."""
    try:
        read_checkpoint(folder)
    except CheckpointError as error:
        return str(folder) in str(error)
    return False


def iter_cuts(folder: Path) -> Iterator[str]:
    """Cut each file of a small checkpoint at each byte, one at a time; yield a description of each damage."""
    yield from _damage_each_byte(folder, lambda content, position: content[:position], "cut")


def iter_bit_flips(folder: Path, rng: random.Random) -> Iterator[str]:
    """Flip one random bit of each byte of a small checkpoint, one at a time; yield a description of each damage."""
    yield from _damage_each_byte(
        folder,
        lambda content, position: _replace_byte(content, position, content[position] ^ 1 << rng.randrange(8)),
        "bit",
    )


def _damage_each_byte(folder: Path, damage_content: Callable[[bytes, int], bytes], damage_kind: str) -> Iterator[str]:
    for name in FILES:
        path = folder / name
        content = path.read_bytes()
        for position in range(len(content)):
            path.write_bytes(damage_content(content, position))
            yield f"{damage_kind} of {name} at byte {position}"
        path.write_bytes(content)


def _replace_byte(content: bytes, position: int, byte: int) -> bytes:
    return content[:position] + bytes([byte]) + content[position + 1 :]


def damage(folder: Path, damage_kind: str, rng: random.Random) -> bool:
    """Damage one random file of a checkpoint in the given way; return False if that did not change the file."""
    path = folder / rng.choice(FILES)
    content = path.read_bytes()
    position = rng.randrange(len(content))
    if damage_kind in ("missing", "folder"):
        path.unlink()
        if damage_kind == "folder":
            path.mkdir()
        return True
    if damage_kind == "swapped":
        other_path = folder / rng.choice([name for name in FILES if name != path.name])
        other_content = other_path.read_bytes()
        other_path.write_bytes(content)
        path.write_bytes(other_content)
        return True
    length = rng.randint(1, 4096)
    damaged_content = {
        "cut": content[:position],
        "bit": _replace_byte(content, position, content[position] ^ 1 << rng.randrange(8)),
        "byte": _replace_byte(content, position, rng.randrange(256)),
        "zeros": content[:position] + bytes(len(content[position : position + length])) + content[position + length :],
        "empty": b"",
        "longer": content + rng.randbytes(length),
    }[damage_kind]
    path.write_bytes(damaged_content)
    return damaged_content != content


def check_damage(source: Path, count: int, seed: int, scratch: Path) -> tuple[Counter[str], list[str]]:
    """Damage `count` copies of a real checkpoint at random; return the number per kind and what was not refused."""
    rng, damage_counts, accepted = random.Random(seed), Counter[str](), []
    while damage_counts.total() < count:
        shutil.copytree(source, scratch)
        damage_kind = rng.choice(DAMAGE_KINDS)
        if damage(scratch, damage_kind, rng):
            damage_counts[damage_kind] += 1
            if not is_refused(scratch):
                accepted.append(f"{damage_kind}, number {damage_counts.total()}")
        shutil.rmtree(scratch)
    return damage_counts, accepted
