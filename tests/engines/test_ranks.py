"""Tests of a Tune trial of several ranks on declared GPUs: its bundles, its rows, and its end when a rank dies."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.fakes.scripted import SMALL_SETTINGS
from tests.fakes.trainers import QUIET_SETTINGS, make_quiet_trainer
from trainable.backend.gpus import make_bundles
from trainable.backend.torch_backend import TorchBackend
from tune_study.plan.study_plan import ResourcePlan
from tune_study.tune.local_ray import prepare_environment, start_local_ray

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-engines"),
]

SETTINGS = {
    **SMALL_SETTINGS,
    **{key.replace("__", "."): value for key, value in QUIET_SETTINGS.items()},
    "trainer.total_training_steps": 2,
    "trainer.n_gpus_per_node": 2,
    "actor.use_kl_loss": True,
    "actor.kl_loss_coef": 0.1,
}


@pytest.fixture(scope="module")
def declared_gpus() -> Iterator[None]:
    """Two GPUs that are only declared. Ray assigns them, and the run computes on the CPU."""
    prepare_environment(())
    with start_local_ray(ResourcePlan(make_bundles(2), 4, ("0", "1"), (), 1, ""), Console(quiet=True)):
        yield


def run_trial(folder: Path, **overrides: object) -> tuple[list[dict[str, Any]], Any]:
    """Run one trial of two ranks, and return its rows on disk and Tune's result."""
    from ray import tune

    from trainable.trial import PPO

    run_paths = {"run_id": "run", "seed": 0, "run_dir": str(folder / "run"), "checkpoint_dir": str(folder / "kept")}
    config = {**SETTINGS, **overrides, "seed": 0, "run": {"study": "kl", "arm": "0", "runs": [run_paths]}}
    tuner = tune.Tuner(
        PPO,
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=str(folder / "tune"),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    result = tuner.fit()[0]
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines], result


STEPS: dict[str, dict[str, object]] = {
    "stage 2": {"trainer.zero_stage": 2},
    "stage 3": {"trainer.zero_stage": 3},
    # A pass over the full mini-batch with the current weights precedes each optimizer step of DeepSpeed.
    "tpo": {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill", "actor.ppo_epochs": 2},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_trial_of_two_ranks_writes_the_rows_of_one(tmp_path: Path, declared_gpus: None, name: str) -> None:
    rows, result = run_trial(tmp_path, **STEPS[name])
    assert result.error is None
    assert len(rows) == 2
    trainer = make_quiet_trainer(
        trainer__total_training_steps=2,
        trainer__n_gpus_per_node=2,
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        **{key.replace(".", "__"): value for key, value in STEPS[name].items()},
    )
    assert isinstance(trainer.backends["actor"], TorchBackend)
    columns = {"train_success", "reward_std", "pg_loss", "kl_loss", "entropy", "ppo_kl", "actor_grad_norm", "vf_loss"}
    columns |= {"tpo_target_entropy", "tpo_target_top_prob", "sampled_tokens"}
    for row in rows:
        expected_row = trainer.step().row
        for column in columns & expected_row.keys():
            assert row[column] == pytest.approx(expected_row[column], rel=1e-3, abs=1e-5), column


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-engines")
def test_vllm_samples_on_every_rank_from_sharded_weights(tmp_path: Path, declared_gpus: None) -> None:
    rows, result = run_trial(
        tmp_path, **{"trainer.zero_stage": 3, "rollout.name": "vllm", "rollout.max_model_len": 256}
    )
    assert result.error is None
    assert len(rows) == 2
    for row in rows:
        assert row["optimizer_steps"] > 0
        assert row["engine_mismatch_mean"] < 1e-4
        assert row["engine_ess_fraction"] > 0.999


def test_a_rank_that_dies_ends_the_trial_with_its_cause_and_the_rows_stay(tmp_path: Path, declared_gpus: None) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with _kill_rank_when(lambda: path.exists() and path.read_text().count("\n") >= 2):
        rows, result = run_trial(tmp_path, **{"trainer.total_training_steps": 200})
    assert result.error is not None
    assert "rank 1 of 2 has ended" in str(result.error)
    assert 2 <= len(rows) < 200


def test_a_rank_that_dies_before_it_has_joined_is_reported_at_once(tmp_path: Path, declared_gpus: None) -> None:
    with _kill_rank_when(lambda: True):
        rows, result = run_trial(tmp_path)
    assert rows == []
    assert "rank 1 of 2 has ended" in str(result.error)


@contextmanager
def _kill_rank_when(is_time: Callable[[], bool]) -> Iterator[None]:
    """Kill the first process of another rank once `is_time` is true, and check that this has happened."""
    has_killed = threading.Event()

    def kill() -> None:
        while not has_killed.is_set():
            for process in psutil.process_iter() if is_time() else ():
                if "ray::Rank" in " ".join(_get_command_line(process)):
                    os.kill(process.pid, signal.SIGKILL)
                    has_killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    assert has_killed.is_set()
    killer.join()


def _get_command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_error_of_another_rank_is_that_of_the_trial(tmp_path: Path, declared_gpus: None) -> None:
    """The ValueError of one rank is reported, and not the connections that its end closes for the others."""
    import ray

    from trainable.ppo.distributed import _find_first_error

    @ray.remote
    def fails() -> None:
        raise ValueError("the shape does not fit")

    @ray.remote
    def is_cut_off() -> None:
        raise RuntimeError("Connection closed by peer")

    error = _find_first_error([is_cut_off.remote(), fails.remote()], RuntimeError("Connection closed by peer"))
    assert isinstance(error, ValueError)
    assert "the shape does not fit" in str(error)
    assert error.__notes__ == ["(on rank 2 of 3)"]
