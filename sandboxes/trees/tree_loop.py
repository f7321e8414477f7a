"""The loop of trees: root agents work in REPLs, where their code may call children, which have separate REPLs."""

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
from trainable.config.setting_types import PromptStyle
from trainable.envs.prompts import ChatFormat
from trainable.files.step_phase import STEP_PHASE
from trainable.models.codec import Codec
from trainable.rollout.episode import Transcript
from trainable.rollout.sampler import Sampler, SamplingParams

MAX_THREADS = 16
"""Number of REPL processes that compute at the same time. The threads only wait for them."""
FILES_PER_PROCESS = 4
"""Open files of this process per REPL: three streams and a handle."""
SPARE_FILES = 256
"""Open files reserved for everything else."""
MAX_OPEN_FILES = 65_536


class TreeTexts(NamedTuple):
    """How texts become tokens. markers: texts of special tokens and of the chat format, which would end a message."""

    codec: Codec
    chat: ChatFormat
    style: PromptStyle
    markers: Sequence[str]


class TreeSettings(NamedTuple):
    """Limits of trees, of the code in them, and of their conversations (tokens)."""

    tree: TreeLimits
    process: ReplLimits
    context_length: int


@dataclass(eq=False)
class Rollout:
    """A rollout, finished or in progress."""

    prompt: str
    papers: Mapping[str, str]
    parent_turn: int
    """For a child, the turn of its root that called it; -1 for a root."""
    stream: np.random.Generator
    """Source of all its random numbers, and its children's."""
    session: ReplSession = field(init=False)
    transcript: Transcript = field(default_factory=Transcript)
    observations: list[str] = field(default_factory=list)
    """The result of each reply, the last one empty if the rollout ended with it."""
    validity: list[bool] = field(default_factory=list)
    """Whether each reply had exactly one code block, or an answer."""
    answer: str | None = None
    out_of_context: bool = False
    """Whether its next turn, with a reply of maximum length, might not have fitted."""
    children: list["Rollout"] = field(default_factory=list)
    """Those that are finished, in the order in which they were called."""

    @property
    def role(self) -> Role:
        """Role of the rollout: only a root may call children."""
        return "root" if self.parent_turn < 0 else "child"


