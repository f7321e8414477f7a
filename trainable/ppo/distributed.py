"""PPO training on several ranks. Rank 0 is the process of the trial, and each other rank is a Ray actor in the trial.

All ranks run the same methods of a `PPOTrainer` at the same time, and meet in its collectives. Most of this module
handles failures: if a rank fails or dies, the others must end, and the study must learn the cause.
"""

import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import ray
import torch
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from trainable.backend.gpus import take_gpus
from trainable.backend.world import DistributedWorld, connect, disconnect
from trainable.config.own_parts import PartFile, list_part_files, register_file
from trainable.config.run_config import RunConfig
from trainable.ppo.evaluation import Evaluation
from trainable.ppo.trainer import Diagnostics, PPOTrainer, StepOutput
from trainable.runs.run_files import Row

T = TypeVar("T")

_ENV_PREFIX = "TUNE_STUDY_"
"""Prefix of the environment variables that tell which run a process belongs to. Ranks inherit them from their trial."""
_ERROR_TIMEOUT_S = 10.0
"""Seconds that rank 0 waits for the other ranks to report their errors, or to close."""
_FAILURE_GRACE_S = 60.0
"""Seconds that rank 0 has to notice that another rank has failed, before its process is ended."""
_POLL_S = 0.2
"""Seconds between rank 0's checks for failed ranks during the rendezvous."""


def make_trainer(settings: RunConfig, diagnostics: Diagnostics) -> "PPOTrainer | DistributedTrainer":
    """Make the trainer of a run: a single process with torch, or one rank per GPU with DeepSpeed.

    Raises ValueError if trainer.strategy=torch is set for several GPUs.
    """
    if settings.trainer.num_threads is not None:
        torch.set_num_threads(settings.trainer.num_threads)
    world_size = max(1, int(settings.trainer.n_gpus_per_node))  # 0, or a fraction of a GPU, is one process
    if world_size > 1 and settings.trainer.strategy == "torch":
        raise ValueError(
            f"trainer.strategy=torch trains on one GPU, and the run has {world_size}: add "
            f"--set trainer.strategy=deepspeed, or --gpus-per-exp 1."
        )
    if settings.trainer.uses_deepspeed:  # even with one rank, since DeepSpeed needs a process group
        return DistributedTrainer(settings, world_size, diagnostics)
    return PPOTrainer(settings, diagnostics=diagnostics)


