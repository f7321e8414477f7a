"""The command `doctor`: check this machine before a run, and give advice for each problem.

Quick checks come first. Starting Ray comes last, since it needs what the others check.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

import psutil
from rich.console import Console
from rich.filesize import decimal

from search_spaces.catalog import STUDIES
from search_spaces.declaration.presets import PRESETS
from trainable.backend.gpus import make_bundles
from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.setting_types import format_value
from tune_study.host import machine_checks
from tune_study.host.console import print_line, print_table
from tune_study.host.gpus import Gpu, count_cpus, detect_gpus
from tune_study.host.machine_checks import CheckResult
from tune_study.host.session_folder import FOLDER_PREFIX, RAY_SUBFOLDER
from tune_study.placement.disk import estimate_disk_budget
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_engines, choose_preset, preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.study_plan import make_plan

_TIMEOUT_S = 120.0
"""Time limit of an import and of Ray's start. On a busy machine with two cores they take 10 s."""

# Print torch's version, the CUDA version that it is built for, the number of usable GPUs, and torch's last warning.
_TORCH_SCRIPT = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
messages = [str(warning.message).split("(Triggered")[0].strip() for warning in caught]
print(json.dumps([torch.__version__, torch.version.cuda or "", devices, messages[-1] if messages else ""]))
"""
_RAY_SCRIPT = "from tune_study.commands.doctor import start_ray; start_ray()"


class ProcessResult(NamedTuple):
    """How a separate Python process ended.

    output_line: last line of its output. problem: what went wrong; empty without a problem. seconds: how long it ran.
    """

    pid: int
    output_line: str
    problem: str
    seconds: float


def diagnose(console: Console, output: Path, preset: str | None, environ: Mapping[str, str]) -> int:
    """Check this machine and print the report (see `run_checks`). Returns the exit code: 1 for a problem, else 0."""
    results = run_checks(output, preset, environ, lambda line: print_line(console, line))
    print_report(console, results)
    return int(any(result.severity == "problem" for result in results))


def print_report(console: Console, results: Sequence[CheckResult]) -> None:
    """Print all results as a table, then advice for those that are not ok, then a summary."""
    rows = [[result.name, result.severity, result.detail] for result in results]
    print_table(console, ("check", "severity", "result"), rows)
    # Problems come last, next to the summary: a terminal shows the end of the output.
    for severity in ("remark", "problem"):
        for result in results:
            if result.severity == severity:
                print_line(console, f"{severity}: {result.name}: {result.advice}")
    count = sum(result.severity == "problem" for result in results)
    summary = f"{count} problem{'s' * (count > 1)} to solve before a run."
    print_line(console, summary if count else "No problems found: this machine is ready for a run.")


def run_checks(
    output: Path, preset: str | None, environ: Mapping[str, str], announce: Callable[[str], None]
) -> list[CheckResult]:
    """Run every check, in the order of the report. Raises PlanError for an unknown preset.

    If a check raises, that is reported as a problem, and the other checks continue. output: the folder of --output,
    which need not exist; no file is left in it. preset: the value of --preset; None to choose one as `run` does.
    environ: the environment, also of the processes that are started. announce: called with a message before each check
    that takes seconds.
    """
    gpus = detect_gpus(environ)
    chosen_preset, _ = choose_preset(preset, gpus)
    if chosen_preset not in PRESETS:
        raise PlanError(
            f"There is no preset `{format_value(chosen_preset)}`: type --preset {' or --preset '.join(PRESETS)}."
        )
    ray_folder = machine_checks.find_ray_folder(environ)
    # Functions, so that each check runs in its turn and an error ends only that check.
    checks: tuple[tuple[str, Callable[[], Iterable[CheckResult]]], ...] = (
        ("requirements", lambda: check_requirements("tune_study")),
        ("processor", lambda: machine_checks.check_resources(PRESETS[chosen_preset].uses_gpus, gpus)),
        ("disk", lambda: machine_checks.check_disks(output, ray_folder, PRESETS[chosen_preset].uses_gpus)),
        ("output", lambda: machine_checks.check_output(output)),
        ("network", lambda: [machine_checks.check_ports(), machine_checks.check_host_name(socket.gethostname())]),
        ("Ray's sockets", lambda: [machine_checks.check_socket_path(ray_folder)]),
        ("model", lambda: [check_preset_model(chosen_preset, environ, is_needed=preset is not None)]),
        ("preset", lambda: check_preset_needs(chosen_preset, gpus, output, environ)),
        ("GPU", lambda: machine_checks.check_gpus(gpus, len(detect_gpus(environ={})))),
        ("Importing torch ...", lambda: check_torch(gpus, environ)),
        ("Importing ray.tune ...", lambda: [check_import("ray.tune", environ)]),
        ("Importing transformers ...", lambda: [check_import("transformers", environ)]),
        ("Starting Ray ...", lambda: [check_ray_start(ray_folder, environ, _TIMEOUT_S)]),
    )
    return [result for name, check in checks for result in _run_check(name, check, announce)]


def _run_check(
    name: str, check: Callable[[], Iterable[CheckResult]], announce: Callable[[str], None]
) -> list[CheckResult]:
    """Run a check and turn an exception into a problem. A check whose name ends in dots is announced."""
    if name.endswith("..."):
        announce(name)
    try:
        return list(check())
    except Exception as error:
        detail = f"this check failed: {format_value(f'{type(error).__name__}: {error}', 300)}"
        advice = "Fix the cause that the error names; if it names a package, install that again."
        return [CheckResult(name.removesuffix(" ..."), "problem", detail, advice)]


def check_requirements(distribution: str) -> list[CheckResult]:
    """Compare Python and packages with the requirements of `distribution`; a remark if it is not installed."""
    try:
        package_metadata = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        detail = f"{distribution} is not installed, so its requirements are unknown"
        return [CheckResult("packages", "remark", detail, "Type `pip install -e .` in the folder with pyproject.toml.")]
    version = ".".join(str(number) for number in sys.version_info[:3])
    python_specifiers, packages, extras = (
        package_metadata.get_all(key) or [] for key in ("Requires-Python", "Requires-Dist", "Provides-Extra")
    )
    return [check_python(",".join(python_specifiers), version), *check_packages(packages, extras)]


def check_python(specifier: str, version: str) -> CheckResult:
    """Compare the version of Python with a specifier like `>=3.11`. An empty specifier allows every version."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(specifier).contains(version, prereleases=True):
        return CheckResult("Python", "ok", version)
    advice = f"Create an environment with Python {specifier} and install tune_study there."
    return CheckResult("Python", "problem", f"{version} is not {specifier}", advice)