def roll_out_trees(
    questions: Sequence[Question],
    group_size: int,
    sampler: Sampler,
    texts: TreeTexts,
    settings: TreeSettings,
    params: SamplingParams,
    streams: Sequence[np.random.Generator],
) -> list[Rollout]:
    """Answer every question `group_size` times; return the roots, grouped by question.

    The roots take their turns together. When their code calls children, the children of all roots form one batch, which
    is played to the end before the roots continue. If a child's first turn does not fit into the context, the call is
    refused, which the root's code sees as a ValueError. streams: one generator per tree, the source of all its random
    numbers.

    Raises ValueError if the first turn of a root does not fit into the context.
    """
    roots = [
        Rollout(question.text, question.papers, -1, streams[group * group_size + number])
        for group, question in enumerate(questions)
        for number in range(group_size)
    ]
    # As many roots at once as open files allow, each with the children of one call.
    files_per_root = FILES_PER_PROCESS * (1 + min(settings.tree.children_per_call, settings.tree.children))
    size = max((_allow_open_files() - SPARE_FILES) // files_per_root, 1)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for start in range(0, len(roots), size):
            open_roots = roots[start : start + size]
            with ExitStack() as stack:
                loop = _TreeLoop(sampler, texts, settings, params, pool, stack)
                if not loop.start(open_roots):
                    length = settings.context_length
                    raise ValueError(f"A question and a reply do not fit into the context of {length} tokens.")
                loop.play(open_roots)
    return roots


def _allow_open_files() -> int:
    """Raise this process's limit on open files to `MAX_OPEN_FILES` if allowed; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, wanted = (
        MAX_OPEN_FILES if value == resource.RLIM_INFINITY else min(value, MAX_OPEN_FILES) for value in (soft, hard)
    )
    if limit < wanted:
        with suppress(OSError, ValueError):  # on systems that do not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
    return limit


def format_first_turn(prompt: str, papers: Mapping[str, str], role: Role, texts: TreeTexts, limits: TreeLimits) -> str:
    """Format a rollout's conversation up to its first reply."""
    system = format_instructions(role, limits.turns, texts.style)
    task = _hide_markers(format_task(prompt, papers, texts.style), texts)
    return texts.chat.format_first_turn(system, task)


def _hide_markers(text: str, texts: TreeTexts) -> str:
    """Break up all markers in a text, so that they have no effect."""
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

    def start(self, rollouts: Sequence[Rollout]) -> bool:
        """Start the REPLs of rollouts if the first turn of each fits into the context; return whether they fit."""
        limits = self.settings.tree
        messages = [
            format_first_turn(rollout.prompt, rollout.papers, rollout.role, self.texts, limits) for rollout in rollouts
        ]
        prompts = self.texts.codec.encode(messages)
        if any(len(prompt) + self.params.max_new_tokens > self.settings.context_length for prompt in prompts):
            return False
        sessions = self.pool.map(self._start_session, rollouts)
        for rollout, prompt, session in zip(rollouts, prompts, sessions, strict=True):
            rollout.session = session
            rollout.transcript.append_prompt(prompt)
        return True

    def _start_session(self, rollout: Rollout) -> ReplSession:
        session = ReplSession(rollout.papers, self.settings.tree, rollout.role == "root", self.settings.process)
        self.stack.callback(session.close)
        return session

    def play(self, rollouts: Sequence[Rollout]) -> None:
        """Play all rollouts to their ends, together with the children that they call."""
        if not rollouts:
            return
        prompts = [rollout.transcript.tokens[0].tolist() for rollout in rollouts]
        streams = [rollout.stream.spawn(1)[0] for rollout in rollouts]
        conversation = self.sampler.start_conversation(prompts, self.params, streams)
        rows = list(range(len(rollouts)))
        new_tokens: list[list[int]] = [[] for _ in rows]
        while rows:
            STEP_PHASE.show_share(f"{len(rows)} of {len(rollouts)} conversations go on")
            replies = conversation.sample_replies(rows, new_tokens)
            texts = self.texts.codec.decode([reply.token_ids for reply in replies])
            active = [rollouts[row] for row in rows]
            for rollout, reply, text in zip(active, replies, texts, strict=True):
                rollout.transcript.append_reply(reply, text)
            for rollout, outcome in zip(active, self._read_replies(active, texts), strict=True):
                if isinstance(outcome, RolloutAnswer):
                    rollout.answer = outcome.text
                rollout.observations.append(outcome.text if isinstance(outcome, TurnObservation) else "")
                rollout.validity.append(isinstance(outcome, RolloutAnswer) or outcome.is_valid)
            rows, new_tokens = self._continue(rollouts, rows)
            for rollout in set(active) - {rollouts[row] for row in rows}:
                rollout.session.close()

    def _read_replies(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[TurnObservation | RolloutAnswer]:
        """Return the outcomes of the replies, after all of their children have answered."""
        outcomes = list(self.pool.map(lambda rollout, text: rollout.session.read(text), rollouts, texts))
        while waiting := [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Query)]:
            children = [self._make_children(rollouts[index], outcomes[index]) for index in waiting]
            self.play([child for asked in children if not isinstance(asked, str) for child in asked])
            results = self.pool.map(_reply_to_query, (rollouts[index] for index in waiting), children)
            for index, outcome in zip(waiting, results, strict=True):
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Query)]

    def _make_children(self, rollout: Rollout, query: Outcome) -> list[Rollout] | str:
        """Make the children that a query calls, or return the reason for refusing it."""
        assert isinstance(query, Query)
        turn = rollout.transcript.num_turns - 1
        children = []
        for prompt, context in zip(query.prompts, query.contexts, strict=True):
            # A bare text gets the id `context`; without a context, a child sees the texts of its root.
            papers = {"context": context} if isinstance(context, str) else context
            stream = rollout.stream.spawn(1)[0]
            children.append(Rollout(prompt, rollout.papers if papers is None else papers, turn, stream))
        if self.start(children):
            return children
        return f"a question and its reply may have at most {self.settings.context_length} tokens"

    def _continue(self, rollouts: Sequence[Rollout], rows: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Append the observations of the rows that continue; return these rows, and their new tokens."""
        chat, limits = self.texts.chat, self.settings.tree
        live_rows = [
            row for row in rows if rollouts[row].answer is None and rollouts[row].transcript.num_turns < limits.turns
        ]
        messages = []
        for row in live_rows:
            transcript = rollouts[row].transcript
            turns_left = limits.turns - transcript.num_turns
            observation = format_observation(rollouts[row].observations[-1], turns_left, self.texts.style)
            message = chat.format_next_turn(_hide_markers(observation, self.texts))
            messages.append(message if transcript.is_closed else chat.end_marker + message)
        next_rows, new_tokens = [], []
        for row, ids in zip(live_rows, self.texts.codec.encode(messages), strict=True):
            transcript, params = rollouts[row].transcript, self.params
            # Otherwise the conversation ends with the last reply.
            if transcript.append_prompt_if_it_fits(ids, params.max_new_tokens, self.settings.context_length):
                next_rows.append(row)
                new_tokens.append(ids)
            else:
                rollouts[row].out_of_context = True
        return next_rows, new_tokens


def _reply_to_query(rollout: Rollout, children: Sequence[Rollout] | str) -> Outcome:
    if isinstance(children, str):
        return rollout.session.refuse_query(children)
    rollout.children.extend(children)
    return rollout.session.give_answers([child.answer or "" for child in children])
