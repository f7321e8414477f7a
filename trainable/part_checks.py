"""Try plug-ins on a small example before a study starts, so that mistakes are found within a second."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainable.config.base_config import BaseRunConfig
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.own_parts import OwnPartError, PartFile, describe_error, get_part, get_part_file, list_parts
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.config.sections import EnvConfig
from trainable.config.setting_types import format_value
from trainable.envs.environment import FIRST_TEST_SEED, Environment, Level, PlayedTurn, TurnOutcome
from trainable.envs.games.make import get_turn_limits, make_environment
from trainable.envs.prompts import ACTION_SEPARATOR, CHATML
from trainable.families import list_families
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import STEP_COLUMNS, make_empty_row
from trainable.runs.stop_rules import evaluate_own_rules

MAX_MEASURE_LENGTH = 60

_SEEDS = (1, 2, 3)
"""Seeds of the levels in the example."""


class PartTrial:
    """Calls a plug-in, and turns its errors into an `OwnPartError` that names the setting, the plug-in and the line."""

    def __init__(self, setting: str, value: str, file: PartFile) -> None:
        self.setting, self.value, self.file = setting, value, file
        self.name = value.partition("#")[0].rpartition(":")[2]

    def fail(self, problem: str) -> OwnPartError:
        """Make the error to raise for a problem, given as a clause such as "step() returned None"."""
        name = self.value.partition("#")[0]
        page = "docs/add_an_environment.md" if self.setting == "env.name" else "docs/add_a_part.md"
        return OwnPartError(
            f"{self.setting}={format_value(name, 1000)} cannot be used: {problem}. Correct "
            f"{format_value(self.file.path, 1000)}; {page} has an example."
        )

    def call(self, signature: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the plug-in. signature: how to show the call, such as `loss(logprobs, old_logprobs)`."""
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            raise self.fail(f"{signature} raised {describe_error(error, self.file.path)}") from None

    def check_tensor(self, signature: str, tensor: Any, shape: tuple[int, ...], is_mask: bool = False) -> None:
        """Raise unless `tensor` is a tensor of this shape, of booleans if `is_mask`, otherwise of finite numbers."""
        kind = "bools" if is_mask else "numbers"
        wanted = f"and a tensor {list(shape)} of {kind} is needed"
        if not isinstance(tensor, Tensor):
            raise self.fail(f"{signature} returned {_describe(tensor)}, {wanted}")
        has_type = tensor.dtype == torch.bool if is_mask else tensor.is_floating_point()
        if tuple(tensor.shape) != shape or not has_type:
            raise self.fail(f"{signature} returned a tensor {list(tensor.shape)} of {tensor.dtype}, {wanted}")
        if not bool(torch.isfinite(tensor).all()):
            raise self.fail(f"{signature} returned numbers that are not finite")


def check_part(config: BaseRunConfig, setting: str) -> None:
    """Try the plug-in that a setting of `config` names. Raise OwnPartError, with the problem, if it fails.

    setting: a key of `list_parts(config)`.
    """
    value = list_parts(config)[setting].format()
    file = get_part_file(value)
    setting = re.sub(r"\.\d+$", "", setting)  # the list, if it is an entry of a list
    trial = PartTrial(setting, value, file)
    part = get_part(value)
    if not callable(part) and setting != "env.name":
        raise trial.fail(f"it is {_describe(part)}, and a function is needed")
    checks: Mapping[str, Callable[[PartTrial, Any, Any], None]] = {
        "env.name": _check_game,
        "env.reward": _check_reward,
        "filter.rollout_filter_strategy": _check_filter,
        "algorithm.adv_estimator": _check_estimator,
        "actor.policy_loss": _check_policy_loss,
        "trainer.own_stop_rules": _check_stop_rule,
    }
    if setting in checks:
        checks[setting](trial, part, config)
    else:  # of a sandbox
        family = next(family for family in list_families() if family.config_class is type(config))
        resolve_name(family.part_checks[setting])(trial, part, config)


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_policy_loss(trial: PartTrial, loss: Any, config: RunConfig) -> None:
    signature, count = f"{trial.name}(logprobs, old_logprobs, advantages)", 6
    logprobs = torch.linspace(-2.0, -0.1, count).requires_grad_()
    advantages = torch.linspace(-1.0, 1.0, count)
    token_loss = trial.call(signature, loss, logprobs, torch.full((count,), -1.0), advantages)
    trial.check_tensor(signature, token_loss, (count,))
    if not token_loss.requires_grad:
        raise trial.fail(f"{signature} returned a loss without a gradient with respect to logprobs")
    # With several GPUs, a pass may have no tokens.
    empty = trial.call(f"{trial.name}() without tokens", loss, logprobs[:0], logprobs[:0].detach(), advantages[:0])
    trial.check_tensor(f"{trial.name}() without tokens", empty, (0,))


