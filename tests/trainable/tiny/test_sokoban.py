from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.fakes.scripted import ScriptedSampler
from tests.oracles.sokoban import parse_grid, solve
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_validation_levels
from trainable.envs.prompts import END_OF_MESSAGE, make_prompt_template, parse_reply
from trainable.envs.sokoban.board import DIRECTIONS, Action, Tile, step
from trainable.envs.sokoban.game import Sokoban
from trainable.envs.sokoban.generate import SokobanLevel
from trainable.envs.sokoban.solver import compute_distance_table
from trainable.models.codec import Codec
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer
from trainable.rollout.sampler import SamplingParams
from trainable.tiny.dialogues import Habits, Segment, make_dialogue
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.sokoban import DEMONSTRATOR

PROMPT_TEMPLATE = make_prompt_template(Sokoban(), "compact", 10)
LEVELS = make_validation_levels(Sokoban(), 96)
LETTERS = {"U": Action.UP, "D": Action.DOWN, "L": Action.LEFT, "R": Action.RIGHT}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SOKOBAN_TINY.build_tokenizer()


PUBLISHED = (5, 2, 10)  # turns, actions per turn, actions


def make_segments(
    level: SokobanLevel, habits: Habits, seed: int = 0, limits: tuple[int, int, int] = PUBLISHED
) -> list[Segment]:
    rngs, game = (np.random.default_rng(seed), np.random.default_rng(0)), Sokoban()
    return make_dialogue(game, level.cells, PROMPT_TEMPLATE, DEMONSTRATOR, habits, TurnLimits(*limits), *rngs)


def replay(
    level: SokobanLevel, segments: list[Segment], tokenizer: Tokenizer, limits: tuple[int, int, int] = PUBLISHED
) -> Episode:
    """Replay the episode in the real game, with the trained segments as the replies of the model."""
    replies = [tokenizer.encode(segment.text).ids for segment in segments if segment.is_trained]
    stop_token = tokenizer.token_to_id(END_OF_MESSAGE)
    player = TurnPlayer(Sokoban(), PROMPT_TEMPLATE, Codec(tokenizer), TurnLimits(*limits), -0.1, 512)
    params, sampler = SamplingParams(1.0, 24, stop_token), ScriptedSampler([replies])
    rng, luck_rng = np.random.default_rng(0), np.random.default_rng(0)
    (episode,) = player.roll_out(RolloutRequest([level], 1, sampler, params, rng, luck_rng))
    return episode


@dataclass
class Turn:
    """A turn of a dialogue: the board with its outer wall, the thought, and the parsed reply."""

    cells: np.ndarray
    thought: str
    plan: list[Action]
    actions: tuple[Action, ...]


def read_turns(segments: list[Segment]) -> list[Turn]:
    turns = []
    for observation, reply in zip(segments[::2], segments[1::2], strict=True):
        inner_rows = observation.text.split("State:\n")[1].splitlines()[:4]
        cells = parse_grid("\n".join(["######", *(f"#{row}#" for row in inner_rows), "######"]))
        text = reply.text.removesuffix(END_OF_MESSAGE)
        thought = text.split("</think>")[0]
        plan = [LETTERS[letter] for letter in thought.split(" ")[-1]]
        names = parse_reply(text, 2, Sokoban().read_action).actions
        turns.append(Turn(cells, thought, plan, tuple(Action[name.upper()] for name in names)))
    return turns


def compute_distance_after(cells: np.ndarray, actions: list[Action]) -> int | None:
    for action in actions:
        cells = step(cells[None], np.array([action])).cells[0]
    solution = solve(cells)
    return None if solution is None else len(solution)


STRAY = Habits(detour=0.7, careless=0.3, unfinished=0.2)


