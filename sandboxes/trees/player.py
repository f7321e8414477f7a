"""The player of the game `papers`: trees of rollouts that write code in REPLs and call children."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxes.trees.repl.char_f1 import compute_char_f1
from sandboxes.trees.repl.judge import JudgeError, make_judge
from sandboxes.trees.repl.papers import CODE_ACTION, QUERY_ACTION, SUCCESS_SCORE, PaperLevel, ScoreAnswer
from sandboxes.trees.repl.process import ReplLimits
from sandboxes.trees.repl.session import TreeLimits
from sandboxes.trees.tree_loop import Rollout, TreeSettings, TreeTexts, format_first_turn, roll_out_trees
from trainable.config.games import PapersConfig
from trainable.config.run_config import RunConfig
from trainable.models.codec import Codec
from trainable.models.load import Policy
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import RolloutRequest, check_length


@dataclass(frozen=True)
class TreePlayer:
    """Answers questions about papers with trees of rollouts."""

    texts: TreeTexts
    settings: TreeSettings
    score_answer: ScoreAnswer
    format_penalty: float
    """Added to the root's score for each of its turns that has neither exactly one code block nor an answer."""

    def encode_first_turn(self, level: PaperLevel) -> list[int]:
        """See `Player.encode_first_turn`."""
        question = level.question
        text = format_first_turn(question.text, question.papers, "root", self.texts, self.settings.tree)
        return self.texts.codec.encode([text])[0]

    def check_first_turns(self, levels: Sequence[PaperLevel], response_length: int) -> None:
        """See `Player.check_first_turns`."""
        longest = max(len(self.encode_first_turn(level)) for level in levels)
        check_length(longest, response_length, self.settings.context_length)

    def roll_out(self, request: RolloutRequest) -> list[Episode]:
        """See `Player.roll_out`. The sampler is the only source of randomness."""
        levels, group_size = request.levels, request.group_size
        questions, streams = [level.question for level in levels], request.rng.spawn(len(levels) * group_size)
        roots = roll_out_trees(
            questions, group_size, request.sampler, self.texts, self.settings, request.params, streams
        )
        groups = [number // group_size for number in range(len(roots))]
        return [self._make_episode(root, levels[group], group) for root, group in zip(roots, groups, strict=True)]

    def _make_episode(self, rollout: Rollout, level: PaperLevel, group: int) -> Episode:
        """Make the episode of a root or of a child. A child has no reward: the tree has a single one, at its root."""
        score, rewards = 0.0, [0.0] * len(rollout.validity)
        if rollout.role == "root":
            score = self.score_answer(level.question, rollout.answer or "")
            rewards = [self.format_penalty * (not is_valid) for is_valid in rollout.validity]
            rewards[-1] += score
        asked = [child.parent_turn for child in rollout.children]
        actions = tuple(
            (CODE_ACTION,) * is_valid + (QUERY_ACTION,) * asked.count(turn)
            for turn, is_valid in enumerate(rollout.validity)
        )
        return Episode(
            level_seed=level.seed,
            group=group,
            **rollout.transcript.make_arrays(),
            turn_rewards=tuple(rewards),
            turn_actions=actions,
            turn_validity=tuple(rollout.validity),
            stop_reason=_find_stop_reason(rollout, score),
            texts=tuple(rollout.transcript.texts),
            children=tuple(self._make_episode(child, level, group) for child in rollout.children),
            parent_turn=rollout.parent_turn,
            answer=rollout.answer,
            evidence=level.question.evidence if rollout.role == "root" else (),
        )


def _find_stop_reason(rollout: Rollout, score: float) -> StopReason:
    if score >= SUCCESS_SCORE:
        return StopReason.SUCCESS
    if rollout.answer is not None:
        return StopReason.FAILURE
    if rollout.out_of_context:
        return StopReason.OUT_OF_CONTEXT
    return StopReason.OUT_OF_TURNS if any(rollout.validity) else StopReason.MALFORMED


def make_player(config: RunConfig, policy: Policy, codec: Codec, context_length: int) -> TreePlayer:
    """Make the player of a run. context_length: maximum tokens of a conversation. JudgeError: see `make_score`."""
    env, style = config.env, config.model.prompt_style
    papers = env.papers
    # The policy's special tokens, and anything in its chat format that looks like one.
    special_tokens = [token.content for token in policy.tokenizer.get_added_tokens_decoder().values() if token.special]
    chat_text = policy.chat_format.format_first_turn("", "") + policy.chat_format.format_next_turn("")
    markers = list(dict.fromkeys([*special_tokens, *re.findall(r"<[^<>\s]+>|\[[A-Z_/]+\]", chat_text)]))
    texts = TreeTexts(codec, policy.chat_format, style, markers)
    tree = TreeLimits(env.max_turn, papers.max_children_per_call, papers.max_children, papers.observation_chars)
    process = ReplLimits(papers.execution_seconds, papers.execution_mib * 2**20)
    settings = TreeSettings(tree, process, context_length)
    return TreePlayer(texts, settings, make_score(papers), env.format_penalty)


def make_score(papers: PapersConfig) -> ScoreAnswer:
    """Make the reward function that env.papers.score names. JudgeError if it is a judge that is not available."""
    if papers.score == "char_f1":
        return lambda question, answer: compute_char_f1(answer, question.papers, question.evidence)
    judge = make_judge(papers)
    if obstacle := judge.find_obstacle():
        raise JudgeError(obstacle)
    return lambda question, answer: judge.score(question.text, answer, question.evidence)
