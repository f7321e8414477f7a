"""What a run needs, tried out before the run: what was found, and what to do about it. Quick checks first, Ray last."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import IO, NamedTuple

import psutil
from rich.console import Console

from search_spaces.declaration.presets import PRESETS
from trainable.config.constants import SHIPPED
from trainable.config.run_config import RunConfig, with_overrides
from trainable.config.setting_types import shown
from tune_study.host import machine
from tune_study.host.console import print_table, say
from tune_study.host.gpus import Gpu, cpu_count, detect_gpus
from tune_study.host.machine import Finding
from tune_study.host.session_folder import PREFIX, RAY
from tune_study.placement.models import check_model
from tune_study.placement.resources import bundles, choose_preset
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError

_SECONDS = 120.0
"""What an import or Ray's start-up is given. On a busy machine with two cores they take 10."""

_TORCH = """
import json, warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
said = [str(warning.message).split("(Triggered")[0].strip() for warning in caught]
print(json.dumps([torch.__version__, torch.version.cuda or "", devices, said[-1] if said else ""]))
"""
_RAY = "from tune_study.commands.doctor import start_ray; start_ray()"


class ProcessEnd(NamedTuple):
    """How a Python of its own ended: its process id, the last line it printed, what went wrong ("": nothing)."""

    pid: int
    said: str
    problem: str
    seconds: float


def diagnose(console: Console, output: Path, preset: str | None, environ: Mapping[str, str]) -> int:
    """Examine this machine and print the report. The exit code: 1 if there is a problem, else 0."""
    findings = examine(output, preset, environ, lambda line: say(console, line))
    print_report(console, findings)
    return int(any(finding.level == "problem" for finding in findings))


def print_report(console: Console, findings: Sequence[Finding]) -> None:
    """All findings as a table, then what to do about each that is not ok, then what it amounts to."""
    print_table(console, ("check", "level", "found"), [[each.name, each.level, each.found] for each in findings])
    for level in ("remark", "problem"):
        for each in findings:
            if each.level == level:
                say(console, f"{level}: {each.name}: {each.advice}")
    count = sum(each.level == "problem" for each in findings)
    words = f"{count} problem{'s' * (count > 1)} to solve before a run."
    say(console, words if count else "Nothing stands in the way of a run.")


def examine(
    output: Path, preset: str | None, environ: Mapping[str, str], announce: Callable[[str], None]
) -> list[Finding]:
    """Every check, in the order of the report. PlanError for a preset that does not exist.

    output: the folder of --output; it need not exist, and nothing stays in it. preset: of --preset; None chooses as
    `run` does. environ: the environment, also of the processes that are started. announce: told what takes seconds
    before it starts. A check that breaks is a problem, and the others go on.
    """
    gpus = detect_gpus(environ)
    chosen, _ = choose_preset(preset, gpus)
    if chosen not in PRESETS:
        raise PlanError(f"There is no preset `{shown(chosen)}`: type --preset {' or --preset '.join(PRESETS)}.")
    ray = machine.ray_folder(environ)
    checks: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("requirements", lambda: check_declared("tune_study")),
        ("processor", lambda: machine.check_processor(chosen, gpus)),
        ("disk", lambda: machine.check_disks(output, ray, chosen)),
        ("output", lambda: machine.check_output(output)),
        ("network", lambda: [machine.check_ports(), machine.check_host_name(socket.gethostname())]),
        ("Ray's sockets", lambda: [machine.check_socket_path(ray)]),
        ("model", lambda: [check_preset_model(chosen, environ)]),
        ("GPU", lambda: machine.check_gpus(gpus, len(detect_gpus({})))),
        ("Importing torch ...", lambda: check_torch(gpus, environ)),
        ("Importing ray.tune ...", lambda: [check_import("ray.tune", environ)]),
        ("Importing transformers ...", lambda: [check_import("transformers", environ)]),
        ("Starting Ray ...", lambda: [check_ray_start(ray, environ, _SECONDS)]),
    )
    return [finding for name, check in checks for finding in _guarded(name, check, announce)]


