import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.trainers import copy_weights, make_quiet_trainer
from tests.fakes.trials import find_newest_checkpoint, get_rows, start_trial
from trainable.backend.meter import (
    check_finite,
    find_nonfinite_gradients,
    find_nonfinite_losses,
    find_nonfinite_weights,
)
from trainable.backend.torch_backend import TorchBackend
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import measure_mismatch
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.failures import NON_FINITE, NonFiniteError, classify_failure

IN_TORCH = {"model__compiled_passes": False}
LAYER = "model.layers.0.mlp.up_proj.weight"


def break_gradient(trainer: PPOTrainer, value: float) -> torch.utils.hooks.RemovableHandle:
    """Make one entry of one gradient `value` in all later backward passes."""

    def change_entry(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed[0, 0] = value
        return changed

    return dict(trainer.model.named_parameters())[LAYER].register_hook(change_entry)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_optimizer_step_with_a_broken_gradient_is_skipped_and_counted(value: float) -> None:
    trainer = make_quiet_trainer(actor__ppo_mini_batch_size=2)
    handle = break_gradient(trainer, value)
    old_weights = {name: tensor for name, tensor in copy_weights(trainer).items() if name.startswith("actor/")}
    row = trainer.step().row
    assert row["nonfinite_updates"] > 1
    assert row["optimizer_steps"] == 0
    assert all(torch.equal(copy_weights(trainer)[name], tensor) for name, tensor in old_weights.items())
    assert trainer.consecutive_nonfinite_steps == 1
    handle.remove()
    row = trainer.step().row
    assert (row["nonfinite_updates"], trainer.consecutive_nonfinite_steps) == (0, 0)
    assert row["optimizer_steps"] > 0


def test_repeated_nonfinite_updates_end_the_run_with_steps_and_tensors_named() -> None:
    trainer = make_quiet_trainer(trainer__nonfinite_patience=2, trainer__total_training_steps=5)
    trainer.step()
    break_gradient(trainer, math.nan)
    trainer.step()
    with pytest.raises(NonFiniteError) as raised:
        trainer.step()
    assert str(raised.value) == (
        "updates were skipped in 2 consecutive training steps, up to step 3, because of values that are not "
        f"finite: gradient of actor.{LAYER} (trainer.nonfinite_patience=2)"
    )
    assert classify_failure(raised.value, True)[:1] == ("non-finite",)


def test_the_count_goes_on_in_another_process() -> None:
    trainer = make_quiet_trainer(trainer__nonfinite_patience=3, trainer__total_training_steps=5)
    break_gradient(trainer, math.nan)
    trainer.step()
    trainer.step()
    resumed = make_quiet_trainer(trainer__nonfinite_patience=3, trainer__total_training_steps=5)
    resumed.load_state(*trainer.get_state())
    break_gradient(resumed, math.nan)
    with pytest.raises(NonFiniteError, match="updates were skipped in 3 consecutive training steps, up to step 3,"):
        resumed.step()


def test_weights_that_a_step_broke_end_the_run_and_the_state_before_is_kept(tmp_path: Path) -> None:
    trainable = start_trial(tmp_path)
    trainable.step()
    trainer = trainable.begin().trainer.trainer
    critic, backend = trainer.critic, trainer.backends["critic"]
    assert critic is not None
    assert isinstance(backend, TorchBackend)
    with torch.no_grad():
        critic.model.embed_tokens.weight[-1] = 3e38  # the embedding of a token that never occurs
    backend.optimizer.param_groups[0]["weight_decay"] = -1e9
    result = trainable.step()
    assert result["done"]
    assert "the weights after step 2 are not finite: weight critic" in result["failure"]
    assert result["failure_class"] == NON_FINITE
    assert [row["step"] for row in get_rows(trainable)] == [1]
    assert find_newest_checkpoint(tmp_path).name == "step_1"
    tensors, _ = read_checkpoint(find_newest_checkpoint(tmp_path))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_a_policy_without_finite_logits_is_not_sampled_from() -> None:
    trainer = make_quiet_trainer()
    trainer.step()
    with torch.no_grad():
        trainer.model.lm_head.weight[3, 0] = math.nan
    with pytest.raises(
        NonFiniteError, match=r"logits, divided by the temperature 1, .* in the validation after step 1$"
    ):
        trainer.evaluate("val", "greedy")
    with pytest.raises(NonFiniteError, match=r"logits, divided by the temperature 1, were not finite .*, in step 2$"):
        trainer.step()


def test_nonfinite_gradients_weights_and_losses_are_named() -> None:
    finite, broken, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    finite.grad, broken.grad = torch.ones(3), torch.tensor([1.0, math.inf, 0.0])
    named_parameters = [("a", finite), ("b", broken), ("c", unused)]
    gradients = [(name, parameter.grad) for name, parameter in named_parameters if parameter.grad is not None]
    assert find_nonfinite_gradients(gradients, torch.tensor(math.inf)) == ["gradient of b"]
    assert find_nonfinite_gradients(gradients[:1], torch.tensor(1.0)) == []
    assert find_nonfinite_gradients(gradients[:1], torch.tensor(math.inf)) == ["norm of the gradient"]
    assert find_nonfinite_weights(named_parameters) == []
    broken.data[1] = math.nan
    assert find_nonfinite_weights(named_parameters) == ["weight b"]
    losses = [("pg_loss", torch.tensor(math.nan)), ("kl_loss", torch.tensor(1.0)), ("entropy", torch.tensor(-math.inf))]
    assert find_nonfinite_losses(losses) == ["pg_loss", "entropy"]
    assert find_nonfinite_losses(losses[1:2]) == find_nonfinite_losses([]) == []
    # A sum that overflows is of finite numbers.
    assert find_nonfinite_losses([("pg_loss", torch.tensor(3e38))] * 2) == []


@pytest.mark.parametrize(
    ("settings", "quantity"),
    [
        ({"actor__entropy_coeff": 1e38}, "finite: norm of the gradient"),
        # Passes in torch multiply before they scale: compiled ones have finite gradients here.
        ({**IN_TORCH, "actor__entropy_coeff": 3.4e38}, r"finite: gradient of actor\.model\.embed_tokens\.weight"),
        ({"actor__use_kl_loss": True, "actor__kl_loss_coef": 1e30}, "finite: norm of the gradient"),
        ({"env__format_penalty": -1e30, "critic__ppo_mini_batch_size": 8}, "finite: vf_loss"),
        (
            {"rollout__temperature": 1.2e-38},
            "logits, divided by the temperature 1.2e-38, were not finite during sampling",
        ),
    ],
    ids=str,
)
def test_a_setting_that_overflows_ends_with_the_step_and_a_quantity(settings: dict[str, object], quantity: str) -> None:
    trainer = make_quiet_trainer(trainer__nonfinite_patience=1, **settings)
    with pytest.raises(NonFiniteError, match=quantity) as raised:
        trainer.step()
    assert re.search(r"\bstep 1\b", str(raised.value))


def test_rewards_that_overflow_are_found_with_any_metric_of_the_filter() -> None:
    trainer = make_quiet_trainer(env__format_penalty=-3e38, filter__rollout_filter_metric="length")
    with pytest.raises(NonFiniteError, match=r"^rewards of groups were not finite, in step 1$"):
        trainer.step()


@pytest.mark.parametrize(
    ("trainer_value", "engine_value", "words"),
    [(math.nan, -1.0, "log-probs of the trainer were"), (math.inf, math.nan, "of the trainer and the engine were")],
)
def test_log_probs_that_are_not_finite_are_no_mismatch_of_engines(
    trainer_value: float, engine_value: float, words: str
) -> None:
    with pytest.raises(NonFiniteError, match=f"{words} not finite at step 7"):
        measure_mismatch(torch.tensor([-1.0, trainer_value]), torch.tensor([-1.0, engine_value]), step=7)


def test_a_long_list_of_names_is_cut() -> None:
    names = [f"gradient of {number}" for number in range(6)]
    with pytest.raises(NonFiniteError, match="gradient of 0, gradient of 1, gradient of 2 and 3 more"):
        check_finite(9, 3, 3, [*names, *names], [])
