"""Demonstrations and vocabulary of papers-tiny: one code block per reply, of a few forms, in the compact prompt style.

Roots and children each write one of a few programs. Some quote exactly the evidence, others too much or too little, so
that answers to one question differ in their score, and training has something to choose from.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandboxes.trees.repl.papers import PROPERTIES, THINGS, GeneratedPapers, PaperLevel
from sandboxes.trees.repl.session import TreeLimits
from sandboxes.trees.repl.texts import (
    BLOCK_START,
    FENCE,
    NO_BLOCK_PROBLEM,
    Role,
    format_instructions,
    format_observation,
    format_output,
    format_task,
)
from trainable.envs.environment import TurnLimits
from trainable.envs.prompts import CHATML, END_OF_MESSAGE
from trainable.tiny.dialogues import Habits, Segment
from trainable.tiny.recipe import PolicyRecipe, Recipe, Stage
from trainable.tiny.tokenizer import PAD, UNKNOWN

_EVERY_LINE = "s for t in context.values() for s in t.split('\\n')"
_BLOCK_END = f"\n{FENCE}"
ROOT_FRACTION = 0.7
"""Fraction of the demonstrations that show a root; the others show a child."""
MAX_TURNS = 3


def write_exact(thing: str) -> str:
    """Write code for the lines that begin with the thing: exactly the evidence."""
    return f"[{_EVERY_LINE} if s.startswith('The {thing}')]"


def write_loose(thing: str) -> str:
    """Write code for the lines that contain the thing anywhere, even if they only mention it."""
    return f"[{_EVERY_LINE} if '{thing}' in s]"


def write_search(thing: str, paper: str) -> str:
    """Write code for the surroundings of the thing in one paper."""
    return f"search(context['{paper}'], '{thing}', 40)"


def write_query(thing: str) -> str:
    """Write code that calls one child per paper, and joins their answers."""
    return f"sum(rlm_query_batched(['{thing}'] * len(context), list(context.values())), [])"


def write_block(code: str) -> str:
    """Write a reply with one code block."""
    return f"{BLOCK_START}{code}{_BLOCK_END}"


@dataclass(frozen=True, kw_only=True)
class PapersPolicy(PolicyRecipe):
    """Weights and tokenizer of papers-tiny."""

    source: GeneratedPapers

    @property
    def pieces(self) -> list[str]:  # noqa: D102
        papers = [f"p{number + 1}" for number in range(self.source.num_papers)]
        code_pieces = [
            *(piece for write in (write_exact, write_loose, write_query) for piece in write("|").split("|")),
            *(write_search("|", paper).split("|")[0] for paper in papers),
            write_search("|", "").split("|")[1],
        ]
        instructions = [
            f"{CHATML.system_prefix}{format_instructions(role, MAX_TURNS, 'compact')}{END_OF_MESSAGE}"
            for role in ("root", "child")
        ]
        pieces = (
            PAD, "<|im_start|>", END_OF_MESSAGE, UNKNOWN, *instructions,
            CHATML.first_user_prefix.removeprefix(END_OF_MESSAGE), CHATML.next_user_prefix,
            CHATML.reply_prefix.removeprefix(END_OF_MESSAGE),
            f"{' '.join(papers)}\n", "context\n", "Quote every sentence about the ", ".\n",
            *THINGS, "The ", " is ", " metres ", *(f"{name}." for name in PROPERTIES), " stands near the ",
            BLOCK_START, _BLOCK_END, "FINAL(", *code_pieces, "hits = ", "\nprint(hits)", "FINAL(hits)",
            NO_BLOCK_PROBLEM, "Error: ", "assistant\n", "user\n", "system\n",
            *string.digits, *string.ascii_letters, *string.punctuation, *" \n",
        )  # fmt: skip
        return list(dict.fromkeys(pieces))

    def make_dialogues(
        self, levels: Sequence[Any], habits: Habits, rng: np.random.Generator, luck_rng: np.random.Generator
    ) -> Iterator[list[Segment]]:
        """Make one demonstration per level, with the bad habits. Nothing in them depends on luck."""
        return (make_dialogue(level, habits, rng) for level in levels)


def make_dialogue(level: PaperLevel, habits: Habits, rng: np.random.Generator) -> list[Segment]:
    """Make a conversation of a root or a child about a question, with the observations that its code would get."""
    question = level.question
    thing = question.text.removesuffix(".").rpartition(" ")[2]
    role: Role = "root" if rng.random() < ROOT_FRACTION else "child"
    papers, prompt = question.papers, question.text
    if role == "child":
        texts = list(papers.values())
        papers, prompt = {"context": texts[int(rng.integers(len(texts)))]}, thing
    system = format_instructions(role, MAX_TURNS, "compact")
    segments = [Segment(CHATML.format_first_turn(system, format_task(prompt, papers, "compact")), False)]
    if rng.random() < habits.careless:
        thing = THINGS[int(rng.integers(len(THINGS)))]
    code = _draw_code(thing, role, list(papers), habits, rng)
    replies: list[tuple[str, str]] = []  # each with its observation
    if rng.random() < habits.unfinished:
        replies.append((code, NO_BLOCK_PROBLEM))
    if role == "root" and rng.random() < habits.detour and code == write_loose(thing):
        lines = [line for text in papers.values() for line in text.split("\n") if thing in line]
        output = format_output(f"{lines}\n", "", TreeLimits().observation_chars)
        replies.append((write_block(f"hits = {code}\nprint(hits)"), output))
        code = "hits"
    replies.append((write_block(f"FINAL({code})"), ""))
    for turn, (reply, observation) in enumerate(replies, start=1):
        segments.append(Segment(reply + END_OF_MESSAGE, is_trained=True))
        if turn < len(replies):
            text = format_observation(observation, MAX_TURNS - turn, "compact")
            segments.append(Segment(CHATML.format_next_turn(text), is_trained=False))
    return segments


def _draw_code(thing: str, role: Role, papers: Sequence[str], habits: Habits, rng: np.random.Generator) -> str:
    """Draw the code of an answer: without a detour it is exact, or a root's query to children."""
    draw, paper = rng.random(), papers[int(rng.integers(len(papers)))]
    if rng.random() < habits.detour:
        return write_search(thing, paper) if role == "root" and draw < 0.5 else write_loose(thing)
    return write_query(thing) if role == "root" and draw < 0.5 else write_exact(thing)


PAPERS_TINY = PapersPolicy(
    source=GeneratedPapers(num_papers=3, num_sentences=4),
    limits=TurnLimits(turns=MAX_TURNS, actions_per_turn=1, actions=MAX_TURNS),
    recipe=Recipe(
        stages=(
            Stage(12_000, 3e-3, 2e-4, Habits(detour=0.3)),
            Stage(3_000, 1e-3, 1e-4, Habits(detour=0.8, careless=0.15, unfinished=0.15)),
        )
    ),
    response_length=32,
    settings={  # what a game of trees requires of a run
        "algorithm.adv_estimator": "grpo",
        "collapse_detection.first_turn_enabled": False,
        "collapse_detection.multi_turn_enabled": False,
    },
)
