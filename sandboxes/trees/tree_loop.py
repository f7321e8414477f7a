"""The loop of trees: roots work in a REPL, whose code may ask children, which work in REPLs of their own."""

import resource
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sandboxes.trees.repl.process import Query, ReplLimits
from sandboxes.trees.repl.questions import Question
from sandboxes.trees.repl.session import Outcome, ReplSession, RolloutAnswer, TreeLimits, TurnObservation
from sandboxes.trees.repl.texts import Role, format_instructions, format_observation, format_task
from trainable.envs.chat import ChatFormat
from trainable.envs.environment import PromptStyle
from trainable.files.step_phase import STEP_PHASE
from trainable.models.codec import Codec
from trainable.rollout.sampler import Sampler, SamplingParams
from trainable.rollout.transcript import TokenArrays, Transcript

MAX_THREADS = 16
"""Processes of REPLs that compute at the same time. The threads only wait for them."""
FILES_PER_PROCESS = 4
"""Open files of this process for each REPL: three streams and a handle."""
SPARE_FILES = 256
"""Open files for everything else."""
MAX_OPEN_FILES = 65_536
CHARS_PER_TOKEN = 16
"""Characters for each token of the context, beyond which a question to a child is refused unread."""
SECONDS_PER_CHAR = 4e-6
"""CPU time that a question costs the code that asks it: what the slowest tokenizer that was measured needs. A price
per character does not depend on the load of the machine."""


class TreeTexts(NamedTuple):
    """How texts become tokens.

    style: of the prompts. markers: texts of special tokens and of the chat format, which nothing that a policy has
    written may contain: they would end its message and begin another one.
    """

    codec: Codec
    chat: ChatFormat
    style: PromptStyle
    markers: Sequence[str]


class TreeSettings(NamedTuple):
    """Limits of trees, of the code in them, and of their conversations (tokens)."""

    tree: TreeLimits
    process: ReplLimits
    context_length: int


class Rollout(NamedTuple):
    """One finished rollout, of T tokens.

    arrays: its tokens. texts: of its replies. observations: what each reply led to, the last one empty if the rollout
    ended with it. validity: whether each reply had exactly one block of code, or an answer. answer: None if it gave
    none. prompt: the question. parent_turn: of a child, the turn of its root that asked it; -1 for a root.
    out_of_context: whether its next turn, with a reply of full length, might not have fitted.
    """

    arrays: TokenArrays
    texts: tuple[str, ...]
    observations: tuple[str, ...]
    validity: tuple[bool, ...]
    answer: str | None
    prompt: str
    parent_turn: int
    out_of_context: bool


class Tree(NamedTuple):
    """A root with its children, in the order in which they were asked. group: number of its question."""

    group: int
    root: Rollout
    children: tuple[Rollout, ...]


class _Task(NamedTuple):
    """What a rollout begins with.

    parent_turn: of a child; -1 for a root. stream: all of its random numbers, and those of its children.
    """

    prompt: str
    papers: Mapping[str, str]
    parent_turn: int
    stream: np.random.Generator

    @property
    def role(self) -> Role:
        return "root" if self.parent_turn < 0 else "child"


@dataclass(eq=False)
class _Player:
    """A rollout in progress. children: those that are finished."""

    task: _Task
    session: ReplSession
    transcript: Transcript = field(default_factory=Transcript)
    observations: list[str] = field(default_factory=list)
    validity: list[bool] = field(default_factory=list)
    answer: str | None = None
    out_of_context: bool = False
    children: list["_Player"] = field(default_factory=list)

    def finish(self) -> Rollout:
        """The record of the finished rollout."""
        transcript = self.transcript
        return Rollout(
            transcript.make_arrays(),
            tuple(transcript.texts),
            tuple(self.observations),
            tuple(self.validity),
            self.answer,
            self.task.prompt,
            self.task.parent_turn,
            self.out_of_context,
        )


class _Streams:
    """The random numbers of a conversation's rows, each from the stream of its own rollout."""

    def __init__(self, streams: Sequence[np.random.Generator]) -> None:
        self._streams = streams

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        """One generator per row, which does not depend on how many rows there are."""
        assert n_children == len(self._streams)
        return [stream.spawn(1)[0] for stream in self._streams]


