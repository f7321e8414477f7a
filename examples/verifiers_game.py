"""Play a taskset of the package verifiers as a game of one turn: its prompts and rewards, with the model of a run.

A system prompt comes before the prompt, and the hash of both puts a task into the training, validation or test set.
Run: python -m tune_study run kl --env examples/verifiers_game.py:GAME --preset small --model build/smollm2
"""

import asyncio
from collections import namedtuple
from inspect import signature

import numpy as np
import verifiers.v1 as vf  # python -m pip install 'verifiers>=0.4'

from trainable.envs.environment import FIRST_TEST_SEED, Environment, TurnOutcome
from trainable.envs.games.dataset import FIRST_TRAINING_SEED, Row

SUCCESS = 1.0  # an episode with at least this reward is a success
Level = namedtuple("Level", ["seed", "key", "prompt", "task"])


class Sum(vf.Task):
    @vf.reward
    async def is_right(self, trace):
        return float(trace.last_reply.rstrip(".").split()[-1:] == [str(sum(map(int, self.data.prompt.split("+"))))])


class Sums(vf.Taskset):
    def load(self):
        return [Sum(vf.TaskData(prompt=f"{a} + {b}", system_prompt="Add.")) for a in range(30) for b in range(30)]


def list_needs(taskset, task):
    """List what a task needs besides the texts of its prompt and of one reply."""
    messages = [] if isinstance(task.data.prompt, str) else task.data.prompt or []
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    needs = {
        "a runtime": task.NEEDS_CONTAINER or any("runtime" in signature(f).parameters for f in hooks),
        "setup() or finalize()": (type(task).setup, type(task).finalize) != (vf.Task.setup, vf.Task.finalize),
        "tools": task.toolsets(task.config) or taskset.toolsets(taskset.config),
        "a judge": task.config.judges,
        "an Env of its own": vf.environment_class(taskset.config.id) is not vf.SingleAgentEnv,
        "replies or images": any(m.role not in ("system", "user") or not isinstance(m.content, str) for m in messages),
    }
    return [name for name, is_needed in needs.items() if is_needed]


async def compute_reward(level, reply):
    """Compute the weighted sum of the rewards of a task after a conversation of one turn."""
    prompt, answer = vf.UserMessage(content=level.prompt), vf.AssistantMessage(content=reply)
    nodes = [vf.MessageNode(message=prompt), vf.MessageNode(parent=0, message=answer, sampled=True)]
    task = vf.TraceTask(type=type(level.task).__name__, data=level.task.data)
    trace = vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)
    await level.task.score(trace)
    return trace.reward


class VerifiersGame(Environment):  # whose compute_chance() and compute_best() return None: not known
    name = title = "verifiers"
    has_held_out_levels, measures = True, {}
    settings = {"model.prompt_style": "plain", "env.max_turn": 1}

    def __init__(self, taskset):
        sets = ({}, {}, {})
        for task in taskset.take(20_000):  # it may be infinite
            if needs := list_needs(taskset, task):
                raise ValueError(f"{type(task).__name__} needs {', '.join(needs)}: this game has only replies")
            row = Row("\n\n".join(filter(None, [task.data.system_prompt, task.data.prompt_text])), "")
            sets[min(row.key[0] % 10, 2)][row.key] = Level(0, row.key, row.prompt, task)
        if not all(sets):
            raise ValueError(f"{type(taskset).__name__} has too few prompts for a training, validation and test set")
        self.test, self.validation, self.training = ([rows[key] for key in sorted(rows)] for rows in sets)

    def make_levels(self, seeds):
        sets = [self.validation if seed < FIRST_TRAINING_SEED else self.training for seed in seeds]
        return [rows[seed % len(rows)]._replace(seed=int(seed)) for seed, rows in zip(seeds, sets, strict=True)]

    def make_test_levels(self, count):
        return [level._replace(seed=FIRST_TEST_SEED + n) for n, level in enumerate(self.test[:count])]

    def start(self, levels):
        return list(levels)

    def step(self, states, actions, luck):
        replies = ["".join(texts) for texts in actions]
        rewards = np.array([asyncio.run(compute_reward(*pair)) for pair in zip(states, replies, strict=True)])
        done = np.array([len(texts) > 0 for texts in actions])
        return TurnOutcome(list(states), rewards, done.astype(int), done, done & (rewards >= SUCCESS))

    def read_action(self, word):
        return word if word.strip() else None

    def format_instructions(self, max_actions):
        return "You are a helpful assistant."

    def format_state(self, state, style):
        return state.prompt


# Of an installed package: VerifiersGame(vf.load_taskset(vf.taskset_config_type("reverse-text")(id="reverse-text")))
GAME = VerifiersGame(Sums(vf.TasksetConfig()))
