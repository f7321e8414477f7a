"""The ranks of a run: processes that all run the same program, each on its share of episodes."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its stubs

from trainable.runs.state import Lazy

T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""How long a rank waits for the others: one may play long episodes while the others have ended theirs."""


class World(Protocol):
    """All ranks of a run, seen from one of them. Every method is called by all ranks, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def gather(self, mine: T) -> list[T]:
        """The objects of all ranks, in the order of ranks."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of a tensor of one shape."""
        ...

    def join(self, part: Tensor) -> Tensor:
        """The ranks' parts, all of one shape (n,), one behind the other."""
        ...

    def spread(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Rank 0's tensors by name, on the processor; the others give None.

        Several ranks get each one when they ask for it: all of them for the same ones, in the same order.
        """
        ...


@dataclass(frozen=True)
class Alone:
    """A run of one process."""

    rank: int = 0
    size: int = 1

    def gather(self, mine: T) -> list[T]:
        """What this rank has."""
        return [mine]

    def total(self, part: Tensor) -> Tensor:
        """The part itself."""
        return part

    def join(self, part: Tensor) -> Tensor:
        """The part itself."""
        return part

    def spread(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The tensors themselves."""
        return tensors or {}


@dataclass(frozen=True)
class Connected:
    """Ranks of torch's default process group, which has been set up."""

    rank: int
    size: int

    def gather(self, mine: T) -> list[T]:
        """All ranks' objects. They travel as pickles between the processes of one run, through its own sockets."""
        found: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(found, mine)
        return [entry for entry in found if entry is not None]

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        torch.distributed.all_reduce(part)
        return part

    def join(self, part: Tensor) -> Tensor:
        """Gathered on the device that `part` is on."""
        found = part.new_empty(self.size * part.numel())
        torch.distributed.all_gather_into_tensor(found, part.contiguous())
        return found

    def spread(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Rank 0's tensors, of which a rank holds one after the other."""
        mine = tensors or {}
        about = self.gather({name: (value.shape, value.dtype) for name, value in mine.items()})[0]

        def make(name: str) -> Tensor:
            shape, dtype = about[name]
            value = mine[name].cpu().contiguous() if self.rank == 0 else torch.empty(shape, dtype=dtype)
            torch.distributed.broadcast(value, 0)
            return value

        return Lazy({name: shape for name, (shape, _) in about.items()}, make)


ALONE = Alone()


def connect(rank: int, size: int, meeting: Path, wait: Callable[[], object] | None = None) -> Connected:
    """Join the ranks that meet at a file of this machine: no port is opened for it, so none can be taken.

    Sockets between ranks stay on the loopback device. meeting: a file that no other run uses; it must stay while the
    ranks are connected, since NCCL reads it again. wait: called again and again until all ranks have come, so that who
    knows of one that never will can raise; None: those that have come wait for `PATIENCE`.
    """
    if size == 1 and torch.distributed.is_initialized():
        return Connected(rank, size)  # of an earlier run in this process
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    store = FileStore(str(meeting), size)
    store.set(f"here/{rank}", "")
    while wait is not None and not store.check([f"here/{other}" for other in range(size)]):
        wait()
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    if torch.cuda.is_available():  # NCCL connects at its first call: better now than in the middle of a step
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    return Connected(rank, size)


def leave(meeting: Path) -> None:
    """End this process's part in a group of several, and delete the file.

    A group of one stays: DeepSpeed keeps what it made of it, and the next run of this process goes on with that.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.destroy_process_group()
    meeting.unlink(missing_ok=True)


def my_block(count: int, world: World) -> range:
    """Which of `count` things in a row this rank takes: consecutive ones, as equally many as can be."""
    base, more = divmod(count, world.size)
    start = world.rank * base + min(world.rank, more)
    return range(start, start + base + (world.rank < more))


def skipped_children(draws: np.random.Generator, count: int) -> np.random.Generator:
    """`draws`, whose next children are those after the first `count`: as if other ranks' had been spawned here."""
    sequence = draws.bit_generator.seed_seq
    assert isinstance(sequence, np.random.SeedSequence)
    sequence.spawn(count)
    return draws


def dealt_rows(lengths: Tensor, ranks: int) -> list[Tensor]:
    """The rows of a mini-batch that each rank works on, so that ranks have nearly as many rows, and tokens.

    lengths: (N,) tokens of each row. Returns int64 indices in their order, for every rank; they may be none. Rows are
    dealt back and forth, the longest first. Source: definition.
    """
    order = torch.argsort(lengths.cpu(), descending=True, stable=True)
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    turns = (there_and_back * -(-len(order) // len(there_and_back)))[: len(order)]
    holder = torch.tensor(turns, dtype=torch.long, device=order.device)
    return [order[holder == rank].sort().values for rank in range(ranks)]


def in_order(parts: Sequence[Sequence[T]]) -> Iterator[T]:
    """What ranks hold in blocks, as one row of things."""
    return (entry for part in parts for entry in part)
