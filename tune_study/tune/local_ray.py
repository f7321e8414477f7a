"""Ray on this machine: started for a study, or once for all studies of a suite."""

import logging
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console

from trainable.runs.orphans import MARK_ENV, make_ray_mark
from tune_study.host.console import print_line
from tune_study.host.machine import find_ray_folder
from tune_study.host.session_folder import make_session_folder
from tune_study.plan.allotment import ResourcePlan

if TYPE_CHECKING:
    from tune_study.tune.watchdog import Daemon

_AUTH_MODE_ENV, _AUTH_TOKEN_ENV = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


class LocalRay:
    """Ray, which is kept from one study to the next while they ask for the same CPUs and GPUs. A context manager.

    folders: of the studies that need it; it ends with the last of them, with one that fails, or with the context.
    here: the studies run on this machine alone, not on a cluster.
    """

    def __init__(self, folders: Sequence[Path], console: Console, *, is_local: bool = True) -> None:
        self._folders = tuple(folders)
        self._is_local = is_local
        self._console = console
        self._pending_folders = set(folders)
        self._exit_stack = ExitStack()
        self._resources: tuple[int, tuple[str, ...]] | None = None
        self._daemons: tuple[Daemon, ...] = ()

    def __enter__(self) -> Self:
        """From here on, whatever Ray starts inherits whose it is, and is found if it outlives this process."""
        if self._is_local:
            os.environ[MARK_ENV] = make_ray_mark(self._folders)
        return self

    def __exit__(self, *_: object) -> None:
        """Ray is ended."""
        self.close()
        os.environ.pop(MARK_ENV, None)

    @contextmanager
    def acquire(self, folder: Path, resource_plan: ResourcePlan) -> Iterator["tuple[Daemon, ...]"]:
        """Ray during the body, for the study in `folder`; its processes, where they are this one's."""
        self._pending_folders.discard(folder)
        try:
            yield self._ensure_started((resource_plan.cpus, resource_plan.gpus), resource_plan)
        except BaseException:
            self.close()  # what still runs must not write on while the study is being ended
            raise
        if not self._pending_folders:
            self.close()

    def _ensure_started(
        self, resources: tuple[int, tuple[str, ...]], resource_plan: ResourcePlan
    ) -> "tuple[Daemon, ...]":
        """Processes of a Ray with what is wanted: the one that is there, if it lives, or a new one."""
        from tune_study.tune.watchdog import has_exited

        if self._resources != resources or any(map(has_exited, self._daemons)):
            self.close()
            self._daemons = self._exit_stack.enter_context(start_local_ray(resource_plan, self._console))
            self._resources = resources
        return self._daemons

    def close(self) -> None:
        """End Ray, if it was started here."""
        self._resources, self._daemons = None, ()
        self._exit_stack.close()


@contextmanager
def start_local_ray(resource_plan: ResourcePlan, console: Console) -> Iterator["tuple[Daemon, ...]"]:
    """Ray on this machine alone, unless the caller started or joined one; its processes, where they are this one's.

    It listens on the loopback address, asks for a token that only its own processes have, and keeps its files in a
    folder that only this user can enter (docs/reliability.md says what that leaves open).
    """
    import ray

    from tune_study.tune.watchdog import find_ray_daemons

    # It repeats at the end, as an error, which trials did not complete; their statuses say it.
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
    if ray.is_initialized():
        yield ()
        return
    print_line(console, "Starting Ray ...")
    with make_session_folder(find_ray_folder(os.environ)) as folder:
        _init_ray(resource_plan, folder)
        try:
            yield find_ray_daemons()
        finally:
            ray.shutdown()


@cache
def _get_token() -> str:
    """The token of every Ray that this process starts; it is made here and written nowhere.

    Ray reads its token once in a process, so that another one for a later start would be refused.
    """
    return secrets.token_hex(32)


def _init_ray(resource_plan: ResourcePlan, folder: Path) -> None:
    """`ray.init` with its files in `folder`; what it starts inherits the token, and nothing else does.

    Ray 2.60 asks for a token where no mode is set, and then also in a process that had imported Ray before, which
    setting the mode to `token` here would come too late for. RuntimeError if a later Ray does otherwise.
    """
    import ray

    # A closed terminal tells the whole process group; Ray's processes inherit that they do not hear it, as Ray itself
    # sees to for Ctrl-C.
    old_signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    os.environ.pop(_AUTH_MODE_ENV, None)
    user_token = os.environ.get(_AUTH_TOKEN_ENV)
    os.environ[_AUTH_TOKEN_ENV] = _get_token()
    try:
        ray.init(
            address="local",
            num_cpus=resource_plan.cpus,
            num_gpus=len(resource_plan.gpus),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    finally:
        os.environ.pop(_AUTH_TOKEN_ENV)
        if user_token is not None:
            os.environ[_AUTH_TOKEN_ENV] = user_token
        signal.pthread_sigmask(signal.SIG_SETMASK, old_signal_mask)
    if os.environ.get(_AUTH_MODE_ENV) != "token":
        ray.shutdown()
        raise RuntimeError(f"Ray {ray.__version__} started without asking for a token, so it was ended again")
