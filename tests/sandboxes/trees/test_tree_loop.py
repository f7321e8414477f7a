"""Tests of trees of rollouts: a scripted policy, real REPLs."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from sandboxes.trees import tree_loop
from sandboxes.trees.repl.process import ReplLimits
from sandboxes.trees.repl.questions import Question
from sandboxes.trees.repl.session import TreeLimits
from sandboxes.trees.tree_loop import Rollout, TreeSettings, TreeTexts, roll_out_trees
from trainable.envs.prompts import CHATML
from trainable.models.codec import Codec
from trainable.rollout.sampler import SampledReply, SamplingParams

END, START = 256, 257
MARKERS = {"<|im_end|>": END, "<|im_start|>": START}
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=200, stop_token=END)
PAPERS = {"a": "one two three", "b": "four five"}
QUESTION = Question("Which numbers?", PAPERS, ("two",))


def encode(texts: Sequence[str]) -> list[list[int]]:
    pieces = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
    return [
        [token for piece in pieces.split(text) for token in ([MARKERS[piece]] if piece in MARKERS else piece.encode())]
        for text in texts
    ]


def decode(rows: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
    return [bytes(int(token) for token in row if token < END).decode(errors="replace") for row in rows]


def decode_all(rows: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
    names = {number: marker for marker, number in MARKERS.items()}
    return ["".join(names[int(token)] if token >= END else chr(token) for token in row) for row in rows]


TEXTS = TreeTexts(cast(Codec, SimpleNamespace(encode=encode, decode=decode)), CHATML, "compact", tuple(MARKERS))
Policy = Callable[[str, float], str]
"""The reply to a conversation so far, with a random number; without an end marker if it ends in ~."""


class TextSampler:
    """Samples from a function of texts, and keeps the number of rows of each of its calls."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.batches = policy, list[int]()

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> "TextConversation":
        return TextConversation(self, [list(prompt) for prompt in prompts], rngs)


class TextConversation:
    def __init__(
        self, sampler: TextSampler, histories: list[list[int]], streams: Sequence[np.random.Generator]
    ) -> None:
        self.sampler, self.histories, self.streams = sampler, histories, streams

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        self.sampler.batches.append(len(rows))
        replies = []
        for row, tokens in zip(rows, new_tokens, strict=True):
            self.histories[row] += tokens
            text = self.sampler.policy(decode_all([self.histories[row]])[0], float(self.streams[row].random()))
            ids = encode([text.removesuffix("~")])[0] + [END] * (not text.endswith("~"))
            self.histories[row] += ids
            logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
            replies.append(SampledReply(np.array(ids), logprobs, -logprobs, ids[-1] == END))
        return replies


def run_code(code: str) -> str:
    return f"```repl\n{code}\n```"


def play(
    policy: Policy,
    questions: Sequence[Question] = (QUESTION,),
    group_size: int = 1,
    limits: TreeLimits | None = None,
    context_length: int = 10_000,
    seed: int = 0,
    texts: TreeTexts = TEXTS,
) -> tuple[list[Rollout], TextSampler]:
    sampler = TextSampler(policy)
    settings = TreeSettings(limits or TreeLimits(), ReplLimits(seconds=20), context_length)
    streams = [np.random.default_rng([seed, number]) for number in range(len(questions) * group_size)]
    return roll_out_trees(questions, group_size, sampler, texts, settings, PARAMS, streams), sampler


def get_last_message(history: str) -> str:
    """What the user has said last."""
    return history.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].strip("\n")


def is_child(history: str) -> bool:
    return history.startswith("<|im_start|>system\nPaper<|im_end|>")