def _guarded(name: str, check: Callable[[], Iterable[Finding]], announce: Callable[[str], None]) -> list[Finding]:
    """The findings of a check, or the problem that it broke. One whose name ends in dots is announced."""
    if name.endswith("..."):
        announce(name)
    try:
        return list(check())
    except Exception as error:
        found = f"this check broke: {shown(f'{type(error).__name__}: {error}', 300)}"
        advice = "Solve what the error names; where it names a package, install that again."
        return [Finding(name.removesuffix(" ..."), "problem", found, advice)]


def check_declared(distribution: str) -> list[Finding]:
    """Python and packages against what the installed `distribution` declares; a remark where it is not installed."""
    try:
        declared = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        found = f"{distribution} is not installed, so what it requires is not known"
        return [Finding("packages", "remark", found, "Type `pip install -e .` in the folder with pyproject.toml.")]
    version = ".".join(str(part) for part in sys.version_info[:3])
    wanted, packages, extras = (
        declared.get_all(key) or [] for key in ("Requires-Python", "Requires-Dist", "Provides-Extra")
    )
    return [check_python(",".join(wanted), version), *check_packages(packages, extras)]


def check_python(wanted: str, version: str) -> Finding:
    """The version of Python against a specifier like `>=3.11`; an empty one allows all."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("Python", "ok", version)
    advice = f"Make an environment with Python {wanted} and install there."
    return Finding("Python", "problem", f"{version} is not {wanted}", advice)


def check_packages(requirements: Sequence[str], extras: Sequence[str]) -> list[Finding]:
    """What is installed against requirements as metadata writes them: a problem where needed, a remark in an extra."""
    findings = []
    for extra in ("", *extras):
        wanting = unmet(requirements, extra)
        name = f"optional: {extra}" if extra else "packages"
        found = "; ".join(f"{requirement}: {there}" for requirement, there in wanting.items())
        advice = f"Type `pip install {' '.join(repr(requirement) for requirement in wanting)}`"
        if not wanting:
            findings.append(Finding(name, "ok", "all are installed, in versions that fit"))
        elif extra:
            findings.append(Finding(name, "remark", found, f"{advice} if you need it."))
        else:
            findings.append(Finding(name, "problem", found, f"{advice}."))
    return findings


def unmet(requirements: Iterable[str], extra: str) -> dict[str, str]:
    """Requirement -> what there is instead. extra: only what that extra adds; "": only what is always needed."""
    from packaging.requirements import Requirement

    wanting = {}
    for requirement in map(Requirement, requirements):
        marker, requirement.marker = requirement.marker, None
        is_always_needed, is_needed = (marker is None or marker.evaluate({"extra": name}) for name in ("", extra))
        if not is_needed or (extra and is_always_needed):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wanting[str(requirement)] = "not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wanting[str(requirement)] = f"{version} is installed"
    return wanting


def check_preset_model(preset: str, environ: Mapping[str, str]) -> Finding:
    """The model of a preset: the shipped one must be whole; another that is not here is a remark."""
    path = with_overrides(RunConfig(), PRESETS[preset]).model.path
    shipped = files("trainable") / "tiny" / "sokoban_tiny"
    try:
        check_model(str(shipped) if path == SHIPPED else path, environ)
    except PlanError as error:
        found = str(error).partition(". ")[0]
        if path == SHIPPED:
            return Finding("model", "problem", found, "Install tune_study again.")
        return Finding("model", "remark", found, f"Type `hf download {path}`, or choose another with --model.")
    return Finding("model", "ok", f"{path} is here")


def check_torch(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Finding]:
    """Whether torch can be imported, and whether that build can use the GPUs there are."""
    outcome = run_python(_TORCH, environ, _SECONDS)
    if outcome.problem:
        return [_import_finding("torch", outcome)]
    version, cuda, devices, warning = json.loads(outcome.said)
    return [_import_finding("torch", outcome), judge_torch(version, cuda, devices, warning, gpus)]


def judge_torch(version: str, cuda: str, devices: int, warning: str, gpus: Sequence[Gpu]) -> Finding:
    """torch against the GPUs. cuda: the version it is built for, "" for none. devices: how many it can use."""
    name = "torch and GPU"
    if not gpus:
        return Finding(name, "ok", f"torch {version}; there is no GPU to use")
    if not cuda:
        advice = "Install a build with CUDA (https://pytorch.org/get-started/locally), or type --preset laptop."
        return Finding(name, "problem", f"a GPU is visible and torch {version} is built without CUDA", advice)
    if not devices:
        advice = f"Update the driver, or install torch for the CUDA version that `nvidia-smi` shows (this is {cuda})."
        return Finding(name, "problem", f"torch {version} can use no GPU: {warning or 'it does not say why'}", advice)
    found = f"torch {version} for CUDA {cuda} can use {devices} of {len(gpus)} visible GPUs"
    if devices < len(gpus):
        return Finding(name, "remark", found, "Name those that work in CUDA_VISIBLE_DEVICES or with --gpus.")
    return Finding(name, "ok", found)


def check_import(module: str, environ: Mapping[str, str]) -> Finding:
    """Whether `module` can be imported, tried in a process of its own, which a crash cannot leave."""
    return _import_finding(module, run_python(f"import {module}", environ, _SECONDS))


def _import_finding(module: str, outcome: ProcessEnd) -> Finding:
    name = f"import {module}"
    if not outcome.problem:
        return Finding(name, "ok", f"{outcome.seconds:.1f} s")
    package = module.partition(".")[0]
    advice = f"Type `python -c 'import {module}'` to see all of it; `pip install --force-reinstall {package}` may help."
    return Finding(name, "problem", outcome.problem, advice)


def check_ray_start(ray: Path, environ: Mapping[str, str], limit: float) -> Finding:
    """Ray started as a run starts it, given one task, and stopped, within `limit` seconds. ray: see `ray_folder`."""
    outcome = run_python(_RAY, environ, limit)
    if not outcome.problem:
        return Finding("start Ray", "ok", f"started and ran a task in {float(outcome.said):.1f} s")
    sessions = sorted(ray.glob(f"{PREFIX}{outcome.pid}*/{RAY}/session_*_{outcome.pid}"))
    advice = f"See whether {ray} can be written; Ray has made no session there. RAY_TMPDIR names another folder."
    if sessions:
        advice = f"Read the logs in {sessions[-1] / 'logs'}, gcs_server.* and raylet.* first."
    return Finding("start Ray", "problem", outcome.problem, advice)


def start_ray() -> None:
    """Start Ray, run a task of ours in a worker, stop Ray, and print the seconds; for a process of its own."""
    from tune_study.tune.local_ray import started_ray
    from tune_study.tune.run import prepare_environment

    gpus = tuple(gpu.id for gpu in detect_gpus(os.environ))
    prepare_environment(gpus)
    import ray

    start = time.monotonic()
    with started_ray(Allotment(bundles(0), cpu_count(), gpus, (), 1, ""), Console(quiet=True)):
        ray.get(ray.remote(cpu_count).remote(), timeout=_SECONDS)
        seconds = time.monotonic() - start
    print(seconds)


def run_python(code: str, environ: Mapping[str, str], limit: float) -> ProcessEnd:
    """Run `code` in a Python of its own for at most `limit` seconds; after them it and its children are ended.

    Files take what it prints: a pipe would stay open for as long as any process that it started.
    """
    start, ending = time.monotonic(), None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environ))
        try:
            ending = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_tree(process)
        seconds = time.monotonic() - start
        said, complaint = _last_line(out), shown(_last_line(err), 300)
    if ending is None:
        problem = f"it had not ended after {limit:g} s"
    elif ending < 0:
        problem = f"it was ended by {signal.Signals(-ending).name}"
    else:
        problem = (complaint or f"it ended with {ending}") if ending else ""
    return ProcessEnd(process.pid, said, problem, seconds)


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started, if it still runs, and everything below it, each by its id."""
    if process.poll() is not None:
        return  # Its id may be another's by now.
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
