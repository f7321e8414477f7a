"""Tests of training on trees: credit by hand, batches, gradients, and whole steps with real REPLs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sandboxes.trees.recipe import PAPERS_TINY
from sandboxes.trees.repl.char_f1 import compute_char_f1
from sandboxes.trees.repl.texts import NO_BLOCK_PROBLEM
from tests.fakes.hub_models import write_small_model
from tests.fakes.scripted import make_episode, make_small_config
from tests.fakes.trainers import check_resumption, run_steps
from trainable.config.run_config import ConfigError
from trainable.ppo.evaluation import record_episode
from trainable.ppo.targets import compute_tree_advantages
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import recompute_logprobs
from trainable.rollout.episode import Episode, collate, list_rollouts, replace_rollouts
from trainable.runs.episode_lines import MAX_ANSWER_CHARS

SETTINGS = {name.replace(".", "__"): value for name, value in PAPERS_TINY.settings.items()}


def make_trainer(**overrides: object) -> PPOTrainer:
    game = {"name": "papers", "max_turn": 3, "group_size": 6, "format_penalty": 0.0, "test_env_groups": 0}
    settings = {f"env__{name}": value for name, value in game.items()} | {"model__path": "papers-tiny"}
    settings |= {"rollout__response_length": PAPERS_TINY.response_length, **SETTINGS, **overrides}
    return PPOTrainer(make_small_config(**settings))


def make_tree(score: float, group: int, children: Sequence[int] = (), seed: int = 0) -> Episode:
    """A root of two turns with `score`, and children of so many turns."""
    rng = np.random.default_rng(seed)
    root = make_episode([(3, 2, 0.0), (2, 4, score)], group, rng)
    return root._replace(children=tuple(make_episode([(2, 3, 0.0)] * turns, group, rng) for turns in children))


TREES = [make_tree(1.0, 0, [1], 0), make_tree(0.0, 0, [], 1), make_tree(0.5, 1, [2, 1], 2), make_tree(0.5, 1, [], 3)]


def test_children_follow_their_root_in_a_batch() -> None:
    batch = collate(TREES)
    assert batch.tree_ids.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert batch.is_root.tolist() == [True, False, True, True, False, False, True]
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.lengths.tolist() == [len(rollout.tokens) for rollout in list_rollouts(TREES)]
    assert replace_rollouts(TREES, list_rollouts(TREES)) == TREES


@pytest.mark.parametrize(("norm_by_std", "expected"), [(True, 1.0), (False, 0.5)])
def test_every_rollout_has_the_advantage_of_its_root_among_roots(norm_by_std: bool, expected: float) -> None:
    batch = collate(TREES)
    # The scores of children are not read: what they are changes nothing.
    scores = torch.where(batch.is_root, batch.scores, 99.0)
    advantages = compute_tree_advantages(batch, scores, norm_by_std)
    by_rollout = [float(row[mask].unique()) for row, mask in zip(advantages, batch.mask, strict=True)]
    assert by_rollout == pytest.approx([expected, expected, -expected, 0, 0, 0, 0])
    assert (advantages[~batch.mask] == 0).all()
    # Over the batch, the deviation is that of all four roots.
    std = float(batch.scores[batch.is_root].std(correction=0)) if norm_by_std else 1.0
    by_batch = compute_tree_advantages(batch, scores, norm_by_std, has_batch_std=True)
    torch.testing.assert_close(by_batch, compute_tree_advantages(batch, scores, norm_by_std=False) / std)


@pytest.mark.long
def test_the_gradient_of_a_step_is_the_weighted_sum_over_segments() -> None:
    trainer = make_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.1, algorithm__tree_weighting="one-per-tree")
    episodes = trainer.roll_out(trainer.val_levels[:4], 6, "sampling")
    assert any(episode.children for episode in episodes)
    prepared = trainer.prepare_batch(episodes, 4, 4, np.random.default_rng(0))
    assert len(prepared.batch.lengths) == len(list_rollouts(episodes))  # no copies
    update = trainer.make_actor_update()
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    expected = [torch.zeros_like(weight) for weight in weights]
    batch, targets = prepared.batch, prepared.targets
    for row in range(len(batch.lengths)):
        length = int(batch.lengths[row])
        tokens = batch.tokens[row : row + 1, :length]
        hidden = trainer.model.model.compute_hidden_states(tokens, torch.arange(length))
        logprobs = trainer.model.lm_head(hidden).log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        mask = batch.mask[row, 1:length]
        # The ratio is 1 at the first update, so that nothing is clipped; its gradient is that of the log-prob. The k3
        # estimate of the KL to the same policy has no gradient.
        terms = targets.loss_weights[row, 1:length] * targets.advantages[row, 1:length] * logprobs
        for total, gradient in zip(expected, torch.autograd.grad(-terms[mask].sum(), weights), strict=True):
            total += gradient
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in expected)).item()
    before = [weight.detach().clone() for weight in weights]
    meter = update.run(batch, targets, prepared.order)
    assert meter.optimizer_steps == 1  # all trees are one mini-batch
    assert meter.compute_means()["actor_grad_norm"] == pytest.approx(norm, rel=1e-3)
    # The step goes down this gradient, and not up.
    steps = zip(weights, before, expected, strict=True)
    assert sum(((weight - old) * gradient).sum() for weight, old, gradient in steps).item() < 0


@pytest.mark.long
def test_a_step_trains_and_counts() -> None:
    first, second = run_steps(make_trainer(), 2)
    assert first["base_val_children"] >= 0
    assert first["batch_size"] == 12 * (1 + first["train_children"])
    assert first["train_reward"] > 0
    assert first["optimizer_steps"] == 1
    assert second["val_reward"] > 0
    assert second["train_response_tokens"] < second["sampled_tokens"]


@pytest.mark.long
def test_a_restored_run_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    check_resumption(lambda: make_trainer(trainer__total_training_steps=2), tmp_path)


@pytest.mark.long
def test_recorded_trees_have_their_children_and_weights() -> None:
    trainer = make_trainer(trainer__log_val_generations=16, env__val_env_groups=16)
    evaluation = trainer.evaluate("val", "sampled")
    trees = [episode for episode in evaluation.episodes if episode.children]
    assert trees
    for tree in evaluation.episodes:
        weights = [[turn.weight or 0.0 for turn in rollout.turns] for rollout in (tree, *tree.children)]
        assert sum(weights[0]) == pytest.approx(1)
        assert sum(map(sum, weights[1:])) == pytest.approx(float(bool(tree.children)))
    levels = {level.seed: level.question for level in trainer.val_levels}
    answers = {tree.level: tree.answer for tree in evaluation.episodes if tree.answer is not None}
    assert answers
    for tree in evaluation.episodes:
        question = levels[tree.level]
        assert tree.evidence == "\n".join(question.evidence)
        score = compute_char_f1(tree.answer or "", question.papers, question.evidence)
        penalties = sum(trainer.config.env.format_penalty for turn in tree.turns if not turn.valid)
        assert tree.score == pytest.approx(score + penalties)
    assert any(child.answer for tree in trees for child in tree.children)
    child = trees[0].children[0]
    assert "Paper<|im_end|>" in child.turns[0].observation
    assert trees[0].turns[child.parent_turn].actions.count("ask") >= 1


def test_a_record_has_the_beginning_of_a_long_answer() -> None:
    trainer = make_trainer()
    (tree,) = trainer.roll_out(trainer.val_levels[:1], 1, "sampling")
    texts = ["x" * MAX_ANSWER_CHARS, "x" * (MAX_ANSWER_CHARS + 1)]
    whole, cut = (
        record_episode(tree._replace(answer=text, evidence=(text,)), 0, trainer.codec, trainer.config.algorithm)
        for text in texts
    )
    assert (whole.answer, whole.evidence) == (texts[0], texts[0])
    assert cut.answer == cut.evidence
    assert cut.answer.endswith("x ... (2,001 characters)")
    assert len(cut.answer) == MAX_ANSWER_CHARS


@pytest.mark.long
@pytest.mark.parametrize("train_children", [True, False])
def test_trees_that_a_step_trained_on_are_recorded_with_their_advantages(train_children: bool) -> None:
    trainer = make_trainer(
        env__env_groups=4,
        trainer__log_train_generations=21,
        trainer__test_freq=1,
        algorithm__train_children=train_children,
        filter__rollout_filter_value=1.0,
    )
    output = trainer.step()
    trees = output.trained_episodes
    group_size = trainer.config.env.group_size
    assert [tree.rollout for tree in trees] == [place % group_size for place in range(21)]
    assert {tree.step for tree in trees} == {1}
    assert len({tree.level for tree in trees}) == 4
    # By hand: the score of a tree among those of its question, in units of their standard deviation.
    scores = np.array([tree.score for tree in trees[:group_size]])
    expected = (scores - scores.mean()) / (scores.std() + 1e-6)
    assert expected.max() > 0.5
    for tree, advantage in zip(trees[:group_size], expected, strict=True):
        assert [turn.advantage for turn in tree.turns] == pytest.approx([advantage] * len(tree.turns), abs=1e-4)
    children = [(tree, child) for tree in trees for child in tree.children]
    assert children
    for tree, child in children:
        advantages = [turn.advantage for turn in child.turns]
        if train_children:
            assert advantages == pytest.approx([tree.turns[0].advantage] * len(child.turns), abs=1e-6)
        else:
            assert advantages == [None] * len(child.turns)


def test_log_probs_go_to_the_rollouts_they_are_of_and_children_that_are_not_trained_to_no_batch() -> None:
    """An engine with weights of its own, such as vLLM, has all rollouts of the trees scored again by the trainer."""
    trainer = make_trainer()
    episodes = trainer.roll_out(trainer.val_levels[:4], 6, "sampling")
    rollouts = list_rollouts(episodes)
    assert len(rollouts) > len(episodes)
    assert len(collate(rollouts).lengths) == len(rollouts)
    scored = recompute_logprobs(trainer.model, rollouts, 1.0, 8, trainer.device)
    for rollout, other in zip(rollouts, scored, strict=True):
        assert (other.tokens == rollout.tokens).all()
        np.testing.assert_allclose(other.logprobs[other.mask], rollout.logprobs[rollout.mask], atol=2e-4)
        assert (other.engine_logprobs == rollout.logprobs).all()
    trainer = make_trainer(algorithm__train_children=False)
    episodes = trainer.roll_out(trainer.val_levels[:4], 6, "sampling")
    assert any(episode.children for episode in episodes)
    prepared = trainer.prepare_batch(episodes, 4, 4, np.random.default_rng(0))
    assert len(prepared.batch.lengths) == len(episodes)


@pytest.mark.long
def test_a_hub_model_of_another_architecture_plays_with_the_full_prompt(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path, "qwen3")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 8192}))
    settings = {"env__env_groups": 1, "env__group_size": 2, "env__max_turn": 2, "env__val_env_groups": 2}
    settings |= {"rollout__max_model_len": 8192, "rollout__response_length": 24}
    settings |= {"trainer__log_train_generations": 1, "trainer__test_freq": 1, "model__lora_rank": 4}
    output = make_trainer(model__path=str(folder), model__prompt_style="full", **settings).step()
    # Random weights write no block; each reply is answered, and the answer asks for one.
    assert output.row["train_invalid_turns"] == 1
    assert output.row["optimizer_steps"] == 1
    (episode,) = output.trained_episodes
    first, second = (turn.observation for turn in episode.turns)
    assert "<|turn|>system" in first
    assert "rlm_query_batched" in first
    assert NO_BLOCK_PROBLEM in second
    assert math.isfinite(output.row["actor_grad_norm"])


def test_no_child_is_asked_where_none_may_be_and_markers_of_the_chat_format_are_hidden() -> None:
    row = make_trainer(env__papers__max_children=0).step().row
    assert row["train_children"] == 0
    assert row["batch_size"] == 12
    player = make_trainer().player
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(player.texts.markers)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm__adv_estimator": "rloo"}, "set algorithm.adv_estimator=grpo"),
        ({"actor__policy_loss": "tpo", "algorithm__adv_estimator": "grpo"}, "actor.policy_loss"),
        ({"env__group_size": 1}, "set env.group_size=2 or more"),
        (
            {"filter__max_num_gen_batches": 2, "filter__rollout_filter_include_zero": False},
            "filter.max_num_gen_batches=1",
        ),
        ({"filter__mask_void_turns": True}, "set filter.mask_void_turns=false"),
        ({"trainer__gradient_analysis_mode": True}, "set trainer.gradient_analysis_mode=false"),
        ({"collapse_detection__first_turn_enabled": True}, "set collapse_detection.first_turn_enabled=false"),
    ],
)
def test_what_does_not_fit_trees_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(**overrides)
