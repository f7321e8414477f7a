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
from tune_study.commands.preflight import PlacementChoices, make_plans_that_fit, prepare_study
from tune_study.commands.requests import LaunchRequest
from tune_study.commands.run_options import ChosenPreset
from tune_study.host import machine_checks
from tune_study.host.console import print_line
from tune_study.host.gpus import Gpu, count_cpus, detect_gpus
from tune_study.host.machine_checks import CheckResult
from tune_study.host.session_folder import FOLDER_PREFIX, RAY_SUBFOLDER
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.errors import PlanError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.study_plan import StudyPlan, make_plan

_RAY = "start of Ray"
_SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has shared memory, in which Ray keeps its objects."""
_TIMEOUT_S = 240.0
"""Time limit of Ray's start and of the imports in its worker. On a busy machine with two cores they take 20 s."""
_RAY_SCRIPT = "import sys; from tune_study.commands.doctor import start_ray; start_ray(int(sys.argv[1]))"


def diagnose(console: Console, output: Path, preset: str | None) -> int:
    """Run every check and print its result. Returns the exit code: 1 for a problem, else 0.

    output: the folder of --output, which need not exist; no file is left in it. preset: the value of --preset; None to
    choose one as `run` does. Raises PlanError for an unknown preset.
    """
    gpus, options = detect_gpus(os.environ), LaunchRequest()

    def make_plans(chosen: ChosenPreset) -> list[StudyPlan]:
        return [make_plan(STUDIES["kl"], chosen.name, chosen.reason, chosen.settings, None, None, output)]

    choices = PlacementChoices(preset, has_adapters=False, has_gpus=False)
    (plan,) = make_plans_that_fit(make_plans, choices, options, gpus)
    problems: list[str] = []
    for name, check in list_checks(plan, options, gpus).items():
        if name == _RAY:
            print_line(console, "Starting Ray ...")
        result = run_check(check)
        if result.text in problems:
            continue  # a start would be refused for the same reason
        print_line(console, f"{result.severity}: {name}: {result.text}")
        if result.severity == "problem":
            problems.append(result.text)
    summary = f"{len(problems)} problem{'s' * (len(problems) > 1)} to solve before a run."
    print_line(console, summary if problems else "No problems found: this machine is ready for a run.")
    return 1 if problems else 0


def list_checks(
    plan: StudyPlan, options: LaunchRequest, gpus: tuple[Gpu, ...]
) -> dict[str, Callable[[], CheckResult | None]]:
    """List the checks by name. Those that only raise PlanError return None."""
    config, ray_folder = plan.ppo_config, machine_checks.find_ray_folder(os.environ)
    # By default, a study on GPUs runs one trial per GPU. Others run at most `ray_num_cpus` trials concurrently.
    used_gpus = len(gpus) if config.trainer.n_gpus_per_node else 0
    trials = used_gpus or min(count_cpus(), config.trainer.ray_num_cpus)
    return {
        "memory": lambda: machine_checks.check_memory(machine_checks.measure_available_memory(), trials),
        "disk for Ray": lambda: machine_checks.check_disk(
            ray_folder, "problem", "Free some space, or set RAY_TMPDIR to another folder."
        ),
        "shared memory": lambda: (
            machine_checks.check_disk(_SHARED_MEMORY, "remark", "Docker: `--shm-size=8g`.")
            if _SHARED_MEMORY.is_dir()
            else None
        ),
        "write access": lambda: machine_checks.check_output(plan.output),
        "GPU": lambda: machine_checks.check_gpus(gpus, len(detect_gpus(environ={}))),
        "model": lambda: check_model(config.model.path, os.environ, config.model.chat_format),
        "engines": lambda: check_engines(config, os.environ),
        "start of a KL sweep": lambda: CheckResult("ok", prepare_study(plan, options, gpus, None).space_line),
        _RAY: lambda: check_ray_start(ray_folder, used_gpus, _TIMEOUT_S),
    }


def run_check(check: Callable[[], CheckResult | None]) -> CheckResult:
    """Run a check; an exception is a problem, so that the other checks continue."""
    try:
        return check() or CheckResult("ok", "as a run needs it")
    except PlanError as error:
        return CheckResult("problem", str(error))
    except Exception as error:
        return CheckResult("problem", f"this check failed: {format_value(f'{type(error).__name__}: {error}', 300)}")


def check_ray_start(ray_folder: Path, n_gpus: int, timeout_s: float) -> CheckResult:
    """Check that Ray starts as in a run and executes a task within `timeout_s` seconds; see `start_ray`.

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
    torch = import_module("torch")
    for index in range(n_gpus):
        torch.ones(1, device=f"cuda:{index}").sum().item()
    modules = ["trainable.ppo.trainer", "transformers", *(["vllm"] if n_gpus and find_spec("vllm") else [])]
    for module in modules:
        import_module(module)
    return str(torch.__version__)