def check_packages(requirements: Sequence[str], extras: Sequence[str]) -> list[CheckResult]:
    """Compare installed packages with requirements from package metadata.

    A missing package is a problem if it is always needed, and a remark if only an extra needs it.
    """
    results = []
    for extra in ("", *extras):
        unmet_requirements = find_unmet(requirements, extra)
        name = f"optional: {extra}" if extra else "packages"
        detail = "; ".join(f"{requirement}: {reason}" for requirement, reason in unmet_requirements.items())
        advice = f"Type `pip install {' '.join(repr(requirement) for requirement in unmet_requirements)}`"
        if not unmet_requirements:
            results.append(CheckResult(name, "ok", "all are installed in suitable versions"))
        elif extra:
            results.append(CheckResult(name, "remark", detail, f"{advice} if you need it."))
        else:
            results.append(CheckResult(name, "problem", detail, f"{advice}."))
    return results


def find_unmet(requirements: Iterable[str], extra: str) -> dict[str, str]:
    """Find the unmet requirements, with what is installed instead.

    requirements: from the package's metadata. extra: an extra, to check only the requirements that it adds; empty to
    check only those that are always needed.
    """
    from packaging.requirements import Requirement

    unmet_requirements = {}
    for requirement in map(Requirement, requirements):
        # Without its marker, the requirement can be passed to pip.
        marker, requirement.marker = requirement.marker, None
        # A requirement with the marker `extra == "vllm"` is needed only with this extra.
        is_always_needed, is_needed = (marker is None or marker.evaluate({"extra": name}) for name in ("", extra))
        if not is_needed or (extra and is_always_needed):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet_requirements[str(requirement)] = "not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet_requirements[str(requirement)] = f"{version} is installed"
    return unmet_requirements


