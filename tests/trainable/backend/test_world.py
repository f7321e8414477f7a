"""How ranks share work: every thing has one holder, and their parts sum to the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.trainers import make_quiet_trainer
from trainable.algo.batching import order_length_stratified
from trainable.backend.meter import Meter
from trainable.backend.world import (
    SINGLE_PROCESS,
    SingleProcess,
    chain_blocks,
    compute_local_range,
    shard_rows,
    skip_child_seeds,
)
from trainable.config.seeds import make_rng
from trainable.ppo import update
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes

SIZES = st.integers(1, 7)


def ranks(size: int) -> list[SingleProcess]:
    """Worlds that know their number and speak to nobody."""
    return [SingleProcess(rank, size) for rank in range(size)]


@given(st.integers(0, 40), SIZES)
def test_blocks_are_consecutive_and_as_equal_as_can_be(count: int, size: int) -> None:
    blocks = [compute_local_range(count, world) for world in ranks(size)]
    assert [number for block in blocks for number in block] == list(range(count))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(st.lists(st.integers(1, 1000), max_size=40), SIZES)
def test_rows_have_one_holder_and_ranks_nearly_as_many_of_them(lengths: list[int], size: int) -> None:
    dealt = shard_rows(torch.tensor(lengths, dtype=torch.long), size)
    assert len(dealt) == size
    assert sorted(row for rows in dealt for row in rows.tolist()) == list(range(len(lengths)))
    assert all(rows.tolist() == sorted(rows.tolist()) for rows in dealt)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), SIZES)
def test_ranks_have_nearly_as_many_tokens(lengths: list[int], size: int) -> None:
    tokens = [int(torch.tensor(lengths)[rows].sum()) for rows in shard_rows(torch.tensor(lengths), size)]
    assert max(tokens) - min(tokens) <= max(lengths)  # dealt back and forth, nobody is ahead by more than the longest


def test_one_rank_takes_all_in_their_order() -> None:
    assert [rows.tolist() for rows in shard_rows(torch.tensor([5, 3, 9]), 1)] == [[0, 1, 2]]


@given(st.integers(0, 30), st.integers(1, 5))
def test_skipped_children_are_those_of_the_ranks_before(count: int, mine: int) -> None:
    whole = np.random.default_rng(3).spawn(count + mine)
    own = skip_child_seeds(np.random.default_rng(3), count).spawn(mine)
    assert [draws.random() for draws in own] == [draws.random() for draws in whole[count:]]


def test_what_alone_gathers_is_its_own() -> None:
    assert list(chain_blocks(SINGLE_PROCESS.all_gather_object([1, 2]))) == [1, 2]
    part = torch.ones(2)
    assert SINGLE_PROCESS.all_reduce(part) is part
    assert SINGLE_PROCESS.broadcast({"a": part}) == {"a": part}


@pytest.mark.parametrize("size", [2, 3, 4, 9])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gradients_and_sums_of_all_ranks_are_those_of_one(size: int, mode: str) -> None:
    trainer = make_quiet_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.5, actor__entropy_coeff=0.1)
    levels = trainer.val_levels * 2
    episodes = trainer.roll_out(levels, 4, make_rng(0, "sampling", 1))
    batch, targets, _ = trainer.prepare_batch(episodes, 2, 2, make_rng(0, "duplicates", 1))
    order = order_length_stratified(batch.lengths)
    whole, alone = gradient(trainer, make_passes(batch, targets, order, mode, 2, batch.tokens.shape[1]))
    parts = [
        gradient(trainer, make_passes(batch, targets, order, mode, 2, batch.tokens.shape[1], world))
        for world in ranks(size)
    ]
    summed = torch.stack([part for part, _ in parts]).sum(0)
    assert float((summed - whole).norm()) < 1e-5 * float(whole.norm())
    assert sum(meter.tokens for _, meter in parts) == alone.tokens
    for name, value in alone.step_sums.items():
        assert sum(meter.step_sums[name] for _, meter in parts) == pytest.approx(value, abs=1e-5)


def test_ranks_make_equally_many_passes_and_one_that_waits_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "TOKENS_PER_PASS", {"cpu": 1})  # every row is a pass
    trainer = make_quiet_trainer()
    episodes = trainer.roll_out(trainer.val_levels, 5, make_rng(0, "sampling", 1))
    batch, targets, _ = trainer.prepare_batch(episodes, 1, 1, make_rng(0, "duplicates", 1))
    rows, width = torch.arange(5), batch.tokens.shape[1]
    cuts = [list(make_passes(batch, targets, rows, "token-mean", 2, width, world)) for world in ranks(3)]
    assert [len(cut) for cut in cuts] == [2, 2, 2]
    trained = [[int(part.batch.mask.sum()) for part in cut] for cut in cuts]
    assert sum(map(sum, trained)) == int(batch.mask[:5].sum())
    assert sum(count == 0 for counts in trained for count in counts) == 1
    empty = next(part for cut in cuts for part in cut if not part.batch.mask.any())
    assert len(empty.weights) == len(empty.batch.find_prediction_positions()) == 0
    assert not empty.batch.count_needed_tokens().any()


def gradient(trainer: PPOTrainer, cut: object) -> tuple[torch.Tensor, Meter]:
    """Of the whole loss, and the meter that read it."""
    meter, update = Meter(), trainer.make_actor_update()
    trainer.model.zero_grad(set_to_none=True)
    for part in cut:  # type: ignore[attr-defined]
        sum(update.compute_loss_terms(part, meter).values()).backward()  # type: ignore[union-attr]
    found = torch.cat([weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None])
    trainer.model.zero_grad(set_to_none=True)
    return found, meter


def test_levels_played_by_ranks_are_the_episodes_of_one() -> None:
    trainer = make_quiet_trainer()
    levels = [*trainer.levels[0], *trainer.levels[1]]
    whole = trainer.roll_out(levels, 3, make_rng(0, "sampling", 7))
    shared = []
    for world in ranks(3):
        trainer.world = world
        shared += trainer.roll_out(levels, 3, make_rng(0, "sampling", 7))
    assert [(one.group, one.tokens.tolist()) for one in shared] == [(one.group, one.tokens.tolist()) for one in whole]
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(shared, whole, strict=True))
