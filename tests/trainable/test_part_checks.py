"""Parts of the user are tried before a study starts: each kind, right, and wrong in several ways."""

import re
from pathlib import Path

import pytest

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from tests.test_docs import PAGES, SAVED_FILE
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import OwnPartError, PartFile, list_parts, pin_parts, register_file
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.part_checks import check_part

SAVED_TEXTS = {
    name: text for page in PAGES for name, text in re.findall(SAVED_FILE, Path(page).read_text("utf-8"), re.DOTALL)
}
"""The files that the documents ask to save."""

SMALL_SANDBOX = {"task": "token_reversal", "batch_size": 4, "seq_len": 3, "trainer.total_training_steps": 2}


def check(setting: str, text: str, name: str = "part") -> None:
    """Check the part `name` of a file with this text."""
    register_file(PartFile("own.py", text))
    value = f"own.py:{name}"
    if setting == "method":
        config: BaseRunConfig = apply_overrides(UpdateRuleConfig(), {**SMALL_SANDBOX, setting: value})
    else:
        model = {"model.path": "sokoban-tiny", "model.prompt_style": "compact"}
        config = apply_overrides(RunConfig(), {**model, setting: f"[{value}]" if "stop_rules" in setting else value})
    config = pin_parts(config)
    (name,) = list_parts(config)
    check_part(config, name)


@pytest.mark.parametrize(
    ("setting", "file", "name"),
    [
        ("env.name", "bandit.py", "Bandit"),
        ("env.reward", "my_parts.py", "brief"),
        ("filter.rollout_filter_strategy", "my_parts.py", "better_half"),
        ("algorithm.adv_estimator", "my_parts.py", "batch_baseline"),
        ("actor.policy_loss", "my_parts.py", "plain_ratio"),
        ("trainer.own_stop_rules", "my_parts.py", "too_certain"),
        ("method", "bold.py", "successes_only"),
    ],
)
def test_the_parts_of_the_documents_pass(setting: str, file: str, name: str) -> None:
    check(setting, SAVED_TEXTS[file], name)


LOSS, ESTIMATOR, FILTER = "actor.policy_loss", "algorithm.adv_estimator", "filter.rollout_filter_strategy"
RULE, REWARD_SETTING = "trainer.own_stop_rules", "env.reward"


@pytest.mark.parametrize(
    ("setting", "signature", "body", "message"),
    [
        (LOSS, "logprobs, old", "return logprobs", r"part\(logprobs, .*\) raised TypeError: part\(\) takes 2"),
        (LOSS, "*_", "return _[0].sum()", r"a tensor \[\] of torch.float32, and a tensor \[6\] of numbers"),
        (LOSS, "*_", "return _[0].detach()", "without a gradient with respect to logprobs"),
        (LOSS, "*_", "return _[0] / 0", "numbers that are not finite"),
        (LOSS, "*_", "return _[0] - _[0].max()", r"raised RuntimeError: .*numel\(\) == 0.* \(own.py, line 2"),
        (LOSS, "*_", "return None", "returned None, and a tensor"),
        (ESTIMATOR, "*_", "return _[0]", r"tensor \[4\] of torch.float32, and a tensor \[4, 3\] of numbers"),
        (ESTIMATOR, "*_", "return _[0][:, None]", r"tensor \[4, 1\] of torch.float32, and a tensor \[4, 3\]"),
        (ESTIMATOR, "*_", "return _[0][_[3]]", r"raised IndexError: .*\(own.py, line 2: `return _\[0\]\[_\[3\]\]`\)\."),
        (FILTER, "*_", "return _[0]", r"and a tensor \[4\] of bools is needed"),
        (FILTER, "scores, *_", "return scores[:2] > 0", r"tensor \[2\] of torch.bool"),
        (FILTER, "scores, *_", "return scores > scores[1]", "raised IndexError: index 1 .*line 2"),
        (FILTER, "scores, *_, groups", "return groups[4][0].texts", "raised IndexError: list index .*line 2"),
        (RULE, "", "return None", r"part\(rows\) raised TypeError: part\(\) takes 0 positional arguments"),
        (RULE, "rows", "return rows[-3] and None", "raised IndexError: list .*line 2"),
        (RULE, "rows", "return True", r"returned True: it must return None, or \(value, threshold\)"),
        (RULE, "rows", "return rows[0]['entrpy']", "raised KeyError: 'entrpy' .own.py, line 2"),
        (REWARD_SETTING, "level, turns", "return [0.0]", r"returned \[0.0\] for two turns"),
        (REWARD_SETTING, "level, turns", "return None", "returned None for two turns"),
        (REWARD_SETTING, "level, turns", "return [float('nan')] * 2", "a finite number per turn"),
        ("method", "rollouts", "return rollouts.rewards.mean(1)", "takes 1 positional argument but 3 were given"),
        (
            "method",
            "_, log_probs, config",
            "return log_probs.mean()",
            r"the loss of each member, \[1\], and this is a ten",
        ),
        ("method", "_, log_probs, config", "return log_probs[0, 0, 0, 99]", "raised IndexError: index 99 .*line 2"),
    ],
)
def test_a_wrong_part_is_refused_with_what_is_wrong(setting: str, signature: str, body: str, message: str) -> None:
    with pytest.raises(OwnPartError, match=message) as error:
        check(setting, f"def part({signature}):\n    {body}\n")
    assert str(error.value).startswith(f"{setting}=own.py:part cannot be used: ")
    assert str(error.value).endswith("Correct own.py; docs/add_a_part.md has an example.")