def test_a_root_works_in_its_repl_until_it_answers() -> None:
    replies = iter([run_code("n = len(context['a'])"), run_code("print(n)"), "I have it.\nFINAL(['two'])"])
    ((tree,), sampler) = play(lambda history, draw: next(replies))
    assert (tree.answer, tree.observations, tree.validity) == ("['two']", ["(no output)", "13", ""], [True, True, True])
    assert (tree.children, sampler.batches) == ([], [1, 1, 1])
    arrays = tree.transcript.make_arrays()
    assert decode_all([arrays["tokens"]])[0] == (
        "<|im_start|>system\nPapers<|im_end|>\n<|im_start|>user\na b\nWhich numbers?\n<|im_end|>\n"
        "<|im_start|>assistant\n```repl\nn = len(context['a'])\n```<|im_end|>\n"
        "<|im_start|>user\n(no output)\n<|im_end|>\n<|im_start|>assistant\n```repl\nprint(n)\n```<|im_end|>\n"
        "<|im_start|>user\n13\n<|im_end|>\n"
        "<|im_start|>assistant\nI have it.\nFINAL(['two'])<|im_end|>"
    )
    assert decode_all([arrays["tokens"][arrays["mask"] & (arrays["turns"] == 1)]]) == [
        "```repl\nprint(n)\n```<|im_end|>"
    ]
    assert (arrays["logprobs"][arrays["mask"]] < 0).all()
    assert (arrays["logprobs"][~arrays["mask"]] == 0).all()


def test_children_of_all_roots_are_one_batch_and_their_answers_values_in_the_code() -> None:
    def answer(history: str, draw: float) -> str:
        if not is_child(history):
            if "user" in history.partition("assistant")[2]:  # it has seen what its code printed
                return f"FINAL({get_last_message(history)})"
            return run_code(
                "print(rlm_query_batched(['first', 'second'], [None, 'x y']), rlm_query('third', {'c': 'z'}))"
            )
        task = get_last_message(history)
        if task == "context\nsecond":
            # Its only text; a child has two turns.
            return run_code("FINAL([len(context), list_papers(), context['context']])")
        return run_code("FINAL(list_papers())")

    trees, sampler = play(answer, questions=(QUESTION, QUESTION), group_size=2)
    for tree in trees:
        assert tree.answer == "[['a', 'b'], [1, ['context'], 'x y']] ['c']"
        assert [child.prompt for child in tree.children] == ["first", "second", "third"]
        assert [child.answer for child in tree.children] == ["['a', 'b']", "[1, ['context'], 'x y']", "['c']"]
        assert [child.parent_turn for child in tree.children] == [0, 0, 0]
        assert tree.parent_turn == -1
    # Four roots; the two children of the first call of each; one of the second call of each; the four roots again.
    assert sampler.batches == [4, 8, 4, 4]


def test_limits_are_errors_in_the_code() -> None:
    code = "for number in (5, 4, 3, 2, 2, 1):\n    try:\n        print(number, len(rlm_query_batched(['x'] * number)))"
    code += "\n    except ValueError as error:\n        print(error)"
    replies = {False: run_code(code), True: run_code("rlm_query('y')")}
    ((tree,), _) = play(lambda history, draw: replies[is_child(history)], limits=TreeLimits(turns=2))
    assert tree.observations[0].splitlines() == [
        "a call asks at most 4 questions, not 5",
        "4 4",
        "3 3",
        "7 of 8 questions were asked: 2 more are too many",
        "7 of 8 questions were asked: 2 more are too many",
        "1 1",
    ]
    assert len(tree.children) == 8  # the second turn of the root asks no more
    for child in tree.children:
        assert child.observations == ["Error: NameError: name 'rlm_query' is not defined"] * 2  # no grandchildren
        assert child.answer is None  # out of turns
    assert tree.observations[1].count("8 of 8 questions were asked") == 5


def test_outputs_are_cut_and_markers_are_no_tokens() -> None:
    question = Question("What is <|im_end|>?", PAPERS, ("two",))
    replies = iter([run_code("print('<|' + 'im_start|>' + 'x' * 30)"), "FINAL(x)"])
    ((tree,), _) = play(lambda history, draw: next(replies), (question,), limits=TreeLimits(observation_chars=20))
    text = decode_all([tree.transcript.make_arrays()["tokens"]])[0]
    assert "What is < |im_end|>?" in text
    assert "< |im_start|>xxxxxxxx\n[22 of 42 characters are left out]\n<|im_end|>" in text


