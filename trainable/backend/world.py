"""The ranks of a run: processes that run the same program, each on its shard of the episodes."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its stubs

from trainable.runs.flat_state import LazyTensors

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for the others in a collective. It must exceed the time of a rollout, because one rank may
still play long episodes when the others have finished."""


@dataclass(frozen=True)
class World:
    """All ranks of a run as seen from one of them; this class is for one process, `DistributedWorld` for several.

    All ranks must call the same methods in the same order. rank: number of this process, from 0. size: number of
    processes.
    """

    rank: int = 0
    size: int = 1

    def all_gather_object(self, local_object: T) -> list[T]:
        """Gather the objects of all ranks, in rank order."""
        return [local_object]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor, which has the same shape on each rank, over ranks."""
        return tensor


@dataclass(frozen=True)
class DistributedWorld(World):
    """The ranks of torch's default process group, which must be initialized."""

    def all_gather_object(self, local_object: T) -> list[T]:
        """Gather the objects of all ranks, which are pickled and sent through sockets between this run's processes."""
        gathered_objects: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered_objects, local_object)
        return gathered_objects

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks, all of one shape (n,), in rank order, on the device of `tensor`."""
        gathered_tensor = tensor.new_empty(self.size * tensor.numel())
        torch.distributed.all_gather_into_tensor(gathered_tensor, tensor.contiguous())
        return gathered_tensor

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Broadcast rank 0's tensors by name, on the CPU; the other ranks pass None.

        A tensor is sent when it is read, so all ranks must read the same tensors in the same order. A receiving rank
        has only one of them in memory at a time.
        """
        # Shapes and dtypes are sent now, so that a state can be refused by its shapes. Tensors are sent when they are
        # read.
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


SINGLE_PROCESS = World()


def connect(
    rank: int, world_size: int, rendezvous: Path, on_wait: Callable[[], object] | None = None
) -> DistributedWorld:
    """Initialize the process group of a run's ranks, which are all on one machine.

    rank: number of this process, from 0. world_size: number of ranks. rendezvous: a file for this run alone, at which
    the ranks meet. Unlike a port, no other process can take it. It must stay while the ranks are connected, because
    NCCL reads it again. on_wait: called repeatedly until all ranks have arrived; may raise if a rank will never arrive.
    With None, a rank waits for the others for at most `COLLECTIVE_TIMEOUT`.
    """
    # `disconnect` keeps groups of one rank.
    if world_size == 1 and torch.distributed.is_initialized():
        return DistributedWorld(rank, world_size)
    # The loopback device, unless you have set another.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    store = FileStore(str(rendezvous), world_size)
    store.set(f"here/{rank}", "")
    # Wait here, because `init_process_group` would wait without noticing that a rank has died.
    while on_wait is not None and not store.check([f"here/{other}" for other in range(world_size)]):
        on_wait()
    # gloo is for checkpoints, which are sent as CPU tensors, as NCCL cannot.
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backends, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    if torch.cuda.is_available():
        # NCCL connects at its first collective. Do it now instead of during a step.
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    return DistributedWorld(rank, world_size)


def disconnect(rendezvous: Path) -> None:
    """Leave a process group of several ranks and delete the file at which they met.

    A group of one rank is kept for the next run of this process, because DeepSpeed caches objects that refer to it.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.destroy_process_group()
    rendezvous.unlink(missing_ok=True)


def compute_local_range(num_items: int, world: World) -> range:
    """Compute the range of consecutive items, out of `num_items`, for this rank; sizes differ by at most one."""
    base_size, remainder = divmod(num_items, world.size)
    start = world.rank * base_size + min(world.rank, remainder)
    return range(start, start + base_size + (world.rank < remainder))


def skip_child_seeds(rng: np.random.Generator, num_skipped: int) -> np.random.Generator:
    """Skip the next `num_skipped` children of `rng`, which belong to episodes of lower ranks, and return it.

    Each episode then draws from the same child as in a run with one rank.
    """
    seed_sequence = rng.bit_generator.seed_seq
    assert isinstance(seed_sequence, np.random.SeedSequence)
    seed_sequence.spawn(num_skipped)
    return rng


def shard_rows(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Shard the rows of a mini-batch so that ranks have nearly equal numbers of rows and tokens.

        longest row first, to ranks 0, 1, …, R − 1, R − 1, …, 1, 0, 0, 1, …

    lengths: (N,) tokens of each row. Returns int64 row indices of each rank, ascending; a rank may have none.
    """
    order = torch.argsort(lengths.cpu(), descending=True, stable=True)
    rank_cycle = [*range(ranks), *reversed(range(ranks))]
    # Back and forth, so that the rank with the longest row of one round gets the shortest of the next.
    assigned_ranks = (rank_cycle * -(-len(order) // len(rank_cycle)))[: len(order)]
    owner_ranks = torch.tensor(assigned_ranks, dtype=torch.long, device=order.device)
    return [order[owner_ranks == rank].sort().values for rank in range(ranks)]