@pytest.mark.parametrize(
    ("habits", "limits"),
    [(Habits(), PUBLISHED), (STRAY, PUBLISHED), (STRAY, (5, 3, 7)), (Habits(careless=1.0), (4, 4, 10))],
)
def test_a_dialogue_is_an_episode_of_the_real_game(
    habits: Habits, limits: tuple[int, int, int], tokenizer: Tokenizer
) -> None:
    for level in LEVELS[:32]:
        segments = make_segments(level, habits, level.seed, limits)
        episode = replay(level, segments, tokenizer, limits)
        token_ids = [tokenizer.encode(segment.text).ids for segment in segments]
        assert episode.tokens.tolist() == [token for segment_ids in token_ids for token in segment_ids]
        is_trained = [segment.is_trained for segment in segments]
        assert episode.mask.tolist() == np.repeat(is_trained, [len(segment_ids) for segment_ids in token_ids]).tolist()
        assert len(episode.texts) == limits[0] or episode.stop_reason in (StopReason.SUCCESS, StopReason.OUT_OF_ACTIONS)


def test_the_clean_demonstrator_solves_every_level_by_a_shortest_path(tokenizer: Tokenizer) -> None:
    for level in LEVELS[:32]:
        shortest = solve(level.cells)
        assert shortest is not None
        episode = replay(level, make_segments(level, Habits()), tokenizer)
        assert (episode.success, episode.actions) == (True, len(shortest))
        assert episode.score == pytest.approx(11 - 0.1 * len(shortest))


def test_a_thought_names_where_things_stand_and_a_plan_that_solves_the_level() -> None:
    for level in LEVELS:
        for turn in read_turns(make_segments(level, Habits(detour=0.5), level.seed)):
            spots = {
                "P": np.isin(turn.cells, [Tile.PLAYER, Tile.PLAYER_ON_TARGET]),
                "X": turn.cells == Tile.BOX,
                "O": np.isin(turn.cells, [Tile.TARGET, Tile.PLAYER_ON_TARGET]),
            }
            names = "".join("{}{}{} ".format(symbol, *np.argwhere(spot)[0]) for symbol, spot in spots.items())
            assert turn.thought.startswith(names)
            assert compute_distance_after(turn.cells, turn.plan) == 0


@pytest.mark.long
def test_a_detour_is_one_wasted_legal_move_in_a_level_that_stays_solvable() -> None:
    detour_count = 0
    for level in LEVELS:
        for turn in read_turns(make_segments(level, Habits(detour=1.0), level.seed)):
            table = compute_distance_table(turn.cells)
            player = int(np.flatnonzero(turn.cells >= Tile.PLAYER)[0])
            distance_before = int(table[player, int(np.flatnonzero(turn.cells == Tile.BOX)[0])])
            outcome = step(turn.cells[None], np.array(turn.plan[:1]))
            if len(turn.plan) == distance_before:
                # This level has no detour: every first move either helps or makes the level unsolvable.
                for action in DIRECTIONS:
                    distance = compute_distance_after(turn.cells, [action])
                    is_moved = (step(turn.cells[None], np.array([action])).cells != turn.cells).any()
                    assert not is_moved or distance is None or distance < distance_before
                continue
            detour_count += 1
            distance = compute_distance_after(turn.cells, turn.plan[:1])
            assert (outcome.cells != turn.cells).any()
            assert distance is not None
            assert distance >= distance_before
            assert len(turn.plan) == 1 + distance
            assert turn.actions == tuple(turn.plan[:2])
    assert detour_count > 100


def test_levels_are_shown_in_all_eight_views_and_equal_streams_give_equal_dialogues() -> None:
    def make_shown_dialogues(seed: int) -> list[list[Segment]]:
        rng, luck_rng = np.random.default_rng(seed), np.random.default_rng(0)
        return list(SOKOBAN_TINY.make_dialogues(LEVELS[:64], Habits(detour=0.5), rng, luck_rng))

    dialogues = make_shown_dialogues(1)
    assert make_shown_dialogues(1) == dialogues
    assert make_shown_dialogues(2) != dialogues
    views = set()
    for level, segments in zip(LEVELS[:64], dialogues, strict=True):
        cells = read_turns(segments)[0].cells
        assert SokobanLevel(0, cells).key == level.key
        boards = [np.rot90(board, turns) for board in (level.cells, level.cells.T) for turns in range(4)]
        views.add(next(view for view, board in enumerate(boards) if np.array_equal(board, cells)))
    assert len(views) == 8
