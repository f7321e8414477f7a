"""Tests of gradient analyses under the published keys: the set of keys, and numbers that equal those of the rows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.gradients.published_metrics import make_published_metrics, make_published_tables, read_published_metrics
from tests.analysis.gradients.test_tables import AFTER, ALL, BEFORE, make_frames, make_rows
from tests.fakes.run_folders import FakeAnalysis, FakeRun
from trainable.files.json_lines import write_lines

BUCKET_KEYS = (
    *("task", "entropy", "kl", "per_sample/task", "per_sample/entropy", "per_sample/kl", "per_token/task"),
    *("per_token/entropy", "per_token/kl", "loss/policy", "loss/entropy", "loss/kl", "loss/total", "sample_count"),
    *("sample_pct", "reward_std_mean", "reward_std_min", "reward_std_max", "group_rv_count"),
)
ANALYSIS_KEYS = (
    *("source_env_groups", "source_group_size", "source_batch_size", "adjusted_batch_size", "empty_after_filter"),
    *("uses_training_batch", "filter_kept_count", "filter_kept_ratio", "filter_zero_count", "in_group_reward_std"),
    "chosen_in_group_reward_std",
)
PUBLISHED = {
    *(f"grad_norm/{bucket}/{key}" for bucket in ("all", "bucket_1", "bucket_2") for key in BUCKET_KEYS),
    *(f"actor/loss/{name}" for name in ("policy", "entropy", "kl", "total")),
    *(f"actor/grad_norm/{name}" for name in ("task", "entropy", "kl")),
    *(f"grad_analysis/{key}" for key in ANALYSIS_KEYS),
}


def test_published_keys_are_those_of_the_published_system() -> None:
    fake_analysis = FakeAnalysis(51, components=ALL, buckets=2)
    assert set(make_published_metrics(make_rows(fake_analysis))) == PUBLISHED
    fake_analysis = replace(fake_analysis, prefilter=True)
    # Before the filter, the actor is not repeated.
    expected = {key.replace("grad_norm/", "grad_norm_prefilter/") for key in PUBLISHED if key.startswith("grad_norm/")}
    expected |= {"grad_analysis_prefilter/source_batch_size", "grad_analysis_prefilter/adjusted_batch_size"}
    assert set(make_published_metrics(make_rows(fake_analysis))) == expected
    # A component that is off has no key.
    metrics = make_published_metrics(make_rows(AFTER, BEFORE))
    assert not [key for key in metrics if key.endswith("/kl")]
    assert "grad_norm_prefilter/bucket_6/per_token/entropy" in metrics
    assert not any(math.isnan(value) for value in metrics.values())


def test_published_values_are_those_of_the_rows_and_the_value_loss_is_only_in_the_total() -> None:
    metrics = make_published_metrics(make_rows(replace(AFTER, components=ALL), BEFORE))
    rows = {(row["bucket"], row["component"]): row for row in replace(AFTER, components=ALL).make_line()["rows"]}
    assert metrics["grad_norm/bucket_3/task"] == rows["bucket_3", "task"]["norm"]
    assert metrics["grad_norm/bucket_3/per_sample/kl"] == rows["bucket_3", "kl"]["norm_per_sample"]
    assert metrics["grad_norm/bucket_6/per_token/entropy"] == rows["bucket_6", "entropy"]["norm_per_token"]
    assert metrics["grad_norm/bucket_1/loss/policy"] == rows["bucket_1", "task"]["loss"]
    assert metrics["grad_norm/bucket_1/loss/total"] == rows["bucket_1", "total"]["loss"]
    assert metrics["grad_norm/bucket_2/group_rv_count"] == rows["bucket_2", "task"]["group_count"]
    assert metrics["actor/loss/policy"] == metrics["grad_norm/all/loss/policy"] == rows["all", "task"]["loss"]
    assert metrics["actor/grad_norm/kl"] == rows["all", "kl"]["norm"]
    assert metrics["grad_analysis/source_batch_size"] == metrics["grad_analysis_prefilter/source_batch_size"] == 24 * 16
    assert (metrics["grad_analysis/uses_training_batch"], metrics["grad_analysis/empty_after_filter"]) == (0, 0)
    fake_analysis = FakeAnalysis(1, components=("task", "value"), buckets=1)
    metrics = make_published_metrics(make_rows(fake_analysis))
    assert not [key for key in metrics if key.endswith("value")]
    losses = {(row["bucket"], row["component"]): row["loss"] for row in fake_analysis.make_line()["rows"]}
    assert metrics["actor/loss/total"] == losses["all", "total"]
    assert metrics["actor/loss/total"] != metrics["actor/loss/policy"]


def test_a_filter_that_kept_nothing_has_a_key_that_says_so() -> None:
    empty_analysis = replace(AFTER, buckets=0)
    both_metrics = make_published_metrics(make_rows(BEFORE, empty_analysis))
    empty_metrics = make_published_metrics(make_rows(empty_analysis))
    values = (24, 16, 384, 0, 1, 0, 0, 0, 24, 0, 0)
    expected = {f"grad_analysis/{key}": value for key, value in zip(ANALYSIS_KEYS, values, strict=True)}
    assert empty_metrics == expected
    assert {key: value for key, value in both_metrics.items() if "_prefilter" not in key} == expected
    assert "grad_norm_prefilter/all/task" in both_metrics


@pytest.mark.parametrize(("form", "has_critic"), [("gae", True), ("grpo", False)])
def test_keys_say_what_is_skipped(form: str, has_critic: bool) -> None:
    rows = make_rows(replace(AFTER, source="probe")).assign(form=form)
    metrics = make_published_metrics(rows)
    assert (metrics["trainer/gradient_analysis_only"], metrics["actor/skipped_for_gradient_analysis_only"]) == (1, 1)
    assert ("critic/skipped_for_gradient_analysis_only" in metrics) == has_critic
    assert not [key for key in make_published_metrics(rows.assign(analysis_only=0)) if "analysis_only" in key]


def test_groups_have_one_table_per_bucket_and_one_of_all(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, [(FakeRun("0", steps=3), [BEFORE, AFTER])])
    group_tables = make_published_tables(frames.gradient_groups)
    prefixes = ("grad_norm", "grad_norm_prefilter")
    buckets = ("all", *(f"bucket_{number}" for number in range(1, 7)))
    assert set(group_tables) == {f"{prefix}/{bucket}/group_rv_table" for prefix in prefixes for bucket in buckets}
    expected_rows = [[group["bucket"], group["group"], group["reward_std"]] for group in AFTER.make_line()["groups"]]
    assert group_tables["grad_norm/all/group_rv_table"] == expected_rows
    assert group_tables["grad_norm/bucket_3/group_rv_table"] == [row for row in expected_rows if row[0] == "bucket_3"]
    json.dumps(group_tables)
    assert make_published_tables(pd.DataFrame(columns=list(frames.gradient_groups))) == {}


def test_metrics_of_a_step_are_read_from_the_lines_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "gradients.jsonl"
    assert read_published_metrics(path, 1) == ({}, {})
    path.parent.mkdir()
    analyses = (FakeAnalysis(1, prefilter=True), FakeAnalysis(1, buckets=0), AFTER)
    write_lines(path, [fake_analysis.make_line() for fake_analysis in analyses])
    (first, first_tables), (last, last_tables) = (read_published_metrics(path, step) for step in (1, 51))
    assert first["grad_analysis/empty_after_filter"] == 1
    assert set(first_tables) == {key for key in first_tables if key.startswith("grad_norm_prefilter/")} != set()
    assert last["grad_norm/all/task"] == AFTER.make_line()["rows"][-3]["norm"]
    assert len(last_tables["grad_norm/all/group_rv_table"]) == 24
    assert read_published_metrics(path, 2) == ({}, {})
