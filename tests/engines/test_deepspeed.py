"""DeepSpeed over processes of this machine, against plain torch: same rows, weights, moments, whatever the ranks."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.hub_models import NO_SYSTEM, small_model
from trainable.records import TIME_COLUMNS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-engines"),
]

STEPS = 2
PATIENCE_S = 240.0
KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__entropy_coeff": 0.01}


def trained(folder: Path, size: int, start: Path | None = None, steps: int = STEPS, **overrides: object) -> Path:
    """The folder of a run of `size` ranks (0: plain torch)."""
    folder.mkdir()
    words = [str(size), str(steps), json.dumps({**KL, **overrides}), "" if start is None else str(start / "state")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.rank", str(folder), str(rank), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(max(1, size))
    ]  # fmt: skip
    said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said[0][-3000:]
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return [{name: value for name, value in row.items() if name not in TIME_COLUMNS} for row in found]


def assert_same_rows(mine: list[dict[str, Any]], its: list[dict[str, Any]]) -> None:
    assert [row.keys() for row in mine] == [row.keys() for row in its]
    for one, other in zip(mine, its, strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def assert_same_state(mine: Path, its: Path, lr: float = 3e-4) -> None:
    """Weights and moments to float tolerance: AdamW divides by the square root of a small number."""
    ours, theirs = (load_file(folder / "state" / "state.safetensors") for folder in (mine, its))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        moved = lr * 0.1 if name.startswith(("actor/", "critic/", "head/")) else 1e-4 * float(value.abs().max()) + 1e-12
        assert float((ours[name].float() - value.float()).abs().max()) <= moved, name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain") / "run", 0)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (1, {}), (2, {}), (4, {}), (2, {"trainer__zero_stage": 1}), (2, {"trainer__offload_optimizer": True}),
        (3, {}),
    ],
    ids=["1 rank", "2 ranks", "4 ranks", "stage 1", "offload", "3 ranks"],
)  # fmt: skip
def test_ranks_train_as_one_device_does(tmp_path: Path, plain: Path, size: int, more: dict[str, object]) -> None:
    found = trained(tmp_path / "run", size, None, STEPS, **more)
    assert_same_rows(rows(found), rows(plain))
    assert_same_state(found, plain)


def test_a_shared_trunk_and_grpo_do_too(tmp_path: Path) -> None:
    for number, more in enumerate(({"critic__shared_trunk": True}, {"algorithm__adv_estimator": "grpo"})):
        found, wanted = (trained(tmp_path / f"{number}-{size}", size, None, 1, **more) for size in (2, 0))
        assert_same_rows(rows(found), rows(wanted))
        assert_same_state(found, wanted)


def test_a_model_of_another_architecture_does_too(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", "gemma", NO_SYSTEM)
    more = {"model__path": str(model), "rollout__response_length": 8, "env__max_turn": 2}
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **more) for size in (2, 0))
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)


def test_a_mini_batch_of_several_passes_is_one_step(tmp_path: Path) -> None:
    sizes = {f"{part}__ppo_mini_batch_size": 64 for part in ("actor", "critic")}  # 64 rows: two passes a rank of two
    found, wanted = (trained(tmp_path / str(size), size, None, 1, env__group_size=32, **sizes) for size in (2, 0))
    assert rows(found)[0]["optimizer_steps"] == 1
    assert_same_rows(rows(found), rows(wanted))
    assert_same_state(found, wanted)


@pytest.mark.parametrize(("wrote", "goes_on"), [(2, 0), (0, 2), (2, 3)])
def test_a_state_of_some_ranks_goes_on_with_others(tmp_path: Path, plain: Path, wrote: int, goes_on: int) -> None:
    first = trained(tmp_path / "first", wrote, None, 1)
    second = trained(tmp_path / "second", goes_on, first, STEPS - 1)
    assert_same_rows(rows(first) + rows(second), rows(plain))
    assert_same_state(second, plain)


def test_a_step_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    more = {"actor__entropy_coeff": 3e38, "trainer__nonfinite_patience": 5}  # the loss is beyond float32
    found, wanted = (trained(tmp_path / str(size), size, None, 1, **more) for size in (2, 0))
    skipped = [rows(folder)[0]["nonfinite_updates"] for folder in (found, wanted)]
    assert skipped[0] == skipped[1] > 0
    assert_same_state(found, wanted)


AGAIN = """
from tests.scripted import small
from tests.trainers import QUIET
from trainable.backend.ranks import make_trainer
for _ in range(2):
    trainer = make_trainer(small(**{**QUIET, "trainer__strategy": "deepspeed"}))
    assert trainer.step().row["optimizer_steps"] == 2
    trainer.load_state(*trainer.state())
    trainer.release()
    assert not trainer.meeting.exists()
"""


def test_a_process_can_train_one_run_after_the_other() -> None:
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
