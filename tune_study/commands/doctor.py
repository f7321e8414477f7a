"""The command `doctor`: try on this machine what a run needs, and say how to solve each problem."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from search_spaces.catalog import STUDIES
from trainable.backend.gpus import make_bundles
from trainable.config.setting_types import format_value
from trainable.files.paths import UnsafePathError
from tune_study.commands.preflight import list_checks, make_plans_that_fit, prepare_study
from tune_study.commands.requests import ChosenPreset, LaunchRequest, StudyRequest
from tune_study.host.console import print_line
from tune_study.host.gpus import Gpu, count_cpus, detect_gpus
from tune_study.host.machine_checks import FOLDER_PREFIX, RAY_SUBFOLDER, find_ray_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan, make_plan

_TIMEOUT_S = 240.0
"""Time limit of Ray's start and of the imports in its worker. On a busy machine with two cores they take 20 s."""
_RAY_SCRIPT = "import sys; from tune_study.commands.doctor import start_ray; start_ray(int(sys.argv[1]))"


def diagnose(console: Console, output: Path, preset: str | None) -> int:
    """Try what a start of the study `kl` needs, and Ray. Returns the exit code: 1 for a problem, else 0.

    output: the folder of --output, which need not exist; no file is left in it. preset: the value of --preset; None to
    choose one as `run` does. Raises PlanError for an unknown preset.
    """
    gpus, options = detect_gpus(os.environ), LaunchRequest()

    def make_plans(chosen: ChosenPreset) -> list[StudyPlan]:
        return [make_plan(STUDIES["kl"], chosen.name, chosen.reason, chosen.settings, None, None, output)]

    (plan,) = make_plans_that_fit(make_plans, StudyRequest(preset=preset), options, gpus)
    print_line(console, f"GPU: {describe_gpus(gpus, len(detect_gpus(environ={})))}")
    used_gpus = len(gpus) if plan.base_config.trainer.n_gpus_per_node else 0
    checks: list[Callable[[], str | None]] = [
        *list_checks(plan),
        lambda: prepare_study(plan, options, gpus, None).space_line,
        lambda: "Starting Ray ...",
        lambda: f"Ray: {try_ray(find_ray_folder(os.environ), used_gpus, _TIMEOUT_S)}",
    ]
    problems: list[str] = []
    for check in checks:
        try:
            if result := check():
                print_line(console, result)
            continue
        except (PlanError, UnsafePathError) as error:
            problem = str(error)
        except Exception as error:  # the other checks continue
            problem = f"a check failed: {format_value(f'{type(error).__name__}: {error}', 300)}"
        if problem not in problems:
            print_line(console, f"Problem: {problem}")
            problems.append(problem)
    summary = f"{len(problems)} problem{'s' * (len(problems) > 1)} to solve before a run."
    print_line(console, summary if problems else "No problems found: this machine is ready for a run.")
    return 1 if problems else 0


def describe_gpus(gpus: tuple[Gpu, ...], machine_gpu_count: int) -> str:
    """List the visible GPUs, or say why there is none of the `machine_gpu_count` GPUs of this machine."""
    if gpus:
        return ", ".join(f"{gpu.id} ({gpu.name})" for gpu in gpus)
    if machine_gpu_count:
        return f"CUDA_VISIBLE_DEVICES hides all {machine_gpu_count}. Type `unset CUDA_VISIBLE_DEVICES` to use them."
    return "none is visible. --preset laptop needs none. For --preset paper, check the output of `nvidia-smi`."


def try_ray(ray_folder: Path, n_gpus: int, timeout_s: float) -> str:
    """Start Ray as in a run, and execute a task within `timeout_s` seconds; see `start_ray`. Raises PlanError.

    ray_folder: the folder where Ray keeps the files of its sessions.
    """
    exit_code = None
    # A separate process can be killed: calls to Ray never return if its daemons die while they start. Its output goes
    # to a file, since a pipe stays open until the last process that inherited it has ended.
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-c", _RAY_SCRIPT, str(n_gpus)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process:
            try:
                exit_code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()  # Ray's daemons end with it
        out.seek(0)
        lines = out.read().decode(errors="replace").strip().splitlines() or [f"it ended with exit code {exit_code}"]
    if exit_code == 0:
        return lines[-1]
    reason = format_value(lines[-1], 300)
    if exit_code is None:
        reason = f"it did not end within {timeout_s:g} s"
    elif exit_code < 0:  # Popen reports the signal that ended a process, such as a segmentation fault, like this
        reason = f"it was ended by {signal.Signals(-exit_code).name}"
    # After an error the session folder is kept for its logs. If there is none, Ray failed before it wrote a log.
    sessions = sorted(ray_folder.glob(f"{FOLDER_PREFIX}*/{RAY_SUBFOLDER}/session_*_{process.pid}"))
    advice = f"Ray created no session in {ray_folder}; set RAY_TMPDIR to use another folder."
    if sessions:
        advice = f"The logs are in {sessions[-1] / 'logs'}; read gcs_server.* and raylet.* first."
    raise PlanError(f"Ray does not start: {reason}. {advice}")


def start_ray(n_gpus: int) -> None:
    """Start Ray, try the engines in a worker, stop Ray, and print how long this took.

    `try_ray` calls it in a separate process.
    """
    from tune_study.tune.local_ray import start_local_ray
    from tune_study.tune.run import prepare_environment

    start_time = time.monotonic()
    gpus = tuple(gpu.id for gpu in detect_gpus(os.environ))[:n_gpus]
    prepare_environment(gpus)
    import ray

    resource_plan = ResourcePlan(
        bundles=make_bundles(n_gpus=0), cpus=count_cpus(), gpus=gpus, gpu_slots=(), max_concurrent=1, gpu_label=""
    )
    with start_local_ray(resource_plan, Console(quiet=True)):
        task = ray.remote(num_gpus=n_gpus, max_retries=0)(try_engines)
        torch_version = ray.get(task.remote(n_gpus), timeout=_TIMEOUT_S)
    seconds = time.monotonic() - start_time
    print(f"started in {seconds:.1f} s; a worker imported torch {torch_version} and uses {n_gpus} GPUs")


def try_engines(n_gpus: int) -> str:
    """Import what trains and samples, and compute on each GPU; return torch's version. Runs in a worker of Ray."""
    torch = import_module("torch")
    for index in range(n_gpus):
        torch.ones(1, device=f"cuda:{index}").sum().item()
    modules = ["trainable.ppo.trainer", "transformers", *(["vllm"] if n_gpus and find_spec("vllm") else [])]
    for module in modules:
        import_module(module)
    return str(torch.__version__)
