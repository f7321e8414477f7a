"""Gradient analyses under the keys of the published system, for its plots and for W&B.

Keys below `grad_norm/` and `grad_analysis/` are after the filter, those below `grad_norm_prefilter/` and
`grad_analysis_prefilter/` before it.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.data.frames import SCHEMAS, records, typed
from analysis.data.line_files import analysis_of, gradient_rows, group_rows, read_lines
from analysis.gradients.tables import COMPONENTS, WHOLE, check_one, measured
from trainable.config.choices import ADVANTAGE_ESTIMATORS

TABLE_COLUMNS = ("bucket", "group_id", "reward_std")
_NORMS = {"norm": "", "norm_per_sample": "per_sample/", "norm_per_token": "per_token/"}
_LOSSES = {"task": "policy", "entropy": "entropy", "kl": "kl", "total": "total"}
_COUNTS = {
    "sample_count": "sample_count", "sample_pct": "sample_pct", "group_count": "group_rv_count",
    "reward_std_mean": "reward_std_mean", "reward_std_min": "reward_std_min", "reward_std_max": "reward_std_max",
}  # fmt: skip
_FILTER = {
    "source_groups_kept": "filter_kept_count", "source_kept_ratio": "filter_kept_ratio",
    "source_zero_std_groups": "filter_zero_count", "source_reward_std": "in_group_reward_std",
    "source_reward_std_kept": "chosen_in_group_reward_std",
}  # fmt: skip

Tables = dict[str, list[list[str | int | float]]]


class Published(NamedTuple):
    """numbers: by key. tables: by key, rows of TABLE_COLUMNS."""

    numbers: dict[str, float]
    tables: Tables


def published_of_step(path: Path, step: int) -> Published:
    """Numbers and tables of one step in a run's gradients.jsonl; none where it says nothing of the step."""
    lines = [line for line in read_lines(path, analysis_of) if line["step"] == step]
    frames = [
        typed(pd.DataFrame(rows).assign(run_id=path.parent.name, seed=0), SCHEMAS[name]) if rows else None
        for name, rows in (("gradients", gradient_rows(lines)), ("gradient_groups", group_rows(lines)))
    ]
    gradients, groups = frames
    return Published(
        {} if gradients is None else published_metrics(gradients), {} if groups is None else published_tables(groups)
    )


def published_metrics(frame: pd.DataFrame) -> dict[str, float]:
    """The numbers of one run, source and step under the keys of the published system; a missing one has no key.

    frame: rows of `gradients`. The value loss of a shared trunk has no published key; it is in `loss/total`. ValueError
    where the rows are of more than one step, source or run.
    """
    check_one(frame, ["study", "run_id", "source", "step"])
    found: dict[str, float] = {}
    for prefilter, rows in frame.groupby("prefilter"):
        ending = "_prefilter" if prefilter else ""
        for bucket, components in measured(rows).groupby("bucket", sort=False):
            found |= {f"grad_norm{ending}/{bucket}/{key}": value for key, value in _bucket(components).items()}
        found |= {f"grad_analysis{ending}/{key}": value for key, value in _batch(rows, bool(prefilter)).items()}
    for name, key in _LOSSES.items():  # the published system logs the whole batch after the filter twice
        found[f"actor/loss/{key}"] = found.get(f"grad_norm/{WHOLE}/loss/{key}", math.nan)
        if name != "total":
            found[f"actor/grad_norm/{name}"] = found.get(f"grad_norm/{WHOLE}/{name}", math.nan)
    found |= _what_is_skipped(frame)
    return {key: value for key, value in found.items() if not math.isnan(value)}


def published_tables(groups: pd.DataFrame) -> Tables:
    """The reward std of every group of one run, source and step, by key: a table a bucket, and one of the whole batch.

    groups: rows of `gradient_groups`.
    """
    found: Tables = {}
    for prefilter, rows in groups.groupby("prefilter"):
        prefix = "grad_norm_prefilter" if prefilter else "grad_norm"
        listed = rows[["bucket", "group", "reward_std"]].to_numpy(dtype=object).tolist()
        found |= {
            f"{prefix}/{bucket}/group_rv_table": [row for row in listed if bucket in (row[0], WHOLE)]
            for bucket in (*dict.fromkeys(rows["bucket"]), WHOLE)
        }
    return found


def _bucket(components: pd.DataFrame) -> dict[str, float]:
    """Keys below grad_norm/<bucket>/ of one bucket. components: its rows."""
    found = {key: float(components[column].iloc[0]) for column, key in _COUNTS.items()}
    for row in records(components):
        name = row["component"]
        if name in COMPONENTS:
            found |= {f"{place}{name}": float(row[column]) for column, place in _NORMS.items()}
        if name in _LOSSES:
            found[f"loss/{_LOSSES[name]}"] = float(row["loss"])
    return found


def _batch(rows: pd.DataFrame, prefilter: bool) -> dict[str, float]:
    """Keys below grad_analysis/ or grad_analysis_prefilter/; the published source batch is what was played for both."""
    first = rows.iloc[0]
    groups, size = (float(first[name]) for name in ("source_env_groups", "source_group_size"))
    sizes = {"source_batch_size": groups * size, "adjusted_batch_size": float(first["adjusted_batch_size"])}
    if prefilter:
        return sizes
    return {
        **sizes, "source_env_groups": groups, "source_group_size": size,
        "empty_after_filter": float(first["empty_after_filter"] > 0),
        "uses_training_batch": float(first["uses_training_batch"]),
        **{key: float(first[column]) for column, key in _FILTER.items()},
    }  # fmt: skip


def _what_is_skipped(frame: pd.DataFrame) -> dict[str, float]:
    """The keys of an analysis without an update; that of the critic where there is one."""
    if not (frame["analysis_only"] > 0).any():
        return {}
    forms = [ADVANTAGE_ESTIMATORS[form] for form in frame["form"].unique() if form in ADVANTAGE_ESTIMATORS]
    parts = ["actor", *(["critic"] if any(form.needs_critic for form in forms) else [])]
    return {
        "trainer/gradient_analysis_only": 1.0,
        **{f"{part}/skipped_for_gradient_analysis_only": 1.0 for part in parts},
    }