def roll_out_trees(
    questions: Sequence[Question],
    group_size: int,
    sampler: Sampler,
    texts: TreeTexts,
    settings: TreeSettings,
    params: SamplingParams,
    streams: Sequence[np.random.Generator],
) -> list[Tree]:
    """Answer every question `group_size` times; the trees of a question are consecutive.

    The roots take their turns together. Where their code asks children, those of all roots are one batch, which takes
    its turns to the end before the roots go on. A child of which the first turn does not fit into the context is
    refused, which its root's code sees as a ValueError.

    Args:
        questions: P questions.
        group_size: G trees per question.
        sampler: samples the replies.
        texts: how texts become tokens.
        settings: limits.
        params: of the sampler, for roots and children.
        streams: one generator per tree (P * G). All random numbers of a tree come from its own.

    Raises ValueError if the first turn of a root does not fit into the context.
    """
    trees: list[Tree] = []
    tasks = [
        _Task(question.text, question.papers, -1, streams[group * group_size + number])
        for group, question in enumerate(questions)
        for number in range(group_size)
    ]
    # As many roots at once as have all files that they need, each with the children of a call.
    files_per_root = FILES_PER_PROCESS * (1 + min(settings.tree.children_per_call, settings.tree.children))
    size = max((_allow_open_files() - SPARE_FILES) // files_per_root, 1)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for start in range(0, len(tasks), size):
            with ExitStack() as stack:
                roots = _TreeLoop(sampler, texts, settings, params, pool, stack).play_roots(tasks[start : start + size])
            trees += [
                Tree(number // group_size, root.finish(), tuple(child.finish() for child in root.children))
                for number, root in enumerate(roots, start=start)
            ]
    return trees


def _allow_open_files() -> int:
    """Let this process open up to `MAX_OPEN_FILES` files if it may; return how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # of systems that do not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_OPEN_FILES)


def format_first_turn(prompt: str, papers: Mapping[str, str], role: Role, texts: TreeTexts, limits: TreeLimits) -> str:
    """A rollout's conversation up to its first reply."""
    system = format_instructions(role, limits.turns, texts.style)
    task = _hide_markers(format_task(prompt, papers, texts.style), texts)
    return texts.chat.format_first_turn(system, task)


def _hide_markers(text: str, texts: TreeTexts) -> str:
    """A text in which no marker is one any more."""
    for marker in texts.markers:
        text = text.replace(marker, f"{marker[0]} {marker[1:]}" if len(marker) > 1 else " ")
    return text


@dataclass
class _TreeLoop:
    sampler: Sampler
    texts: TreeTexts
    settings: TreeSettings
    params: SamplingParams
    pool: ThreadPoolExecutor
    stack: ExitStack

    def play_roots(self, tasks: Sequence[_Task]) -> list[_Player]:
        """Play roots to their ends. ValueError if the first turn of one does not fit into the context."""
        prompts = self._encode_prompts(tasks)
        if not all(map(self._fits, prompts)):
            raise ValueError(
                f"A question and a reply do not fit into the context of {self.settings.context_length} tokens."
            )
        roots = self._make_players(tasks, prompts)
        self.play(roots)
        return roots

    def _encode_prompts(self, tasks: Sequence[_Task]) -> list[list[int]]:
        """The first prompts of rollouts."""
        limits = self.settings.tree
        return self.texts.codec.encode(
            [format_first_turn(task.prompt, task.papers, task.role, self.texts, limits) for task in tasks]
        )

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self.params.max_new_tokens <= self.settings.context_length

    def _make_players(self, tasks: Sequence[_Task], prompts: Sequence[Sequence[int]]) -> list[_Player]:
        """Rollouts before their first turns. prompts: the first one of each."""
        players = list(map(_Player, tasks, self.pool.map(self._start_session, tasks)))
        for player, prompt in zip(players, prompts, strict=True):
            player.transcript.append_prompt(prompt)
        return players

    def _start_session(self, task: _Task) -> ReplSession:
        session = ReplSession(task.papers, self.settings.tree, task.role == "root", self.settings.process)
        self.stack.callback(session.close)
        return session

    def play(self, players: Sequence[_Player]) -> None:
        """Play all rollouts to their ends, together with the children that they ask."""
        if not players:
            return
        prompts = [player.transcript.tokens[0].tolist() for player in players]
        streams = _Streams([player.task.stream for player in players])
        conversation = self.sampler.start_conversation(prompts, 1, self.params, streams)
        rows = list(range(len(players)))
        new_tokens: list[list[int]] = [[] for _ in rows]
        while rows:
            STEP_PHASE.show_share(f"{len(rows)} of {len(players)} conversations go on")
            replies = conversation.sample_replies(rows, new_tokens)
            texts = self.texts.codec.decode([reply.token_ids for reply in replies])
            active = [players[row] for row in rows]
            for player, reply, text in zip(active, replies, texts, strict=True):
                player.transcript.append_reply(reply, text)
            for player, outcome in zip(active, self._read_replies(active, texts), strict=True):
                if isinstance(outcome, RolloutAnswer):
                    player.answer = outcome.text
                player.observations.append(outcome.text if isinstance(outcome, TurnObservation) else "")
                player.validity.append(isinstance(outcome, RolloutAnswer) or outcome.is_valid)
            rows, new_tokens = self._continue(players, rows)
            for player in set(active) - {players[row] for row in rows}:
                player.session.close()

    def _read_replies(self, players: Sequence[_Player], texts: Sequence[str]) -> list[TurnObservation | RolloutAnswer]:
        """What the replies lead to, after all of their children have answered."""
        outcomes = list(self.pool.map(lambda player, text: player.session.read(text), players, texts))
        while waiting := [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Query)]:
            children = [self._make_children(players[index], outcomes[index]) for index in waiting]
            self.play([child for asked in children if not isinstance(asked, str) for child in asked])
            results = self.pool.map(_reply_to_query, (players[index] for index in waiting), children)
            for index, outcome in zip(waiting, results, strict=True):
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Query)]

    def _make_children(self, player: _Player, query: Outcome) -> list[_Player] | str:
        """The children that a query asks, or why there are none."""
        assert isinstance(query, Query)
        turn = player.transcript.num_turns - 1
        tasks = []
        for prompt, context in zip(query.prompts, query.contexts, strict=True):
            # A text alone has the id `context`; without a context, a child sees the texts of its root.
            papers = {"context": context} if isinstance(context, str) else context
            stream = player.task.stream.spawn(1)[0]
            tasks.append(_Task(prompt, player.session.papers if papers is None else papers, turn, stream))
        problem = f"a question and its reply may have at most {self.settings.context_length} tokens"
        num_chars = [len(task.prompt) + sum(map(len, task.papers)) for task in tasks]
        if max(num_chars) > CHARS_PER_TOKEN * self.settings.context_length:
            return problem
        player.session.charge(SECONDS_PER_CHAR * sum(num_chars))
        prompts = self._encode_prompts(tasks)
        if not all(map(self._fits, prompts)):
            return problem
        return self._make_players(tasks, prompts)

    def _continue(self, players: Sequence[_Player], rows: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Append the observations of the rows that go on; return these rows, and their new tokens."""
        chat, limits = self.texts.chat, self.settings.tree
        live_rows = [
            row for row in rows if players[row].answer is None and players[row].transcript.num_turns < limits.turns
        ]
        messages = []
        for row in live_rows:
            transcript = players[row].transcript
            turns_left = limits.turns - transcript.num_turns
            observation = format_observation(players[row].observations[-1], turns_left, self.texts.style)
            message = chat.format_next_turn(_hide_markers(observation, self.texts))
            messages.append(message if transcript.is_closed else chat.end_marker + message)
        next_rows, new_tokens = [], []
        for row, ids in zip(live_rows, self.texts.codec.encode(messages), strict=True):
            transcript, params = players[row].transcript, self.params
            # Otherwise the conversation ends with the last reply.
            if transcript.append_prompt_if_it_fits(ids, params.max_new_tokens, self.settings.context_length):
                next_rows.append(row)
                new_tokens.append(ids)
            else:
                players[row].out_of_context = True
        return next_rows, new_tokens


def _reply_to_query(player: _Player, children: Sequence[_Player] | str) -> Outcome:
    if isinstance(children, str):
        return player.session.refuse(children)
    player.children.extend(children)
    return player.session.give_answers([child.answer or "" for child in children])
