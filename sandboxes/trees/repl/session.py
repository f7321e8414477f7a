"""The REPL of one rollout: takes replies, and returns observations, questions for children, or a final answer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sandboxes.trees.repl.process import Execution, Query, ReplLimits, ReplProcess
from sandboxes.trees.repl.texts import format_output, parse_reply


class TreeLimits(NamedTuple):
    """Limits of the episodes of a tree; the defaults are the published values."""

    turns: int = 10
    """Replies of the root, and of each child."""
    children_per_call: int = 4
    children: int = 8
    observation_chars: int = 3_000
    """Length of the printed output that the policy reads."""


class TurnObservation(NamedTuple):
    """Result of a reply. is_valid: whether the reply had exactly one code block, whatever the code did."""

    text: str
    is_valid: bool


class RolloutAnswer(NamedTuple):
    """The final answer of a rollout."""

    text: str


Outcome = TurnObservation | Query | RolloutAnswer


class ReplSession(ReplProcess):
    """The REPL of a root or of a child. Replies never raise errors: what is wrong with them becomes an observation.

    papers: texts by id. is_root: whether the code may call children; a child may not, so a tree has depth one.
    """

    def __init__(
        self, papers: Mapping[str, str], limits: TreeLimits, is_root: bool, process_limits: ReplLimits | None = None
    ) -> None:
        super().__init__(papers, may_query=is_root, limits=process_limits)
        self.tree_limits, self.num_children = limits, 0

    def read(self, reply: str) -> Outcome:
        """Execute the code of a reply. After a Query, `give_answers` or `refuse_query` continues the same reply."""
        content = parse_reply(reply)
        if content.code is not None:
            return self._advance(self.execute(content.code))
        if content.answer is not None:
            return RolloutAnswer(content.answer)
        if content.variable is not None:
            outcome = self._advance(self.execute(f"FINAL_VAR({content.variable!r})"))
            return outcome._replace(is_valid=False) if isinstance(outcome, TurnObservation) else outcome
        assert content.problem is not None
        return TurnObservation(content.problem, is_valid=False)

    def give_answers(self, answers: Sequence[str]) -> Outcome:
        """Pass back the final answers of the last Query's children, in the order of its prompts."""
        return self._advance(self.answer(answers))

    def refuse_query(self, problem: str) -> Outcome:
        """Raise a ValueError in the code that asked the last Query."""
        return self._advance(self.refuse(problem))

    def _advance(self, result: Execution | Query) -> Outcome:
        """Refuse queries beyond the limits until the code ends or makes one within them."""
        while isinstance(result, Query):
            num_prompts, limits = len(result.prompts), self.tree_limits
            problem = f"{self.num_children} of {limits.children} questions were asked: {num_prompts} more are too many"
            if num_prompts > limits.children_per_call:
                problem = f"a call asks at most {limits.children_per_call} questions, not {num_prompts}"
            elif self.num_children + num_prompts <= limits.children:
                self.num_children += num_prompts
                return result
            result = self.refuse(problem)
        if result.final is not None:
            return RolloutAnswer(result.final)
        return TurnObservation(format_output(result.stdout, result.stderr, self.tree_limits.observation_chars), True)
