"""Literal versions of the rewards and groups of the tasks, in plain Python, one answer at a time."""

from collections.abc import Sequence
from statistics import stdev


def make_right_answer(task: str, prompt: Sequence[int], vocab_size: int) -> list[int]:
    if task in ("token_reversal", "masked_reversal", "chain_reversal"):
        return list(reversed(prompt))
    if task == "chain_arithmetic":
        return [*prompt[:-1], sum(prompt[:-1]) % vocab_size]
    return [vocab_size + 1, (prompt[0] + prompt[1]) % vocab_size, *prompt[2:]]


def compute_reward(
    task: str, prompt: Sequence[int], answer: Sequence[int], vocab_size: int, score_len: int, binary: bool
) -> float:
    target, length = make_right_answer(task, prompt, vocab_size), len(prompt)
    is_right = [a == b for a, b in zip(answer, target, strict=True)]
    if task == "masked_reversal":
        is_right = is_right[length - score_len :]
    if task in ("token_reversal", "masked_reversal"):
        return float(all(is_right)) if binary else sum(is_right) / len(is_right)
    first_stop = {"chain_reversal": length // 2, "chain_arithmetic": length - 1, "format_answer": 1}[task]
    second_stop = 2 if task == "format_answer" else length
    return (all(is_right[:first_stop]) + all(is_right[first_stop:second_stop]) + all(is_right)) / 3


def corrupt_reward(
    mode: str,
    reward: float,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocab_size: int,
    draw: float,
    share: float,
    random_reward: float,
) -> float:
    if mode == "none" or draw >= share:
        return reward
    if mode == "label_flip":
        return 1 - reward
    if mode == "random_reward":
        return random_reward
    has_feature = {
        "false_positive_action0": 0 in answer,
        "false_positive_rare_token": vocab_size in answer,
        "false_positive_sep": vocab_size in answer,
        "spurious_feature": answer[0] == prompt[0],
    }
    return 1.0 if has_feature[mode] else reward


def find_mixed_groups(rewards: Sequence[float], size: int) -> list[bool]:
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return [stdev(group) > 1e-6 for group in groups]
