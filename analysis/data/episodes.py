"""Read the episodes that a run recorded at its validations (`trainer.log_val_generations`)."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from analysis.data.families import Row
from analysis.data.run_files import has_valid_entries, is_bool, is_int64, is_number, is_text, select_lines
from trainable.files.control_characters import escape_controls
from trainable.files.json_values import DamageWarning
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from trainable.runs.run_files import EPISODES_FILE, RunLines


def read_episodes(run_dir: Path) -> list[RecordedEpisode]:
    """The recorded episodes of a run, sorted by step and level; none if the run has recorded none.

    If lines repeat, the last one counts per (step, level), as in levels.jsonl. A DamageWarning names every line that
    was left out, and any other damage to the files of the run, since it may be the reason why episodes are missing.

    Args:
        run_dir: the folder of the run, <study>/runs/<run_id>.
    """
    lines = RunLines.read(run_dir)
    for problem in (*lines.find_damage(), *map(_find_problem, lines.files[EPISODES_FILE].records)):
        if problem:
            warnings.warn(f"{escape_controls(str(run_dir))}: {problem}.", DamageWarning, stacklevel=2)
    return [_make_episode(line) for line in select_lines(lines.files[EPISODES_FILE], _get_episode_key)]


def _get_episode_key(line: Row) -> tuple[int, int] | None:
    """(step, level) of a line of episodes.jsonl, or None if it is no episode."""
    return None if _find_problem(line) else (line["step"], line["level"])


def _find_problem(line: Row) -> str:
    """Why a line is no episode, although its checksum is right; empty if it is one."""
    names = [name for name, is_valid in _EPISODE_VALIDATORS.items() if not is_valid(line.get(name))]
    step = f" of step {line['step']}" if is_int64(line.get("step")) else ""
    return f"{EPISODES_FILE} has a line{step} that is no episode: see {', '.join(names)}" if names else ""


def _make_episode(line: Row) -> RecordedEpisode:
    fields = {name: line[name] for name in RecordedEpisode._fields}
    return RecordedEpisode(**{**fields, "turns": tuple(_make_turn(turn) for turn in line["turns"])})


def _make_turn(turn: Row) -> RecordedTurn:
    fields = {name: turn[name] for name in RecordedTurn._fields}
    return RecordedTurn(**{**fields, "actions": tuple(turn["actions"])})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and is_int64(value) and value >= 0


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_turn_list(value: object) -> bool:
    return has_valid_entries(value, _TURN_VALIDATORS)


_TURN_VALIDATORS: Mapping[str, Callable[[object], bool]] = {
    "observation": is_text,
    "reply": is_text,
    "actions": _is_text_list,
    "reward": is_number,
    "valid": is_bool,
}
_EPISODE_VALIDATORS: Mapping[str, Callable[[object], bool]] = {
    "step": _is_count,
    "level": _is_count,
    "turns": _is_turn_list,
    "success": is_bool,
    "stop_reason": is_text,
    "score": is_number,
}
