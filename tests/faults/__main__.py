"""The long fault injection: `make test-faults-long`. Prints a table and, as JSON, every figure in it."""

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
    Tally,
    Tormented,
    compare,
    finish,
    kill_driver,
    kill_trials,
    unbroken,
)

KILLS_A_STUDY = 8
STEPS = 120
"""Of a run: long enough that a study is still under way at its eighth kill."""
RHYTHMS = {1: (), 3: ("--set=trainer.resume_every=3", "--save-freq=4")}
"""Steps between two rolling states, and the options that ask for them."""

MOST_KILOBYTES_A_TRIAL = 100.0
"""What an ended trial may take in the driver: Ray Tune's own record of it. It took 110 before its windows were cut."""


def say(line: str) -> None:
    """Progress, beside the table."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def new_folder(root: Path, name: str) -> Path:
    """A folder for one study."""
    folder = root / name
    folder.mkdir()
    return folder


def kill_drivers(root: Path, kills: int, dice: random.Random) -> tuple[Tally, list[str]]:
    """Kill drivers in every way until `kills` have been killed; the tally, and every difference found."""
    return _kill(root, kills, dice, "driver")


def kill_processes(root: Path, kills: int, dice: random.Random) -> tuple[Tally, list[str]]:
    """Kill the processes of trials until `kills` have been killed; nothing is resumed by hand."""
    return _kill(root, kills, dice, "trial")


def _kill(root: Path, kills: int, dice: random.Random, what: str) -> tuple[Tally, list[str]]:
    straight = {every: unbroken(new_folder(root, f"straight-{every}"), STEPS, more) for every, more in RHYTHMS.items()}
    tally, found, studies = Tally(), list[str](), list[Tormented]()
    while tally.kills.total() < kills:
        every = list(RHYTHMS)[tally.studies % len(RHYTHMS)]
        study = Tormented(new_folder(root, f"study-{tally.studies}"), STEPS, RHYTHMS[every])
        count = min(KILLS_A_STUDY, kills - tally.kills.total())
        tally.most_recomputed_by_a_kill = 0
        if what == "trial":
            kill_trials(study, count, dice, tally)
        else:
            for _ in range(count):
                kill_driver(study, dice.choice(DRIVER_KILLS), dice, tally)
            finish(study)
        if tally.most_recomputed_by_a_kill > every:
            found.append(f"{tally.most_recomputed_by_a_kill} steps recomputed by a kill with a state every {every}")
        found += compare(study, straight[every], tally)
        studies.append(study)
        say(f"{tally.kills.total()} of {kills} {what} kills, {tally.studies} studies, {len(found)} differences")
    tally.processes_left += sum(study.agents_gone() for study in studies)
    return tally, found


def damage_checkpoints(straight: Path, count: int, root: Path) -> dict[str, Any]:
    """Damage copies of a real state of the shipped model."""
    state = next(straight.glob("results/*/runs/*/state/step_*"))
    done, missed = damage.check_damage(state, count, seed=7, scratch=root / "scratch")
    return {"damaged": done.total(), "by_kind": dict(done), "not_refused": missed}


def mistype(count: int) -> dict[str, Any]:
    """Malformed input of every kind; each check raises at the first traceback or file written."""
    checks: dict[str, Callable[..., malformed.Tally]] = {
        "malformed command lines": malformed.check_command_lines,
        "arbitrary command lines": malformed.check_arbitrary_lines,
        "configurations": malformed.check_configurations,
        "damaged study folders": malformed_folders.check_folders,
    }
    found = {}
    for name, check in checks.items():
        tally = check(count, derandomize=False)
        say(f"{name}: {tally.examples}")
        found[name] = {"examples": tally.examples, "answers": dict(tally.answers)}
    return found


def remember(trials: int, root: Path) -> dict[str, Any]:
    """The driver's memory over many tiny trials."""
    readings = memory.readings(new_folder(root, "memory"), trials, max(1, trials // 15))
    resident, rows = memory.slope(readings)
    return {
        "trials": trials,
        "megabytes": [round(reading.resident, 1) for reading in readings],
        "kilobytes_a_trial": round(resident, 1),
        "kilobytes_of_rows_a_trial": round(rows, 2),
    }


def main() -> int:
    """Everything, or what the options ask for. 1 where anything was lost, duplicated, misread or let through."""
    parser = argparse.ArgumentParser(description=__doc__)
    counts = {"driver-kills": 110, "trial-kills": 100, "checkpoints": 2000, "inputs": 5000, "trials": 300, "seed": 0}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dice, report, harm = random.Random(options.seed), dict[str, Any](), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        root = Path(name)
        for title, kill, count in (
            ("driver", kill_drivers, options.driver_kills),
            ("trial", kill_processes, options.trial_kills),
        ):
            tally, found = kill(new_folder(root, title), count, dice)
            harm += tally.harm() + len(found)
            report[f"{title} kills"] = {**asdict(tally), "kills": dict(tally.kills), "differences": found}
            say(json.dumps(report[f"{title} kills"]))
        report["checkpoints"] = damage_checkpoints(root / "driver" / "straight-1", options.checkpoints, root)
        harm += len(report["checkpoints"]["not_refused"])
        say(json.dumps(report["checkpoints"]))
        report["inputs"] = mistype(options.inputs)
        report["memory"] = remember(options.trials, root)
        harm += report["memory"]["kilobytes_a_trial"] > MOST_KILOBYTES_A_TRIAL
    print_table(report)
    print(json.dumps(report))
    return int(harm > 0)


def print_table(report: dict[str, Any]) -> None:
    """The table of docs/reliability.md."""
    rows = [("what", "how often", "what came of it")]
    for title in ("driver kills", "trial kills"):
        tally = report[title]
        kills = ", ".join(f"{count} {kind.split(', ')[1]}" for kind, count in sorted(tally["kills"].items()))
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
    rows += [(name, str(found["examples"]), "0 tracebacks") for name, found in report["inputs"].items()]
    memories = report["memory"]
    rows.append(
        (
            "driver memory",
            f"{memories['trials']} trials",
            f"{memories['kilobytes_a_trial']} kB a trial beside {memories['kilobytes_of_rows_a_trial']} kB of rows",
        )
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    sys.exit(main())
