"""The command `noise-floor`: which difference a number of seeds can detect, from repeated runs of one setting."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.data.compare import SIGNIFICANCE_LEVEL, collect_outcomes, list_arms, require_single_study, select_runs
from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.sources.importing import RunNames, import_logs, name_runs
from analysis.stats.estimates import MIN_SEEDS, estimate_deviation
from analysis.sweep.planned_power import POWER, find_noise_floors
from analysis.sweep.verdicts import format_number
from trainable.config.setting_types import format_value
from trainable.runs.study_record import STUDY_FILE
from trainable.sources.logs import Roles
from trainable.sources.names import Name
from trainable.sources.reading import read_runs
from tune_study.folder import locate
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.storage_uri import is_uri
from tune_study.plan.typed_settings import find_arm

SEED_COUNTS = (2, 3, 5, 8, 10, 20)


def read_frames(
    sources: Sequence[str], seed_key: str | None, columns: Sequence[Name], step: str = ""
) -> tuple[StudyFrames, bool]:
    """Read one RUN, or logs as `import` does. Return the frames, and whether they are of a RUN.

    columns, step: see `importing.parse_columns`. Raises PlanError if a source cannot be read.
    """
    folders = [
        source
        for source in sources
        if is_uri(source) or any((Path(source) / name).exists() for name in (STUDY_FILE, "results"))
    ]
    if folders and len(sources) > 1:
        raise PlanError(
            f"{format_value(folders[0], 1000)} is the folder of a study: type it alone, or logs of one setting."
        )
    # A LogError is a ValueError, too.
    if folders:
        with locate.open_for_reading(folders[0]) as (folder, is_running), as_plan_error(ValueError):
            return load(folder, live=is_running), True
    with tempfile.TemporaryDirectory() as temp_dir, as_plan_error(ValueError):
        folder = Path(temp_dir) / "results" / "logs"
        logs = read_runs(list(map(Path, sources)), Roles([seed_key] if seed_key else [], step))
        # Logs without settings are of one setting, since nobody can tell them apart.
        same = RunNames("", [("all", number) for number in range(len(logs))], [])
        run_names = name_runs(logs, (), seed_key) if seed_key or any(log.settings for log in logs) else same
        import_logs(logs, run_names, folder, columns)
        return load(folder), False


def choose_arm(frames: StudyFrames, arm: str | None, *, has_baseline: bool) -> str:
    """Choose the arm whose runs are read: as typed, the only one, or the baseline. Raises PlanError if it is not known.

    has_baseline: False for logs, whose first setting is no more a baseline than the others.
    """
    (study,), arms = require_single_study(frames).studies, list_arms(frames)
    if arm is not None:
        return find_arm(arm, arms)
    if len(arms) == 1 or (has_baseline and study.baseline in arms):
        return arms[0] if len(arms) == 1 else study.baseline
    raise PlanError(
        f"These runs are of several settings, and noise is that of one: type --arm with one of {', '.join(arms)} "
        f"({study.axis.setting})."
    )


def estimate_floors(frames: StudyFrames, arm: str) -> dict[str, Any]:
    """Estimate the noise of an arm in the primary outcome, and what it lets a number of seeds detect.

    Only runs that ended count, as in a report. Raises PlanError with fewer than two, and if all have the same outcome.
    """
    (family,) = frames.families
    values = collect_outcomes(frames, family.primary_column).get_values(arm)
    if len(values) < 2:
        num_runs = len(select_runs(frames, arm))
        ended = f"Only {len(values)} of {num_runs} runs ended with a `{family.primary_column}`, and one run says"
        raise PlanError(
            f"{'One run says' if len(values) == num_runs else ended} nothing about noise: type two or more logs of one "
            "setting with other seeds, or the folder of a study that has them."
        )
    deviation = estimate_deviation(values)
    if not deviation.value > 0:
        raise PlanError(
            f"All {len(values)} runs have a `{family.primary_column}` of {values.iloc[0]:g}: equal numbers say nothing "
            "about noise. Type runs with other seeds."
        )
    return {
        "arm": arm,
        "outcome": family.primary_column,
        "runs": [{"seed": int(seed), "value": value} for seed, value in values.items()],
        "mean": float(values.mean()),
        "std": deviation.value,
        "std_low": deviation.low,
        "std_high": deviation.high,
        "power": POWER,
        "level": SIGNIFICANCE_LEVEL,
        "floors": find_noise_floors(deviation, SEED_COUNTS),
    }


def print_floors(console: Console, floors: Mapping[str, Any]) -> None:
    """Print the noise and a row per number of seeds, from `estimate_floors`."""
    std, low, high = (format_number(floors[name]) for name in ("std", "std_low", "std_high"))
    print_line(
        console,
        f"{len(floors['runs'])} runs of arm {floors['arm']}, {floors['outcome']}: mean "
        f"{format_number(floors['mean'])}, standard deviation {std} [{low}, {high}]",
    )
    rows = [
        [str(row["seeds"]), *(format_number(row[name]) for name in ("difference", "low", "high"))]
        if math.isfinite(row["difference"])
        else [str(row["seeds"]), f"no verdict below {MIN_SEEDS} seeds", "", ""]
        for row in floors["floors"]
    ]
    print_table(console, ("seeds per arm", "least detectable difference", "from", "to"), rows)
    print_line(
        console,
        f"An arm that differs from the baseline by so much is called better or worse with a probability of "
        f"{100 * POWER:.0f} % (two-sided {100 * SIGNIFICANCE_LEVEL:.0f} %, one comparison). Brackets, from and to are "
        "95 % intervals: few runs know the standard deviation badly.",
    )
