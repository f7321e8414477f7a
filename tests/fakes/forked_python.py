"""Run `python -m tune_study` or a script in a process of its own that does not import the slow packages again.

One process imports them, and forks for every command, which saves two to four seconds per command. Commands that start
Ray need a new interpreter instead, since Ray's processes are started with the arguments of this one.
"""

import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import torch

_PRELOADED_MODULES = [
    "tune_study.commands.cli",
    "tune_study.probe",
    "analysis.report.pages",
    "analysis.sweep.planned_power",
    "trainable.ppo.trainer",
    __name__,
]


def run_python(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> "CompletedProcess[str]":
    """Run `python` with `arguments` in `folder`; returns its exit code and what it printed.

    arguments: `-W error` or nothing, then `-m MODULE` or the path of a script, then its arguments. environment: the
    environment variables of the process; None for those of this process.
    """
    with TemporaryDirectory() as output_folder:
        outputs = [Path(output_folder) / name for name in ("stdout", "stderr")]
        process = _get_context().Process(
            target=_run,
            args=(list(arguments), folder, dict(os.environ if environment is None else environment), outputs),
        )
        process.start()
        process.join()
        texts = [output.read_text(encoding="utf-8") for output in outputs]
        assert process.exitcode is not None
        return CompletedProcess(list(arguments), process.exitcode, *texts)


def _get_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED_MODULES)
    return context


def _run(arguments: list[str], folder: Path, environment: dict[str, str], outputs: list[Path]) -> None:
    """Be the process of a command: its folder, its environment, its output and its exit code."""
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # OMP_NUM_THREADS is only read when a process starts
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    code: object = 0
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, str(folder))  # where `python -m` looks first
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
