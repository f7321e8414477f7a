"""Synthetic results folders, as a study writes them.

The rows follow a made-up learning curve, and the outcomes of the levels agree with the rows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from search_spaces.declaration import presets
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.files.json_lines import write_lines
from trainable.files.json_values import write_object
from trainable.runs.records import STEP_COLUMNS
from trainable.runs.study_record import SCHEMA, StudyRecord

UNSETTLED_STATUSES = ("", "running", "waiting")


@dataclass(frozen=True)
class FakeRun:
    """One run to write.

    success: sampled validation success before training, and the limit of its curve. status: "" writes no status.json.
    steps: number of rows; the last one has a validation. stop: rule, value and threshold. settings: dotted fields of
    the configuration of a named arm.
    """

    arm: str
    seed: int = 0
    status: str = "completed"
    steps: int = 60
    success: tuple[float, float] = (0.35, 0.60)
    greedy: tuple[float, float] = (0.60, 0.64)
    reason: str = ""
    stop: tuple[str, float, float] | None = None
    rows: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return f"arm{self.arm.replace('.', '')}-seed{self.seed}"


@dataclass(frozen=True)
class FakeStudy:
    """What all runs of the study share. levels: number of validation levels, some of which are equal up to symmetry."""

    name: str = "kl"
    run: str = "kl_sweep_sokoban-tiny"
    setting: str = "actor.kl_loss_coef"
    baseline: str = "0"
    levels: int = 120
    test_freq: int = 5
    total_steps: int = 60
    values: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_study(output: Path, runs: Sequence[FakeRun], study: FakeStudy | None = None) -> Path:
    """Write <output>/results/<run> for `runs` and return it."""
    fake_study = study or FakeStudy()
    folder = output / "results" / fake_study.run
    for run in runs:
        _write_run(folder / "runs" / run.run_id, run, fake_study)
    write_object(folder / "study.json", _make_study_json(runs, fake_study))
    return folder


def make_study_record(**keys: Any) -> StudyRecord:
    """Make a study.json with these keys, as JSON has them, and the fewest others."""
    needed = {"name": "s", "preset": "laptop", "axis": {}, "seeds": [], "runs": [], "settings": {}}
    return TypeAdapter(StudyRecord).validate_json(json.dumps({**needed, **keys}))


def _make_config(run: FakeRun | None, fake_study: FakeStudy) -> dict[str, Any]:
    overrides: dict[str, object] = {
        **presets.PRESETS["laptop"].settings,
        "trainer.total_training_steps": fake_study.total_steps,
        "trainer.test_freq": fake_study.test_freq,
        "env.val_env_groups": fake_study.levels,
        "env.test_env_groups": fake_study.levels,
    }
    if run is not None:
        overrides |= {"seed": run.seed}
        if run.arm.replace(".", "").lstrip("-").isdigit():
            overrides |= {"actor.use_kl_loss": True, fake_study.setting: float(run.arm)}
        overrides |= run.settings
    return apply_overrides(RunConfig(), overrides).model_dump(mode="json")


def _make_head(run: FakeRun, fake_study: FakeStudy) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "study": fake_study.name,
        "arm": run.arm,
        "label": run.arm.replace(".", ""),
        "seed": run.seed,
        "experiment_name": f"sokoban_{fake_study.name}_sweep_nofilter_{run.arm.replace('.', '')}-sokoban-tiny",
        "config_hash": f"hash-{fake_study.setting if run.arm != '0' else 'base'}-{run.arm}",
        "log": f"logs/{run.run_id}.log",
        "checkpoints": f"model_saving/{run.run_id}",
    }


def _make_study_json(runs: Sequence[FakeRun], fake_study: FakeStudy) -> dict[str, Any]:
    values = fake_study.values or tuple(dict.fromkeys(run.arm for run in runs))
    return {
        "schema": SCHEMA,
        "name": fake_study.name,
        "question": "Does a KL penalty to the initial policy prevent collapse, and at which coefficient does it start "
        "to cost success?",
        "run": fake_study.run,
        "preset": "laptop",
        "preset_reason": "no CUDA GPU is visible",
        "axis": {"setting": fake_study.setting, "option": "--kl-values", "values": list(values)},
        "baseline": fake_study.baseline,
        "seeds": sorted({run.seed for run in runs}),
        "runs": [_make_head(run, fake_study) for run in runs],
        "settings": _make_config(None, fake_study),
        "stop_rules": ["reward_variance_collapse", "low_validation_success", "empty_filtered_steps"],
        "versions": {"python": "3.11.9", "torch": "2.13.0", "ray": "2.60.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "command": "python -m tune_study run kl --preset laptop",
        "created_at": "2026-01-02T03:04:05+00:00",
        "model": "sokoban-tiny",
        **fake_study.extra,
    }


def _write_run(folder: Path, run: FakeRun, fake_study: FakeStudy) -> None:
    write_object(folder / "run.json", {**_make_head(run, fake_study), "config": _make_config(run, fake_study)})
    if run.status:
        write_object(folder / "status.json", make_status_json(run, run.run_id))
    if run.steps:
        evaluations = _make_evaluations(run, fake_study)
        write_lines(folder / "levels.jsonl", evaluations)
        rows = _make_rows(run, fake_study, evaluations)
        write_lines(folder / "metrics.jsonl", [*rows[:-1], {**rows[-1], **make_stop_columns(run.stop, run.steps)}])


def make_stop_columns(stop: tuple[str, float, float] | None, step: int | None) -> dict[str, Any]:
    """Make the columns of the row at which a rule fired; empty without a rule."""
    if stop is None:
        return {}
    rule, value, threshold = stop
    return {"stop_rule": rule, "stop_value": value, "stop_threshold": threshold, "stop_step": step}


def make_status_json(run: Any, trial: str) -> dict[str, Any]:
    """Make status.json of a FakeRun of this module or of a sandbox. trial: what its id ends with."""
    rule, value, threshold = run.stop or ("", None, None)
    return {
        "run_id": run.run_id,
        "status": run.status,
        "reason": run.reason,
        "stop_rule": rule,
        "stop_value": value,
        "stop_threshold": threshold,
        "stop_step": run.steps if run.stop else None,
        "trial_id": f"trial-{trial}",
        "started_at": "2026-01-02T03:04:06+00:00",
        "ended_at": None if run.status in UNSETTLED_STATUSES else "2026-01-02T03:06:06+00:00",
    }


def _make_rng(run: FakeRun) -> np.random.Generator:
    return np.random.default_rng([run.seed, *run.arm.encode()])


def _make_evaluations(run: FakeRun, fake_study: FakeStudy) -> list[dict[str, Any]]:
    """Make the evaluations of a run.

    Validations are sampled every `test_freq` steps and greedy before and after training; the test follows at the end.
    The evaluations before training are equal for all arms.
    """
    generator = _make_rng(run)
    last_step = run.steps
    steps = [*range(fake_study.test_freq, last_step, fake_study.test_freq), last_step]
    base_rng = np.random.default_rng(run.seed)
    evaluations = [
        _make_evaluation(0, "val", mode, start_and_limit, fake_study, base_rng)
        for mode, start_and_limit in (("sampled", run.success), ("greedy", run.greedy))
    ]
    evaluations += [_make_evaluation(step, "val", "sampled", run.success, fake_study, generator) for step in steps]
    evaluations += [_make_evaluation(last_step, "val", "greedy", run.greedy, fake_study, generator)]
    evaluations += [
        _make_evaluation(last_step, "test", mode, start_and_limit, fake_study, generator)
        for mode, start_and_limit in (("sampled", run.success), ("greedy", run.greedy))
    ]
    return sorted(evaluations, key=lambda line: line["step"])


def _make_evaluation(
    step: int,
    split: str,
    mode: str,
    start_and_limit: tuple[float, float],
    fake_study: FakeStudy,
    generator: np.random.Generator,
) -> dict[str, Any]:
    success_rate = start_and_limit[1] + (start_and_limit[0] - start_and_limit[1]) * math.exp(-step / 12)
    difficulty = np.random.default_rng(7).random(fake_study.levels)
    level_draws = 0.5 * generator.random(fake_study.levels) + 0.5 * difficulty
    threshold = math.sqrt(success_rate / 2) if success_rate <= 0.5 else 1 - math.sqrt((1 - success_rate) / 2)
    return {
        "step": step,
        "split": split,
        "mode": mode,
        "levels": list(range(123, 123 + fake_study.levels)),
        "clusters": [
            index - index % 2 if index < fake_study.levels // 4 else index for index in range(fake_study.levels)
        ],
        "success": "".join("1" if value < threshold else "0" for value in level_draws),
    }


def compute_success_rate(line: Mapping[str, Any]) -> float:
    """Return the fraction of successful episodes of one line of levels.jsonl."""
    return float(line["success"].count("1") / len(line["success"]))


def _make_rows(run: FakeRun, fake_study: FakeStudy, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    success_rates = {(line["step"], line["split"], line["mode"]): compute_success_rate(line) for line in evaluations}
    generator = _make_rng(run)
    rows = []
    for step in range(1, run.steps + 1):
        row = {
            **_make_number_columns(run, step, generator),
            **_make_success_columns(run, step, success_rates),
            **run.rows,
        }
        rows.append(
            {"run_id": run.run_id, "study": fake_study.name, "arm": run.arm, "seed": run.seed, "step": step, **row}
        )
    return rows


def _make_number_columns(run: FakeRun, step: int, generator: np.random.Generator) -> dict[str, float | None]:
    """Make every step column except those of collapse detection; counts are integers and totals are sums."""
    kept_groups = 8 if run.success[1] > 0.01 else max(1, 8 - step // 6)
    fixed_columns: dict[str, float | None] = {
        "groups": 8,
        "groups_kept": kept_groups,
        "kept_ratio": kept_groups / 8,
        "zero_std_groups": 8 - kept_groups,
        "reward_std": max(0.02, 3.5 * math.exp(-step / (60 if kept_groups == 8 else 12)) + 0.2 * generator.normal()),
        "entropy": 0.5 * math.exp(-step / 80) + (0 if kept_groups == 8 else 0.02 * step) + 0.01 * generator.normal(),
        "optimizer_steps": kept_groups // 2,
        "env_steps": 900,
        "sampled_tokens": 5000,
        "trained_tokens": 625 * kept_groups,
        "total_optimizer_steps": step * kept_groups // 2,
        "total_env_steps": 900 * step,
        "total_sampled_tokens": 5000 * step,
        "total_trained_tokens": 625 * kept_groups * step,
        "seconds_step": 1.5,
        "seconds_total": 1.5 * step,
        "kl_loss": None if run.arm == "0" else 0.01 * step,
    }
    unmeasured = (
        *("base_", "test_", "collapse_", "scheduled_", "reference_step", "stapo_", "masked_", "gen_batches"),
        "train_shared_",
    )
    return {
        column.name: None
        if "success" in column.name or column.name.startswith(unmeasured)
        else fixed_columns.get(column.name, round(float(generator.random()), 6))
        for column in STEP_COLUMNS
    }


def _make_success_columns(
    run: FakeRun, step: int, success_rates: Mapping[tuple[int, str, str], float]
) -> dict[str, float | None]:
    columns = {
        "train_success": run.success[0],
        "val_success": success_rates.get((step, "val", "sampled")),
        "val_success_unseen": success_rates.get((step, "val", "sampled")),
        "val_greedy_success": success_rates.get((step, "val", "greedy")),
        "test_success": success_rates.get((step, "test", "sampled")),
        "test_greedy_success": success_rates.get((step, "test", "greedy")),
    }
    if step == 1:
        columns["base_val_success"] = columns["base_val_success_unseen"] = success_rates[0, "val", "sampled"]
        columns["base_val_greedy_success"] = success_rates[0, "val", "greedy"]
    return columns


EMPTY_ROW: Mapping[str, Any] = {
    "bucket": "all",
    "component": "task",
    "form": "gae",
    "coefficient": 1.0,
    "sample_count": 0,
    "group_count": 0,
    "source_env_groups": 24,
    "source_group_size": 16,
    "source_batch_size": 384,
    "adjusted_batch_size": 0,
    "uses_training_batch": False,
    "bucket_mode": "quantile",
    "empty_after_filter": 1,
    "analysis_only": 0,
    "source_groups_kept": 0,
    "source_kept_ratio": 0.0,
    "source_zero_std_groups": 24,
    "source_reward_std": 0.0,
    "source_reward_std_kept": 0.0,
}
"""The row of a batch of which the filter kept nothing."""


@dataclass(frozen=True)
class FakeAnalysis:
    """One line of gradients.jsonl or probes.jsonl, in which only the task gradient grows with the reward std.

    components: the components of the loss that are on; the total is added. folds: below 3 there is no interval.
    buckets: number of buckets of 4 groups each; 0 stands for a filter that keeps no group.
    """

    step: int = 1
    source: str = "train"
    prefilter: bool = False
    components: tuple[str, ...] = ("task", "entropy")
    buckets: int = 6
    folds: int = 8
    seed: int = 0
    mode: str = "quantile"

    def make_line(self) -> dict[str, Any]:
        """Return the line, as a run writes it."""
        names = {"step": self.step, "source": self.source, "prefilter": self.prefilter}
        if not self.buckets:
            return {**names, "rows": [EMPTY_ROW], "groups": []}
        rng = np.random.default_rng([self.seed, self.step, self.prefilter, *self.source.encode()])
        stds = np.sort(rng.uniform(0 if self.prefilter else 1, 5, 4 * self.buckets))
        bucket_stds = [("all", stds), *((f"bucket_{k + 1}", stds[4 * k : 4 * k + 4]) for k in range(self.buckets))]
        groups = [{"bucket": f"bucket_{n // 4 + 1}", "group": n, "reward_std": std} for n, std in enumerate(stds)]
        rows = [
            row
            for name, members in [*bucket_stds[1:], bucket_stds[0]]
            for row in self._make_bucket_rows(name, members, len(stds), rng)
        ]
        return {**names, "rows": rows, "groups": groups}

    def _make_bucket_rows(
        self, name: str, stds: np.ndarray, groups: int, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        count = 16 * len(stds)
        shared_columns = {
            "bucket": name,
            "weight": len(stds) / groups,
            "fold_count": self.folds,
            "sample_count": count,
            "sample_pct": 100 * len(stds) / groups,
            "token_count": 20 * count,
            "group_count": len(stds),
            "reward_std_mean": float(stds.mean()),
            "reward_std_min": float(stds.min()),
            "reward_std_max": float(stds.max()),
            "source_env_groups": 4 * self.buckets,
            "source_group_size": 16,
            "source_batch_size": 16 * groups,
            "adjusted_batch_size": 16 * groups + 32,
            "uses_training_batch": False,
            "bucket_mode": self.mode,
            "empty_after_filter": 0,
            "analysis_only": int(self.source == "probe"),
            "source_groups_kept": groups - 4,
            "source_kept_ratio": 1 - 4 / groups,
            "source_zero_std_groups": 2,
            "source_reward_std": 2.5,
            "source_reward_std_kept": 3.0,
        }
        noise = {component: float(rng.uniform(0.01, 0.02)) for component in self.components}
        signal = {
            component: float(stds.mean()) ** 2 / 50 if component == "task" else 0.03 for component in self.components
        }
        means = {component: math.sqrt(noise[component] + signal[component]) for component in self.components}
        rows = [self._make_row(component, signal[component], noise[component], count) for component in self.components]
        shares = [self._make_share_columns(component, means, signal) for component in self.components]
        total = self._make_row("total", sum(signal.values()), sum(noise.values()), count)
        total_columns = {"norm": None, "norm_per_sample": None, "norm_per_token": None, "share": 1.0}
        total |= total_columns | {"loss": sum(row["loss"] for row in rows)}
        return [{**shared_columns, **row, **share} for row, share in zip([*rows, total], [*shares, {}], strict=True)]

    def _make_share_columns(
        self, component: str, means: Mapping[str, float], signal: Mapping[str, float]
    ) -> dict[str, Any]:
        signal_share, half_width = signal[component] / sum(signal.values()), 0.1 if self.folds >= 3 else None
        return {
            "share": means[component] / sum(means.values()),
            "signal_share": signal_share,
            "signal_share_low": half_width and signal_share - half_width,
            "signal_share_high": half_width and signal_share + 2 * half_width,
        }

    def _make_row(self, component: str, signal: float, noise: float, count: int) -> dict[str, Any]:
        norm, snr, tokens = 2 * math.sqrt(signal + noise), signal / noise, 20 * count
        half_width = 1.5 if self.folds >= 3 else None
        cosines = {"task": 1.0, "entropy": 0.1, "kl": -0.2}
        return {
            "component": component,
            "norm": norm,
            "norm_per_sample": norm / count,
            "norm_per_token": norm / tokens,
            "loss": -0.01 * len(component),
            "mean_norm": math.sqrt(signal + noise),
            "signal": signal,
            "noise": noise,
            "snr": snr,
            "snr_low": half_width and snr - half_width,
            "snr_high": half_width and snr + half_width,
            **{f"cosine_{name}": value if name in self.components else None for name, value in cosines.items()},
        }


def write_analyses(folder: Path, run: FakeRun, analyses: Sequence[FakeAnalysis]) -> None:
    """Write the lines of `analyses` to the folder of `run` below `folder`, each to the file of its source."""
    for source, name in (("train", "gradients.jsonl"), ("probe", "probes.jsonl")):
        lines = [analysis.make_line() for analysis in analyses if analysis.source == source]
        if lines:
            write_lines(folder / "runs" / run.run_id / name, lines)
