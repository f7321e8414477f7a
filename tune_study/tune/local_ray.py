"""Start Ray on this machine, for one study or once for all studies of a suite, and watch its processes.

Nothing here imports Ray before it is started, because Ray reads its environment on import.
"""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
from rich.console import Console

from trainable.runs.orphans import MARK_ENV, make_ray_mark
from tune_study.host.console import print_line
from tune_study.host.machine_checks import find_ray_folder, make_session_folder
from tune_study.plan.study_plan import ResourcePlan

DAEMON_NAMES = ("raylet", "gcs_server")
"""Executables of Ray's agent on a machine and of its control server. If one exits, calls to Ray never return."""
Daemons = Mapping[str, psutil.Process]
"""Processes by the name of their executable, empty if Ray was not started here."""
_CHECK_INTERVAL_S = 2.0
_AUTH_MODE_ENV, _AUTH_TOKEN_ENV = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Ray's variables for its mode of authentication, and for the token that a client must send."""
_TOKEN = secrets.token_hex(32)
"""The token of every Ray that this process starts: 256 random bits, never written to a file.

Ray reads the token only once and would refuse a different one at a later start, so there is one per process.
"""


_ENVIRONMENT = {
    # Threads of torch sleep while they wait. By default they spin, and a step beside other programs takes ten times as
    # long, not twice.
    "OMP_WAIT_POLICY": "passive",
    # Send no usage data to Ray's developers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Tune prints nothing, since `Progress` shows the runs, and the Recorder writes tracebacks to each run's log.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # At 0, Tune does not warn about frequent saves of its experiment state, which no study is resumed from.
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # A trial that hangs as it ends is killed after a minute; by default, Tune would keep its GPU for ten.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "60",
    # `Interrupt` handles Ctrl-C; Tune's own handler would end the experiment without waiting for the current steps.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # In Ray 2.60 each trial starts its own worker, so workers that Ray starts in advance only take CPU time.
    "RAY_prestart_worker_first_driver": "0",
}
"""Set before Ray is imported, unless the user has set them."""

_LOOPBACK_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""At 0, Ray listens only on the loopback address. Ray has this switch for systems without cluster support."""


def prepare_environment(gpus: tuple[str, ...], joins_cluster: bool = False, has_storage: bool = False) -> None:
    """Set the environment variables that Ray and torch read when they are imported and started.

    gpus: ids of the GPUs that Ray may use; empty if it starts without a GPU or runs elsewhere. joins_cluster: whether
    Ray connects to other nodes, and must not be limited to the loopback address. has_storage: whether Tune copies the
    files of all trials to a storage whenever it saves its state, which no study is resumed from.
    """
    if has_storage:  # every ten minutes, and not nearly all the time (docs/cluster.md)
        os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "600")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Set even if the user has set it, unlike the others: Ray must not be reachable from other machines.
    if not joins_cluster:
        os.environ[_LOOPBACK_ENV] = "0"
    if gpus:
        # Ray assigns the GPUs that this variable lists.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


class LocalRay:
    """A context manager that keeps Ray running from one study to the next while they need the same CPUs and GPUs.

    Ray ends after a study that fails, or with the context. is_local: whether the studies in `folders` run on this
    machine instead of a cluster.
    """

    def __init__(self, folders: Sequence[Path], console: Console, *, is_local: bool = True) -> None:
        self._folders, self._console, self._is_local = tuple(folders), console, is_local
        self._exit_stack = ExitStack()
        self._resources: tuple[int, tuple[str, ...]] | None = None
        self._daemons: Daemons = {}

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
    def acquire(self, resource_plan: ResourcePlan) -> Iterator[Daemons]:
        """Provide Ray during the body; yield its processes if they were started here.

        A running Ray is kept if it is alive and has the CPUs and GPUs of the plan, which it cannot change. Otherwise, a
        new one is started.
        """
        resources = resource_plan.cpus, resource_plan.gpus
        try:
            if self._resources != resources or any(map(has_exited, self._daemons.values())):
                self.close()
                self._daemons = self._exit_stack.enter_context(start_local_ray(resource_plan, self._console))
                self._resources = resources
            yield self._daemons
        except BaseException:
            self.close()  # runs must not keep writing while the driver concludes the study
            raise

    def close(self) -> None:
        """End Ray, if it was started here."""
        # First, because the shutdown may raise, and a Ray that is half shut down must not count as running.
        self._resources, self._daemons = None, {}
        self._exit_stack.close()


def has_exited(process: psutil.Process) -> bool:
    """Check whether the process has exited. psutil still finds zombies, which have exited and wait to be reaped."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_children() -> None:
    """Kill all child processes of this process, and their children, by their ids.

    Without Ray's daemons, nothing else ends the workers, and a worker that keeps training holds its run's lock.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    # SIGKILL takes effect at once, except during a system call, such as a write to a slow disk.
    psutil.wait_procs(children, timeout=5)


@contextmanager
def watch_daemons(daemons: Daemons, on_daemon_lost: Callable[[str], None]) -> Iterator[None]:
    """During the body, check in a thread that all `daemons` are alive; call `on_daemon_lost` if one has exited.

    The main thread is then stuck in a call to Ray. on_daemon_lost: called with a message; must end this process.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_CHECK_INTERVAL_S):
            for name, process in daemons.items():
                if has_exited(process):
                    on_daemon_lost(f"Ray's process {name} ({process.pid}) has exited")
                    return  # the other daemon follows, and one message is enough

    thread = threading.Thread(target=watch, name="ray-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


SILENCED_LOGGERS = ("ray.tune.tune", "ray.tune.execution.experiment_state")
"""Loggers of Tune whose errors would alarm without reason.

The first logs trials that did not complete, as their statuses already say. The second logs a traceback if Tune cannot
copy its experiment state, which happens when a temporary file of that state is renamed meanwhile. Studies are resumed
from their own files and never read that state.
"""


@contextmanager
def start_local_ray(resource_plan: ResourcePlan, console: Console) -> Iterator[Daemons]:
    """Start Ray on this machine, unless it is already initialized; yield its processes if they were started here.

    Ray listens only on the loopback address, requires a token that only its processes know, and keeps its files in a
    folder that only this user can enter (docs/reliability.md describes the remaining risks).
    """
    import ray

    for name in SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # `join_cluster` or a Python program has called `ray.init`, and will end it.
    if ray.is_initialized():
        yield {}
        return
    print_line(console, "Starting Ray ...")
    with make_session_folder(find_ray_folder(os.environ)) as folder:
        _init_ray(resource_plan, folder)
        # The processes that this process has started, which excludes another study's Ray.
        daemons: dict[str, psutil.Process] = {}
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has exited
                command = Path((child.cmdline() or [""])[0]).name
                daemons |= {name: child for name in DAEMON_NAMES if name in command}
        try:
            yield daemons
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
        signal.pthread_sigmask(signal.SIG_SETMASK, old_signal_mask)
    if os.environ.get(_AUTH_MODE_ENV) != "token":
        ray.shutdown()
        raise RuntimeError(f"Ray {ray.__version__} started without requiring a token, so it was shut down again")
