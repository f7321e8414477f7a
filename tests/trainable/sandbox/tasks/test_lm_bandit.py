"""The language-model bandit: its text, its stacked weights, its rewards, prices and evaluation."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.fakes.hub_models import make_model, write_model
from tests.trainable.sandbox.tasks import oracles
from trainable.models.load import load_policy
from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.language_models import LanguageModelEnsemble
from trainable.sandbox.tasks.lm_bandit import LanguageModelBandit
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.tasks.texts import (
    SHIPPED_PASSAGES,
    SHIPPED_TEXT,
    make_sokoban_passages,
    read_passages,
    read_tokens,
)


def started(
    seeds: tuple[int, ...] = (3, 4), **settings: object
) -> tuple[LanguageModelBandit, LanguageModelEnsemble, MemberRngs]:
    config = UpdateRuleConfig(**{"task": "lm_bandit", "batch_size": 24, "context_len": 10, **settings})
    task, streams = make_task(config), MemberRngs(seeds)
    assert isinstance(task, LanguageModelBandit)
    return task, task.make_models(streams), streams


def moved(models: LanguageModelEnsemble) -> LanguageModelEnsemble:
    """The models with other weights, each member's its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in models.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return models


def test_a_member_is_the_policy_with_its_weights() -> None:
    task, models, streams = started()
    moved(models)
    rollouts = task.sample(models, streams, 1)
    log_probs = task.compute_log_probs(models, rollouts)
    assert log_probs.shape == (2, 24, 1, task.num_actions)
    log_probs[..., 0, 0].sum().backward()
    for member in range(2):
        policy = load_policy("sokoban-tiny", torch.device("cpu")).model
        own = {name.removeprefix("policy."): weight[member].detach() for name, weight in models.weights.items()}
        policy.load_state_dict(own, strict=False)
        every = torch.arange(24 * 10)
        whole = policy.lm_head(policy.model.compute_hidden_states(rollouts.observations[member], every))
        expected = whole.view(24, 10, -1)[:, -1].log_softmax(-1)
        torch.testing.assert_close(log_probs[member, :, 0], expected, atol=1e-4, rtol=1e-4)
        expected[:, 0].sum().backward()
        for name, weight in policy.named_parameters():
            gradient = models.weights[f"policy.{name}"].grad
            assert gradient is not None
            assert weight.grad is not None
            torch.testing.assert_close(gradient[member], weight.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_another_architecture_is_run_as_transformers_runs_it(kind: str, tmp_path: Path) -> None:
    causal = make_model(kind)
    task, models, streams = started(model_name=str(write_model(causal, tmp_path)))
    rollouts = task.sample(models, streams, 1)
    log_probs = task.compute_log_probs(models, rollouts)
    expected = causal(rollouts.observations.flatten(0, 1)).logits[:, -1].log_softmax(-1).view(2, 24, -1)
    torch.testing.assert_close(log_probs[:, :, 0], expected, atol=1e-4, rtol=1e-4)
    log_probs[1, :, :, 0].sum().backward()
    gradients = [weight.grad for weight in models.weights.values()]
    assert all(gradient is not None and not gradient[0].any() for gradient in gradients)
    assert sum(bool(gradient[1].any()) for gradient in gradients if gradient is not None) > len(gradients) / 2


def test_members_start_with_the_loaded_weights_and_the_policy_keeps_them() -> None:
    task, models, streams = started()
    contexts, _ = task._sample_contexts(streams, 1, 5)
    before = models.compute_initial_log_probs(contexts)
    torch.testing.assert_close(models.compute_logits(contexts).log_softmax(-1).detach(), before, atol=1e-5, rtol=1e-5)
    moved(models)
    assert torch.equal(models.compute_initial_log_probs(contexts), before)
    assert not torch.allclose(models.compute_logits(contexts).log_softmax(-1), before, atol=1e-2)


@pytest.mark.parametrize("method", ["DG", "GRPO"])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_a_batch_is_what_its_fields_say(method: str, weight: float) -> None:
    task, models, streams = started(method=method, kl_weight=weight, group_size=4)
    moved(models)
    rollouts = task.sample(models, streams, 1)
    log_probs = task.compute_log_probs(models, rollouts).detach()[:, :, 0]
    first = models.compute_initial_log_probs(rollouts.observations)
    text = task.tokens.train.tolist()
    for member in range(2):
        for row in range(24):
            action, label = (int(part[member, row]) for part in (rollouts.actions, rollouts.labels))
            stretch = [*rollouts.observations[member, row].tolist(), label]
            assert any(text[start : start + 11] == stretch for start in range(len(text)) if text[start] == stretch[0])
            price = weight * (log_probs - first)[member, row]
            assert float(rollouts.rewards[member, row]) == pytest.approx(
                float(action == label) - float(price[action]), abs=1e-4
            )
            every = torch.nn.functional.one_hot(torch.tensor(label), task.num_actions) - price
            mean = float((log_probs[member, row].exp() * every).sum())
            assert rollouts.expected_reward is not None
            assert float(rollouts.expected_reward[member, row]) == pytest.approx(mean, abs=1e-4)
            of_taken = float(log_probs[member, row, action])
            assert float(rollouts.behavior_log_probs[member, row, 0]) == pytest.approx(of_taken, abs=1e-4)
        if method == "GRPO":
            solved = (rollouts.actions == rollouts.labels)[member, :, 0].float().tolist()
            mixed = oracles.mixed_groups(solved, 4)
            kept = mixed if any(mixed) else [True] * 6
            assert rollouts.keep_mask[member].tolist() == [one for one in kept for _ in range(4)]


def test_noise_flips_what_is_right_before_the_price_is_paid() -> None:
    task, models, streams = started(kl_weight=0.3, reward_noise=1.0, reward_noise_mode="label_flip")
    moved(models)
    noisy = task.sample(models, streams, 1)
    plain, _, _ = started(kl_weight=0.3)
    clean = plain.sample(models, streams, 1)
    solved = (clean.actions == clean.labels)[..., 0].float()
    torch.testing.assert_close(noisy.rewards, clean.rewards + 1 - 2 * solved, atol=1e-5, rtol=1e-5)
    assert noisy.expected_reward is None


def test_evaluation_is_over_windows_that_do_not_overlap() -> None:
    task, models, streams = started(context_len=100)
    moved(models)
    found = task.evaluate(models, streams, 1)
    text = task.tokens.test.tolist()
    starts = range(0, len(text) - 100, 101)
    first, wrong, surprisal, entropy = [], [], [], []
    for start in starts:
        context, target = torch.tensor(text[start : start + 100]), text[start + 100]
        log_probs = models.compute_logits(context.expand(2, 1, -1)).log_softmax(-1)[0, 0].detach()
        first.append(float(models.compute_initial_log_probs(context[None])[0, target]))
        wrong.append(int(log_probs.argmax()) != target)
        surprisal.append(-float(log_probs[target]))
        entropy.append(-float((log_probs.exp() * log_probs).sum()))
    count = len(wrong)
    easiest = sorted(range(count), key=lambda window: -first[window])
    sizes = [count // 3 + (count % 3 > 0), count // 3 + (count % 3 > 1), count // 3]
    thirds = easiest[: sizes[0]], easiest[sizes[0] : sizes[0] + sizes[1]], easiest[sizes[0] + sizes[1] :]
    expected = {
        "test_error": sum(wrong) / count,
        "perplexity": math.exp(sum(surprisal) / count),
        "entropy": sum(entropy) / count,
        **{
            f"error_{name}": sum(wrong[window] for window in third) / len(third)
            for name, third in zip(("easy", "medium", "hard"), thirds, strict=True)
        },
    }
    assert {name: float(value[0]) for name, value in found.items()} == pytest.approx(expected, abs=1e-3, rel=1e-3)


def test_the_shipped_text_is_what_its_recipe_makes() -> None:
    shipped = read_passages(SHIPPED_TEXT)
    assert len(shipped) == SHIPPED_PASSAGES
    assert shipped[:5] == make_sokoban_passages(5)
    tokenizer = load_policy("sokoban-tiny", torch.device("cpu")).tokenizer
    tokens = read_tokens(None, tokenizer, 128)
    whole = torch.cat(tokens).tolist()
    assert tokenizer.token_to_id("<|unknown|>") not in whole
    assert tokenizer.decode(whole, skip_special_tokens=False) == "\n".join(shipped)


def test_a_text_is_its_lines_and_its_last_quarter_is_for_evaluation(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.txt", [f"P1{n} X22 O3{n} LURD" for n in range(1, 9)]
    text.write_text("\n\n".join(lines), encoding="utf-8")
    tokenizer = load_policy("sokoban-tiny", torch.device("cpu")).tokenizer
    tokens = read_tokens(str(text), tokenizer, 4)
    assert tokenizer.decode(tokens.train.tolist()) == "\n".join(lines[:6])
    assert tokenizer.decode(tokens.test.tolist()) == "\n" + "\n".join(lines[6:])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"UP\nDOWN\n", "context_len=10 needs 11 and 33"),
        ("bytes.txt", b"\xff\xfe\xff", "cannot be read"),
        ("broken.jsonl", b'"UP\n', "is not JSON Lines"),
        ("numbers.jsonl", b"1\n2\n", "not strings"),
        ("empty.txt", b"", "context_len=10 needs 11 and 33"),
        (None, b"", "cannot be read"),
    ],
)
def test_other_texts_are_refused(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        started(text_file=str(path))


def test_a_context_longer_than_the_model_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="the 512 tokens that sokoban-tiny can read: set context_len=512, or less"):
        started(context_len=513)


def test_passages_may_hold_newlines(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps("a\nb") + "\n" + json.dumps("c"), encoding="utf-8")
    assert read_passages(path) == ["a\nb", "c"]
