"""Try plug-ins on a small example before a study starts, so that mistakes are found within a second.

A check calls the plug-in as a run does, and raises OwnPartError with a clause for what a run would not notice. Any
other exception is one of the plug-in: it is shown with the line of the user's file that raised it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainable.config import own_parts
from trainable.config.base_config import BaseRunConfig
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.own_parts import has_parameter
from trainable.config.run_config import RunConfig
from trainable.config.sections import EnvConfig
from trainable.config.setting_types import format_value
from trainable.envs.environment import FIRST_TEST_SEED, Environment, PlayedTurn, TurnOutcome
from trainable.envs.games.make import get_turn_limits, make_environment
from trainable.envs.prompts import ACTION_SEPARATOR, CHATML
from trainable.families import list_families
from trainable.rollout.episode import Episode, StopReason
from trainable.runs.records import STEP_COLUMNS, make_empty_row
from trainable.runs.stop_rules import evaluate_own_rules

_SEEDS = (1, 2, 3)
"""Seeds of the levels in the example."""
_EPISODE = Episode(
    level_seed=_SEEDS[0],
    group=0,
    tokens=np.arange(3),
    mask=np.array([False, True, True]),
    logprobs=np.array([0, -1, -1], dtype=np.float32),
    entropies=np.array([0, 1, 1], dtype=np.float32),
    turns=np.zeros(3, dtype=np.int64),
    turn_rewards=(1.0,),
    turn_actions=(("Up",),),
    turn_validity=(True,),
    stop_reason=StopReason.SUCCESS,
    texts=("a</think><answer>Up</answer>",),
)


def check_part(config: BaseRunConfig, setting: str) -> None:
    """Try the plug-in that a setting of `config` names. Raise OwnPartError, with the problem, if it fails.

    setting: a key of `list_parts(config)`.
    """
    part_name = own_parts.list_parts(config)[setting]
    part, value = own_parts.get_part(part_name.format()), format_value(part_name._replace(digest="").format(), 1000)
    setting = re.sub(r"\.\d+$", "", setting)  # the list, if it is an entry of a list
    if setting in _CHECKS:
        arguments, check = _CHECKS[setting]
    else:  # of a sandbox
        family = next(family for family in list_families() if family.config_class is type(config))
        arguments, check = "", resolve_name(family.part_checks[setting])
    try:
        _require(callable(part) or setting == "env.name", f"it is {_describe(part)}, and a function is needed")
        check(part, config)
        return
    except own_parts.OwnPartError as error:
        problem = str(error)
    except (Exception, SystemExit) as error:
        problem = f"{part_name.name}{arguments} raised {own_parts.describe_error(error)}"
    page = "docs/add_an_environment.md" if setting == "env.name" else "docs/add_a_part.md"
    file = own_parts.get_part_file(part_name)
    raise own_parts.OwnPartError(
        f"{setting}={value} cannot be used: {problem}. Correct {format_value(file.path, 1000)}; {page} has an example."
    )


def _require(condition: object, clause: str) -> None:
    if not condition:
        raise own_parts.OwnPartError(clause)


def _require_tensor(answer: Any, shape: tuple[int, ...], kind: str = "numbers") -> None:
    """Raise unless `answer` is a tensor of this shape, of bools or of finite numbers."""
    has_shape = isinstance(answer, Tensor) and tuple(answer.shape) == shape
    has_kind = has_shape and (answer.dtype == torch.bool if kind == "bools" else answer.is_floating_point())
    _require(has_kind, f"it returned {_describe(answer)}, and a tensor {list(shape)} of {kind} is needed")
    _require(torch.isfinite(answer).all(), "it returned numbers that are not finite")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


def _check_policy_loss(loss: Any, config: RunConfig) -> None:
    logprobs = torch.linspace(-2.0, -0.1, 6).requires_grad_()
    advantages, episode_index = torch.linspace(-1.0, 1.0, 6), torch.tensor([0, 0, 0, 1, 1, 2])
    for count in (6, 0):  # with several GPUs, a pass may have no tokens
        index = {"episode_index": episode_index[:count]} if has_parameter(loss, "episode_index") else {}
        token_loss = loss(logprobs[:count], torch.full((count,), -1.0), advantages[:count], **index)
        _require_tensor(token_loss, (count,))
        _require(
            token_loss.requires_grad or not count, "it returned a loss without a gradient with respect to logprobs"
        )


def _check_estimator(estimator: Any, config: RunConfig) -> None:
    mask = torch.tensor([[True, True, False], [False, True, True], [True, False, False], [True, True, True]])
    _require_tensor(estimator(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]), mask), (4, 3))


def _check_filter(keep_groups: Any, config: RunConfig) -> None:
    value, largest = config.filter.rollout_filter_value, config.filter.rollout_filter_type == "largest"
    for scores in (torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([1.0])):
        groups = {"groups": [[_EPISODE, _EPISODE]] * len(scores)} if has_parameter(keep_groups, "groups") else {}
        _require_tensor(keep_groups(scores, value, largest, **groups), (len(scores),), "bools")


def _check_stop_rule(rule: Any, config: RunConfig) -> None:
    columns = make_empty_row(all_quantities=config.collapse_detection.all_quantities, schedules=config.schedules)
    measures = make_environment(config.env).measures
    numbers = dict.fromkeys([*columns, *(f"train_{name}" for name in measures)], 1.0)
    rows = [{**numbers, "step": step, "stop_rule": ""} for step in (1, 2, 3)]
    names = [name for name in config.trainer.own_stop_rules if own_parts.get_part(name) is rule]
    for count in (1, len(rows)):
        evaluate_own_rules(rows[:count], names)


def _check_reward(reward: Any, config: RunConfig) -> None:
    environment = make_environment(config.env)
    (level,) = environment.make_levels(_SEEDS[:1])
    words = _list_example_words(environment.format_instructions(config.env.max_actions_per_traj))
    actions = [action for word in words if (action := environment.read_action(word)) is not None]
    turns = [
        PlayedTurn("text without tags", (), 0.0, False),
        PlayedTurn("a</think><answer>b</answer>", tuple(actions[:1]), 1.0, True),
    ]
    answer = reward(level, turns)
    numbers = np.asarray([float(number) for number in answer] if isinstance(answer, Iterable) else answer, dtype=float)
    clause = f"it returned {format_value(answer)} for two turns, and a finite number per turn is needed"
    _require(numbers.shape == (2,) and np.isfinite(numbers).all(), clause)


def _check_game(game: Any, config: RunConfig) -> None:
    """Call each method of the environment that the game makes, as a run does, with three levels."""
    environment: Environment[Any] = make_environment(config.env)
    levels, test_levels = environment.make_levels(_SEEDS), environment.make_test_levels(2)
    _require([level.seed for level in levels] == [*_SEEDS], f"make_levels({_SEEDS}) made levels with other seeds")
    _require(
        len(test_levels) == 2 and all(level.seed >= FIRST_TEST_SEED for level in test_levels),
        f"make_test_levels(2) did not make two levels with seeds of {FIRST_TEST_SEED} and above: others are no test",
    )
    keys = [level.key for level in levels]
    _require(all(isinstance(key, bytes) for key in keys), "it made a level without bytes as `key`")
    is_same = [level.key for level in environment.make_levels(_SEEDS)] == keys
    _require(is_same, "make_levels() returned another level for a seed when it was called again")

    states = environment.start(levels)
    _require(isinstance(states, list) and len(states) == len(levels), f"start() did not return {len(levels)} states")
    instructions = environment.format_instructions(config.env.max_actions_per_traj)
    words = _list_example_words(instructions)
    answers = [environment.read_action(word) for word in [*words, "no such word"]]
    is_plain = config.model.prompt_style == "plain"  # a whole reply is the action, and has no tags
    actions = tuple(action for action in (answers if is_plain else answers[:-1]) if action is not None)
    clause = "the instructions have no example of an answer, <answer>ACTION</answer>, whose action read_action() knows"
    _require(actions or is_plain, clause)
    texts = [environment.format_state(state, style) for style in ("full", "compact") for state in states]
    _check_words(environment.title, [*texts[len(states) :], *actions], config)

    luck = np.full((len(levels), config.env.max_actions_per_turn), 0.5)
    for names in ((), *((action,) for action in dict.fromkeys(actions))):
        _check_outcome(environment.step(environment.start(levels), [names] * len(levels), luck), len(levels), names)
    for compute in (environment.compute_chance, environment.compute_best):
        shares = compute(levels, get_turn_limits(config.env))
        has_shape = shares is None or np.shape(shares) == (len(levels),)
        _require(has_shape, f"compute_chance() or compute_best() returned neither None nor {len(levels)} numbers")
    column_names = {column.name for column in STEP_COLUMNS}
    for name, measure in environment.measures.items():
        clause = f"the measure {format_value(name)} has the name of a column of docs/metrics.md"
        _require(f"val_{name}" not in column_names, clause)
        float(measure(levels[0], actions))


def _check_outcome(outcome: Any, count: int, names: tuple[str, ...]) -> None:
    """Check the outcome of a turn of `count` episodes, each with the actions `names`."""
    call = f"step(states, [{list(names)}, ...], luck) returned"
    _require(isinstance(outcome, TurnOutcome), f"{call} {_describe(outcome)}, and a TurnOutcome is needed")
    has_states = isinstance(outcome.states, list) and len(outcome.states) == count
    _require(has_states, f"{call} states that are not a list of {count}")
    kinds = {"rewards": np.floating, "action_counts": np.integer, "done": np.bool_, "success": np.bool_}
    for name, kind in kinds.items():
        array = getattr(outcome, name)
        has_kind = isinstance(array, np.ndarray) and array.shape == (count,) and np.issubdtype(array.dtype, kind)
        _require(has_kind, f"{call} {name} that are not an array of {count} numpy.{kind.__name__}")
    _require(not (outcome.success & ~outcome.done).any(), f"{call} success where done is False")


def _list_example_words(instructions: str) -> list[str]:
    """List the words of the example answers in the instructions of a game."""
    examples = re.findall(r"<answer>(.*?)</answer>", instructions, re.DOTALL)
    return [word.strip() for example in examples for word in example.split(ACTION_SEPARATOR)]


def _check_words(title: str, texts: Sequence[str], config: RunConfig) -> None:
    """Raise if the few words of a shipped policy's tokenizer do not cover the title, the states and the actions."""
    shipped_model = SHIPPED_MODELS.get(config.model.path)
    if shipped_model is None:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shipped_model.folder / "tokenizer.json"))

    def is_known(text: str) -> bool:
        return bool(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text)

    # The title is the entire system message, of which the tokenizer knows exactly one.
    known_title = make_environment(EnvConfig(name=shipped_model.game)).title
    _require(
        is_known(CHATML.system_prefix + title + CHATML.end_marker),
        f"model.path={config.model.path} does not know the title {format_value(repr(title))}, which is its system "
        f"message: set title = {known_title!r}, with which this policy answers in the right form",
    )
    unknown_words = dict.fromkeys(word for text in texts for word in text.split() if not is_known(word))
    pieces = [piece.strip() for piece in tokenizer.get_vocab() if "<|" not in piece and piece.strip()]
    known_words = sorted({piece for piece in pieces if len(piece) == 1 or piece.isalpha()})
    _require(
        not unknown_words,
        f"model.path={config.model.path} does not know {format_value(', '.join(unknown_words), 200)}, which the "
        f"compact states or the example of an answer have. It knows {', '.join(known_words)} and what consists of "
        "these. Use such words, or a model of the hub with --model NAME --set model.prompt_style=full",
    )


_CHECKS: Mapping[str, tuple[str, Callable[[Any, Any], None]]] = {
    "env.name": ("", _check_game),
    "env.reward": ("(level, turns)", _check_reward),
    "filter.rollout_filter_strategy": ("(scores, value, largest)", _check_filter),
    "algorithm.adv_estimator": ("(scores, group_ids, mask)", _check_estimator),
    "actor.policy_loss": ("(logprobs, old_logprobs, advantages)", _check_policy_loss),
    "trainer.own_stop_rules": ("(rows)", _check_stop_rule),
}
"""The arguments of a plug-in for each setting that names one, and its check."""