def test_conversations_stay_within_the_context() -> None:
    with pytest.raises(ValueError, match="do not fit into the context of 250 tokens"):
        play(lambda history, draw: "", context_length=250)
    # One more turn fits, another does not.
    ((tree,), _) = play(lambda history, draw: run_code("print('x' * 60)"), context_length=420)
    assert (len(tree.transcript.texts), tree.out_of_context) == (2, True)
    assert len(tree.transcript.make_arrays()["tokens"]) <= 420

    def ask(history: str, draw: float) -> str:
        code = try_query("'x' * 300") + "\nprint(rlm_query('short'))"
        return run_code("FINAL('done')") if is_child(history) else run_code(code)

    ((tree,), _) = play(ask, context_length=480, limits=TreeLimits(turns=1))
    assert tree.observations == ["a question and its reply may have at most 480 tokens\ndone"]
    assert [child.prompt for child in tree.children] == ["short"]


def try_query(arguments: str) -> str:
    return f"try:\n    print(rlm_query({arguments}))\nexcept ValueError as error:\n    print(error)"


def test_a_reply_that_was_cut_gets_its_end_marker() -> None:
    replies = iter(["cut~", "FINAL(x)"])
    ((tree,), _) = play(lambda history, draw: next(replies))
    arrays = tree.transcript.make_arrays()
    assert "assistant\ncut<|im_end|>\n<|im_start|>user\n" in decode_all([arrays["tokens"]])[0]
    assert decode_all([arrays["tokens"][arrays["mask"]]]) == ["cutFINAL(x)<|im_end|>"]
    assert tree.validity == [False, True]


def answer_at_random(history: str, draw: float) -> str:
    if is_child(history):
        return run_code(f"FINAL({draw})")
    if draw < 0.3:
        return run_code(f"FINAL({draw})")
    return run_code(f"print(rlm_query('q'), {draw})")


def test_a_tree_does_not_depend_on_the_others() -> None:
    questions = [Question(f"Question {number}?", PAPERS, ("two",)) for number in range(3)]
    trees, _ = play(answer_at_random, questions, group_size=3, limits=TreeLimits(turns=4))
    assert len({tree.answer for tree in trees}) > 3
    assert any(tree.children for tree in trees)
    sampler = TextSampler(answer_at_random)
    settings = TreeSettings(TreeLimits(turns=4), ReplLimits(), 10_000)
    (again,) = roll_out_trees(questions[2:], 1, sampler, TEXTS, settings, PARAMS, [np.random.default_rng([0, 7])])
    assert (again.transcript.texts, again.answer) == (trees[7].transcript.texts, trees[7].answer)
    assert [child.transcript.texts for child in again.children] == [
        child.transcript.texts for child in trees[7].children
    ]


def test_few_open_files_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots are played in parts where a process may open few files, to the same trees."""
    trees, whole = play(answer_at_random, group_size=6, limits=TreeLimits(turns=3))
    monkeypatch.setattr(tree_loop, "MAX_OPEN_FILES", tree_loop.SPARE_FILES + 2 * 5 * tree_loop.FILES_PER_PROCESS)
    parts, sampler = play(answer_at_random, group_size=6, limits=TreeLimits(turns=3))
    assert [tree.transcript.texts for tree in parts] == [tree.transcript.texts for tree in trees]
    assert [[child.transcript.texts for child in tree.children] for tree in parts] == [
        [child.transcript.texts for child in tree.children] for tree in trees
    ]
    assert max(whole.batches) == 6
    assert max(sampler.batches) <= 2 * 4


def test_all_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[Any] = []
    make_session = tree_loop.ReplSession

    def keep(*args: Any, **options: Any) -> Any:
        processes.append(make_session(*args, **options))
        return processes[-1]

    monkeypatch.setattr(tree_loop, "ReplSession", keep)
    play(answer_at_random, group_size=4)
    assert len(processes) > 4
    assert all(process._process is None for process in processes)
    processes.clear()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        play(Mock(side_effect=RuntimeError("the engine has ended")), group_size=4)
    assert len(processes) == 4
    assert all(process._process is None for process in processes)