GROUP_FILTER = """
import torch

def part(scores, value, largest, groups):
    return torch.tensor([any(episode.success and all(episode.turn_validity) for episode in group) for group in groups])
"""
REWARD = """
COSTS = {"Up": 1.0, "Right": 2.0}

def part(level, turns):
    return [-sum(COSTS[name] for name in turn.actions) for turn in turns]
"""


def test_an_object_that_is_called_is_a_function_and_nothing_else() -> None:
    check("trainer.own_stop_rules", "class Rule:\n    def __call__(self, rows):\n        return None\npart = Rule()\n")
    with pytest.raises(OwnPartError, match="it is a float, and a function is needed"):
        check("actor.policy_loss", "part = 0.5\n")
    check("filter.rollout_filter_strategy", GROUP_FILTER)
    check("env.reward", REWARD)  # which reads the actions of the game


NEXT_SYMBOL = 'globals().setdefault("symbols", __import__("itertools").cycle(range(4))).__next__()'
"""Another symbol each time, where random draws would at times be the same ones."""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    def read_action(self, word):", "    def read(self, word):", "object has no attribute 'read_action'"),
        ("measures = {}", 'measures = {"odd": lambda level: 1.0}', r"<lambda>\(\) takes 1 positional argument"),
        ("def start(self, levels):", "def start(self):", r"start\(\) takes 1 positional argument but 2 were"),
        ("return [level.key.decode() for level in levels]", "return None", "start.. did not return 3 states"),
        ("FIRST_TEST_SEED, FIRST_TEST_SEED + count", "count", "two levels with seeds of 900000000 and above"),
        ("np.random.default_rng(seed).integers(4)", NEXT_SYMBOL, "another level for a seed when it was called again"),
        ("symbol.encode())", "symbol)", "a level without bytes as `key`"),
        ("wins.astype(float), counts", "wins.sum(), counts", "rewards that are not an array of 3 numpy.floating"),
        ("counts, counts > 0, wins)", "counts, wins, counts > -1)", "returned success where done is False"),
        ("return TurnOutcome(states,", "return TurnOutcome(None,", "states that are not a list of 3"),
        ("measures = {}", 'measures = {"success": lambda *_: 1.0}', "the measure success has the name of a column"),
        ("return TurnOutcome(", "return tuple((", None),
        ("Example: <answer>Up</answer>", "No example.", "the instructions have no example of an answer"),
        ("return word if word in ARMS.values() else None", "return ARMS[word]", "raised KeyError: 'Up' .own.py, line"),
        ('"Sokoban"', '"Bandit"', r"does not know the title 'Bandit', .* set title = 'Sokoban'"),
        ('"#": "Up"', '"#": "lever"', "does not know lever, which"),
        ("return state\n", 'return "a long text"\n', "model.path=sokoban-tiny does not know a, long, text"),
        ("        return None\n", "        return [0.5] * 2\n", "neither None nor 3 numbers"),
    ],
)  # fmt: skip
def test_a_wrong_game_is_refused_with_the_method(old: str, new: str, message: str | None) -> None:
    text = SAVED_TEXTS["bandit.py"]
    assert old in text
    text = text.replace(old, new)
    if message is None:
        text = text.replace("counts > 0, wins)", "counts > 0, wins))")
        message = "returned a tuple, and a TurnOutcome is needed"
    if "lever" in new:
        text = text.replace("<answer>Up</answer>", "<answer>lever</answer>")
    with pytest.raises(OwnPartError, match=message) as error:
        check("env.name", text, "Bandit")
    assert str(error.value).endswith("Correct own.py; docs/add_an_environment.md has an example.")


def test_in_the_plain_style_any_reply_is_tried_and_no_example_is_needed() -> None:
    def check_plain(text: str) -> None:
        register_file(PartFile("own.py", text.replace("Example: <answer>Up</answer>", "No example.")))
        settings = {"env.name": "own.py:Bandit", "model.path": "none", "model.prompt_style": "plain"}
        check_part(pin_parts(apply_overrides(RunConfig(), settings)), "env.name")

    bandit = SAVED_TEXTS["bandit.py"]
    check_plain(bandit)
    bandit = bandit.replace("return word if word in ARMS.values() else None", "return word")
    check_plain(bandit)
    with pytest.raises(OwnPartError, match="raised KeyError: 'no such word'"):
        check_plain(
            bandit.replace(
                "        wins =", "        [ARMS[name] for names in actions for name in names]\n        wins ="
            )
        )