def _check_estimator(trial: PartTrial, estimator: Any, config: RunConfig) -> None:
    signature = f"{trial.name}(scores, group_ids, mask)"
    mask = torch.tensor([[True, True, False], [False, True, True], [True, False, False], [True, True, True]])
    advantages = trial.call(signature, estimator, torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]), mask)
    trial.check_tensor(signature, advantages, (4, 3))


def _check_filter(trial: PartTrial, keep_groups: Any, config: RunConfig) -> None:
    signature = f"{trial.name}(scores, value, largest)"
    settings = config.filter
    largest = settings.rollout_filter_type == "largest"
    for scores in (torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([1.0])):
        is_kept = trial.call(signature, keep_groups, scores, settings.rollout_filter_value, largest)
        trial.check_tensor(signature, is_kept, (len(scores),), is_mask=True)


def _check_stop_rule(trial: PartTrial, rule: Any, config: RunConfig) -> None:
    columns = make_empty_row(all_quantities=config.collapse_detection.all_quantities)
    measures = trial.call("the game", make_environment, config.env).measures
    numbers = dict.fromkeys([*columns, *(f"train_{name}" for name in measures)], 1.0)
    rows = [{**numbers, "step": step, "stop_rule": ""} for step in (1, 2, 3)]
    for count in (1, len(rows)):
        trial.call(f"{trial.name}(rows) with {count} row{'s' * (count > 1)}", rule, rows[:count])
        try:
            evaluate_own_rules(rows[:count], [trial.value])
        except ValueError as error:
            raise trial.fail(str(error)) from None


def _check_reward(trial: PartTrial, reward: Any, config: RunConfig) -> None:
    signature = f"{trial.name}(level, turns)"
    environment = trial.call("the game", make_environment, config.env)
    (level,) = environment.make_levels(_SEEDS[:1])
    words = _list_example_words(environment.format_instructions(config.env.max_actions_per_traj))
    actions = [action for word in words if (action := environment.read_action(word)) is not None]
    turns = [
        PlayedTurn("text without tags", (), 0.0, False),
        PlayedTurn("a</think><answer>b</answer>", tuple(actions[:1]), 1.0, True),
    ]
    rewards = trial.call(signature, reward, level, turns)
    try:
        numbers = [float(number) for number in rewards]
    except (TypeError, ValueError):
        raise trial.fail(
            f"{signature} returned {_describe(rewards)}, and a list with a number per turn is needed"
        ) from None
    if len(numbers) != len(turns) or not all(map(math.isfinite, numbers)):
        raise trial.fail(
            f"{signature} returned {format_value(numbers)} for two turns, and a finite number per turn is needed"
        )


# ---------------------------------------------------------------------------------------------------------------- games

_METHODS = (
    "make_levels",
    "make_test_levels",
    "start",
    "step",
    "read_action",
    "format_instructions",
    "format_state",
    "compute_chance",
    "compute_best",
)


def _check_game(trial: PartTrial, part: Any, config: RunConfig) -> None:
    environment: Environment[Any] = trial.call(f"{trial.name}()", make_environment, config.env)
    attribute_types = {"name": str, "title": str, "has_held_out_levels": bool, "measures": Mapping}
    for name, attribute_type in attribute_types.items():
        if not isinstance(getattr(environment, name, None), attribute_type):
            raise trial.fail(f"its attribute {name} is not a {attribute_type.__name__}")
    missing_methods = [name for name in _METHODS if not callable(getattr(environment, name, None))]
    if missing_methods:
        raise trial.fail(f"it has no method {missing_methods[0]}")
    levels = _check_levels(trial, environment)
    actions = _check_texts(trial, environment, levels, config)
    _check_steps(trial, environment, levels, actions, config)
    limits = get_turn_limits(config.env)
    for name in ("compute_chance", "compute_best"):
        shares = trial.call(f"{name}(levels, limits)", getattr(environment, name), levels, limits)
        array = np.zeros(len(levels)) if shares is None else np.asarray(shares)
        is_valid = array.shape == (len(levels),) and array.dtype.kind == "f"
        if not is_valid or not bool(((array >= 0) & (array <= 1)).all()):
            raise trial.fail(f"{name}() returned neither None nor an array of {len(levels)} numbers in [0, 1]")
    column_names = {column.name for column in STEP_COLUMNS}
    for name, measure in environment.measures.items():
        if not str(name).isidentifier() or len(name) > MAX_MEASURE_LENGTH or f"val_{name}" in column_names:
            raise trial.fail(
                f"the measure {format_value(name)} cannot be a column: it needs a short name of letters, digits and "
                "`_` that no column of docs/metrics.md has"
            )
        number = trial.call(f"measures[{name!r}](level, actions)", measure, levels[0], actions)
        if not isinstance(number, int | float | np.floating):
            raise trial.fail(f"measures[{name!r}]() returned {_describe(number)}, and a number is needed")


