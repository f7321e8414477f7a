"""Tests of DeepSpeed over processes of one machine: rows, weights and moments equal those of plain torch."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.hub_models import NO_SYSTEM_TEMPLATE, write_small_model
from trainable.runs.records import TIME_COLUMNS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-engines"),
]

STEPS = 2
PATIENCE_S = 240.0
STAGE_3 = {"trainer__zero_stage": 3}
KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__entropy_coeff": 0.01}


def train_ranks(folder: Path, size: int, start: Path | None = None, steps: int = STEPS, **overrides: object) -> Path:
    """Run `size` ranks, or plain torch if `size` is 0, and return the folder of the run."""
    folder.mkdir()
    arguments = [str(size), str(steps), json.dumps({**KL, **overrides}), "" if start is None else str(start / "state")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.rank", str(folder), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(max(1, size))
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    exit_codes = [rank.returncode for rank in ranks]
    assert exit_codes == [0] * len(ranks), next(text for code, text in zip(exit_codes, outputs, strict=True) if code)[
        -3000:
    ]
    return folder


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return [{name: value for name, value in row.items() if name not in TIME_COLUMNS} for row in rows]


def assert_same_rows(rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]) -> None:
    assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for name, value in expected_row.items():
            is_number = isinstance(value, int | float)
            assert row[name] == (pytest.approx(value, rel=1e-3, abs=1e-5) if is_number else value), name


def assert_same_state(folder_a: Path, folder_b: Path, lr: float = 3e-4) -> None:
    """Compare weights and moments with a tolerance, as AdamW divides by the square root of a small number."""
    tensors, expected = (load_file(folder / "state" / "state.safetensors") for folder in (folder_a, folder_b))
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].shape == value.shape
        tolerance = (
            lr * 0.1 if name.startswith(("actor/", "critic/", "head/")) else 1e-4 * float(value.abs().max()) + 1e-12
        )
        assert float((tensors[name].float() - value.float()).abs().max()) <= tolerance, name


def compute_moment_difference(one: Path, other: Path, network: str) -> float:
    """Compute the norm of the difference of the first moments of two runs, which are sums of gradients."""
    states = [load_file(folder / "state" / "state.safetensors") for folder in (one, other)]
    names = [name for name in states[0] if name.startswith(network) and name.endswith("/exp_avg")]
    return float(torch.cat([(states[0][name] - states[1][name]).flatten() for name in names]).norm())


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_ranks(tmp_path_factory.mktemp("plain") / "run", 0)


CASES: dict[str, tuple[int, dict[str, object]]] = {
    **{f"{size} ranks": (size, {}) for size in (1, 2, 3, 4)},
    **{f"stage 3, {size} ranks": (size, STAGE_3) for size in (1, 2, 3, 4)},
    "stage 1": (2, {"trainer__zero_stage": 1}),
    "offload": (2, {"trainer__offload_optimizer": True}),
    "stage 3, optimizer offloaded": (2, {**STAGE_3, "trainer__offload_optimizer": True}),
    "stage 3, swapped to the host": (2, {**STAGE_3, "trainer__swap_to_host": True}),
    "stage 3, parameters offloaded": (2, {**STAGE_3, "trainer__offload_parameters": True}),
    "stage 3, both offloaded": (
        2,
        {**STAGE_3, "trainer__offload_parameters": True, "trainer__offload_optimizer": True},
    ),
}


@pytest.mark.parametrize(("size", "overrides"), CASES.values(), ids=CASES)
def test_ranks_train_as_one_device_does(
    tmp_path: Path, plain_run: Path, size: int, overrides: dict[str, object]
) -> None:
    run_folder = train_ranks(tmp_path / "run", size, None, STEPS, **overrides)
    assert_same_rows(read_rows(run_folder), read_rows(plain_run))
    assert_same_state(run_folder, plain_run)


RECOMPUTED: dict[str, object] = {"model__enable_gradient_checkpointing": True}
VARIANTS: dict[str, dict[str, object]] = {
    "shared trunk": {"critic__shared_trunk": True},
    "grpo": {"algorithm__adv_estimator": "grpo"},
    # 64 rows are two passes on each of two ranks.
    "several passes": {
        "env__group_size": 32,
        **{f"{network}__ppo_mini_batch_size": 64 for network in ("actor", "critic")},
    },
    "recomputed blocks": RECOMPUTED,
}


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_of_two_ranks_is_that_of_one_device(tmp_path: Path, name: str, stage: dict[str, object]) -> None:
    run_folder, expected_folder = (
        train_ranks(tmp_path / str(size), size, None, 1, **stage, **VARIANTS[name]) for size in (2, 0)
    )
    assert_same_rows(read_rows(run_folder), read_rows(expected_folder))
    assert_same_state(run_folder, expected_folder)


def test_a_model_of_another_architecture_trains_as_on_one_device(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", "gemma", NO_SYSTEM_TEMPLATE)
    overrides = {"model__path": str(model), "rollout__response_length": 8, "env__max_turn": 2}
    run_folder, expected_folder = (train_ranks(tmp_path / str(size), size, None, 1, **overrides) for size in (2, 0))
    assert_same_rows(read_rows(run_folder), read_rows(expected_folder))
    assert_same_state(run_folder, expected_folder)


def test_ranks_train_only_the_adapters(tmp_path: Path) -> None:
    overrides = {"model__lora_rank": 4}
    run_folder, expected_folder = (
        train_ranks(tmp_path / str(count), count, None, STEPS, **overrides) for count in (2, 0)
    )
    assert_same_rows(read_rows(run_folder), read_rows(expected_folder))
    assert_same_state(run_folder, expected_folder)
    names = load_file(run_folder / "state" / "state.safetensors")
    assert all("lora_" in name or "score" in name or "_optimizer/" in name for name in names)
    resumed_folder, expected_resumed_folder = (
        train_ranks(tmp_path / f"again-{count}", count, run_folder, 1, **overrides) for count in (2, 0)
    )
    assert_same_rows(read_rows(resumed_folder), read_rows(expected_resumed_folder))
    assert_same_state(resumed_folder, expected_resumed_folder)


def test_in_bfloat16_ranks_change_less_than_the_precision_does(tmp_path: Path) -> None:
    """Ranks sum in another order, so bfloat16 rounds differently. The two stages do not differ."""
    overrides = {**RECOMPUTED, "model__dtype": "bfloat16"}
    stage_2_folder, stage_3_folder = (
        train_ranks(tmp_path / f"{stage}", 2, None, 1, trainer__zero_stage=stage, **overrides) for stage in (2, 3)
    )
    plain_folder, exact_folder = (
        train_ranks(tmp_path / "0", 0, None, 1, **overrides),
        train_ranks(tmp_path / "exact", 0, None, 1, **RECOMPUTED),
    )
    assert (
        read_rows(stage_2_folder)[0]["sampled_tokens"]
        == read_rows(stage_3_folder)[0]["sampled_tokens"]
        == read_rows(plain_folder)[0]["sampled_tokens"]
    )
    for network in ("actor_optimizer", "critic_optimizer"):
        rounding = compute_moment_difference(plain_folder, exact_folder, network)
        assert compute_moment_difference(stage_2_folder, plain_folder, network) < rounding / 4
        assert compute_moment_difference(stage_3_folder, stage_2_folder, network) < rounding / 100


@pytest.mark.parametrize(
    ("first_size", "second_size", "stages"),
    [
        (2, 0, (2, 2)),
        (0, 2, (2, 2)),
        (2, 3, (2, 2)),
        (2, 0, (3, 3)),
        (0, 3, (3, 3)),
        (3, 2, (3, 3)),
        (2, 1, (3, 2)),
        (3, 2, (1, 3)),
    ],
)
def test_a_state_continues_with_another_number_of_ranks(
    tmp_path: Path, plain_run: Path, first_size: int, second_size: int, stages: tuple[int, int]
) -> None:
    first = train_ranks(tmp_path / "first", first_size, None, 1, trainer__zero_stage=stages[0])
    second = train_ranks(tmp_path / "second", second_size, first, STEPS - 1, trainer__zero_stage=stages[1])
    assert_same_rows(read_rows(first) + read_rows(second), read_rows(plain_run))
    assert_same_state(second, plain_run)


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_an_optimizer_is_reset_as_on_one_device(tmp_path: Path, stage: dict[str, object]) -> None:
    reset: dict[str, object] = {"trainer__ref_model_sync_steps": 2, "trainer__ref_model_reset_optimizer": True}
    expected = train_ranks(tmp_path / "expected", 0, None, 3, **reset)
    first = train_ranks(tmp_path / "first", 2, None, 2, **reset, **stage)
    assert_same_state(train_ranks(tmp_path / "second", 2, first, 1, **reset, **stage), expected)
    assert_same_state(train_ranks(tmp_path / "run", 2, None, 3, **reset, **stage), expected)


ANALYSIS = {
    "trainer__gradient_analysis_mode": True,
    "trainer__gradient_analysis_env_groups": 5,
    "trainer__gradient_analysis_group_size": 4,
    "rollout__gradient_analysis_num_buckets": 2,
    "trainer__gradient_analysis_log_prefilter": True,
}


@pytest.mark.parametrize(
    "overrides", [{}, {"trainer__gradient_analysis_sketch": None}, STAGE_3], ids=["", "whole", "3"]
)
def test_diagnostics_and_analyses_of_ranks_equal_those_of_one_device(
    tmp_path: Path, overrides: dict[str, object]
) -> None:
    run_folder, expected_folder = (
        train_ranks(tmp_path / str(size), size, None, 1, **ANALYSIS, **overrides) for size in (3, 0)
    )
    assert any(name.startswith("collapse_trajectory") for name in read_rows(expected_folder)[0])
    assert_same_rows(read_rows(run_folder), read_rows(expected_folder))
    analyses, expected_analyses = (
        json.loads((folder / "gradients.json").read_text()) for folder in (run_folder, expected_folder)
    )
    assert len(expected_analyses) == 2
    for analysis, expected_analysis in zip(analyses, expected_analyses, strict=True):
        assert analysis["groups"] == expected_analysis["groups"]
        assert_same_rows(analysis["rows"], expected_analysis["rows"])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path: Path, stage: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.one_bad_rank", str(tmp_path), str(rank), str(stage)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-3000:]


TWO_RUNS_SCRIPT = """
from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import QUIET_SETTINGS
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.distributed import make_trainer
for _ in range(2):
    trainer = make_trainer(make_small_config(**{**QUIET_SETTINGS, "trainer__strategy": "deepspeed"}), DIAGNOSTICS)
    assert trainer.step().row["optimizer_steps"] == 2
    trainer.load_state(*trainer.get_state())
    trainer.close()
    assert not trainer.rendezvous.exists()
"""


def test_a_process_can_train_one_run_after_the_other() -> None:
    process = subprocess.run(
        [sys.executable, "-c", TWO_RUNS_SCRIPT], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert process.returncode == 0, process.stderr[-3000:]
