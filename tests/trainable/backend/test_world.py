"""How ranks share work: every row belongs to one rank, and the results of all ranks sum to those of one."""

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.trainers import make_quiet_trainer
from trainable.algo.batching import order_length_stratified
from trainable.backend.meter import Meter
from trainable.backend.world import World, compute_local_range, connect, disconnect, shard_rows, skip_child_seeds
from trainable.config.seeds import make_rng
from trainable.ppo import update
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes

SIZES = st.integers(1, 7)


def make_ranks(size: int) -> list[World]:
    """Worlds that have a rank and do not communicate."""
    return [World(rank, size) for rank in range(size)]


@given(st.integers(0, 40), SIZES)
def test_blocks_are_consecutive_and_as_equal_as_can_be(count: int, size: int) -> None:
    blocks = [compute_local_range(count, world) for world in make_ranks(size)]
    assert [number for block in blocks for number in block] == list(range(count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(st.lists(st.integers(1, 1000), max_size=40), SIZES)
def test_every_row_has_one_rank_and_ranks_have_nearly_equal_row_counts(lengths: list[int], size: int) -> None:
    shards = shard_rows(torch.tensor(lengths, dtype=torch.long), size)
    assert len(shards) == size
    assert sorted(row for rows in shards for row in rows.tolist()) == list(range(len(lengths)))
    assert all(rows.tolist() == sorted(rows.tolist()) for rows in shards)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), SIZES)
def test_ranks_have_nearly_equal_token_counts(lengths: list[int], size: int) -> None:
    tokens = [int(torch.tensor(lengths)[rows].sum()) for rows in shard_rows(torch.tensor(lengths), size)]
    # Rows are dealt back and forth, so that no rank exceeds another by more than the longest row.
    assert max(tokens) - min(tokens) <= max(lengths)


@given(st.integers(0, 30), st.integers(1, 5))
def test_skipped_children_are_those_of_the_ranks_before(count: int, local_count: int) -> None:
    all_generators = np.random.default_rng(3).spawn(count + local_count)
    local_generators = skip_child_seeds(np.random.default_rng(3), count).spawn(local_count)
    for local_generator, generator in zip(local_generators, all_generators[count:], strict=True):
        assert local_generator.random() == generator.random()


@pytest.mark.parametrize(("size", "mode"), [(2, "seq-mean-token-mean"), (9, "token-mean")])
def test_gradients_and_sums_of_all_ranks_are_those_of_one(size: int, mode: str) -> None:
    trainer = make_quiet_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.5, actor__entropy_coeff=0.1)
    levels = trainer.val_levels * 2
    episodes = trainer.roll_out(levels, 4, "sampling")
    batch, targets, _ = trainer.prepare_batch(episodes, 2, 2, make_rng(0, "duplicates", 1))
    order = order_length_stratified(batch.lengths)
    arguments = (batch, targets, order, mode, 2, batch.tokens.shape[1])
    expected_gradient, expected_meter = compute_gradient(trainer, make_passes(*arguments))
    rank_results = [compute_gradient(trainer, make_passes(*arguments, world)) for world in make_ranks(size)]
    gradient_sum = torch.stack([gradient for gradient, _ in rank_results]).sum(0)
    assert float((gradient_sum - expected_gradient).norm()) < 1e-5 * float(expected_gradient.norm())
    assert sum(meter.tokens for _, meter in rank_results) == expected_meter.tokens
    for name, value in expected_meter.step_sums.items():
        assert sum(meter.step_sums[name] for _, meter in rank_results) == pytest.approx(float(value), abs=1e-5)


def test_ranks_make_equally_many_passes_and_an_idle_rank_processes_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "TOKENS_PER_PASS", {"cpu": 1})  # every row is a pass
    trainer = make_quiet_trainer()
    episodes = trainer.roll_out(trainer.val_levels, 5, "sampling")
    batch, targets, _ = trainer.prepare_batch(episodes, 1, 1, make_rng(0, "duplicates", 1))
    rows, width = torch.arange(5), batch.tokens.shape[1]
    rank_passes = [list(make_passes(batch, targets, rows, "token-mean", 2, width, world)) for world in make_ranks(3)]
    assert [len(passes) for passes in rank_passes] == [2, 2, 2]
    trained_tokens = [[int(pass_inputs.batch.mask.sum()) for pass_inputs in passes] for passes in rank_passes]
    assert sum(map(sum, trained_tokens)) == int(batch.mask[:5].sum())
    assert sum(count == 0 for counts in trained_tokens for count in counts) == 1
    empty_pass = next(each for passes in rank_passes for each in passes if not each.batch.mask.any())
    assert len(empty_pass.weights) == len(empty_pass.batch.find_prediction_positions()) == 0
    assert not empty_pass.batch.count_needed_tokens().any()


def compute_gradient(trainer: PPOTrainer, passes: object) -> tuple[torch.Tensor, Meter]:
    """Gradient of the whole loss, and the meter that recorded it."""
    meter, update = Meter(), trainer.make_actor_update()
    trainer.model.zero_grad(set_to_none=True)
    for pass_inputs in passes:  # type: ignore[attr-defined]
        sum(update.compute_loss_terms(pass_inputs, meter).values()).backward()  # type: ignore[union-attr]
    gradient = torch.cat([weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None])
    trainer.model.zero_grad(set_to_none=True)
    return gradient, meter


@dataclass(frozen=True)
class TurnTakingRank(World):
    """A rank that is run after the others: it gathers what they have gathered, and its own object."""

    objects: list[Any] = field(default_factory=list)

    def all_gather_object(self, local_object: Any) -> list[Any]:
        self.objects.append(local_object)
        return list(self.objects)


def test_a_validation_of_ranks_records_the_episodes_of_one() -> None:
    trainer = make_quiet_trainer(trainer__log_val_generations=3, env__val_env_groups=5, env__val_group_size=2)
    expected_evaluation = trainer.evaluate("val", "sampled")
    assert len(expected_evaluation.episodes) == 3
    for size in (2, 9):
        objects: list[Any] = []
        for rank in range(size):
            trainer.world = TurnTakingRank(rank, size, objects)
            evaluation = trainer.evaluate("val", "sampled")
        assert evaluation == expected_evaluation  # of the last rank, which has gathered the episodes of all


def meet(rank: int, rendezvous: Path, results: Any) -> None:
    """Be one of two ranks, and tell what it has gathered."""
    world = connect(rank, 2, rendezvous, on_wait=lambda: None)
    gathered_tensor = world.all_gather(torch.tensor([1.0 + rank, 10.0 * rank]))
    results.put((gathered_tensor.tolist(), world.all_gather_object({"rank": rank})))
    disconnect(rendezvous)


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning")
def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # which imports nothing again
    results = context.SimpleQueue()
    ranks = [context.Process(target=meet, args=(rank, tmp_path / "meeting", results)) for rank in (1, 0)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    expected_result = ([1.0, 0.0, 2.0, 10.0], [{"rank": 0}, {"rank": 1}])
    assert [results.get() for _ in ranks] == [expected_result] * 2
    assert not (tmp_path / "meeting").exists()
