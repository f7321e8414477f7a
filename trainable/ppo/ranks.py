"""A trainer on several ranks, seen as one: rank 0 is this process, the others are actors of the same trial."""

import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
import torch
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from trainable.backend.world import connect, leave
from trainable.config.run_config import RunConfig
from trainable.ppo.evaluation import Evaluation
from trainable.ppo.step_record import FinalEvaluation
from trainable.ppo.trainer import Diagnostics, PPOTrainer, Step

T = TypeVar("T")

_MARKS = "TUNE_STUDY_"
"""Variables that say whose a process is: a rank carries those of its trial."""
_CAUSE_S = 10.0
_UNNOTICED_S = 60.0
_LOOK_S = 0.2


def make_trainer(settings: RunConfig, diagnostics: Diagnostics) -> "PPOTrainer | RankedTrainer":
    """The trainer of a run: on one device in torch, on one under DeepSpeed, or on one rank for each of its GPUs."""
    size = max(1, int(settings.trainer.n_gpus_per_node))
    strategy = settings.trainer.strategy
    if size > 1 and strategy == "torch":
        raise ValueError(
            f"trainer.strategy=torch updates on one GPU and the run has {size}: type --set trainer.strategy=deepspeed, "
            f"or --gpus-per-exp 1."
        )
    if size > 1:
        return RankedTrainer(settings, size, diagnostics)
    if strategy == "deepspeed":
        return RankedTrainer(settings, 1, diagnostics)
    return PPOTrainer(settings, diagnostics=diagnostics)


def _meeting() -> Path:
    return Path(tempfile.gettempdir()) / f"tune_study_ranks_{uuid4().hex}"


class Rank:
    """One of the other ranks, in an actor of its own: it does what rank 0 does, and keeps what comes of it."""

    def __init__(
        self, settings: Mapping[str, Any], diagnostics: Diagnostics, rank: int, size: int, meeting: str
    ) -> None:
        torch.set_num_threads(1)
        self.settings, self.diagnostics = settings, diagnostics
        self.rank, self.size, self.meeting = rank, size, Path(meeting)

    def do(self, name: str) -> None:
        """Call a method of the trainer as rank 0 does, or `join` it; what it returns is rank 0's to use."""
        if name == "load_state":  # a state that does not fit is refused by all ranks alike, and the next one is tried
            self.trainer.load_state(self.world.spread(None), self.world.gather({})[0])
            return
        try:
            if name == "join":
                self._join()
            else:
                getattr(self.trainer, name)()
        except Exception:
            # Rank 0 waits for this one in the middle of its own work. A closed connection lets it know; NCCL's would
            # first wait for rank 0, which is ended by its watch instead.
            if torch.distributed.is_initialized() and not torch.cuda.is_available():
                torch.distributed.destroy_process_group()
            raise

    def _join(self) -> None:
        settings = RunConfig.model_validate(self.settings)
        self.world = connect(self.rank, self.size, self.meeting)
        self.trainer = PPOTrainer(settings, self.world, self.diagnostics)


class RankedTrainer:
    """`PPOTrainer` over `size` ranks; the trial's placement group has a bundle for each and this process is rank 0."""

    def __init__(self, settings: RunConfig, size: int, diagnostics: Diagnostics) -> None:
        self.meeting = _meeting()
        self.doing: list[Any] = []
        self.others = [_start(settings, diagnostics, rank, size, self.meeting) for rank in range(1, size)]
        try:
            self.trainer = self._together("join", lambda: PPOTrainer(
                settings, connect(0, size, self.meeting, lambda: _raise_first(self.doing)), diagnostics))  # fmt: skip
        except Exception:
            self._end()
            raise

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        return self.trainer.step_index

    def step(self) -> Step:
        """Train once (see `PPOTrainer.step`)."""
        return self._together("step", self.trainer.step)

    def close(self) -> tuple[FinalEvaluation, list[Evaluation]]:
        """The measurements at the end of a run (see `PPOTrainer.close`)."""
        return self._together("close", self.trainer.close)

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The whole state, collected from the ranks (see `PPOTrainer.state`)."""
        return self._together("state", self.trainer.state)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks (see `PPOTrainer.load_state`)."""
        world = self.trainer.world
        self._together("load_state", lambda: self.trainer.load_state(
            world.spread(tensors), world.gather(dict(values))[0]))  # fmt: skip

    def release(self) -> None:
        """Give back what the engines hold, end the other ranks, and leave the group."""
        ray.wait([other.do.remote("release") for other in self.others] or [ray.put(None)], timeout=_CAUSE_S)
        self.trainer.release()
        self._end()

    def _end(self) -> None:
        for other in self.others:
            ray.kill(other)
        leave(self.meeting)

    def _together(self, name: str, work: Callable[[], T]) -> T:
        """`name` on all other ranks and `work` here, at once; an error of another rank is this one's."""
        self.doing = [other.do.remote(name) for other in self.others]
        is_done = threading.Event()
        threading.Thread(target=_watch, args=(self.doing, is_done), daemon=True).start()
        try:
            found = work()
            ray.get(self.doing)
            return found
        except Exception as error:
            raise _cause(self.doing, error) from None
        finally:
            is_done.set()


def _cause(doing: list[Any], own: Exception) -> Exception:
    """The error of the rank that failed first; the others' are of a closed connection.

    doing: what the ranks 1, 2, ... do. own: the error of rank 0, which may be one of theirs.
    """
    done, _ = ray.wait(doing, num_returns=len(doing), timeout=_CAUSE_S) if doing else ([], [])
    told: list[Exception] = []
    ended: list[Exception] = []
    cut_off: list[Exception] = []
    for rank, result in enumerate(doing, 1):
        try:
            ray.get(result) if result in done else None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            cause.add_note(f"(on rank {rank} of {len(doing) + 1})")
            (cut_off if isinstance(cause, RuntimeError) else told).append(cause)
        except Exception as error:
            ended.append(RuntimeError(f"rank {rank} of {len(doing) + 1} has ended: {str(error).strip()}"))
    is_told = not isinstance(own, RuntimeError | ray.exceptions.RayError)
    return [*([own] if is_told else []), *told, *ended, *cut_off, own][0]


def _raise_first(doing: list[Any]) -> None:
    """Wait a little; the error of another rank, where one has failed."""
    done, _ = ray.wait(doing, timeout=_LOOK_S)
    ray.get(done)


def _watch(doing: list[Any], is_done: threading.Event) -> None:
    """End this process where another rank failed and this one does not notice: NCCL waits for it half an hour."""
    while doing and not is_done.wait(1.0):
        finished, doing = ray.wait(doing, num_returns=1, timeout=1.0)
        try:
            ray.get(finished)
        except Exception:
            if not is_done.wait(_UNNOTICED_S):
                traceback.print_exc()
                os._exit(1)
            return


def _start(settings: RunConfig, diagnostics: Diagnostics, rank: int, size: int, meeting: Path) -> Any:
    """The actor of one rank, in the trial's bundle of its number."""
    place = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=rank)
    marks = {name: value for name, value in os.environ.items() if name.startswith(_MARKS)}
    actor = ray.remote(Rank).options(
        num_cpus=1, num_gpus=1, scheduling_strategy=place, runtime_env={"env_vars": marks}, max_restarts=0
    )
    return actor.remote(settings.model_dump(mode="json"), diagnostics, rank, size, str(meeting))
