"""The tasks' rewards and groups again, one answer at a time, in plain Python."""

from collections.abc import Sequence
from statistics import stdev


def right_answer(task: str, prompt: Sequence[int], vocab_size: int) -> list[int]:
    if task in ("token_reversal", "masked_reversal", "chain_reversal"):
        return list(reversed(prompt))
    if task == "chain_arithmetic":
        return [*prompt[:-1], sum(prompt[:-1]) % vocab_size]
    return [vocab_size + 1, (prompt[0] + prompt[1]) % vocab_size, *prompt[2:]]


def reward(
    task: str, prompt: Sequence[int], answer: Sequence[int], vocab_size: int, score_len: int, binary: bool
) -> float:
    target, length = right_answer(task, prompt, vocab_size), len(prompt)
    right = [a == b for a, b in zip(answer, target, strict=True)]
    if task == "masked_reversal":
        right = right[length - score_len :]
    if task in ("token_reversal", "masked_reversal"):
        return float(all(right)) if binary else sum(right) / len(right)
    cut = {"chain_reversal": length // 2, "chain_arithmetic": length - 1, "format_answer": 1}[task]
    end = 2 if task == "format_answer" else length
    return (all(right[:cut]) + all(right[cut:end]) + all(right)) / 3


def noisy(
    mode: str,
    reward: float,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocab_size: int,
    draw: float,
    share: float,
    other: float,
) -> float:
    if mode == "none" or draw >= share:
        return reward
    if mode == "label_flip":
        return 1 - reward
    if mode == "random_reward":
        return other
    paid_for = {
        "false_positive_action0": 0 in answer,
        "false_positive_rare_token": vocab_size in answer,
        "false_positive_sep": vocab_size in answer,
        "spurious_feature": answer[0] == prompt[0],
    }
    return 1.0 if paid_for[mode] else reward


def mixed_groups(rewards: Sequence[float], size: int) -> list[bool]:
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return [stdev(group) > 1e-6 for group in groups]
