"""Start Ray on this machine, for one study or once for all studies of a suite."""

import logging
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console

from trainable.runs.orphans import MARK_ENV, make_ray_mark
from tune_study.host.console import print_line
from tune_study.host.machine_checks import find_ray_folder, make_session_folder
from tune_study.plan.study_plan import ResourcePlan

if TYPE_CHECKING:
    from tune_study.tune.watchdog import Daemon

_AUTH_MODE_ENV, _AUTH_TOKEN_ENV = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Ray's variables for its mode of authentication, and for the token that a client must send."""
_TOKEN = secrets.token_hex(32)
"""The token of every Ray that this process starts: 256 random bits, never written to a file.

Ray reads the token only once and would refuse a different one at a later start, so there is one per process.
"""


class LocalRay:
    """A context manager that keeps Ray running from one study to the next while they need the same CPUs and GPUs.

    Ray ends after the last of the studies in `folders`, after one that fails, or with the context. is_local: whether
    they run on this machine instead of a cluster.
    """

    def __init__(self, folders: Sequence[Path], console: Console, *, is_local: bool = True) -> None:
        self._folders, self._console, self._is_local = tuple(folders), console, is_local
        self._pending_folders, self._exit_stack = set(folders), ExitStack()
        self._resources: tuple[int, tuple[str, ...]] | None = None
        self._daemons: tuple[Daemon, ...] = ()

    def __enter__(self) -> Self:
        """Mark the processes that Ray starts, so that they can be found if they outlive this process."""
        if self._is_local:  # a cluster's Ray is not started here and would not inherit the mark
            os.environ[MARK_ENV] = make_ray_mark(self._folders)
        return self

    def __exit__(self, *_: object) -> None:
        """End Ray."""
        self.close()
        os.environ.pop(MARK_ENV, None)

    @contextmanager
    def acquire(
        self, folder: Path, resource_plan: ResourcePlan, *, has_next_round: bool = False
    ) -> Iterator["tuple[Daemon, ...]"]:
        """Provide Ray during the body, for the study in `folder`; yield its processes if they were started here.

        A running Ray is kept if it is alive and has the CPUs and GPUs of the plan, which it cannot change. Otherwise, a
        new one is started. has_next_round: whether the same study will need Ray again.
        """
        from tune_study.tune.watchdog import has_exited  # imports Ray

        resources = resource_plan.cpus, resource_plan.gpus
        if not has_next_round:
            self._pending_folders.discard(folder)
        try:
            if self._resources != resources or any(map(has_exited, self._daemons)):
                self.close()
                self._daemons = self._exit_stack.enter_context(start_local_ray(resource_plan, self._console))
                self._resources = resources
            yield self._daemons
        except BaseException:
            self.close()  # runs must not keep writing while the driver concludes the study
            raise
        if not self._pending_folders:  # not needed while the last study writes tables and report
            self.close()

    def close(self) -> None:
        """End Ray, if it was started here."""
        # First, because the shutdown may raise, and a Ray that is half shut down must not count as running.
        self._resources, self._daemons = None, ()
        self._exit_stack.close()


SILENCED_LOGGERS = ("ray.tune.tune", "ray.tune.execution.experiment_state")
"""Loggers of Tune whose errors would alarm without reason.

The first logs trials that did not complete, as their statuses already say. The second logs a traceback if Tune cannot
copy its experiment state, which happens when a temporary file of that state is renamed meanwhile. Studies are resumed
from their own files and never read that state.
"""


@contextmanager
def start_local_ray(resource_plan: ResourcePlan, console: Console) -> Iterator["tuple[Daemon, ...]"]:
    """Start Ray on this machine, unless it is already initialized; yield its processes if they were started here.

    Ray listens only on the loopback address, requires a token that only its processes know, and keeps its files in a
    folder that only this user can enter (docs/reliability.md describes the remaining risks).
    """
    import ray

    from tune_study.tune.watchdog import find_ray_daemons

    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # `join_cluster` or a Python program has called `ray.init`, and will end it.
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


def _init_ray(resource_plan: ResourcePlan, folder: Path) -> None:
    """Call `ray.init` with its files in `folder`; only the processes that it starts inherit the token.

    The variable of the authentication mode is removed, because without it Ray 2.60 requires a token. Setting it to
    `token` is not enough: Ray reads it when it is imported, which may have happened before. Raises RuntimeError if Ray
    has started without requiring a token, as a later version may do.
    """
    import ray

    # A closed terminal sends SIGHUP to the whole process group. Ray's processes inherit the blocked signal, so they
    # survive until the driver ends them. Ray does the same for Ctrl-C.
    old_signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    os.environ.pop(_AUTH_MODE_ENV, None)
    user_token = os.environ.get(_AUTH_TOKEN_ENV)
    os.environ[_AUTH_TOKEN_ENV] = _TOKEN
    try:
        ray.init(
            address="local",  # never a cluster that RAY_ADDRESS names
            num_cpus=resource_plan.cpus,
            num_gpus=len(resource_plan.gpus),
            include_dashboard=False,  # one more port, with an interface that can start programs
            log_to_driver=False,  # the output of workers would break the live table
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    finally:
        # Ray's processes have their copies. No other program that this process starts may inherit the token.
        os.environ.pop(_AUTH_TOKEN_ENV)
        if user_token is not None:
            os.environ[_AUTH_TOKEN_ENV] = user_token
        signal.pthread_sigmask(signal.SIG_SETMASK, old_signal_mask)
    if os.environ.get(_AUTH_MODE_ENV) != "token":
        ray.shutdown()
        raise RuntimeError(f"Ray {ray.__version__} started without requiring a token, so it was shut down again")
