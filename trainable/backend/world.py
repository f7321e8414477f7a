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

from trainable.runs.state import LazyTensors

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=1)
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

    def all_gather_object(self, local_object: T) -> list[T]:
        """The objects of all ranks, in the order of ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor of one shape."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' parts, all of one shape (n,), one behind the other."""
        ...

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Rank 0's tensors by name, on the processor; the others give None.

        Several ranks get each one when they ask for it: all of them for the same ones, in the same order.
        """
        ...


@dataclass(frozen=True)
class SingleProcess:
    """A run of one process."""

    rank: int = 0
    size: int = 1

    def all_gather_object(self, local_object: T) -> list[T]:
        """What this rank has."""
        return [local_object]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The part itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The part itself."""
        return tensor

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The tensors themselves."""
        return tensors or {}


@dataclass(frozen=True)
class DistributedWorld:
    """Ranks of torch's default process group, which has been set up."""

    rank: int
    size: int

    def all_gather_object(self, local_object: T) -> list[T]:
        """All ranks' objects. They travel as pickles between the processes of one run, through its own sockets."""
        gathered_objects: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(gathered_objects, local_object)
        return [entry for entry in gathered_objects if entry is not None]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathered on the device that `part` is on."""
        gathered_tensor = tensor.new_empty(self.size * tensor.numel())
        torch.distributed.all_gather_into_tensor(gathered_tensor, tensor.contiguous())
        return gathered_tensor

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Rank 0's tensors, of which a rank holds one after the other."""
        local_tensors = tensors or {}
        tensor_specs = self.all_gather_object(
            {name: (value.shape, value.dtype) for name, value in local_tensors.items()}
        )[0]

        def broadcast_tensor(name: str) -> Tensor:
            shape, dtype = tensor_specs[name]
            value = local_tensors[name].cpu().contiguous() if self.rank == 0 else torch.empty(shape, dtype=dtype)
            torch.distributed.broadcast(value, 0)
            return value

        return LazyTensors({name: shape for name, (shape, _) in tensor_specs.items()}, broadcast_tensor)


SINGLE_PROCESS = SingleProcess()


def connect(
    rank: int, world_size: int, rendezvous_file: Path, on_wait: Callable[[], object] | None = None
) -> DistributedWorld:
    """Join the ranks that meet at a file of this machine: no port is opened for it, so none can be taken.

    Sockets between ranks stay on the loopback device. meeting: a file that no other run uses; it must stay while the
    ranks are connected, since NCCL reads it again. wait: called again and again until all ranks have come, so that who
    knows of one that never will can raise; None: those that have come wait for `PATIENCE`.
    """
    if world_size == 1 and torch.distributed.is_initialized():
        return DistributedWorld(rank, world_size)  # of an earlier run in this process
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    store = FileStore(str(rendezvous_file), world_size)
    store.set(f"here/{rank}", "")
    while on_wait is not None and not store.check([f"here/{other}" for other in range(world_size)]):
        on_wait()
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backends, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    if torch.cuda.is_available():  # NCCL connects at its first call: better now than in the middle of a step
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    return DistributedWorld(rank, world_size)


def disconnect(rendezvous_file: Path) -> None:
    """End this process's part in a group of several, and delete the file.

    A group of one stays: DeepSpeed keeps what it made of it, and the next run of this process goes on with that.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.destroy_process_group()
    rendezvous_file.unlink(missing_ok=True)


def compute_local_range(num_items: int, world: World) -> range:
    """Which of `count` things in a row this rank takes: consecutive ones, as equally many as can be."""
    base_size, remainder = divmod(num_items, world.size)
    start = world.rank * base_size + min(world.rank, remainder)
    return range(start, start + base_size + (world.rank < remainder))


def skip_child_seeds(rng: np.random.Generator, num_skipped: int) -> np.random.Generator:
    """`draws`, whose next children are those after the first `count`: as if other ranks' had been spawned here."""
    seed_sequence = rng.bit_generator.seed_seq
    assert isinstance(seed_sequence, np.random.SeedSequence)
    seed_sequence.spawn(num_skipped)
    return rng


def shard_rows(lengths: Tensor, ranks: int) -> list[Tensor]:
    """The rows of a mini-batch that each rank works on, so that ranks have nearly as many rows, and tokens.

    lengths: (N,) tokens of each row. Returns int64 indices in their order, for every rank; they may be none. Rows are
    dealt back and forth, the longest first. Source: definition.
    """
    order = torch.argsort(lengths.cpu(), descending=True, stable=True)
    rank_cycle = [*range(ranks), *reversed(range(ranks))]
    assigned_ranks = (rank_cycle * -(-len(order) // len(rank_cycle)))[: len(order)]
    owner_ranks = torch.tensor(assigned_ranks, dtype=torch.long, device=order.device)
    return [order[owner_ranks == rank].sort().values for rank in range(ranks)]


def chain_blocks(blocks: Sequence[Sequence[T]]) -> Iterator[T]:
    """What ranks hold in blocks, as one row of things."""
    return (entry for block in blocks for entry in block)
