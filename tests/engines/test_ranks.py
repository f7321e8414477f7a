"""A Tune trial of several ranks on declared GPUs: its bundles, its rows, and what becomes of it when a rank dies."""

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
from tests.fakes.trainers import QUIET_SETTINGS
from tune_study.placement.resources import make_bundles
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.tune.local_ray import start_local_ray
from tune_study.tune.run import prepare_environment

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
def gpus() -> Iterator[None]:
    """Two GPUs that are only declared: Ray deals them out, the run computes on the processor."""
    prepare_environment(())
    with start_local_ray(ResourcePlan(make_bundles(2), 4, ("0", "1"), (), 1, ""), Console(quiet=True)):
        yield


def run(folder: Path, **overrides: object) -> tuple[list[dict[str, Any]], Any]:
    """Rows on disk and Tune's result of one trial of two ranks."""
    from ray import tune

    from trainable.trial import Trial
    from tune_study.placement.resources import make_placement_group

    place = {"run_id": "run", "seed": 0, "run_dir": str(folder / "run"), "checkpoint_dir": str(folder / "kept")}
    config = {
        "study": "kl",
        "run_id": "run",
        "arm": "0",
        "settings": {**SETTINGS, **overrides},
        "runs": [place],
        "side_by_side": False,
        "finished": False,
        "family": "trainable.families:LANGUAGE_MODEL",
        "stop_rules": [],
        "interrupt": None,
        "storage": None,
        "storage_patience": 0.0,
    }
    tuner = tune.Tuner(
        tune.with_resources(Trial, make_placement_group(2)),
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


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trial_of_two_ranks_writes_the_rows_of_one(tmp_path: Path, gpus: None, stage: int) -> None:
    from tests.fakes.trainers import make_quiet_trainer
    from trainable.backend.torch_backend import TorchBackend

    rows, result = run(tmp_path, **{"trainer.zero_stage": stage})
    assert result.error is None
    assert len(rows) == 2
    alone = make_quiet_trainer(
        trainer__total_training_steps=2, trainer__n_gpus_per_node=2, actor__use_kl_loss=True, actor__kl_loss_coef=0.1
    )
    assert isinstance(alone.backends["actor"], TorchBackend)
    for row in rows:
        wanted = alone.step().row
        for name in ("train_success", "reward_std", "pg_loss", "kl_loss", "entropy", "vf_loss", "sampled_tokens"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name


def test_two_ranks_share_out_the_rollouts_of_a_group_under_the_tpo_loss(tmp_path: Path, gpus: None) -> None:
    """A pass over the whole mini-batch precedes each of DeepSpeed's optimizer steps, with the weights of the moment."""
    from tests.fakes.trainers import make_quiet_trainer

    settings = {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill", "actor.ppo_epochs": 2}
    rows, result = run(tmp_path, **settings)
    assert result.error is None
    assert len(rows) == 2
    alone = make_quiet_trainer(
        trainer__total_training_steps=2,
        trainer__n_gpus_per_node=2,
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        **{key.replace(".", "__"): value for key, value in settings.items()},
    )
    for row in rows:
        wanted = alone.step().row
        for name in ("pg_loss", "tpo_target_entropy", "tpo_target_top_prob", "ppo_kl", "kl_loss", "actor_grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-engines")
def test_vllm_samples_on_every_rank_from_weights_that_are_dealt_out(tmp_path: Path, gpus: None) -> None:
    rows, result = run(
        tmp_path,
        **{
            "trainer.zero_stage": 3,
            "rollout.name": "vllm",
            "rollout.max_model_len": 256,
        },
    )
    assert result.error is None
    assert len(rows) == 2
    for row in rows:
        assert row["optimizer_steps"] > 0
        assert row["engine_mismatch_mean"] < 1e-4
        assert row["engine_ess_fraction"] > 0.999


def test_a_rank_that_dies_ends_the_trial_with_its_cause_and_the_rows_stay(tmp_path: Path, gpus: None) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with _rank_killed_when(lambda: path.exists() and path.read_text().count("\n") >= 2):
        rows, result = run(tmp_path, **{"trainer.total_training_steps": 200})
    assert result.error is not None
    assert "rank 1 of 2 has ended" in str(result.error)
    assert 2 <= len(rows) < 200


def test_a_rank_that_dies_before_it_has_joined_is_told_at_once(tmp_path: Path, gpus: None) -> None:
    with _rank_killed_when(lambda: True):
        rows, result = run(tmp_path)
    assert rows == []
    assert "rank 1 of 2 has ended" in str(result.error)


@contextmanager
def _rank_killed_when(is_time: Callable[[], bool]) -> Iterator[None]:
    """The first process of another rank that is seen once it is time is killed; an end of it was seen."""
    killed = threading.Event()

    def kill() -> None:
        while not killed.is_set():
            for process in psutil.process_iter() if is_time() else ():
                if "ray::Rank" in " ".join(_words(process)):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    assert killed.is_set()
    killer.join()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_what_another_rank_met_is_the_trials_error(tmp_path: Path, gpus: None) -> None:
    """A ValueError of one rank is told, not the connections that it closed for the others."""
    import ray

    from trainable.ppo.distributed import _find_first_error

    @ray.remote
    def fails() -> None:
        raise ValueError("the shape does not fit")

    @ray.remote
    def is_cut_off() -> None:
        raise RuntimeError("Connection closed by peer")

    found = _find_first_error([is_cut_off.remote(), fails.remote()], RuntimeError("Connection closed by peer"))
    assert isinstance(found, ValueError)
    assert "the shape does not fit" in str(found)
    assert found.__notes__ == ["(on rank 2 of 3)"]
