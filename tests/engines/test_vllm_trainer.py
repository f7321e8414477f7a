"""Tests of a trainer with rollouts from vLLM: both have the same log-probs, and a difference ends the run."""

from importlib.util import find_spec

import pytest

from tests.fakes.trainers import make_quiet_trainer
from trainable.models.lora import ADAPTER_NAME, find_adapters
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import EngineMismatchError

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-engines"),
    pytest.mark.filterwarnings("ignore"),
]


def make_vllm_trainer(**settings: object) -> PPOTrainer:
    return make_quiet_trainer(rollout__name="vllm", rollout__max_model_len=256, **settings)


def test_float16_and_a_head_in_float32_lower_the_mismatch_of_bfloat16() -> None:
    mismatches = {}
    for dtype, head_dtype in (("bfloat16", "model"), ("bfloat16", "float32"), ("float16", "model")):
        trainer = make_vllm_trainer(model__dtype=dtype, model__head_dtype=head_dtype)
        mismatches[dtype, head_dtype] = trainer.step().row["engine_mismatch_mean"]
        trainer.close()
    # Measured: 0.0079, 0.0058 and 0.0008 nats.
    assert mismatches["float16", "model"] < mismatches["bfloat16", "model"] / 4
    assert mismatches["bfloat16", "float32"] < mismatches["bfloat16", "model"]


def test_a_cache_for_one_conversation_is_enough_to_start() -> None:
    make_vllm_trainer(rollout__kv_cache_gib=1e-6).close()


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_trees_are_sampled_and_trained(lora_rank: int) -> None:
    """Conversations of children begin while those of their roots wait, and the weights are pushed after each step."""
    from tests.sandboxes.trees.test_runs import make_trainer

    trainer = make_trainer(
        rollout__name="vllm",
        rollout__max_model_len=512,
        model__lora_rank=lora_rank,
        env__env_groups=4,
        trainer__total_training_steps=4,
        trainer__test_freq=1,
    )
    rows = [trainer.step().row for _ in range(3)]
    assert all(row["val_reward"] > 0 for row in rows)
    assert sum(row["train_children"] for row in rows) > 0
    assert max(row["engine_mismatch_mean"] for row in rows) < 1e-4
    assert all(row["optimizer_steps"] == 1 and row["train_reward"] > 0 for row in rows)
    trainer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_into_the_weights_of_vllm(dtype: str) -> None:
    trainer = make_vllm_trainer(
        model__lora_rank=8,
        model__dtype=dtype,
        actor__lr=3e-3,
        critic__shared_trunk=True,
        trainer__total_training_steps=4,
    )
    mismatches = [trainer.step().row["engine_mismatch_mean"] for _ in range(3)]  # the weights have changed twice
    assert max(mismatches) < (1e-4 if dtype == "float32" else 0.02)
    for _, layer in find_adapters(trainer.model):
        layer.scaling[ADAPTER_NAME] *= -1  # changes the passes of the trainer, while vLLM keeps its weights
    # The episodes of the next step are still those of the old adapters: measured, and no reason to end the run.
    assert trainer.step().row["engine_mismatch_mean"] > 5 * max(mismatches)
    trainer.close()


def test_rows_have_the_mismatch_and_old_weights_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_vllm_trainer(trainer__total_training_steps=4)
    for _ in range(2):
        row = trainer.step().row
        assert row["engine_mismatch_mean"] < 1e-4
        assert row["engine_ess_fraction"] > 0.999
        assert row["seconds_sync_weights"] > 0
    state = trainer.get_state()
    monkeypatch.setattr(
        trainer.engine.sampler, "update_weights", lambda weights: list(weights)
    )  # the engine keeps its weights
    for group in trainer.backends["actor"].optimizer.param_groups:  # type: ignore[attr-defined]
        group["lr"] = 0.05
    with pytest.raises(EngineMismatchError, match="samples from other weights"):
        trainer.step()
    monkeypatch.undo()
    trainer.load_state(*state)
    trainer.close()


def test_a_run_trains_from_the_log_probs_of_vllm() -> None:
    rows = {}
    for recomputes in (True, False):
        trainer = make_vllm_trainer(
            rollout__recompute_logprobs=recomputes,
            trainer__total_training_steps=4,
            trainer__measure_val_kl=True,
            trainer__test_freq=2,
        )
        rows[recomputes] = [trainer.step().row for _ in range(2)]
        trainer.close()
    for plain_row, row in zip(rows[True], rows[False], strict=True):
        assert {name for name in plain_row if name not in row} == {
            "entropy",
            "engine_mismatch_mean",
            "engine_mismatch_max",
            "engine_kl",
            "engine_ess_fraction",
        }
        # In float32 both engines compute the same to 1e-4 nats.
        for name in ("pg_loss", "actor_grad_norm", "train_success"):
            assert row[name] == pytest.approx(plain_row[name], rel=1e-2, abs=1e-3), name
    assert "val_kl_to_reference" in rows[False][1]
