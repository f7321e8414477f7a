import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.trainers import copy_weights, make_quiet_trainer
from tests.fakes.trials import find_newest_checkpoint, get_rows, start_trial
from trainable.backend.torch_backend import TorchBackend
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.failures import NON_FINITE, NonFiniteError, RunFailedError, classify_failure
from trainable.runs.nonfinite import (
    check_finite,
    find_nonfinite_gradients,
    find_nonfinite_losses,
    find_nonfinite_weights,
)

LAYER = "model.layers.0.mlp.up_proj.weight"


def breaking(trainer: PPOTrainer, value: float) -> torch.utils.hooks.RemovableHandle:
    """From now on one entry of one gradient is `value`."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt[0, 0] = value
        return spoilt

    return dict(trainer.model.named_parameters())[LAYER].register_hook(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_optimizer_step_with_a_broken_gradient_is_skipped_and_counted(value: float) -> None:
    trainer = make_quiet_trainer(actor__ppo_mini_batch_size=2)
    handle = breaking(trainer, value)
    before = {name: tensor for name, tensor in copy_weights(trainer).items() if name.startswith("actor/")}
    row = trainer.step().row
    assert row["nonfinite_updates"] > 1
    assert row["optimizer_steps"] == 0
    assert all(torch.equal(copy_weights(trainer)[name], tensor) for name, tensor in before.items())
    assert trainer.consecutive_nonfinite_steps == 1
    handle.remove()
    row = trainer.step().row
    assert (row["nonfinite_updates"], trainer.consecutive_nonfinite_steps) == (0, 0)
    assert row["optimizer_steps"] > 0


def test_repeated_ones_end_the_run_with_steps_and_tensors_named() -> None:
    trainer = make_quiet_trainer(trainer__nonfinite_patience=2, trainer__total_training_steps=5)
    trainer.step()
    breaking(trainer, math.nan)
    trainer.step()
    with pytest.raises(NonFiniteError) as caught:
        trainer.step()
    assert str(caught.value) == (
        "updates were skipped in 2 consecutive training steps, up to step 3, because of values that are not "
        f"finite: gradient of {LAYER} (trainer.nonfinite_patience=2)"
    )
    assert classify_failure(caught.value, True)[:1] == ("non-finite",)


def test_the_count_goes_on_in_another_process() -> None:
    first = make_quiet_trainer(trainer__nonfinite_patience=3, trainer__total_training_steps=5)
    breaking(first, math.nan)
    first.step()
    first.step()
    second = make_quiet_trainer(trainer__nonfinite_patience=3, trainer__total_training_steps=5)
    second.load_state(*first.get_state())
    breaking(second, math.nan)
    with pytest.raises(NonFiniteError, match="updates were skipped in 3 consecutive training steps, up to step 3,"):
        second.step()


def test_weights_that_a_step_broke_end_the_run_and_the_state_before_is_kept(tmp_path: Path) -> None:
    trainable = start_trial(tmp_path)
    trainable.step()
    trainer = trainable.begin().trainer.trainer
    critic, backend = trainer.critic, trainer.backends["critic"]
    assert critic is not None
    assert isinstance(backend, TorchBackend)
    with torch.no_grad():
        critic.model.embed_tokens.weight[-1] = 3e38  # of a token that is never read
    backend.optimizer.param_groups[0]["weight_decay"] = -1e9
    with pytest.raises(RunFailedError, match="the weights after step 2 are not finite: weight critic") as raised:
        trainable.step()
    assert raised.value.failure.kind == NON_FINITE
    assert [row["step"] for row in get_rows(trainable)] == [1]
    assert find_newest_checkpoint(tmp_path).name == "step_1"
    assert all(
        bool(torch.isfinite(tensor).all()) for tensor in read_checkpoint(find_newest_checkpoint(tmp_path))[0].values()
    )


def test_a_policy_without_finite_logits_is_not_sampled_from() -> None:
    trainer = make_quiet_trainer()
    with torch.no_grad():
        trainer.model.lm_head.weight[3, 0] = math.nan
    with pytest.raises(NonFiniteError, match="logits were not finite"):
        trainer.step()


def test_what_is_named() -> None:
    whole, broken, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    whole.grad, broken.grad = torch.ones(3), torch.tensor([1.0, math.inf, 0.0])
    named = [("a", whole), ("b", broken), ("c", unused)]
    assert find_nonfinite_gradients(named) == ["gradient of b"]
    assert find_nonfinite_weights(named) == []
    broken.data[1] = math.nan
    assert find_nonfinite_weights(named) == ["weight b"]
    parts = {"pg_loss": torch.tensor(math.nan), "kl_loss": torch.tensor(1.0), "entropy_loss": torch.tensor(-math.inf)}
    assert find_nonfinite_losses(parts) == ["pg_loss", "entropy_loss"]


def test_a_long_list_of_names_is_cut() -> None:
    names = [f"gradient of {number}" for number in range(6)]
    with pytest.raises(NonFiniteError, match="gradient of 0, gradient of 1, gradient of 2 and 3 more"):
        check_finite(9, 3, 3, [*names, *names], [])


@pytest.mark.parametrize(("in_a_row", "ends"), [(0, False), (2, False), (3, True), (4, True)])
def test_patience(in_a_row: int, ends: bool) -> None:
    if ends:
        with pytest.raises(NonFiniteError):
            check_finite(9, in_a_row, 3, ["pg_loss"], [])
    else:
        check_finite(9, in_a_row, 3, ["pg_loss"], [])
