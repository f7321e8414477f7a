"""Tests of the language-model bandit: its text, stacked weights, rewards, KL penalties and evaluation."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.tasks.lm_bandit import (
    WINDOW_BATCH_SIZE,
    LanguageModelBandit,
    LanguageModelEnsemble,
    make_sokoban_passages,
    read_passages,
    read_tokens,
)
from sandboxes.update_rules.training.make import make_task
from tests.fakes.hub_models import make_model, write_model
from tests.sandboxes.update_rules.tasks import oracles
from trainable.models.load import load_policy


def make_task_and_models(
    seeds: tuple[int, ...] = (3, 4), **settings: object
) -> tuple[LanguageModelBandit, LanguageModelEnsemble, MemberRngs]:
    config = UpdateRuleConfig(**{"task": "lm_bandit", "batch_size": 24, "context_len": 10, **settings})
    task, rngs = make_task(config), MemberRngs(seeds)
    return task, task.make_models(rngs), rngs


def perturb(models: LanguageModelEnsemble) -> LanguageModelEnsemble:
    """Add noise to the weights of the models, different for each member."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in models.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return models


def test_a_member_is_the_policy_with_its_weights() -> None:
    task, models, rngs = make_task_and_models()
    perturb(models)
    rollouts = task.sample(models, rngs, 1)
    log_probs = task.compute_logits(models, rollouts).log_softmax(-1)
    assert log_probs.shape == (2, 24, 1, task.policy.model.shape.vocab_size)
    log_probs[..., 0, 0].sum().backward()
    for member in range(2):
        policy = load_policy("sokoban-tiny", torch.device("cpu")).model
        weights = {name: weight[member].detach() for name, weight in models.weights.items()}
        policy.load_state_dict({name.removeprefix("policy."): weights[name] for name in weights}, strict=False)
        positions = torch.arange(24 * 10)
        logits = policy.lm_head(policy.model.compute_hidden_states(rollouts.observations[member], positions))
        expected = logits.view(24, 10, -1)[:, -1].log_softmax(-1)
        torch.testing.assert_close(log_probs[member, :, 0], expected, atol=1e-4, rtol=1e-4)
        expected[:, 0].sum().backward()
        for name, weight in policy.named_parameters():
            gradient = models.weights[f"policy.{name}"].grad
            torch.testing.assert_close(gradient[member], weight.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_another_architecture_is_run_as_transformers_runs_it(model_type: str, tmp_path: Path) -> None:
    causal = make_model(model_type)
    task, models, rngs = make_task_and_models(model_name=str(write_model(causal, tmp_path)))
    rollouts = task.sample(models, rngs, 1)
    log_probs = task.compute_logits(models, rollouts).log_softmax(-1)
    expected = causal(rollouts.observations.flatten(0, 1)).logits[:, -1].log_softmax(-1).view(2, 24, -1)
    torch.testing.assert_close(log_probs[:, :, 0], expected, atol=1e-4, rtol=1e-4)
    log_probs[1, :, :, 0].sum().backward()
    gradients = [weight.grad for weight in models.weights.values()]
    assert all(gradient is not None and not gradient[0].any() for gradient in gradients)
    assert sum(bool(gradient[1].any()) for gradient in gradients if gradient is not None) > len(gradients) / 2


def test_members_start_with_the_loaded_weights_and_the_policy_keeps_them() -> None:
    task, models, rngs = make_task_and_models()
    contexts, _ = task._sample_contexts(rngs, 1, 5)
    initial_log_probs = models.compute_initial_log_probs(contexts)
    torch.testing.assert_close(
        models.compute_logits(contexts).log_softmax(-1).detach(), initial_log_probs, atol=1e-5, rtol=1e-5
    )
    perturb(models)
    assert torch.equal(models.compute_initial_log_probs(contexts), initial_log_probs)
    assert not torch.allclose(models.compute_logits(contexts).log_softmax(-1), initial_log_probs, atol=1e-2)


@pytest.mark.parametrize(("method", "kl_weight"), [("DG", 0.3), ("GRPO", 0.0)])
def test_the_fields_of_a_batch_are_consistent(method: str, kl_weight: float) -> None:
    task, models, rngs = make_task_and_models(method=method, kl_weight=kl_weight, group_size=4)
    perturb(models)
    rollouts = task.sample(models, rngs, 1)
    log_probs = task.compute_logits(models, rollouts).log_softmax(-1).detach()[:, :, 0]
    initial_log_probs = models.compute_initial_log_probs(rollouts.observations)
    text = task.tokens.train.tolist()
    for member in range(2):
        for row in range(24):
            action, label = (int(tensor[member, row]) for tensor in (rollouts.actions, rollouts.labels))
            passage = [*rollouts.observations[member, row].tolist(), label]
            assert any(text[start : start + 11] == passage for start in range(len(text)) if text[start] == passage[0])
            penalty = kl_weight * (log_probs - initial_log_probs)[member, row]
            assert float(rollouts.rewards[member, row]) == pytest.approx(
                float(action == label) - float(penalty[action]), abs=1e-4
            )
            rewards = torch.nn.functional.one_hot(torch.tensor(label), task.policy.model.shape.vocab_size) - penalty
            mean = float((log_probs[member, row].exp() * rewards).sum())
            assert float(rollouts.expected_reward[member, row]) == pytest.approx(mean, abs=1e-4)
            log_prob = float(log_probs[member, row, action])
            assert float(rollouts.behavior_log_probs[member, row, 0]) == pytest.approx(log_prob, abs=1e-4)
        if method == "GRPO":
            is_right = (rollouts.actions == rollouts.labels)[member, :, 0].float().tolist()
            is_mixed = oracles.find_mixed_groups(is_right, 4)
            is_kept = is_mixed if any(is_mixed) else [True] * 6
            assert rollouts.keep_mask[member].tolist() == [keep for keep in is_kept for _ in range(4)]


def test_noise_flips_rewards_before_the_kl_penalty() -> None:
    task, models, rngs = make_task_and_models(kl_weight=0.3, reward_noise=1.0, reward_noise_mode="label_flip")
    perturb(models)
    noisy_rollouts = task.sample(models, rngs, 1)
    clean_task, _, _ = make_task_and_models(kl_weight=0.3)
    clean_rollouts = clean_task.sample(models, rngs, 1)
    is_right = (clean_rollouts.actions == clean_rollouts.labels)[..., 0].float()
    torch.testing.assert_close(noisy_rollouts.rewards, clean_rollouts.rewards + 1 - 2 * is_right, atol=1e-5, rtol=1e-5)
    assert noisy_rollouts.expected_reward is None


@pytest.mark.long
def test_evaluation_is_over_windows_that_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in make_sokoban_passages()[:200]), encoding="utf-8")
    task, models, rngs = make_task_and_models(context_len=100, text_file=str(path))
    perturb(models)
    metrics = task.evaluate(models, rngs, 1)
    text = task.tokens.test.tolist()
    starts = range(0, len(text) - 100, 101)
    initial_log_probs, is_wrong, surprisals, entropies = [], [], [], []
    for start in starts:
        context, target = torch.tensor(text[start : start + 100]), text[start + 100]
        log_probs = models.compute_logits(context.expand(2, 1, -1)).log_softmax(-1)[0, 0].detach()
        initial_log_probs.append(float(models.compute_initial_log_probs(context[None])[0, target]))
        is_wrong.append(int(log_probs.argmax()) != target)
        surprisals.append(-float(log_probs[target]))
        entropies.append(-float((log_probs.exp() * log_probs).sum()))
    count = len(is_wrong)
    assert count > WINDOW_BATCH_SIZE
    ranked_windows = sorted(range(count), key=lambda window: -initial_log_probs[window])
    ends = [0, count // 3 + (count % 3 > 0), 2 * (count // 3) + count % 3, count]
    thirds = [ranked_windows[start:end] for start, end in itertools.pairwise(ends)]
    expected = {
        "test_error": sum(is_wrong) / count,
        "perplexity": math.exp(sum(surprisals) / count),
        "entropy": sum(entropies) / count,
        **{
            f"error_{name}": sum(is_wrong[window] for window in windows) / len(windows)
            for name, windows in zip(("easy", "medium", "hard"), thirds, strict=True)
        },
    }
    assert {name: float(value[0]) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-3, rel=1e-3)


def test_the_default_text_stays_as_it_is() -> None:
    passages = make_sokoban_passages()
    digest = hashlib.sha256("\n".join(passages).encode()).hexdigest()
    assert digest == "c514347c9ed8935d5c1445b3e7512b1fb14330e68d2d85f3160ba484dc647178"
    tokenizer = load_policy("sokoban-tiny", torch.device("cpu")).tokenizer
    tokens = read_tokens(None, tokenizer, 128)
    token_ids = torch.cat(tokens).tolist()
    assert tokenizer.token_to_id("<|unknown|>") not in token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "\n".join(passages)


def test_a_text_is_its_lines_or_passages_and_its_last_quarter_is_for_evaluation(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.txt", [f"P1{n} X22 O3{n} LURD" for n in range(1, 9)]
    text.write_text("\n\n".join(lines), encoding="utf-8")
    tokenizer = load_policy("sokoban-tiny", torch.device("cpu")).tokenizer
    tokens = read_tokens(str(text), tokenizer, 4)
    assert tokenizer.decode(tokens.train.tolist()) == "\n".join(lines[:6])
    assert tokenizer.decode(tokens.test.tolist()) == "\n" + "\n".join(lines[6:])
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps("a\nb") + "\n" + json.dumps("c"), encoding="utf-8")
    assert read_passages(path) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"UP\nDOWN\n", "context_len=10 needs 11 and 33"),
        ("broken.jsonl", b'"UP\n', "cannot be read: Unterminated string"),
        ("numbers.jsonl", b"1\n2\n", "cannot be read: a line is not a string"),
        (None, b"", "cannot be read: .*No such file"),
    ],
)
def test_other_texts_and_contexts_are_refused(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        make_task_and_models(text_file=str(path))
    with pytest.raises(ValueError, match="the 512 tokens that sokoban-tiny can read: set context_len=512, or less"):
        make_task_and_models(context_len=513)
