"""Convert gradient analyses to the metric names that RAGEN logs, for figures like the published ones and for W&B.

`grad_norm/` and `grad_analysis/` describe the batch after the filter, `grad_norm_prefilter/` and
`grad_analysis_prefilter/` the batch before it.
"""

import math
from pathlib import Path

import pandas as pd

from analysis.data.frames import SCHEMAS, cast_frame, to_records
from analysis.data.run_files import get_analysis_key, make_analysis_rows
from analysis.gradients.tables import COMPONENTS, WHOLE_BATCH, drop_empty_batches
from trainable.config.choices import ADVANTAGE_ESTIMATORS
from trainable.files.json_lines import read_lines
from trainable.runs.run_files import select_lines

TABLE_COLUMNS = ("bucket", "group_id", "reward_std")
# Our columns and the published keys, or prefixes of keys.
_NORM_PREFIXES = {"norm": "", "norm_per_sample": "per_sample/", "norm_per_token": "per_token/"}
_LOSS_KEYS = {"task": "policy", "entropy": "entropy", "kl": "kl", "total": "total"}
_COUNT_KEYS = {
    "sample_count": "sample_count",
    "sample_pct": "sample_pct",
    "group_count": "group_rv_count",
    "reward_std_mean": "reward_std_mean",
    "reward_std_min": "reward_std_min",
    "reward_std_max": "reward_std_max",
}
_FILTER_KEYS = {
    "source_groups_kept": "filter_kept_count",
    "source_kept_ratio": "filter_kept_ratio",
    "source_zero_std_groups": "filter_zero_count",
    "source_reward_std": "in_group_reward_std",
    "source_reward_std_kept": "chosen_in_group_reward_std",
}

Tables = dict[str, list[list[str | int | float]]]
"""Rows with `TABLE_COLUMNS` by key."""


def read_published_metrics(path: Path, step: int) -> tuple[dict[str, float], Tables]:
    """Read numbers and tables of one step by key from a run's gradients.jsonl; empty if the step has no analysis."""
    lines = [line for line in select_lines(read_lines(path).records, get_analysis_key) if line["step"] == step]
    # A run's files do not contain its study and seed, and the metrics need neither: any value makes valid frames.
    frames = [
        cast_frame(pd.DataFrame(rows).assign(run_id=path.parent.name, seed=0), SCHEMAS[name]) if rows else None
        for name in ("gradients", "gradient_groups")
        for rows in [make_analysis_rows(lines, name)]
    ]
    gradients, groups = frames
    numbers = {} if gradients is None else make_published_metrics(gradients)
    return numbers, {} if groups is None else make_published_tables(groups)


def make_published_metrics(frame: pd.DataFrame) -> dict[str, float]:
    """Convert the numbers of one run, source and step to their published keys. A missing number has no key.

    The value loss of a shared trunk has no published key; it is included in `loss/total`. frame: rows of
    `StudyFrames.gradients`.
    """
    metrics: dict[str, float] = {}
    for prefilter, rows in frame.groupby("prefilter"):
        suffix = "_prefilter" if prefilter else ""
        for bucket, components in drop_empty_batches(rows).groupby("bucket", sort=False):
            values = {key: components[column].iloc[0] for column, key in _COUNT_KEYS.items()}
            for row in to_records(components):
                # The published system has norms of task, KL and entropy only, and does not log the value loss.
                if row["component"] in COMPONENTS:
                    values |= {f"{prefix}{row['component']}": row[name] for name, prefix in _NORM_PREFIXES.items()}
                if row["component"] in _LOSS_KEYS:
                    values[f"loss/{_LOSS_KEYS[row['component']]}"] = row["loss"]
            metrics |= {f"grad_norm{suffix}/{bucket}/{key}": float(value) for key, value in values.items()}
        # Under both prefixes, "source" refers to the batch before the filter, as in the published system.
        first_row = rows.iloc[0]
        groups, group_size = first_row["source_env_groups"], first_row["source_group_size"]
        values = {"source_batch_size": groups * group_size, "adjusted_batch_size": first_row["adjusted_batch_size"]}
        if not prefilter:
            values |= {
                "source_env_groups": groups,
                "source_group_size": group_size,
                "empty_after_filter": first_row["empty_after_filter"] > 0,
                "uses_training_batch": first_row["uses_training_batch"],
                **{key: first_row[column] for column, key in _FILTER_KEYS.items()},
            }
        metrics |= {f"grad_analysis{suffix}/{key}": float(value) for key, value in values.items()}
    # The published system logs the whole batch after the filter a second time, under `actor/`.
    for name, key in _LOSS_KEYS.items():
        metrics[f"actor/loss/{key}"] = metrics.get(f"grad_norm/{WHOLE_BATCH}/loss/{key}", math.nan)
        if name != "total":
            metrics[f"actor/grad_norm/{name}"] = metrics.get(f"grad_norm/{WHOLE_BATCH}/{name}", math.nan)
    # A step that is analyzed without an update. The published system logs it per role; the role "critic" exists only if
    # the algorithm uses a critic.
    if (frame["analysis_only"] > 0).any():
        forms = [ADVANTAGE_ESTIMATORS[form] for form in frame["form"].unique() if form in ADVANTAGE_ESTIMATORS]
        roles = ["actor", *(["critic"] if any(form.needs_critic for form in forms) else [])]
        metrics |= {f"{role}/skipped_for_gradient_analysis_only": 1.0 for role in roles}
        metrics["trainer/gradient_analysis_only"] = 1.0
    return {key: value for key, value in metrics.items() if not math.isnan(value)}


def make_published_tables(groups: pd.DataFrame) -> Tables:
    """Make tables of the reward std of every group of one run, source and step: one per bucket and for the whole batch.

    groups: rows of `StudyFrames.gradient_groups`.
    """
    tables: Tables = {}
    for prefilter, rows in groups.groupby("prefilter"):
        prefix = "grad_norm_prefilter" if prefilter else "grad_norm"
        table_rows = rows[["bucket", "group", "reward_std"]].to_numpy(dtype=object).tolist()
        tables |= {
            f"{prefix}/{bucket}/group_rv_table": [row for row in table_rows if bucket in (row[0], WHOLE_BATCH)]
            for bucket in (*dict.fromkeys(rows["bucket"]), WHOLE_BATCH)
        }
    return tables
