"""The command `doctor`: train one step of a study on this machine as `run` would, and print what went wrong."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import DEVNULL, STDOUT

from rich.console import Console

from search_spaces.catalog import STUDIES
from tune_study.folder.outputs import check_writable
from tune_study.host.console import print_line
from tune_study.host.machine_checks import detect_gpus, find_ray_folder
from tune_study.plan.study_plan import check_preset

_TIMEOUT_S = 900.0
"""Time limit of the study. On a laptop it takes 15 s; most of the rest is for loading a large model and its engine."""
_WORDS = "run kl --kl-values 0 --seeds 1 --steps 1 --wandb off --set env.val_env_groups=8 --set env.test_env_groups=0"


def diagnose(console: Console, output: Path, preset: str | None) -> int:
    """Train, evaluate and report one step in a new folder below `output`. Returns the exit code: 1 for a problem.

    output: the folder of --output, which need not exist. Nothing is left in it, except the files of a failed run.
    preset: the value of --preset; None to choose one as `run` does. Raises PlanError for an unknown preset, and if no
    file can be written in the folder.
    """
    words = _WORDS.split()
    if preset is not None:
        check_preset(STUDIES["kl"], preset)
        words += ["--preset", preset]
    check_writable(output)
    gpus = ", ".join(f"{gpu.id} ({gpu.name})" for gpu in detect_gpus(os.environ))
    print_line(console, f"GPU: {gpus or 'none is visible; `nvidia-smi` and CUDA_VISIBLE_DEVICES may say why'}")
    print_line(console, "Training one step of the study kl ...")
    existing = next(folder for folder in (output, *output.parents) if folder.is_dir())
    folder, code = tempfile.mkdtemp(prefix="doctor-", dir=existing), None
    command = [sys.executable, "-m", "tune_study", *words, "--output", folder]
    # The study is a separate process, which can be killed: calls to Ray never return if its daemons die while they
    # start. It prints to a file, since a pipe stays open until the last process that inherited it has ended.
    with tempfile.TemporaryFile() as out:
        try:
            code = subprocess.run(command, stdin=DEVNULL, stdout=out, stderr=STDOUT, timeout=_TIMEOUT_S).returncode
            problem = f"the study ended with exit code {code}"
        except subprocess.TimeoutExpired:  # Ray's daemons end with the process
            problem = f"the study did not end within {_TIMEOUT_S:g} s"
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    if code in (0, 2, 3):  # all went well, or the study was refused
        shutil.rmtree(folder)
    else:
        problem += f": its files are in {folder}, and Ray's logs in {find_ray_folder(os.environ)}."
    if code == 0:
        print_line(console, "No problems found: it was trained, evaluated and reported.")
        return 0
    for line in (*lines, f"Problem: {problem}"):
        print_line(console, line)
    return 1
