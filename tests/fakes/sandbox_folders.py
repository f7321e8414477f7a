"""Synthetic folders of the update-rule sandbox, whose rows are evaluations of a made-up curve from step 0 on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.data.summaries import LATE_EVALUATIONS
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.family import STEP_COLUMNS
from sandboxes.update_rules.studies.published import EVIDENCE
from tests.fakes.run_folders import make_status_json, make_stop_columns
from trainable.files.json_lines import write_lines
from trainable.files.json_values import write_object
from trainable.runs.study_record import SCHEMA

ARM_SETTINGS = {arm: settings for study in EVIDENCE for arm, settings in study.axis.named_settings.items()}
UNIFORM_STOP = ("uniform_groups", 10.0, 10.0)


@dataclass(frozen=True)
class FakeRun:
    """One run to write.

    error, entropy: values at step 0 and at the last step. The last row has them exactly. In a run of eight rows or more
    the last four rows have the error, so that it is also the mean over the last evaluations. status: "" writes no
    status.json. steps: the step of the last row, or None for no row. rows: columns that are the same in every row; None
    is a missing value. final: columns of the last row. settings: dotted fields of the arm's configuration.
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
class FakeStudy:
    """What all runs of the study share. settings: the settings of every arm."""

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


def make_seed_runs(arm: str, errors: Sequence[float], **run_fields: Any) -> list[FakeRun]:
    """Make the runs of one arm, one seed for each of the errors at the end."""
    return [FakeRun(arm, seed, error=(0.6, error), **run_fields) for seed, error in enumerate(errors)]


def write_sandbox(output: Path, runs: Sequence[FakeRun], study: FakeStudy | None = None) -> Path:
    """Write <output>/results/<run> for `runs` and return it."""
    fake_study = study or FakeStudy()
    folder = output / "results" / fake_study.run
    for run in runs:
        run_dir = folder / "runs" / run.run_id
        write_object(run_dir / "run.json", {**_make_head(run, fake_study), "config": _make_config(fake_study, run)})
        if run.status:
            write_object(run_dir / "status.json", make_status_json(run, run.arm))
        if run.steps is not None:
            rows = list(_make_rows(run, fake_study, run.steps))
            write_lines(run_dir / "metrics.jsonl", [*rows[:-1], {**rows[-1], **make_stop_columns(run.stop, run.steps)}])
    write_object(folder / "study.json", _make_study_json(runs, fake_study))
    return folder


def _make_config(fake_study: FakeStudy, run: FakeRun | None = None) -> dict[str, Any]:
    """Make a configuration with its defaults filled in; an arm with a published name has the published settings."""
    config_fields: dict[str, Any] = {
        "trainer": {"total_training_steps": fake_study.total_steps, "test_freq": fake_study.test_freq}
    }
    dotted_settings = {
        **fake_study.settings,
        **({"seed": run.seed, **ARM_SETTINGS.get(run.arm, {}), **run.settings} if run else {}),
    }
    for name, value in dotted_settings.items():
        section, _, key = name.rpartition(".")
        (config_fields[section] if section else config_fields)[key] = value
    return UpdateRuleConfig.model_validate(config_fields).model_dump(mode="json")


def _make_head(run: FakeRun, fake_study: FakeStudy) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "study": fake_study.name,
        "arm": run.arm,
        "label": run.arm,
        "seed": run.seed,
        "experiment_name": f"sandbox_{fake_study.name}_{run.arm}",
        "config_hash": f"hash-{fake_study.name}-{run.arm}",
    }


def _make_study_json(runs: Sequence[FakeRun], fake_study: FakeStudy) -> dict[str, Any]:
    arms = list(dict.fromkeys(run.arm for run in runs))
    return {
        "schema": SCHEMA,
        "name": fake_study.name,
        "family": "update_rules",
        "question": "Does a group's distribution of returns move a policy further than its best sample?",
        "run": fake_study.run,
        "preset": "laptop",
        "axis": {"setting": "method", "option": "--arms", "values": arms},
        "baseline": fake_study.baseline,
        "seeds": sorted({run.seed for run in runs}),
        "runs": [_make_head(run, fake_study) for run in runs],
        "settings": _make_config(fake_study),
        "defaults": UpdateRuleConfig().model_dump(mode="json"),
        "stop_rules": ["uniform_groups"],
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "command": "python -m tune_study run influence",
        "created_at": "2026-01-02T03:04:05+00:00",
        **fake_study.extra,
    }


def _make_rows(run: FakeRun, fake_study: FakeStudy, last_step: int) -> Iterable[dict[str, Any]]:
    """Make a row every `test_freq` steps and one at the end, which has no columns of a batch."""
    generator = np.random.default_rng([run.seed, *run.arm.encode()])
    steps = sorted({*range(0, last_step, fake_study.test_freq), last_step})
    empty_row = dict.fromkeys(column.name for column in STEP_COLUMNS)
    for step in steps:
        decay = math.exp(-step / 60) if step < last_step else 0.0
        is_late = len(steps) >= 2 * LATE_EVALUATIONS and step in steps[-LATE_EVALUATIONS:]
        error_decay = 0.0 if is_late else decay
        row = {
            "test_error": run.error[1] + error_decay * (run.error[0] - run.error[1]),
            "entropy": run.entropy[1] + decay * (run.entropy[0] - run.entropy[1]),
            "greedy_separator_rate": 0.0,
            "loss": None if step == last_step else float(generator.normal()),
            "reward": None if step == last_step else float(generator.random()),
            "seconds": 1.0,
            "seconds_total": 1.0 + step / fake_study.test_freq,
            **run.rows,
            **(run.final if step == last_step else {}),
        }
        names = {"run_id": run.run_id, "study": fake_study.name, "arm": run.arm, "seed": run.seed, "step": step}
        yield {**names, **empty_row, **row}