def _check_levels(trial: PartTrial, environment: Environment[Any]) -> Sequence[Level]:
    """Check the levels that the environment makes, and return three of them."""
    levels: Sequence[Level] = trial.call("make_levels(seeds)", environment.make_levels, _SEEDS)
    test_levels = trial.call("make_test_levels(2)", environment.make_test_levels, 2)
    for name, made, count in (("make_levels", levels, len(_SEEDS)), ("make_test_levels", test_levels, 2)):
        if not isinstance(made, Sequence) or len(made) != count:
            raise trial.fail(f"{name}() did not return a list of {count} levels")
        for level in made:
            if not isinstance(getattr(level, "seed", None), int) or not isinstance(getattr(level, "key", None), bytes):
                raise trial.fail(f"{name}() returned a level without an int as `seed` and bytes as `key`")
    if tuple(level.seed for level in levels) != _SEEDS:
        raise trial.fail(f"make_levels({_SEEDS}) returned levels with other seeds")
    if any(level.seed < FIRST_TEST_SEED for level in test_levels):
        raise trial.fail(f"make_test_levels(2) returned seeds below {FIRST_TEST_SEED}, which belong to other levels")
    again = trial.call("make_levels(seeds)", environment.make_levels, _SEEDS[::-1])
    if [level.key for level in again][::-1] != [level.key for level in levels]:
        raise trial.fail("make_levels() returned another level for a seed when it was called again")
    return levels


def _check_texts(
    trial: PartTrial, environment: Environment[Any], levels: Sequence[Level], config: RunConfig
) -> tuple[str, ...]:
    """Check the texts of the game, and return the actions in the example of its instructions."""
    max_actions = config.env.max_actions_per_traj
    instructions = trial.call(f"format_instructions({max_actions})", environment.format_instructions, max_actions)
    states = trial.call("start(levels)", environment.start, levels)
    if not isinstance(states, list) or len(states) != len(levels):
        raise trial.fail(f"start() did not return a list of {len(levels)} states")
    texts = [
        trial.call(f"format_state(state, {style!r})", environment.format_state, state, style)
        for style in ("full", "compact")
        for state in states
    ]
    if not isinstance(instructions, str) or not all(isinstance(text, str) and text for text in texts):
        raise trial.fail("format_instructions() or format_state() did not return a text")
    words = _list_example_words(instructions)
    answers = [trial.call(f"read_action({word!r})", environment.read_action, word) for word in [*words, "no such word"]]
    if any(action is not None and not isinstance(action, str) for action in answers):
        raise trial.fail("read_action() returned neither None nor a text")
    actions = tuple(action for action in answers[:-1] if action is not None)
    if not actions:
        raise trial.fail(
            "the instructions have no example of an answer, <answer>ACTION</answer>, whose action read_action() knows"
        )
    _check_words(trial, environment.title, [*texts[len(states) :], *actions], config)
    return actions


def _list_example_words(instructions: str) -> list[str]:
    """List the words of the example answers in the instructions of a game."""
    examples = re.findall(r"<answer>(.*?)</answer>", instructions, re.DOTALL)
    return [word.strip() for example in examples for word in example.split(ACTION_SEPARATOR)]


