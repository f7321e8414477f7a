"""The long fault injection, `make test-faults-long`: print a table, and every figure in it as JSON."""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults import damage, malformed, malformed_folders, memory
from tests.faults.kills import (
    DRIVER_KILLS,
    InterruptedStudy,
    Tally,
    compare,
    finish,
    kill_driver,
    kill_trials,
    run_uninterrupted,
)

KILLS_PER_STUDY = 8
STEPS = 120
"""Of a run: long enough that a study is still under way at its eighth kill."""
RESUME_OPTIONS = {1: (), 3: ("--set=trainer.resume_every=3", "--save-freq=4")}
"""Steps between two rolling states, and the options that ask for them."""

MAX_KILOBYTES_PER_TRIAL = 100.0
"""What an ended trial may take in the driver: Ray Tune's own record of it. It took 110 before its windows were cut."""


def print_progress(line: str) -> None:
    """Print progress to stderr, separate from the table."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def make_folder(root: Path, name: str) -> Path:
    """Make a folder for one study."""
    folder = root / name
    folder.mkdir()
    return folder


def kill_drivers(root: Path, kills: int, rng: random.Random) -> tuple[Tally, list[str]]:
    """Kill `kills` drivers in randomly chosen ways; return the tally and every difference that was found."""
    return _kill(root, kills, rng, "driver")


def kill_processes(root: Path, kills: int, rng: random.Random) -> tuple[Tally, list[str]]:
    """Kill `kills` processes of trials; nothing is resumed by hand."""
    return _kill(root, kills, rng, "trial")


def _kill(root: Path, kills: int, rng: random.Random, target: str) -> tuple[Tally, list[str]]:
    uninterrupted_studies = {
        interval: run_uninterrupted(make_folder(root, f"straight-{interval}"), STEPS, options)
        for interval, options in RESUME_OPTIONS.items()
    }
    tally, differences, studies = Tally(), list[str](), list[InterruptedStudy]()
    while tally.kills.total() < kills:
        interval = list(RESUME_OPTIONS)[tally.studies % len(RESUME_OPTIONS)]
        study = InterruptedStudy(make_folder(root, f"study-{tally.studies}"), STEPS, RESUME_OPTIONS[interval])
        n_kills = min(KILLS_PER_STUDY, kills - tally.kills.total())
        tally.most_recomputed_by_a_kill = 0
        if target == "trial":
            kill_trials(study, n_kills, rng, tally)
        else:
            for _ in range(n_kills):
                kill_driver(study, rng.choice(DRIVER_KILLS), rng, tally)
            finish(study)
        if tally.most_recomputed_by_a_kill > interval:
            differences.append(
                f"{tally.most_recomputed_by_a_kill} steps recomputed by a kill with a state every {interval}"
            )
        differences += compare(study, uninterrupted_studies[interval], tally)
        studies.append(study)
        print_progress(
            f"{tally.kills.total()} of {kills} {target} kills, {tally.studies} studies, {len(differences)} differences"
        )
    tally.processes_left += sum(study.wait_and_count_orphan_agents() for study in studies)
    return tally, differences


def damage_checkpoints(study_folder: Path, count: int, root: Path) -> dict[str, Any]:
    """Damage copies of a real checkpoint of the shipped model."""
    checkpoint = next(study_folder.glob("results/*/runs/*/state/step_*"))
    damage_counts, accepted = damage.check_damage(checkpoint, count, seed=7, scratch=root / "scratch")
    return {"damaged": damage_counts.total(), "by_kind": dict(damage_counts), "not_refused": accepted}


def check_malformed_inputs(count: int) -> dict[str, Any]:
    """Check malformed input of every kind; each check raises at the first traceback or written file."""
    checks: dict[str, Callable[..., malformed.Tally]] = {
        "malformed command lines": malformed.check_command_lines,
        "arbitrary command lines": malformed.check_arbitrary_lines,
        "configurations": malformed.check_configurations,
        "damaged study folders": malformed_folders.check_folders,
    }
    results = {}
    for name, check in checks.items():
        tally = check(count, derandomize=False)
        print_progress(f"{name}: {tally.examples}")
        results[name] = {"examples": tally.examples, "answers": dict(tally.answers)}
    return results


def measure_memory(trials: int, root: Path) -> dict[str, Any]:
    """Measure the memory of the driver over many tiny trials."""
    readings = memory.take_readings(make_folder(root, "memory"), trials, max(1, trials // 15))
    resident, rows = memory.fit_slopes(readings)
    return {
        "trials": trials,
        "megabytes": [round(reading.resident, 1) for reading in readings],
        "kilobytes_a_trial": round(resident, 1),
        "kilobytes_of_rows_a_trial": round(rows, 2),
    }


def main() -> int:
    """Run all checks in the numbers that the options give; return 1 if anything was lost, misread or accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    counts = {"driver-kills": 110, "trial-kills": 100, "checkpoints": 2000, "inputs": 5000, "trials": 300, "seed": 0}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rng, report, n_errors = random.Random(options.seed), dict[str, Any](), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        root = Path(name)
        for title, kill, count in (
            ("driver", kill_drivers, options.driver_kills),
            ("trial", kill_processes, options.trial_kills),
        ):
            tally, differences = kill(make_folder(root, title), count, rng)
            n_errors += tally.count_errors() + len(differences)
            report[f"{title} kills"] = {**asdict(tally), "kills": dict(tally.kills), "differences": differences}
            print_progress(json.dumps(report[f"{title} kills"]))
        report["checkpoints"] = damage_checkpoints(root / "driver" / "straight-1", options.checkpoints, root)
        n_errors += len(report["checkpoints"]["not_refused"])
        print_progress(json.dumps(report["checkpoints"]))
        report["inputs"] = check_malformed_inputs(options.inputs)
        report["memory"] = measure_memory(options.trials, root)
        n_errors += report["memory"]["kilobytes_a_trial"] > MAX_KILOBYTES_PER_TRIAL
    print_table(report)
    print(json.dumps(report))
    return int(n_errors > 0)


def print_table(report: dict[str, Any]) -> None:
    """Print the table of docs/reliability.md."""
    rows = [("what", "how often", "what came of it")]
    for title in ("driver kills", "trial kills"):
        tally = report[title]
        kills = ", ".join(
            f"{count} {kill_method.split(', ')[1]}" for kill_method, count in sorted(tally["kills"].items())
        )
        rows.append(
            (
                title,
                f"{sum(tally['kills'].values())} ({kills}) over {tally['studies']} studies",
                f"{tally['rows']} rows: {tally['rows_lost']} lost, {tally['rows_duplicated']} duplicated, "
                f"{tally['rows_different']} different; {tally['states_misread']} states misread, "
                f"{tally['weights_different']} final weights different; {tally['processes_left']} processes left; "
                f"no kill cost more steps than lie between two states",
            )
        )
    checkpoints = report["checkpoints"]
    rows.append(("damaged checkpoints", str(checkpoints["damaged"]), f"{len(checkpoints['not_refused'])} not refused"))
    rows += [(name, str(result["examples"]), "0 tracebacks") for name, result in report["inputs"].items()]
    memory_use = report["memory"]
    rows.append(
        (
            "driver memory",
            f"{memory_use['trials']} trials",
            f"{memory_use['kilobytes_a_trial']} kB a trial beside {memory_use['kilobytes_of_rows_a_trial']} kB of rows",
        )
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    sys.exit(main())