def check_preset_model(preset: str, environ: Mapping[str, str], *, is_needed: bool) -> CheckResult:
    """Check the model of a preset. A damaged shipped model is a problem, and so is any other that is missing.

    is_needed: whether the preset was typed. If not, a missing model is only a remark.
    """
    path = apply_overrides(RunConfig(), PRESETS[preset].settings).model.path
    shipped_model = SHIPPED_MODELS.get(path)
    try:
        check_model(path if shipped_model is None else str(shipped_model.folder), environ)
    except PlanError as error:
        detail = str(error).partition(". ")[0]  # the first sentence, since the report adds its advice
        if shipped_model is not None:
            return CheckResult("model", "problem", detail, "Install tune_study again.")
        advice = f"Type `hf download {quote_argument(path)}`, or choose another with --model."
        return CheckResult("model", "problem" if is_needed else "remark", detail, advice)
    return CheckResult("model", "ok", f"{path} is available")


def check_preset_needs(
    preset: str, gpus: Sequence[Gpu], output: Path, environ: Mapping[str, str]
) -> Iterator[CheckResult]:
    """Check what a GPU preset needs in addition: a GPU, its engines, and disk space for a KL sweep.

    Yields nothing for a preset without GPUs. A model of unknown size is not counted in the disk space.
    """
    if not PRESETS[preset].uses_gpus:
        return
    if gpus:
        yield CheckResult("GPU of the preset", "ok", f"{len(gpus)} x {gpus[0].name}")
    else:
        detail = f"preset {preset} trains on a GPU, and none is visible"
        yield CheckResult("GPU of the preset", "problem", detail, "Use a machine with one, or type `--preset laptop`.")
    plan = make_plan(STUDIES["kl"], preset, "checked by doctor", {}, None, None, output)
    try:
        check_engines(plan.ppo_config, environ)
        yield CheckResult("engines of the preset", "ok", f"sampling by {plan.ppo_config.rollout.name}")
    except PlanError as error:
        detail, _, advice = str(error).partition(": ")
        yield CheckResult("engines of the preset", "problem", detail, advice[:1].upper() + advice[1:])
    resource_plan = preflight(plan, None, tuple(gpus), count_cpus(), None, is_real=False)
    budget = estimate_disk_budget(plan, resource_plan, environ)
    if budget.total_bytes is None:
        yield CheckResult("disk of a KL sweep", "remark", "not known before the model is here", "Download the model.")
        return
    detail = f"needs {decimal(budget.total_bytes)}, {decimal(budget.free_bytes)} free"
    if budget.total_bytes <= budget.free_bytes:
        yield CheckResult("disk of a KL sweep", "ok", detail)
    else:
        advice = "Free some space, type --output with a larger disk, or --storage with a bucket."
        yield CheckResult("disk of a KL sweep", "problem", detail, advice)


