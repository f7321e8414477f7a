"""DeepSpeed over processes of this machine, against plain torch: same rows, weights, moments, whatever the ranks."""

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


def trained(folder: Path, size: int, start: Path | None = None, steps: int = STEPS, **overrides: object) -> Path:
    """The folder of a run of `size` ranks (0: plain torch)."""
    folder.mkdir()
    words = [str(size), str(steps), json.dumps({**KL, **overrides}), "" if start is None else str(start / "state")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.rank", str(folder), str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(max(1, size))
    ]
    said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    ended = [rank.returncode for rank in ranks]
    assert ended == [0] * len(ranks), next(text for code, text in zip(ended, said, strict=True) if code)[-3000:]
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return [{name: value for name, value in row.items() if name not in TIME_COLUMNS} for row in found]


def assert_same_rows(mine: list[dict[str, Any]], its: list[dict[str, Any]]) -> None:
    assert [row.keys() for row in mine] == [row.keys() for row in its]
    for one, other in zip(mine, its, strict=True):
        for name, value in other.items():
            is_number = isinstance(value, int | float)
            assert one[name] == (pytest.approx(value, rel=1e-3, abs=1e-5) if is_number else value), name


def assert_same_state(mine: Path, its: Path, lr: float = 3e-4) -> None:
    """Weights and moments to float tolerance: AdamW divides by the square root of a small number."""
    ours, theirs = (load_file(folder / "state" / "state.safetensors") for folder in (mine, its))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        moved = lr * 0.1 if name.startswith(("actor/", "critic/", "head/")) else 1e-4 * float(value.abs().max()) + 1e-12
        assert float((ours[name].float() - value.float()).abs().max()) <= moved, name


def gap(one: Path, other: Path, network: str) -> float:
    """Norm of the difference of two runs' first moments of a network, which are sums of gradients."""
    parts = [load_file(folder / "state" / "state.safetensors") for folder in (one, other)]
    names = [name for name in parts[0] if name.startswith(network) and name.endswith("/exp_avg")]
    return float(torch.cat([(parts[0][name] - parts[1][name]).flatten() for name in names]).norm())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain") / "run", 0)


CASES: dict[str, tuple[int, dict[str, object]]] = {
    **{f"{size} ranks": (size, {}) for size in (1, 2, 3, 4)},
    **{f"stage 3, {size} ranks": (size, STAGE_3) for size in (1, 2, 3, 4)},
    "stage 1": (2, {"trainer__zero_stage": 1}),
    "offload": (2, {"trainer__offload_optimizer": True}),
    "stage 3, optimizer offloaded": (2, {**STAGE_3, "trainer__offload_optimizer": True}),
    "stage 3, parameters offloaded": (2, {**STAGE_3, "trainer__offload_parameters": True}),
    "stage 3, both offloaded": (
        2,
        {**STAGE_3, "trainer__offload_parameters": True, "trainer__offload_optimizer": True},
    ),
}


@pytest.mark.parametrize(("size", "more"), CASES.values(), ids=CASES)
def test_ranks_train_as_one_device_does(tmp_path: Path, plain: Path, size: int, more: dict[str, object]) -> None:
    found = trained(tmp_path / "run", size, None, STEPS, **more)
    assert_same_rows(rows(found), rows(plain))
    assert_same_state(found, plain)


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_a_shared_trunk_and_grpo_do_too(tmp_path: Path, stage: dict[str, object]) -> None:
    for number, more in enumerate(({"critic__shared_trunk": True}, {"algorithm__adv_estimator": "grpo"})):
        found, wanted = (trained(tmp_path / f"{number}-{size}", size, None, 1, **stage, **more) for size in (2, 0))
        assert_same_rows(rows(found), rows(wanted))
        assert_same_state(found, wanted)


def test_a_model_of_another_architecture_does_too(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", "gemma", NO_SYSTEM_TEMPLATE)
    more = {"model__path": str(model), "rollout__response_length": 8, "env__max_turn": 2}
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **more) for size in (2, 0))
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)


def test_adapters_are_all_that_ranks_train(tmp_path: Path) -> None:
    more = {"model__lora_rank": 4}
    found, wanted = (trained(tmp_path / str(count), count, None, STEPS, **more) for count in (2, 0))
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)
    names = load_file(found / "state" / "state.safetensors")
    assert all("lora_" in name or "score" in name or "_optimizer/" in name for name in names)
    again, straight = (trained(tmp_path / f"again-{count}", count, found, 1, **more) for count in (2, 0))
    assert_same_rows(rows(again), rows(straight))
    assert_same_state(again, straight)


