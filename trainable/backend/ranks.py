"""A trainer on several ranks, seen as one: rank 0 is this process, the others are actors of the same trial."""

import os
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import ray
import torch
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from trainable.backend.world import connect, leave
from trainable.config import RunConfig
from trainable.evaluate import Evaluation
from trainable.trainer import PPOTrainer, Row, Step

_MARKS = "TUNE_STUDY_"
"""Variables that say whose a process is: a rank carries those of its trial."""
_CAUSE_S = 10.0
_UNNOTICED_S = 60.0


def make_trainer(settings: RunConfig) -> "PPOTrainer | RankedTrainer":
    """The trainer of a run: on one device in torch, on one under DeepSpeed, or on one rank for each of its GPUs."""
    size = max(1, int(settings.trainer.n_gpus_per_node))
    strategy = settings.trainer.strategy
    if size > 1 and strategy == "torch":
        raise ValueError(
            f"trainer.strategy=torch updates on one GPU and the run has {size}: type --set trainer.strategy=deepspeed, "
            f"or --gpus-per-exp 1."
        )
    if size > 1:
        return RankedTrainer(settings, size)
    return RankedTrainer(settings, 1) if strategy == "deepspeed" else PPOTrainer(settings)


def _meeting() -> Path:
    return Path(tempfile.gettempdir()) / f"tune_study_ranks_{uuid4().hex}"


class Rank:
    """One of the other ranks, in an actor of its own: it does what rank 0 does, and keeps what comes of it."""

    def __init__(self, settings: Mapping[str, Any], rank: int, size: int, meeting: str) -> None:
        torch.set_num_threads(1)
        self.world = connect(rank, size, Path(meeting))
        self.trainer = PPOTrainer(RunConfig.model_validate(settings), self.world)

    def do(self, name: str) -> None:
        """Call a method of the trainer as rank 0 does; what it returns is rank 0's to use."""
        if name == "load_state":  # a state that does not fit is refused by all ranks alike, and the next one is tried
            self.trainer.load_state(self.world.spread(None), self.world.gather({})[0])
            return
        try:
            getattr(self.trainer, name)(*([{}] if name == "close" else []))
        except Exception:
            # Rank 0 waits for this one in the middle of its own work. A closed connection lets it know; NCCL's would
            # first wait for rank 0, which is ended by its watch instead.
            if not torch.cuda.is_available():
                torch.distributed.destroy_process_group()
            raise


class RankedTrainer:
    """`PPOTrainer` over `size` ranks; the trial's placement group has a bundle for each and this process is rank 0."""

    def __init__(self, settings: RunConfig, size: int) -> None:
        self.meeting = _meeting()
        self.others = [_start(settings, rank, size, self.meeting) for rank in range(1, size)]
        made = [other.__ray_ready__.remote() for other in self.others]
        try:
            self.trainer = PPOTrainer(settings, connect(0, size, self.meeting))
        except Exception as error:
            cause = _cause(made, error)
            self._end()
            raise cause from None

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        return self.trainer.step_index

    def step(self) -> Step:
        """Train once (see `PPOTrainer.step`)."""
        return cast(Step, self._together("step"))

    def close(self, row: Row) -> list[Evaluation]:
        """The measurements at the end of a run (see `PPOTrainer.close`)."""
        return cast(list[Evaluation], self._together("close", row))

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The whole state, collected from the ranks (see `PPOTrainer.state`)."""
        return cast(tuple[dict[str, Tensor], dict[str, object]], self._together("state"))

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks (see `PPOTrainer.load_state`)."""
        self._together("load_state", tensors, values)

    def release(self) -> None:
        """Give back what the engines hold, end the other ranks, and leave the group."""
        ray.wait([other.do.remote("release") for other in self.others] or [ray.put(None)], timeout=_CAUSE_S)
        self.trainer.release()
        self._end()

    def _end(self) -> None:
        for other in self.others:
            ray.kill(other)
        leave(self.meeting)

    def _together(self, name: str, *arguments: Any) -> Any:
        """The method on all ranks at once; what rank 0 got. An error of another rank is this one's."""
        doing = [other.do.remote(name) for other in self.others]
        is_done = threading.Event()
        threading.Thread(target=_watch, args=(doing, is_done), daemon=True).start()
        try:
            if name == "load_state":
                tensors, values = arguments
                world = self.trainer.world
                found = None
                self.trainer.load_state(world.spread(dict(tensors)), world.gather(dict(values))[0])
            else:
                found = getattr(self.trainer, name)(*arguments)
        except Exception as error:
            raise _cause(doing, error) from None
        finally:
            is_done.set()
        ray.get(doing)
        return found


def _cause(doing: list[Any], own: Exception) -> Exception:
    """The error of the rank that failed first; the others' are of a closed connection, or of a dead process."""
    if not doing:
        return own
    done, _ = ray.wait(doing, num_returns=len(doing), timeout=_CAUSE_S)
    found = [own]
    for result in done:
        try:
            ray.get(result)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            found.append(cause if isinstance(cause, Exception) else error)
        except Exception as error:
            found.append(error)
    told = [error for error in found if not isinstance(error, RuntimeError | ray.exceptions.RayError)]
    return (told or found[1:] or found)[0]


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


def _start(settings: RunConfig, rank: int, size: int, meeting: Path) -> Any:
    """The actor of one rank, in the trial's bundle of its number."""
    place = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=rank)
    marks = {name: value for name, value in os.environ.items() if name.startswith(_MARKS)}
    actor = ray.remote(Rank).options(
        num_cpus=1, num_gpus=1, scheduling_strategy=place, runtime_env={"env_vars": marks}, max_restarts=0
    )
    return actor.remote(settings.model_dump(mode="json"), rank, size, str(meeting))
