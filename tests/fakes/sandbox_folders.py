"""Synthetic folders of the update-rule sandbox: rows are evaluations of a made-up curve, from step 0 on."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.published.update_rule_sandbox import ARMS
from tests.fakes.run_folders import NOT_SETTLED, write_lines
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.records import STEP_COLUMNS

UNIFORM = ("uniform_groups", 10.0, 10.0)
GROUPED: Mapping[str, object] = {"group_size": 8, "inner_epochs": 4}


@dataclass(frozen=True)
class MadeRun:
    """One run to write. error, entropy: at step 0 and at the last; the last row has them exactly.

    status "" writes no status.json. steps: that of the last row, None: no row. rows: columns that are the same in every
    row, None: missing. final: columns of the last row. settings: dotted fields of the arm's configuration.
    """

    arm: str
    seed: int = 0
    status: str = "completed"
    steps: int | None = 300
    error: tuple[float, float] = (0.6, 0.35)
    entropy: tuple[float, float] = (1.05, 0.4)
    reason: str = ""
    stop: tuple[str, float, float] | None = None
    rows: Mapping[str, float | None] = field(default_factory=dict)
    final: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True)
class MadeStudy:
    """What all runs of the study share; settings are those of every arm."""

    name: str = "influence"
    baseline: str = "DG"
    total_steps: int = 300
    test_freq: int = 20
    settings: Mapping[str, object] = field(default_factory=lambda: {"task": "token_reversal", "batch_size": 96})
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """Name of the folder."""
        return f"sandbox_{self.name}"


def seeds(arm: str, errors: Sequence[float], **made: Any) -> list[MadeRun]:
    """Runs of one arm, a seed each, with these errors at the end."""
    return [MadeRun(arm, seed, error=(0.6, error), **made) for seed, error in enumerate(errors)]


def write_sandbox(output: Path, runs: Sequence[MadeRun], study: MadeStudy | None = None) -> Path:
    """Write <output>/results/<run> for `runs` and return it."""
    made = study or MadeStudy()
    folder = output / "results" / made.run
    for run in runs:
        place = folder / "runs" / run.run_id
        _write_json(place / "run.json", {**_head(run, made), "config": _config(made, run)})
        if run.status:
            _write_json(place / "status.json", _status(run))
        if run.steps is not None:
            write_lines(place / "metrics.jsonl", list(_rows(run, made, run.steps)))
    _write_json(folder / "study.json", _study(runs, made))
    return folder


def _config(made: MadeStudy, run: MadeRun | None = None) -> dict[str, Any]:
    """The configuration with its defaults filled in; an arm of a published name has what was published of it."""
    data: dict[str, Any] = {"trainer": {"total_training_steps": made.total_steps, "test_freq": made.test_freq}}
    dotted = {**made.settings, **({"seed": run.seed, **ARMS.get(run.arm, {}), **run.settings} if run else {})}
    for name, value in dotted.items():
        section, _, key = name.rpartition(".")
        (data[section] if section else data)[key] = value
    return UpdateRuleConfig.model_validate(data).model_dump(mode="json")


def _head(run: MadeRun, made: MadeStudy) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "study": made.name,
        "arm": run.arm,
        "label": run.arm,
        "seed": run.seed,
        "experiment_name": f"sandbox_{made.name}_{run.arm}",
        "config_hash": f"hash-{made.name}-{run.arm}",
    }


def _study(runs: Sequence[MadeRun], made: MadeStudy) -> dict[str, Any]:
    arms = list(dict.fromkeys(run.arm for run in runs))
    return {
        "name": made.name,
        "family": "update_rules",
        "question": "Does a group's distribution of returns move a policy further than its best sample?",
        "run": made.run,
        "preset": "laptop",
        "axis": {"setting": "method", "option": "--arms", "values": arms},
        "baseline": made.baseline,
        "seeds": sorted({run.seed for run in runs}),
        "runs": [_head(run, made) for run in runs],
        "settings": _config(made),
        "defaults": UpdateRuleConfig().model_dump(mode="json"),
        "stop_rules": ["uniform_groups"],
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "command": "python -m tune_study run influence",
        "created_at": "2026-01-02T03:04:05+00:00",
        **made.extra,
    }


def _status(run: MadeRun) -> dict[str, Any]:
    rule, value, threshold = run.stop or ("", None, None)
    return {
        "run_id": run.run_id,
        "status": run.status,
        "reason": run.reason,
        "stop_rule": rule,
        "stop_value": value,
        "stop_threshold": threshold,
        "stop_step": run.steps if run.stop else None,
        "trial_id": f"trial-{run.arm}",
        "started_at": "2026-01-02T03:04:06+00:00",
        "ended_at": None if run.status in NOT_SETTLED else "2026-01-02T03:06:06+00:00",
    }


def _rows(run: MadeRun, made: MadeStudy, end: int) -> Iterable[dict[str, Any]]:
    """A row every test_freq steps and one at the end; the last has no columns of a batch."""
    generator = np.random.default_rng([run.seed, *run.arm.encode()])
    steps = sorted({*range(0, end, made.test_freq), end})
    empty = dict.fromkeys(column.name for column in STEP_COLUMNS)
    for step in steps:
        share = math.exp(-step / 60) if step < end else 0.0
        row = {
            "test_error": run.error[1] + share * (run.error[0] - run.error[1]),
            "entropy": run.entropy[1] + share * (run.entropy[0] - run.entropy[1]),
            "greedy_separator_rate": 0.0,
            "loss": None if step == end else float(generator.normal()),
            "reward": None if step == end else float(generator.random()),
            "seconds": 1.0,
            "seconds_total": 1.0 + step / made.test_freq,
            **run.rows,
            **(run.final if step == end else {}),
        }
        names = {"run_id": run.run_id, "study": made.name, "arm": run.arm, "seed": run.seed, "step": step}
        yield {**names, **empty, **row}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