def _check_words(trial: PartTrial, title: str, texts: Sequence[str], config: RunConfig) -> None:
    """Raise if the few words of a shipped policy's tokenizer do not cover the title, the states and the actions."""
    shipped_model = SHIPPED_MODELS.get(config.model.path)
    if shipped_model is None:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shipped_model.folder / "tokenizer.json"))

    def is_known(text: str) -> bool:
        return bool(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text)

    # The title is the entire system message, of which the tokenizer knows exactly one.
    if not is_known(CHATML.system_prefix + title + CHATML.end_marker):
        known_title = make_environment(EnvConfig(name=shipped_model.game)).title
        raise trial.fail(
            f"model.path={config.model.path} does not know the title {format_value(repr(title))}, which is its system "
            f"message: set title = {known_title!r}, with which this policy answers in the right form"
        )
    unknown_words = dict.fromkeys(word for text in texts for word in text.split() if not is_known(word))
    if unknown_words:
        pieces = [piece.strip() for piece in tokenizer.get_vocab() if "<|" not in piece and piece.strip()]
        known_words = sorted({piece for piece in pieces if len(piece) == 1 or piece.isalpha()})
        raise trial.fail(
            f"model.path={config.model.path} does not know {format_value(', '.join(unknown_words), 200)}, which the "
            f"compact states or the example of an answer have. It knows {', '.join(known_words)} and what consists of "
            "these. Use such words, or a model of the hub with --model NAME --set model.prompt_style=full"
        )


_FIRST_REPLIES = 64
_MAX_SHOWN_WORDS = 8


def describe_first_replies(config: RunConfig) -> str:
    """Describe in a sentence the first replies of an untrained shipped policy in a plug-in game.

    Such a policy never answers with some of its words, whatever `read_action` accepts. Empty if these settings cannot
    run on a CPU. An error of the game is described and not raised, since the run will raise it.
    """
    overrides = {
        "env.env_groups": _FIRST_REPLIES,
        "env.group_size": 1,
        "env.max_turn": 1,
        "env.val_env_groups": 1,
        "trainer.total_training_steps": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 0,
        # Compiling would take longer than the replies.
        "rollout.name": "torch",
        "model.compiled_passes": False,
    }
    game, name = list_parts(config)["env.name"].name, config.model.path
    try:
        config = apply_overrides(config, overrides)
    except ConfigError:
        return ""
    try:
        trainer = PPOTrainer(config)
        episodes = trainer.roll_out(trainer.levels[0], 1, "sampling")
    except Exception as error:
        file = get_part_file(config.env.name)
        return f"Own game: the first replies of {name} in {game} raised {describe_error(error, file.path)}"
    valid_count = sum(episode.turn_validity[0] for episode in episodes)
    answers = [_list_example_words(f"<answer>{episode.texts[0].partition('<answer>')[2]}") for episode in episodes]
    word_counts = Counter(word for words in answers for word in words if word)
    words_text = ", ".join(f"{word} ({count})" for word, count in word_counts.most_common(_MAX_SHOWN_WORDS))
    sentence = f"Own game: {valid_count} of {len(episodes)} first replies of {name} have a valid action of {game}"
    answers_text = f"it answers {format_value(words_text, 200)}" if words_text else "it gives no answer"
    if valid_count:
        return f"{sentence}; {answers_text}"
    return (
        f"{sentence}, so it can learn nothing; {answers_text}. Let read_action() accept words that it answers with, or "
        "use a model of the hub with --model NAME --set model.prompt_style=full"
    )


def _check_steps(
    trial: PartTrial,
    environment: Environment[Any],
    levels: Sequence[Level],
    actions: tuple[str, ...],
    config: RunConfig,
) -> None:
    """Check a turn without an action, and a turn with each action of the example."""
    luck = np.full((len(levels), config.env.max_actions_per_turn), 0.5)
    for names in ((), *((action,) for action in dict.fromkeys(actions))):
        states = environment.start(levels)
        signature = f"step(states, {[list(names)]}, luck)"
        outcome = trial.call(signature, environment.step, states, [names] * len(levels), luck)
        if not isinstance(outcome, TurnOutcome):
            raise trial.fail(f"{signature} returned {_describe(outcome)}, and a TurnOutcome is needed")
        if not isinstance(outcome.states, list) or len(outcome.states) != len(levels):
            raise trial.fail(f"{signature} returned states that are not a list of {len(levels)}")
        for name, kinds in (("rewards", "f"), ("action_counts", "iu"), ("done", "b"), ("success", "b")):
            array = getattr(outcome, name)
            if not isinstance(array, np.ndarray) or array.shape != (len(levels),) or array.dtype.kind not in kinds:
                kind = {"f": "floats", "iu": "integers", "b": "bools"}[kinds]
                raise trial.fail(f"{signature} returned {name} that are not an array of {len(levels)} {kind}")
        if bool((outcome.success & ~outcome.done).any()):
            raise trial.fail(f"{signature} returned success where done is False")
        if bool((outcome.action_counts > len(names)).any()) or bool((outcome.action_counts < 0).any()):
            raise trial.fail(f"{signature} returned action_counts that are not between 0 and {len(names)}")
