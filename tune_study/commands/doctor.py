"""The command `doctor`: try on this machine what a run needs, and say how to solve each problem."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from search_spaces.catalog import STUDIES
from search_spaces.declaration.presets import PRESETS
from trainable.backend.gpus import make_bundles
from trainable.config.setting_types import format_value
from tune_study.host import machine_checks
from tune_study.host.console import print_line
from tune_study.host.gpus import Gpu, count_cpus, detect_gpus
from tune_study.host.machine_checks import CheckResult
from tune_study.host.session_folder import FOLDER_PREFIX, RAY_SUBFOLDER
from tune_study.placement import disk, resources
from tune_study.placement.model_files import check_model
from tune_study.plan.errors import PlanError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.study_plan import StudyPlan, make_plan

_TIMEOUT_S = 240.0
"""Time limit of Ray's start and of the imports in its worker. On a busy machine with two cores they take 20 s."""
_RAY = "start of Ray"
_RAY_SCRIPT = "import sys; from tune_study.commands.doctor import start_ray; start_ray(int(sys.argv[1]))"


def diagnose(console: Console, output: Path, preset: str | None, environ: Mapping[str, str]) -> int:
    """Run every check and print its result. Returns the exit code: 1 for a problem, else 0.

    output: the folder of --output, which need not exist; no file is left in it. preset: the value of --preset; None to
    choose one as `run` does. environ: the environment, also of the process that starts Ray. Raises PlanError for an
    unknown preset.
    """
    gpus = detect_gpus(environ)
    chosen_preset, _ = resources.choose_preset(preset, gpus)
    if chosen_preset not in PRESETS:
        raise PlanError(
            f"There is no preset `{format_value(chosen_preset)}`: type --preset {' or --preset '.join(PRESETS)}."
        )
    plan = make_plan(STUDIES["kl"], chosen_preset, "checked by doctor", {}, None, None, output)
    n_problems = 0
    for name, check in list_checks(plan, gpus, environ).items():
        if name == _RAY:
            print_line(console, "Starting Ray ...")
        result = run_check(check)
        print_line(console, f"{result.severity}: {name}: {result.text}")
        n_problems += result.severity == "problem"
    summary = f"{n_problems} problem{'s' * (n_problems > 1)} to solve before a run."
    print_line(console, summary if n_problems else "No problems found: this machine is ready for a run.")
    return int(n_problems > 0)


def list_checks(
    plan: StudyPlan, gpus: tuple[Gpu, ...], environ: Mapping[str, str]
) -> dict[str, Callable[[], CheckResult | None]]:
    """List the checks by name. Those that only raise PlanError return None."""
    config, ray_folder = plan.ppo_config, machine_checks.find_ray_folder(environ)
    # By default, a study on GPUs runs one trial per GPU. Others run at most `ray_num_cpus` trials concurrently.
    used_gpus = len(gpus) if config.trainer.n_gpus_per_node else 0
    trials = used_gpus or min(count_cpus(), config.trainer.ray_num_cpus)
    shm = Path("/dev/shm")  # only Linux has it
    return {
        "memory": lambda: machine_checks.check_memory(machine_checks.measure_available_memory(), trials),
        "disk for Ray": lambda: machine_checks.check_disk(
            ray_folder, "problem", "Free some space, or set RAY_TMPDIR to another folder."
        ),
        "shared memory": lambda: (
            machine_checks.check_disk(shm, "remark", "Docker: `--shm-size=8g`.") if shm.is_dir() else None
        ),
        "write access": lambda: machine_checks.check_output(plan.output),
        "Ray's sockets": lambda: machine_checks.check_socket_path(ray_folder),
        "GPU": lambda: machine_checks.check_gpus(gpus, len(detect_gpus(environ={}))),
        "model": lambda: check_model(config.model.path, environ, config.model.chat_format),
        "engines": lambda: resources.check_engines(config, environ),
        "KL sweep": lambda: _check_placement(plan, gpus, environ),
        _RAY: lambda: check_ray_start(ray_folder, used_gpus, environ, _TIMEOUT_S),
    }


def run_check(check: Callable[[], CheckResult | None]) -> CheckResult:
    """Run a check; an exception is a problem, so that the other checks continue."""
    try:
        return check() or CheckResult("ok", "as a run needs it")
    except PlanError as error:
        return CheckResult("problem", str(error))
    except Exception as error:
        return CheckResult("problem", f"this check failed: {format_value(f'{type(error).__name__}: {error}', 300)}")


def _check_placement(plan: StudyPlan, gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> CheckResult:
    """Check that the GPUs suffice for a run, and the disk for the study unless the model's size is unknown."""
    resource_plan = resources.preflight(plan, None, gpus, count_cpus(), None, is_real=True)
    budget = disk.estimate_disk_budget(plan, resource_plan, environ)
    disk.check_budget(budget)
    return CheckResult("ok", disk.format_disk_line(budget))


def check_ray_start(ray_folder: Path, n_gpus: int, environ: Mapping[str, str], timeout_s: float) -> CheckResult:
    """Check that Ray starts as in a run and executes a task within `timeout_s` seconds; see `start_ray`.

    ray_folder: the folder where Ray keeps the files of its sessions.
    """
    exit_code = None
    # A separate process can be killed: calls to Ray never return if its daemons die while they start. Its output goes
    # to a file, since a pipe stays open until the last process that inherited it has ended.
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-c", _RAY_SCRIPT, str(n_gpus)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environ)) as process:
            try:
                exit_code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()  # Ray's daemons end with it
        out.seek(0)
        lines = out.read().decode(errors="replace").strip().splitlines() or [f"it ended with exit code {exit_code}"]
    if exit_code == 0:
        return CheckResult("ok", lines[-1])
    reason = format_value(lines[-1], 300)
    if exit_code is None:
        reason = f"it did not end within {timeout_s:g} s"
    elif exit_code < 0:  # Popen reports the signal that ended a process, such as a segmentation fault, like this
        reason = f"it was ended by {signal.Signals(-exit_code).name}"
    # After an error the session folder is kept for its logs. If there is none, Ray failed before it wrote a log.
    sessions = sorted(ray_folder.glob(f"{FOLDER_PREFIX}{process.pid}*/{RAY_SUBFOLDER}/session_*_{process.pid}"))
    advice = f"Ray created no session in {ray_folder}; set RAY_TMPDIR to use another folder."
    if sessions:
        advice = f"The logs are in {sessions[-1] / 'logs'}; read gcs_server.* and raylet.* first."
    return CheckResult("problem", f"{reason}. {advice}")


def start_ray(n_gpus: int) -> None:
    """Start Ray, try the engines in a worker, stop Ray, and print how long this took.

    `check_ray_start` calls it in a separate process.
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
    import torch

    for index in range(n_gpus):
        torch.ones(1, device=f"cuda:{index}").sum().item()
    modules = ["trainable.ppo.trainer", "transformers", *(["vllm"] if n_gpus and find_spec("vllm") else [])]
    for module in modules:
        import_module(module)
    return torch.__version__