def check_torch(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[CheckResult]:
    """Check that torch can be imported and that its build can use the visible GPUs."""
    process_result = run_python(_TORCH_SCRIPT, environ, _TIMEOUT_S)
    import_result = _make_import_result("torch", process_result)
    if process_result.problem:
        return [import_result]
    version, cuda, device_count, warning = json.loads(process_result.output_line)
    return [import_result, check_torch_gpus(version, cuda, device_count, warning, gpus)]


def check_torch_gpus(version: str, cuda: str, device_count: int, warning: str, gpus: Sequence[Gpu]) -> CheckResult:
    """Check that torch can use the visible `gpus`.

    cuda: the CUDA version that torch is built for; empty for a build without CUDA. device_count: number of GPUs that
    torch can use. warning: torch's last warning; empty if there was none.
    """
    name = "torch and GPU"
    if not gpus:
        return CheckResult(name, "ok", f"torch {version}; there is no GPU")
    # The first cause comes first: a build without CUDA never finds a GPU, whatever the driver.
    if not cuda:
        advice = "Install a build with CUDA (https://pytorch.org/get-started/locally), or type --preset laptop."
        return CheckResult(name, "problem", f"a GPU is visible, but torch {version} is built without CUDA", advice)
    if not device_count:
        advice = f"Update the driver, or install torch for the CUDA version that `nvidia-smi` shows (this is {cuda})."
        return CheckResult(
            name, "problem", f"torch {version} can use no GPU: {warning or 'it gives no reason'}", advice
        )
    detail = f"torch {version} for CUDA {cuda} can use {device_count} of {len(gpus)} visible GPUs"
    if device_count < len(gpus):
        return CheckResult(name, "remark", detail, "List the usable ones in CUDA_VISIBLE_DEVICES or with --gpus.")
    return CheckResult(name, "ok", detail)


def check_import(module: str, environ: Mapping[str, str]) -> CheckResult:
    """Check that `module` can be imported. A separate process is used, so that a crash cannot end this one."""
    return _make_import_result(module, run_python(f"import {module}", environ, _TIMEOUT_S))


def _make_import_result(module: str, process_result: ProcessResult) -> CheckResult:
    name = f"import {module}"
    if not process_result.problem:
        return CheckResult(name, "ok", f"{process_result.seconds:.1f} s")
    package = module.partition(".")[0]
    command = f"python -c 'import {module}'"
    advice = f"Type `{command}` to see the whole error; `pip install --force-reinstall {package}` may help."
    return CheckResult(name, "problem", process_result.problem, advice)


def check_ray_start(ray_folder: Path, environ: Mapping[str, str], timeout_s: float) -> CheckResult:
    """Check that Ray starts as in a run, runs one task and stops within `timeout_s` seconds.

    ray_folder: the folder where Ray keeps the files of its sessions.
    """
    # A separate process can be killed: calls to Ray never return if its daemons die while they start.
    process_result = run_python(_RAY_SCRIPT, environ, timeout_s)
    if not process_result.problem:
        return CheckResult("start Ray", "ok", f"started and ran a task in {float(process_result.output_line):.1f} s")
    # After an error the session folder is kept for its logs. If there is none, Ray failed before it wrote a log.
    pid = process_result.pid
    sessions = sorted(ray_folder.glob(f"{FOLDER_PREFIX}{pid}*/{RAY_SUBFOLDER}/session_*_{pid}"))
    advice = f"Check that {ray_folder} is writable: Ray created no session there. Set RAY_TMPDIR to use another folder."
    if sessions:
        advice = f"Read the logs in {sessions[-1] / 'logs'}, first gcs_server.* and raylet.*."
    return CheckResult("start Ray", "problem", process_result.problem, advice)


def start_ray() -> None:
    """Start Ray, run one of our functions in a worker, stop Ray, and print the seconds of start and task.

    `check_ray_start` calls it in a separate process.
    """
    from tune_study.tune.local_ray import start_local_ray
    from tune_study.tune.run import prepare_environment

    gpus = tuple(gpu.id for gpu in detect_gpus(os.environ))
    prepare_environment(gpus)
    import ray

    start_time = time.monotonic()
    resource_plan = ResourcePlan(
        bundles=make_bundles(n_gpus=0), cpus=count_cpus(), gpus=gpus, gpu_slots=(), max_concurrent=1, gpu_label=""
    )
    with start_local_ray(resource_plan, Console(quiet=True)):
        ray.get(ray.remote(count_cpus).remote(), timeout=_TIMEOUT_S)
        seconds = time.monotonic() - start_time
    print(seconds)


def run_python(code: str, environ: Mapping[str, str], timeout_s: float) -> ProcessResult:
    """Run `code` in a separate Python process for at most `timeout_s` seconds; then end it and its children.

    Output goes to files: reading a pipe could exceed the time limit, since a pipe stays open until the last process
    that inherited it has ended.
    """
    start_time, exit_code = time.monotonic(), None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environ))
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            kill_process_tree(process)
        seconds = time.monotonic() - start_time
        output_line, error_line = _read_last_line(out), format_value(_read_last_line(err), 300)
    if exit_code is None:  # it was killed above
        problem = f"it did not end within {timeout_s:g} s"
    elif exit_code < 0:  # Popen reports the signal that ended a process, such as a segmentation fault, like this
        problem = f"it was ended by {signal.Signals(-exit_code).name}"
    else:
        problem = (error_line or f"it ended with exit code {exit_code}") if exit_code else ""
    return ProcessResult(process.pid, output_line, problem, seconds)


def _read_last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def kill_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that we started, if it still runs, and all its descendants, by their ids."""
    if process.poll() is not None:
        return  # its id may be reused by now
    # List the children first: once their parent has ended, they can no longer be found.
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)
