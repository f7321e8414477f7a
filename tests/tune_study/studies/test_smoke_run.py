"""The smoke grid by its command, with the real trainer: all of group 3, and two points of every other group."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.slow
RUN = "smoke_test_top_p_sokoban-tiny_low_var_kl_ftmt"
POINTS = tuple(
    f"{name}-low_var_kl"
    for name in (
        "g1-smoke-ppo-sokoban-topk100-kl0001-ent0",
        "g1-smoke-ppo-sokoban-topk40-kl003-ent0",
        "g2-smoke-ppo-sokoban-topk80-kl0-ent0003",
        "g2-smoke-ppo-sokoban-topk60-kl0-ent003",
        "g4-smoke-ppo-sokoban-ta-topk100-kl0001-ent0001",
        "g4-smoke-ppo-sokoban-ta-topk100-kl003-ent003",
        "g5-smoke-ppo-sokoban-nofilter-kl0001-ent003",
        "g5-smoke-ppo-sokoban-nofilter-kl003-ent0001",
    )
)
SMALL_OPTIONS = [
    f"--set=env.{setting}" for setting in ("env_groups=4", "group_size=4", "val_env_groups=8", "test_env_groups=8")
]


def run_smoke(output: Path, *words: str) -> str:
    """Run the command with small batches and return its output; the command must succeed."""
    command = [sys.executable, "-m", "tune_study", "run", "smoke", "--preset", "laptop", "--output", str(output)]
    # The published runs: one of each arm, also of the baseline.
    process = subprocess.run(
        [*command, "--baseline-seeds", "1", *SMALL_OPTIONS, *words], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    run_smoke(folder, "--groups", "3", "--steps", "5")
    run_smoke(folder / "points", "--groups", ",".join(POINTS), "--steps", "2")
    return folder


def read_summary(output: Path) -> list[str]:
    path = output / "logs/smoke_test_top_p/smoke_test_results_sokoban-tiny_low_var_kl_ftmt.log"
    return path.read_text().split("Summary ===\n")[1].splitlines()[1:]


def test_group_3_runs_to_its_end(output: Path) -> None:
    trials = pd.read_parquet(output / "results" / RUN / "trials.parquet")
    assert trials["status"].tolist() == ["completed"] * 4
    assert trials["steps_done"].tolist() == [5] * 4
    lines = read_summary(output)
    assert lines[-1] == "Total: 4 | Success: 4 | Failed: 0 | Early stopped: 0 | Not ended: 0"
    for line, name in zip(lines, ("topk100", "topk80", "topk60", "topk40"), strict=False):
        cells = dict(cell.split("=", 1) for cell in line.split(" | ")[1:])
        assert line.startswith(f"g3-smoke-ppo-sokoban-{name}-kl0-ent0-low_var_kl-ftmt | ")
        times = {key: float(cells[f"{key}_time"].rstrip("s")) for key in ("train", "eval", "collapse", "total")}
        assert times["total"] == pytest.approx(times["train"] + times["eval"] + times["collapse"], abs=0.02)
        assert min(times.values()) > 0
        log = output / "logs/smoke_test_top_p_details" / f"{line.split(' | ')[0]}.log"
        assert "step 5/5" in log.read_text()


def test_points_of_every_group_run(output: Path) -> None:
    trials = pd.read_parquet(output / "points/results" / RUN / "trials.parquet").set_index("arm")
    assert trials.index.tolist() == list(POINTS)
    assert set(trials["status"]) == {"completed"}
    task_off = trials["config/algorithm.zero_task_advantage"]
    assert task_off[task_off].index.tolist() == [name for name in POINTS if name.startswith("g4")]
    steps = pd.read_parquet(output / "points/results" / RUN / "steps.parquet")
    with_kl = steps[steps["arm"].str.contains("-kl00")]
    assert with_kl["kl_loss"].notna().all()
    assert steps[steps["arm"].str.contains("-kl0-")]["kl_loss"].isna().all()


def test_another_group_joins_by_itself(output: Path) -> None:
    words = ("--groups", "3", "--steps", "5", "--kl-type", "low_var_kl")
    text = run_smoke(output, "--groups", "2", "--steps", "5", "--dry-run")
    assert "20 runs: KL and entropy coefficients, filter in group 2 (16 arms), group 3 (4 arms)" in text
    text = run_smoke(output, *words)
    assert "0 of 4 runs remain" in text
    assert "Starting Ray" not in text
