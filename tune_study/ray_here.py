"""Ray on this machine: started for a study, or once for all studies of a suite."""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tune_study import outputs
from tune_study.describe import say
from tune_study.leftovers import MARK, end_leftovers, mark
from tune_study.resources import Allotment

if TYPE_CHECKING:
    from tune_study.watching import Daemon


class RayHere:
    """Ray, which is kept from one study to the next while they ask for the same CPUs and GPUs.

    waiting: folders of the studies that need it; it ends with the last of them, or with one that fails.
    """

    def __init__(self, waiting: Sequence[Path], console: Console) -> None:
        self._waiting = set(waiting)
        self._console = console
        self._started = ExitStack()
        self._resources: tuple[int, tuple[str, ...]] | None = None
        self._daemons: tuple[Daemon, ...] = ()

    @contextmanager
    def used(self, folder: Path, allotment: Allotment) -> Iterator["tuple[Daemon, ...]"]:
        """Ray during the body, for the study in `folder`; its processes, where they are this one's."""
        wanted = (allotment.cpus, allotment.gpus)
        self._waiting.discard(folder)
        try:
            if self._resources != wanted:
                self.close()
                self._daemons = self._started.enter_context(started_ray(allotment, self._console))
                self._resources = wanted
            yield self._daemons
        except BaseException:
            self.close()  # what still runs must not write on while the study is being ended
            raise
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """End Ray, if it was started here."""
        self._started.close()
        self._resources = None


@contextmanager
def held(folders: Sequence[Path], console: Console, *, here: bool = True) -> Iterator[RayHere]:
    """Hold the folders of studies, and Ray for them, during the body; what earlier starts left behind is ended.

    A suite holds all of its studies from the beginning: Ray's processes belong to each of them, and whoever starts one
    of them ends what an earlier start left behind. here: the studies run on this machine alone, not on a cluster.
    PlanError where another process holds one.
    """
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(outputs.locked(folder))
        ray = RayHere(folders, console)
        if here:
            for leftover in [left for folder in folders for left in end_leftovers(folder)]:
                say(console, f"Ended process {leftover}, which an earlier start of this study had left behind")
            os.environ[MARK] = mark(folders)  # whatever Ray starts inherits it, and is found if it outlives us
            stack.callback(os.environ.pop, MARK, None)
        stack.callback(ray.close)
        yield ray


@contextmanager
def started_ray(allotment: Allotment, console: Console) -> Iterator["tuple[Daemon, ...]"]:
    """Ray on this machine alone, unless the caller started or joined one; its processes, where they are this one's."""
    import ray

    from tune_study.watching import ray_daemons

    # It repeats at the end, as an error, which trials did not complete; their statuses say it.
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
    if ray.is_initialized():
        yield ()
        return
    say(console, "Starting Ray ...")
    # A closed terminal tells the whole process group; Ray's processes inherit that they do not hear it, as Ray itself
    # sees to for Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(
            address="local",
            num_cpus=allotment.cpus,
            num_gpus=len(allotment.gpus),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield ray_daemons()
    finally:
        ray.shutdown()