RECOMPUTED = {"model__enable_gradient_checkpointing": True}


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_recomputed_blocks_are_dealt_too(tmp_path: Path, stage: dict[str, object]) -> None:
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **stage, **RECOMPUTED) for size in (2, 0))
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)


def test_in_bfloat16_ranks_change_less_than_bfloat16_does(tmp_path: Path) -> None:
    """Ranks sum in another order, so bfloat16 rounds otherwise; and the stages differ in nothing."""
    more = {**RECOMPUTED, "model__dtype": "bfloat16"}
    two, three = (trained(tmp_path / f"{stage}", 2, None, 1, trainer__zero_stage=stage, **more) for stage in (2, 3))
    alone, exact = trained(tmp_path / "0", 0, None, 1, **more), trained(tmp_path / "exact", 0, None, 1, **RECOMPUTED)
    assert rows(two)[0]["sampled_tokens"] == rows(three)[0]["sampled_tokens"] == rows(alone)[0]["sampled_tokens"]
    for network in ("actor_optimizer", "critic_optimizer"):
        rounding = gap(alone, exact, network)
        assert gap(two, alone, network) < rounding / 4
        assert gap(three, two, network) < rounding / 100


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_a_mini_batch_of_several_passes_is_one_step(tmp_path: Path, stage: dict[str, object]) -> None:
    sizes = {f"{part}__ppo_mini_batch_size": 64 for part in ("actor", "critic")}  # 64 rows: two passes a rank of two
    found, wanted = (
        trained(tmp_path / str(size), size, None, 1, env__group_size=32, **sizes, **stage) for size in (2, 0)
    )
    assert rows(found)[0]["optimizer_steps"] == 1
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)


@pytest.mark.parametrize(
    ("wrote", "goes_on", "stages"),
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
def test_a_state_of_some_ranks_goes_on_with_others(
    tmp_path: Path, plain: Path, wrote: int, goes_on: int, stages: tuple[int, int]
) -> None:
    first = trained(tmp_path / "first", wrote, None, 1, trainer__zero_stage=stages[0])
    second = trained(tmp_path / "second", goes_on, first, STEPS - 1, trainer__zero_stage=stages[1])
    assert_same_rows(rows(first) + rows(second), rows(plain))
    assert_same_state(second, plain)


ANALYSIS = {
    "trainer__gradient_analysis_mode": True,
    "trainer__gradient_analysis_env_groups": 5,
    "trainer__gradient_analysis_group_size": 4,
    "rollout__gradient_analysis_num_buckets": 2,
    "trainer__gradient_analysis_log_prefilter": True,
}


@pytest.mark.parametrize("more", [{}, {"trainer__gradient_analysis_sketch": None}, STAGE_3], ids=["", "whole", "3"])
def test_what_ranks_diagnose_and_analyse_together_is_what_one_does(tmp_path: Path, more: dict[str, object]) -> None:
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **ANALYSIS, **more) for size in (3, 0))
    assert any(name.startswith("collapse_trajectory") for name in rows(wanted)[0])
    assert_same_rows(rows(found), rows(wanted))
    ours, theirs = (json.loads((folder / "gradients.json").read_text()) for folder in (found, wanted))
    assert len(theirs) == 2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["groups"] == its["groups"]
        assert_same_rows(mine["rows"], its["rows"])


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
    said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-3000:]


@pytest.mark.parametrize("stage", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_a_step_that_is_not_finite_is_skipped_by_all(tmp_path: Path, stage: dict[str, object]) -> None:
    more = {**stage, "actor__entropy_coeff": 3e38, "trainer__nonfinite_patience": 5}  # the loss is beyond float32
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **more) for size in (2, 0))
    skipped = [rows(folder)[0]["nonfinite_updates"] for folder in (found, wanted)]
    assert skipped[0] == skipped[1] > 0
    assert_same_state(found, wanted)


AGAIN = """
from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import QUIET_SETTINGS
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.distributed import make_trainer
for _ in range(2):
    trainer = make_trainer(make_small_config(**{**QUIET_SETTINGS, "trainer__strategy": "deepspeed"}), DIAGNOSTICS)
    assert trainer.step().row["optimizer_steps"] == 2
    trainer.load_state(*trainer.get_state())
    trainer.close()
    assert not trainer.rendezvous_file.exists()
"""


def test_a_process_can_train_one_run_after_the_other() -> None:
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
