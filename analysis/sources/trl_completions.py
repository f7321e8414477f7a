"""Read the completions of TRL as the recorded episodes of a run.

With `log_completions`, its GRPOTrainer writes OUTPUT/completions/completions_00010.parquet whenever it logs, with a row
per completion of the last batch: step, prompt, completion, a column per reward function, and advantage.
"""

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from trainable.files.paths import read_bytes
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from trainable.sources.logs import RunLog, to_number

MAX_FILE_BYTES = 2**28
"""Maximum size of a file, and of its content by its own account."""
MAX_RUN_CHARACTERS = 2**24
"""Maximum characters of a run, since all commands read them: of each step the first texts, all with the same share."""
MAX_TEXT_CHARACTERS = 100_000
"""Maximum characters that are kept of a prompt or a completion."""
_BATCH_ROWS = 64
_COLUMNS = ("prompt", "completion", "advantage")


def read_completions(log: RunLog) -> Iterator[RecordedEpisode]:
    """Read the completions that the run trained on, and then add to the notes of the log which these were.

    A level is a prompt, numbered as prompts appear. The score is TRL's weighted sum of the rewards, and success is a
    score above 0. An evaluation replaces some or all completions in the file of its step, without a sign, and in later
    ones until a batch is generated: these files are left out, and those after the last step of the log.
    """
    evaluated_steps = {row.step for row in log.rows if any(name.startswith("eval_") for name in row.values)}
    steps = sorted(step for step in log.completions if 0 < step <= log.rows[-1].step)
    evaluated_turns, left_out, problems = list[list[RecordedTurn]](), list[int](), list[str]()
    levels, num_kept, num_written = dict[str, int](), 0, 0
    for step in steps:
        try:
            turns, num_rows = _read_turns(log.completions[step], log, MAX_RUN_CHARACTERS // len(steps))
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            problems.append(f"{log.completions[step]} ({reason})")
            continue
        if step in evaluated_steps or turns in evaluated_turns:
            evaluated_turns, left_out = [turns], [*left_out, step]
            continue
        num_kept, num_written = num_kept + len(turns), num_written + num_rows
        rollouts: Counter[int] = Counter()
        for turn in turns:
            level = levels.setdefault(turn.observation, len(levels))
            end = "success" if turn.reward > 0 else "failure"
            yield RecordedEpisode(step, level, (turn,), turn.reward > 0, end, turn.reward, rollout=rollouts[level])
            rollouts[level] += 1
    log.notes.append(
        f"{len(steps) - len(left_out) - len(problems)} steps have completions of the training, of which {num_kept} of "
        f"{num_written} are for `transcripts --trained`. One with a reward above 0 counts as solved."
    )
    if left_out:
        log.notes.append(
            f"At {len(left_out)} steps, such as {left_out[0]}, the completions of an evaluation have replaced those of "
            "the training, and are left out."
        )
    if problems:
        log.notes.append(f"{len(problems)} files of completions cannot be read, such as {problems[0]}.")


def _read_turns(path: Path, log: RunLog, max_characters: int) -> tuple[list[RecordedTurn], int]:
    """Read completions until their texts have `max_characters`. Return these, and how many the file has.

    Raises ValueError, OSError or an error of Arrow if the file is too large, lacks a column, or is damaged.
    """
    file = ParquetFile(io.BytesIO(read_bytes(path, MAX_FILE_BYTES)))
    names, log_keys = file.schema_arrow.names, set(log.keys)
    rewards = [name for name in names if f"rewards/{name}/mean" in log_keys]
    if not rewards or not set(_COLUMNS) <= set(names):
        raise ValueError(f"of {', '.join(_COLUMNS)}, and the log's reward functions, it has {', '.join(names)}")
    if sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes are not read")
    weights = log.settings.get("reward_weights")
    if not isinstance(weights, list) or list(map(to_number, weights)) != weights or len(weights) != len(rewards):
        weights = [1.0] * len(rewards)
    turns = list[RecordedTurn]()
    for batch in file.iter_batches(_BATCH_ROWS, columns=[*_COLUMNS, *rewards]):
        for row in batch.to_pylist():
            prompt, completion = (_format_text(row[name])[:MAX_TEXT_CHARACTERS] for name in _COLUMNS[:2])
            max_characters -= len(prompt) + len(completion)
            if max_characters < 0 and turns:
                return turns, file.metadata.num_rows
            # A reward function may have no answer for some completions.
            values = [(name, weight, to_number(row[name])) for name, weight in zip(rewards, weights, strict=True)]
            score = to_number(sum(weight * value for _, weight, value in values if value is not None))
            parts = tuple(f"{name} {value:.3g}" for name, _, value in values if value is not None)
            if parts and score is not None:
                advantage = to_number(row["advantage"])
                turns.append(RecordedTurn(prompt, completion, parts, score, valid=True, advantage=advantage))
    return turns, file.metadata.num_rows


def _format_text(value: Any) -> str:
    """Format a prompt or a completion: a text, or the messages of a conversation, with calls of tools as JSON."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return str(value)
    lines = []
    for message in value:
        fields = {name: field for name, field in message.items() if field is not None}
        is_text = fields.keys() == {"role", "content"}
        lines.append("[{role}] {content}".format_map(fields) if is_text else json.dumps(fields, default=str))
    return "\n".join(lines)
