"""Write the file of a study whose trials are a command, from an example of that command and of what it wrote."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainable.config.command_lines import format_command, quote_argument, split_words
from trainable.config.schedules import split_values
from trainable.config.setting_types import format_value
from trainable.sources.csv_files import TABLE_SUFFIXES
from trainable.sources.log_files import list_runs
from trainable.sources.logs import LogError, RunLog
from trainable.sources.names import OUR_COLUMNS, find_trainer, read_names
from trainable.sources.reading import read_logs
from tune_study.plan.errors import PlanError

EXAMPLE = format_command(
    *("new", "my-beta", "--vary", "beta=0,0.04"),
    *("--command", "python train.py --beta 0.04 --seed 0 --max_steps 100 --output_dir out"),
)
_FLAG = re.compile(r"(--?)?([A-Za-z_+][\w.+/-]*)=(.*)", re.DOTALL)
_RUN_FLAGS: Mapping[str, str] = {
    "seed": r"(.*[._-])?seed",
    "steps": r"(.*[._-])?(max_?steps|total_training_steps|num_train_steps|max-steps|steps)",
    "output": r"(.*[._-])?(output_?dir|output|default_local_dir|save_path|log_path|out)",
}
"""For each field of a run, the names of flags that have it."""
_CHECKPOINT = re.compile(r"(.*?)(\d+)")
_RESUME: Mapping[str, str] = {
    "trl": "--resume_from_checkpoint {checkpoint}",
    "verl": "trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint} trainer.val_before_train=False",
}
"""Arguments by which trainers continue from a checkpoint."""
_SUCCESS = re.compile(r"success|accuracy|acc|solve|score|reward", re.IGNORECASE)

_FILE = '''"""{question}"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name={name},
    question=__doc__,
    command={command},
    settings={settings},  # the values of all arms
    vary={vary},  # their combinations are the arms
    steps={steps},
    logs={logs},
    columns={columns},  # what arms are compared by
    checkpoints={checkpoints},{remark}
    resume={resume},
    cpus=1,
    gpus={gpus},
)
'''


class _Flag(NamedTuple):
    """A flag of a command: the word that ends in its value, and its name without dashes."""

    position: int
    name: str
    value: str


def format_command_study(name: str, command: str, assignments: Sequence[str], logs: Path | None) -> str:
    """Format the file of a study over the values of flags of an example command.

    command: as it was typed in a shell. assignments: FLAG=VALUE,VALUE, as of --vary. logs: file or folder that the
    example wrote; None for the folder that the command names.

    Raises PlanError if the command cannot be read, or if a flag is missing or has fewer than two values.
    """
    try:
        words = split_words(command)
    except ValueError as error:
        problem = f"--command {format_value(command)} cannot be read ({error})"
        raise PlanError(f"{problem}: type it like {EXAMPLE}.") from None
    flags = {flag.name: flag for flag in _list_flags(words)}
    vary: dict[str, tuple[str, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        key, values = key.strip().lstrip("-"), split_values(text)
        if len(values) < 2 or key not in flags:
            problem = "has no two values" if key in flags else "is no flag of the command"
            advice = f"type FLAG=VALUE,VALUE for one of {', '.join(flags)}" if flags else f"type it like {EXAMPLE}"
            raise PlanError(f"--vary {format_value(assignment)} {problem}: {advice}.")
        vary[key] = values
    if not vary:
        raise PlanError(f"A study varies a flag of the command: type it like {EXAMPLE}.")
    example = {key: flags[key].value for key in vary}
    for key in vary:
        _replace(words, flags[key], key)
    places: dict[str, str] = {}
    for field, pattern in _RUN_FLAGS.items():
        flag = next((flag for key, flag in flags.items() if key not in vary and re.fullmatch(pattern, key)), None)
        if flag is not None:
            places[field] = flag.value
            _replace(words, flag, field)
    output = Path(places.get("output", ""))
    template, log = _find_logs(logs or (output if "output" in places and output.is_dir() else None), output)
    trainer = find_trainer(log.keys) if log is not None else ""
    checkpoints = _find_checkpoints(output) if "output" in places and output.is_dir() else ""
    fields = {
        "question": f"Does {' or '.join(vary)} change the success of training?",
        "name": name,
        "command": " ".join(map(_quote_word, words)),
        "settings": {key: _parse(value) for key, value in example.items()},
        "vary": {key: tuple(map(_parse, texts)) for key, texts in vary.items()},
        "steps": int(places["steps"]) if places.get("steps", "").isdigit() else 100,
        "logs": template,
        "columns": {"val_success": _find_success(log, trainer), **_find_own_names(log, trainer)},
        "checkpoints": checkpoints,
        "remark": "" if checkpoints else "  # like {output}/checkpoint-{step}; without, a killed run begins anew",
        "resume": _RESUME.get(trainer, "") if checkpoints else "",
        "gpus": 0,
    }
    return _FILE.format(
        **{key: value if key in ("question", "remark") else _quote(value) for key, value in fields.items()}
    )


def _quote_word(word: str) -> str:
    """Quote a word of a command, but for the braces of its fields."""
    return word if quote_argument(re.sub(r"[{}]", "", word)) == re.sub(r"[{}]", "", word) else quote_argument(word)


def _quote(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value).replace("'", '"')


def _list_flags(words: Sequence[str]) -> list[_Flag]:
    """List the flags of a command: `--name value`, `--name=value` and, as of Hydra, `name=value`."""
    flags = []
    for index, word in enumerate(words):
        if match := _FLAG.fullmatch(word):
            flags.append(_Flag(index, match[2], match[3]))
        elif word.startswith("-") and index + 1 < len(words) and not re.match(r"-+[A-Za-z]", words[index + 1]):
            flags.append(_Flag(index + 1, word.lstrip("-"), words[index + 1]))
    return flags


def _replace(words: list[str], flag: _Flag, field: str) -> None:
    words[flag.position] = f"{words[flag.position].removesuffix(flag.value)}{{{field}}}"


def _parse(text: str) -> object:
    """Parse a value as Python would: a number or a truth value if it is one."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def _find_logs(place: Path | None, output: Path) -> tuple[str, RunLog | None]:
    """Find the log of the example in a place, and its template; the console without one."""
    if place is None:
        return "{console}", None
    tables = [path for path in place.iterdir() if path.suffix in (*TABLE_SUFFIXES, ".jsonl")] if place.is_dir() else []
    try:
        files = (tables[0],) if len(tables) == 1 else list_runs([place])[0]
        (log,) = read_logs(files)
    except (LogError, ValueError) as error:
        raise PlanError(f"No log of the example can be read, which --logs FILE would name: {error}") from None
    names = {re.sub(r"\d{2,}", "*", file.name) if file.suffix != ".json" else file.name for file in files}
    (name, *others) = sorted(names)
    try:
        parent = files[0].resolve().parent.relative_to(output.resolve())
    except ValueError:
        return str(files[0]), log
    parts = [re.sub(r"\d+", "*", part) for part in parent.parts]
    return "/".join(["{output}", *parts, "*" if others else name]), log


def _find_checkpoints(output: Path) -> str:
    """Find the template of the checkpoints in a folder; empty if it has none."""
    matches = [match for path in output.iterdir() if path.is_dir() and (match := _CHECKPOINT.fullmatch(path.name))]
    prefixes = sorted({match[1] for match in matches if match[1]})
    return f"{{output}}/{prefixes[0]}{{step}}" if prefixes else ""


def _find_own_names(log: RunLog | None, trainer: str) -> dict[str, str]:
    """Find the measurements of a log that are called like ours, if no trainer is known that means others by them."""
    keys = log.keys if log is not None and not trainer else []
    return {key: key for key in keys if key in OUR_COLUMNS and key != "val_success"}


def _find_success(log: RunLog | None, trainer: str) -> str:
    """Find the trainer's name of the success; what is most like one, if it is not known."""
    keys = log.keys if log is not None else []
    for name in read_names().get(trainer, ()):
        if name.column == "val_success":
            for key in keys:
                if name.terms[0].match(key):
                    return key
    return next((key for key in keys if _SUCCESS.search(key)), "THE NAME OF A MEASUREMENT IN THE LOG")
