"""Read the episodes that a run recorded, from validations and from training steps.

See the settings `trainer.log_val_generations` and `trainer.log_train_generations`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pandas as pd

from analysis.data.run_files import has_valid_entries, is_bool, is_int64, is_number, is_text
from analysis.data.schemas import BOOL, FLOAT, INT, TEXT, Row
from trainable.files.json_values import DamageWarning
from trainable.files.paths import check_path, escape_controls
from trainable.runs.episode_lines import RecordedChild, RecordedEpisode, RecordedTurn
from trainable.runs.run_files import EPISODES_FILE, RunLines, select_lines
from trainable.runs.study_record import StudyRecord, is_run_id


def read_episodes(run_dir: Path) -> list[RecordedEpisode]:
    """Read the recorded episodes of a run, sorted by step, level and rollout; empty if none were recorded.

    Includes both validation episodes and episodes that were trained on (`RecordedEpisode.is_trained`). If lines repeat,
    the last one counts per (step, level, rollout), as in levels.jsonl. A DamageWarning names every line that was
    skipped, and any other damage to the run's files, since it may explain missing episodes.
    """
    lines = RunLines.read(run_dir)
    for problem in (*lines.find_damage(), *map(_find_problem, lines.files[EPISODES_FILE].records)):
        if problem:
            warnings.warn(f"{escape_controls(str(run_dir))}: {problem}.", DamageWarning, stacklevel=2)
    return [_make_episode(line) for line in select_lines(lines.files[EPISODES_FILE].records, _get_episode_key)]


def read_episodes_of_run(folder: Path, run_id: str) -> list[RecordedEpisode]:
    """Read the episodes of a run of the study in `folder`, results/<run>; empty if `run_id` is not a valid run id.

    The id may come from an untrusted table. Raises UnsafePathError if the run's folder is a symbolic link.
    """
    if not is_run_id(run_id):
        return []
    run_dir = folder / "runs" / run_id
    check_path(folder, run_dir)
    return read_episodes(run_dir)


def read_episodes_frame(studies: Iterable[tuple[Path, StudyRecord]], *, is_trained: bool = False) -> pd.DataFrame:
    """Read the recorded validation episodes of all runs into a frame, a row each, ordered by run, step and level.

    Columns: study, run_id, arm, seed; step (training steps before the validation), level (its seed), success, score,
    stop_reason, turns (a number), invalid_turns, and text, in which `| ` marks what the policy saw and `> ` what it
    wrote. studies: with the folder results/<run> of each. is_trained: read the episodes that steps trained on instead.
    `step` is then that training step, and there are two more columns: rollout (number among the episodes of a level,
    from 0) and advantage (mean over the turns).
    """
    types = {**_FRAME_TYPES, **(_TRAINED_TYPES if is_trained else {})}
    rows = [
        {
            **episode._asdict(),
            "study": study.name,
            "run_id": entry.run_id,
            "arm": entry.arm,
            "seed": entry.seed,
            "advantage": episode.advantage,
            "turns": len(episode.turns),
            "invalid_turns": sum(not turn.valid for turn in episode.turns),
            "text": "\n".join(format_turns(episode)),
        }
        for folder, study in studies
        for entry in study.runs
        for episode in read_episodes_of_run(folder, entry.run_id)
        if episode.is_trained == is_trained
    ]
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def format_turns(episode: RecordedEpisode) -> Iterator[str]:
    """Format the turns of an episode as lines: `| ` marks what the policy saw, `> ` what it wrote, then its reward.

    Child agents that a turn's code called follow it, indented. In a tree, the final answer of each rollout comes last,
    and then the evidence that a perfect answer quotes.
    """
    for number, turn in enumerate(episode.turns):
        yield from _format_turn(turn, f", reward {turn.reward:.3g}")
        for place, child in enumerate(episode.children, start=1):
            if child.parent_turn == number:
                yield f"    Child {place}: {_CHILD_ENDS.get(child.stop_reason, child.stop_reason)}"
                for child_turn in child.turns:
                    yield from (f"    {line}" for line in _format_turn(child_turn, ""))
                yield from (f"    {line}" for line in _name_lines("final answer", child.answer))
    yield from _name_lines("final answer", episode.answer)
    yield from _name_lines("evidence to quote", episode.evidence)


def _name_lines(name: str, text: str | None) -> Iterator[str]:
    """Prefix each line of a text with its name. None gives no line, an empty text gives one."""
    if text is not None:
        yield from (f"  {name}: {line}" for line in text.splitlines() or [""])


_CHILD_ENDS: Mapping[str, str] = {"success": "answered", "failure": "answered"}
"""Label of a child that ended before any limit: it has no reward, so it neither succeeds nor fails."""


def _format_turn(turn: RecordedTurn, reward: str) -> Iterator[str]:
    yield from (f"| {line}" for line in turn.observation.strip().splitlines())
    yield from (f"> {line}" for line in turn.reply.strip().splitlines() or [""])
    actions = ", ".join(turn.actions) or "no action"
    numbers = {"advantage": turn.advantage, "weight": turn.weight}
    credit = "".join(f", {name} {value:.3g}" for name, value in numbers.items() if value is not None)
    yield f"  {actions}{'' if turn.valid else ' (invalid reply)'}{reward}{credit}"


def _get_episode_key(line: Row) -> tuple[int, int, int] | None:
    """Return (step, level, rollout) of a line of episodes.jsonl, rollout -1 for a validation; None if it is invalid."""
    rollout = line.get("rollout")
    return None if _find_problem(line) else (line["step"], line["level"], -1 if rollout is None else rollout)


def _find_problem(line: Row) -> str:
    """Explain why a line with a correct checksum is still no valid episode; empty if it is one."""
    names = [name for name, is_valid in _EPISODE_VALIDATORS.items() if not is_valid(line.get(name))]
    step = f" of step {line['step']}" if is_int64(line.get("step")) else ""
    return f"{EPISODES_FILE} has a line{step} that is no episode: see {', '.join(names)}" if names else ""


def _make_episode(line: Row) -> RecordedEpisode:
    children = tuple(RecordedChild(**_read_fields(child, _CHILD_VALIDATORS)) for child in line.get("children") or ())
    return RecordedEpisode(**{**_read_fields(line, _EPISODE_VALIDATORS), "children": children})


def _read_fields(entry: Row, names: Iterable[str]) -> Row:
    """Read the fields of an episode or a child, with its turns."""
    fields = {name: entry[name] for name in names if name in entry}
    return {**fields, "turns": tuple(map(_make_turn, entry["turns"]))}


def _make_turn(turn: Row) -> RecordedTurn:
    fields = {name: turn[name] for name in _TURN_VALIDATORS if name in turn}
    return RecordedTurn(**{**fields, "actions": tuple(turn["actions"])})


_FRAME_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("study", "run_id", "arm"), TEXT),
    **dict.fromkeys(("seed", "step", "level"), INT),
    "success": BOOL,
    "score": FLOAT,
    "stop_reason": TEXT,
    "turns": INT,
    "invalid_turns": INT,
    "text": TEXT,
}
_TRAINED_TYPES: Mapping[str, str] = {"rollout": INT, "advantage": FLOAT}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and is_int64(value) and value >= 0


def _allow_none(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_valid(value)


_TURN_VALIDATORS: Mapping[str, Callable[[object], bool]] = {
    "observation": is_text,
    "reply": is_text,
    "actions": lambda value: isinstance(value, list) and all(map(is_text, value)),
    "reward": is_number,
    "valid": is_bool,
    "weight": _allow_none(is_number),
    "advantage": _allow_none(is_number),
}


_CHILD_VALIDATORS: Mapping[str, Callable[[object], bool]] = {
    "parent_turn": _is_count,
    "turns": lambda value: has_valid_entries(value, _TURN_VALIDATORS),
    "stop_reason": is_text,
    "answer": _allow_none(is_text),
}
_EPISODE_VALIDATORS: Mapping[str, Callable[[object], bool]] = {
    "step": _is_count,
    "level": _is_count,
    "turns": lambda value: has_valid_entries(value, _TURN_VALIDATORS),
    "success": is_bool,
    "stop_reason": is_text,
    "score": is_number,
    "children": _allow_none(lambda value: has_valid_entries(value, _CHILD_VALIDATORS)),
    "rollout": _allow_none(_is_count),
    "answer": _allow_none(is_text),
    "evidence": _allow_none(is_text),
}