class RankActor:
    """The actor of a rank other than 0. It calls the same methods of its trainer as rank 0, without returning results.

    settings: the fields of a `RunConfig`, as JSON values. part_files: the files of the plug-ins that they name.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        part_files: Sequence[PartFile],
        diagnostics: Diagnostics,
        rank: int,
        world_size: int,
        rendezvous: Path,
    ) -> None:
        take_gpus(ray.get_gpu_ids(), os.environ)
        torch.set_num_threads(settings["trainer"]["num_threads"] or 1)
        self.settings, self.part_files, self.diagnostics = settings, part_files, diagnostics
        self.rank, self.world_size, self.rendezvous = rank, world_size, rendezvous

    def run_method(self, method_name: str) -> None:
        """Call a method of the trainer together with rank 0, which has the result, or connect if it is "join"."""
        if method_name == "load_state":
            # Outside of the `try`, which would close the connection: if a state does not fit, all ranks refuse it, stay
            # connected, and try the next one. Rank 0 sends the arguments through the process group.
            self.trainer.load_state(
                self.world.broadcast(tensors=None), self.world.all_gather_object(local_object={})[0]
            )
            return
        try:
            if method_name == "join":
                self._join()
            else:
                getattr(self.trainer, method_name)()
        except Exception:
            # Rank 0 may be waiting for this rank in a collective, which fails when the connection is closed. But NCCL
            # waits for rank 0 before it closes, so with NCCL `_watch_ranks` ends rank 0's process.
            if torch.distributed.is_initialized() and not torch.cuda.is_available():
                torch.distributed.destroy_process_group()
            raise

    def _join(self) -> None:
        """Connect to the other ranks and make the trainer."""
        for file in self.part_files:
            register_file(file)
        settings = RunConfig.model_validate(self.settings)
        self.world = connect(self.rank, self.world_size, self.rendezvous)
        self.trainer = PPOTrainer(settings, self.world, self.diagnostics)


class DistributedTrainer:
    """A `PPOTrainer` on each of `world_size` ranks, of which this process is rank 0. Each has a bundle of the trial.

    Every method runs on all ranks at once. If a rank fails, the root cause is raised here (see `_find_first_error`).
    """

    def __init__(self, settings: RunConfig, world_size: int, diagnostics: Diagnostics) -> None:
        # A unique file in the temporary folder of this machine, on which all ranks run.
        self.rendezvous = Path(tempfile.gettempdir()) / f"tune_study_ranks_{uuid4().hex}"
        # Ray's object references to the calls that are running on the other ranks.
        self.pending_refs: list[Any] = []
        self.rank_actors = [
            _start_rank(settings, diagnostics, rank, world_size, self.rendezvous) for rank in range(1, world_size)
        ]
        try:
            self.trainer = self._run_on_all_ranks(
                "join",
                lambda: PPOTrainer(
                    settings,
                    # `connect` waits for all ranks, and `on_wait` raises if a rank has died and will never arrive. The
                    # lambda reads `pending_refs` late, since `_run_on_all_ranks` replaces the list.
                    connect(
                        rank=0,
                        world_size=world_size,
                        rendezvous=self.rendezvous,
                        on_wait=lambda: ray.get(ray.wait(self.pending_refs, timeout=_POLL_S)[0]),
                    ),
                    diagnostics,
                ),
            )
        except BaseException:  # also Ctrl-C: nothing else would close the other ranks, which hold GPUs
            self._kill_ranks()
            raise

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        return self.trainer.step_index

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepOutput:
        """Train one step (see `PPOTrainer.step`). The others wait while `before_update` is called on this rank."""
        return self._run_on_all_ranks("step", lambda: self.trainer.step(before_update))

    def evaluate_final(self, row: Row) -> tuple[Row, list[Evaluation]]:
        """Evaluate at the end of a run (see `PPOTrainer.evaluate_final`)."""
        return self._run_on_all_ranks("evaluate_final", lambda: self.trainer.evaluate_final(row))

    def get_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Gather the full state from all ranks (see `PPOTrainer.get_state`)."""
        return self._run_on_all_ranks("get_state", self.trainer.get_state)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from a state, possibly of a different number of ranks (see `PPOTrainer.load_state`)."""
        world = cast(DistributedWorld, self.trainer.world)
        self._run_on_all_ranks(
            "load_state",
            lambda: self.trainer.load_state(world.broadcast(tensors), world.all_gather_object(dict(values))[0]),
        )

    def close(self) -> None:
        """Close the engines of all ranks, end the other ranks, and leave the process group."""
        if self.rank_actors:
            close_refs = [actor.run_method.remote("close") for actor in self.rank_actors]
            # `wait` instead of `get`, so that this rank can close even if another has failed or does not answer.
            ray.wait(close_refs, num_returns=len(close_refs), timeout=_ERROR_TIMEOUT_S)
        self.trainer.close()
        self._kill_ranks()

    def _kill_ranks(self) -> None:
        """End the processes of the other ranks, and leave the process group."""
        for actor in self.rank_actors:
            ray.kill(actor)
        disconnect(self.rendezvous)

    def _run_on_all_ranks(self, method_name: str, call: Callable[[], T]) -> T:
        """Run `method_name` on all other ranks and `call` here. Return its result, or raise the root cause."""
        # Start the other ranks first, since `call` waits for them in its collectives.
        self.pending_refs = [actor.run_method.remote(method_name) for actor in self.rank_actors]
        is_done = threading.Event()
        threading.Thread(target=_watch_ranks, args=(self.pending_refs, is_done), daemon=True).start()
        try:
            result = call()
            ray.get(self.pending_refs)  # another rank may fail after its last collective
            return result
        except Exception as error:
            # `from None`, since the local error is often just a closed connection, which would hide the cause.
            raise _find_first_error(self.pending_refs, error) from None
        finally:
            is_done.set()


def _find_first_error(pending_refs: list[Any], local_error: Exception) -> Exception:
    """Find the root cause among the errors of all ranks: if one fails, others may report a closed connection.

    Returns the likeliest cause, in this order: an error of rank 0 that cannot be a consequence, an error that another
    rank reported, the death of a rank, a RuntimeError of another rank, and the error of rank 0.
    """
    if not pending_refs:  # a single rank
        return local_error
    # Give the others time to fail, too. A rank that is still stuck in a collective then has nothing to report.
    ready_refs, _ = ray.wait(pending_refs, num_returns=len(pending_refs), timeout=_ERROR_TIMEOUT_S)
    # Only two types can be consequences: RuntimeError of a closed connection, and RayError of another rank's error.
    is_local_cause = not isinstance(local_error, RuntimeError | ray.exceptions.RayError)
    ranked_errors: list[tuple[int, Exception]] = [(0 if is_local_cause else 4, local_error)]
    for rank, ref in enumerate(pending_refs, 1):
        try:
            if ref in ready_refs:
                ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            cause.add_note(f"(on rank {rank} of {len(pending_refs) + 1})")
            # torch reports closed connections as RuntimeErrors, so an error of another type is more likely the cause.
            ranked_errors.append((3 if isinstance(cause, RuntimeError) else 1, cause))
        except Exception as error:  # raised by Ray for an actor that died before it could report an error
            message = f"rank {rank} of {len(pending_refs) + 1} has ended: {str(error).strip()}"
            ranked_errors.append((2, RuntimeError(message)))
    return min(ranked_errors, key=itemgetter(0))[1]


def _watch_ranks(pending_refs: list[Any], is_done: threading.Event) -> None:
    """Watch the other ranks in a thread of rank 0, and end this process if one fails and rank 0 does not notice.

    Otherwise, rank 0 could wait in an NCCL collective for `COLLECTIVE_TIMEOUT`. is_done: set when the call on rank 0
    has returned or raised.
    """
    while pending_refs and not is_done.wait(1.0):
        finished_refs, pending_refs = ray.wait(pending_refs, num_returns=1, timeout=1.0)
        try:
            ray.get(finished_refs)
        except Exception:
            if not is_done.wait(_FAILURE_GRACE_S):
                # The main thread is stuck in a collective, where no exception can reach it, and `sys.exit` would only
                # end this thread. Tune notices that the process died, and the study retries the trial.
                traceback.print_exc()
                os._exit(1)
            return  # the main thread has noticed, and raises the cause


def _start_rank(settings: RunConfig, diagnostics: Diagnostics, rank: int, world_size: int, rendezvous: Path) -> Any:
    """Start the actor of a rank, in the bundle of the same number in the trial's placement group."""
    scheduling_strategy = PlacementGroupSchedulingStrategy(
        get_current_placement_group(), placement_group_bundle_index=rank
    )
    # From these variables, `terminate_orphans` knows which run a process belongs to.
    env_vars = {name: value for name, value in os.environ.items() if name.startswith(_ENV_PREFIX)}
    actor = ray.remote(RankActor).options(
        num_cpus=1,
        num_gpus=1,
        scheduling_strategy=scheduling_strategy,
        runtime_env={"env_vars": env_vars},
        max_restarts=0,  # a restarted rank could not rejoin the group, so the whole trial is retried instead
    )
    return actor.remote(
        settings.model_dump(mode="json"), list_part_files(settings), diagnostics, rank, world_size, rendezvous
    )
