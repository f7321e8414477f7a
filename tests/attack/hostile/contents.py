"""Hostile texts, names, numbers, nestings and code in the files of a study that are no tables."""

import hashlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.fakes.lines import chain_lines
from trainable.files.json_lines import write_lines
from trainable.files.json_values import CHECKSUM_KEY, format_object
from trainable.runs.run_files import LINE_FILES

MARKER = "attack-of-the-folder"
"""A word by which markup from the folder is recognized in a page."""


@dataclass(frozen=True)
class HostileCopy:
    """A copy of the sample study that is about to be changed.

    folder: its results/<run>. home: the user's home folder. run_ids: of the run that has ended and the interrupted one.
    """

    folder: Path
    home: Path
    run_ids: tuple[str, str]

    @property
    def output(self) -> Path:
        """The output folder."""
        return self.folder.parent.parent

    def run_dir(self, number: int = 0) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / self.run_ids[number]


Change = Callable[[HostileCopy, random.Random], None]
Content = dict[str, Any]


def edit_json(path: Path, edit: Callable[[Content], object]) -> None:
    """Change a JSON object in place, and give it the checksum that belongs."""
    content = json.loads(path.read_text())
    content.pop(CHECKSUM_KEY)
    edit(content)
    path.write_text(json.dumps(json.loads(format_object(content))))


# Texts.

TEXTS = {
    "escape": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;file:///etc/passwd\x1b\\text\x1b]8;;\x1b\\",
    "c1-controls": "\x9b2J\x90q\x9c",
    "bell-and-backspace": "\x07\x08\x08\x7f",
    "carriage-return": "fine\rbad",
    "bidirectional": "\u202egnp.evil\u2066x",
    "nul": "a\x00b",
    "lone-surrogate": "a\ud800b",
    "line-feeds": "\n\n\ntune_study: all is well\n",
    "markup": f"<script>{MARKER}</script><img src=x onerror={MARKER}><svg onload={MARKER}>\"'></script></style>",
    "console-markup": "[link=file:///etc/passwd]x[/link][bold red]y[/][/]",
    "mathtext": r"$\frac{$ $x_{$ \(",
    "template": "{{ 7*7 }}{% include '/etc/passwd' %}{0.__class__}%s%n",
    "formula": "=cmd|'/c calc'!A0,@SUM(1)",
    "long": "x" * 300_000,
    "right-to-left": "قصف\u200f" * 20,
}


def _change_study_texts(text: str, copy: HostileCopy, rng: random.Random) -> None:
    """Texts of study.json that no command compares with anything."""

    def edit(content: Content) -> None:
        content.update(question=text, preset_reason=text, command=f"python {text}", created_at=text)
        content["contrasts"] = [{"name": text, "pairs": [["PPO", "GRPO"]]}]
        for start in content["starts"]:
            start.update(at=text, command=text, versions={text: text}, git={"commit": text, "dirty": True})

    edit_json(copy.folder / "study.json", edit)


def _change_arm_texts(text: str, copy: HostileCopy, rng: random.Random) -> None:
    """The names of arms, labels, axis and study, in study.json and run.json alike."""

    def edit_run(content: Content) -> None:
        content.update(arm=f"{text}{content['arm']}", label=text, experiment_name=text)

    def edit(content: Content) -> None:
        content["axis"].update(setting=text, option=text, values=[f"{text}{value}" for value in ("PPO", "GRPO")])
        content["baseline"] = f"{text}PPO"
        for run in content["runs"]:
            edit_run(run)

    edit_json(copy.folder / "study.json", edit)
    for number in (0, 1):
        edit_json(copy.run_dir(number) / "run.json", edit_run)


def _change_status_texts(text: str, copy: HostileCopy, rng: random.Random) -> None:
    """The texts of status.json, of run.json and of the logs."""
    for number in (0, 1):
        edit_json(
            copy.run_dir(number) / "status.json",
            lambda content: content.update(
                status="failed", reason=text, failure_class=text, stop_rule=text, trial_id=text, started_at=text
            ),
        )
        edit_json(copy.run_dir(number) / "run.json", lambda content: content.update(log=text, checkpoints=text))
    for log in copy.output.glob("logs/**/*.log"):
        log.write_text(text, errors="replace")


def rewrite_rows(path: Path, edit: Callable[[Content], object]) -> None:
    """Change every line of a file of rows, with the checksums that belong."""
    lines = []
    for line in path.read_bytes().splitlines():
        row = {name: value for name, value in json.loads(line).items() if name != CHECKSUM_KEY}
        edit(row)
        lines.append(json.dumps(row).encode())
    path.write_bytes(chain_lines(lines))


def _change_row_texts(text: str, copy: HostileCopy, rng: random.Random) -> None:
    """The texts of rows, evaluations and analyses, with right checksums."""
    for number in (0, 1):
        for name in LINE_FILES:
            rewrite_rows(copy.run_dir(number) / name, partial(_replace_texts, text))


def _replace_texts(text: str, row: Content) -> None:
    for name, value in row.items():
        if isinstance(value, str) and name not in ("run_id", "success"):
            row[name] = text
    row["stop_rule"] = text
    row["failure"] = text
    for inner_row in (*row.get("rows", []), *row.get("turns", [])):
        inner_row.update({name: text for name, value in inner_row.items() if isinstance(value, str)})


TEXT_PLACES: dict[str, Callable[[str, HostileCopy, random.Random], None]] = {
    "study": _change_study_texts,
    "arms": _change_arm_texts,
    "status": _change_status_texts,
    "rows": _change_row_texts,
}


# Names of runs and of files.

RUN_IDS: dict[str, object] = {
    "parent": "../../../home/letters",
    "absolute": "/etc",
    "dot": ".",
    "dots": "..",
    "empty": "",
    "long": "x" * 300,
    "number": 7,
    "null": None,
    "list": ["a"],
    "nul": "a\x00b",
    "line-feed": "a\nb",
    "surrogate": "a\ud800",
    "hidden": ".ssh",
}


def _change_run_id(run_id: object, copy: HostileCopy, rng: random.Random) -> None:
    edit_json(copy.folder / "study.json", lambda content: content["runs"][1].update(run_id=run_id))
    edit_json(copy.run_dir(1) / "run.json", lambda content: content.update(run_id=run_id))


def _change_run_paths(path: str, copy: HostileCopy, rng: random.Random) -> None:
    """The paths of logs and checkpoints, of which a plan knows better."""
    for run in (0, 1):
        edit_json(copy.run_dir(run) / "run.json", lambda content: content.update(log=path, checkpoints=path))

    def edit(content: Content) -> None:
        content.update(run=path, model=path, storage=None)
        for run in content["runs"]:
            run.update(log=path, checkpoints=path, experiment_name=path)

    edit_json(copy.folder / "study.json", edit)


def _add_many_runs(copy: HostileCopy, rng: random.Random) -> None:
    """A list of 100,000 runs in study.json."""

    def edit(content: Content) -> None:
        content["runs"] += [{**content["runs"][0], "run_id": f"run-{number}"} for number in range(100_000)]

    edit_json(copy.folder / "study.json", edit)


def _add_values(copy: HostileCopy, count: int) -> None:
    """Lists of about `count` arms and of `count` seeds."""

    def edit(content: Content) -> None:
        content["axis"]["values"] += [f"value-{number}" for number in range(count - 10)]
        content["seeds"] = list(range(count))

    edit_json(copy.folder / "study.json", edit)


def _add_many_values(copy: HostileCopy, rng: random.Random) -> None:
    """A list of nearly as many arms as a study may have runs."""
    _add_values(copy, 10_000)


def _add_too_many_values(copy: HostileCopy, rng: random.Random) -> None:
    """A list of 100,000 arms and of 100,000 seeds."""
    _add_values(copy, 100_000)


def _add_many_folders(copy: HostileCopy, rng: random.Random) -> None:
    """20,000 checkpoints and 5,000 runs of which study.json knows nothing."""
    for number in range(20_000):
        (copy.run_dir() / "state" / f"step_{number + 10}").mkdir()
    for number in range(5_000):
        (copy.folder / "runs" / f"run-{number}").mkdir()


def _add_deep_folders(copy: HostileCopy, rng: random.Random) -> None:
    """A folder 1,500 levels deep, whose path is longer than the system takes."""
    folder = os.getcwd()
    os.chdir(copy.folder)
    try:
        for _ in range(1_500):
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(folder)


def _add_odd_names(copy: HostileCopy, rng: random.Random) -> None:
    """Names that are no text, that a terminal obeys, that look like options or like numbers of steps."""
    names = [b"\xff\xfe", b"\x1b[2J", b"a\nb", b"-rf", b"x" * 255, "\u202eevil".encode(), b"<script>", b"$\\frac{$"]
    for folder in (copy.folder, copy.folder / "runs", copy.run_dir(), copy.run_dir() / "state"):
        for name in names:
            (Path(os.fsdecode(os.fsencode(folder) + b"/" + name))).mkdir()
    for name_text in ("step_99999999999999999999999", "step_-1", "step_1e5", "step_\u0663", "step_", "step_007"):
        (copy.run_dir() / "state" / name_text).mkdir()


# Code.

CODE = "import pathlib\npathlib.Path({!r}).touch()\n"


def _plant_modules(copy: HostileCopy, rng: random.Random) -> None:
    """Modules in the folder and in the current folder, and files that name them."""
    code = CODE.format(str(copy.home / "ran"))
    current_folder = copy.home.parent / "current"
    names = ("evil", "sitecustomize", "conftest", "gradient_analysis", "sokoban", "PPO", "altair")
    for folder in (copy.folder, copy.output, copy.run_dir(), current_folder):
        for name in names:
            (folder / f"{name}.py").write_text(code)
        (folder / "__init__.py").write_text(code)
    claims = dict.fromkeys(
        ("trainable", "trainer", "family", "module", "class", "study", "config_class", "stop_rules_from"), "evil:Evil"
    )
    for number in (0, 1):
        edit_json(copy.run_dir(number) / "run.json", lambda content: content.update(claims))
    edit_json(copy.folder / "study.json", lambda content: content.update(trainable="evil:Evil", trainer="evil:Evil"))


def _name_module(key: str, value: str, copy: HostileCopy, rng: random.Random) -> None:
    _plant_modules(copy, rng)
    edit_json(copy.folder / "study.json", lambda content: content.update({key: value}))


def _declare_in_file(path: str, copy: HostileCopy, rng: random.Random) -> None:
    """A study that says it was declared in a file, with code that makes a file; the file exists where it points to."""
    _plant_modules(copy, rng)
    code = CODE.format(str(copy.home / "ran"))
    declaration = {"path": path, "sha256": hashlib.sha256(code.encode()).hexdigest(), "text": code + "\x1b[31m\x07"}
    edit_json(copy.folder / "study.json", lambda content: content.update(name="my-lr", declaration=declaration))


def _use_parts(path: str, copy: HostileCopy, rng: random.Random) -> None:
    """A study whose runs use parts of a file that exists where it points to, and whose text makes a file."""
    _plant_modules(copy, rng)
    code = CODE.format(str(copy.home / "ran"))
    sha256 = hashlib.sha256(code.encode()).hexdigest()
    part = f"{path}:Evil#{sha256[:16]}"

    def use_part(config: dict[str, Any]) -> None:
        config["env"].update(name=part, reward=part)
        config["trainer"].update(own_stop_rules=[part])

    def change_study(content: dict[str, Any]) -> None:
        content.update(code=[{"path": path, "sha256": sha256, "text": code + "\x1b[31m\x07"}])
        use_part(content["settings"])

    edit_json(copy.folder / "study.json", change_study)
    for number in (0, 1):
        edit_json(copy.run_dir(number) / "run.json", lambda content: use_part(content["config"]))


class Toucher:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


def _plant_pickles(copy: HostileCopy, rng: random.Random) -> None:
    """Pickles under every name that Ray Tune, torch, numpy or pandas might read."""
    content = pickle.dumps(Toucher(copy.home / "ran"))
    names = (
        "tuner.pkl",
        "searcher-state-1.pkl",
        "search_gen_state-1.json",
        "trainable.pkl",
        ".tune_metadata",
        "params.pkl",
        "error.pkl",
        "state.pt",
        "state.pkl",
        "pytorch_model.bin",
        "optimizer.pt",
        "data.pkl",
        "steps.pkl",
        "checkpoint.pkl",
    )
    folders = [copy.folder, copy.run_dir(), copy.run_dir(1), *copy.run_dir().glob("state/*")]
    folders += [path for path in copy.folder.iterdir() if path.is_dir() and path.name not in ("runs", "figures")]
    for folder in folders:
        for name in names:
            (folder / name).write_bytes(content)


def _replace_with_pickle(pattern: str, copy: HostileCopy, rng: random.Random) -> None:
    for path in copy.output.glob(pattern):
        path.unlink()
        path.write_bytes(pickle.dumps(Toucher(copy.home / "ran")))


# JSON: nestings, numbers, encodings, sizes.

NESTED = b'{"a":' + b"[" * 1_000_000
JSON_CONTENTS: dict[str, bytes] = {
    "nested-lists": b"[" * 1_000_000,
    "nested-objects": b'{"a":' * 1_000_000,
    "long-number": b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "no-number": b'{"schema": NaN, "name": Infinity}',
    "other-encoding": '{"schema": 1}'.encode("utf-16"),
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "equal-keys": b'{"schema": 1, "schema": 2, "name": "a", "name": []}',
    "large": b'{"a": "' + b"x" * 60_000_000 + b'"}',
    "many-keys": json.dumps({f"key-{number}": number for number in range(300_000)}).encode(),
}
JSON_FILES = {
    "study.json": "results/*/study.json",
    "run.json": "results/*/runs/*PPO*/run.json",
    "status.json": "results/*/runs/*PPO*/status.json",
    "checksums.json": "results/*/runs/*/state/*/checksums.json",
}
NUMBERS: dict[str, object] = {
    "not-a-number": float("nan"),
    "infinity": float("inf"),
    "huge": 10**400,
    "beyond-64-bits": 2**63,
    "negative": -1,
    "fraction": 0.5,
    "text": "1",
    "null": None,
    "truth": True,
}


def _write_json(pattern: str, content: bytes, copy: HostileCopy, rng: random.Random) -> None:
    for path in copy.output.glob(pattern):
        path.write_bytes(content)


def _write_state(content: bytes, copy: HostileCopy, rng: random.Random) -> None:
    """The values of every checkpoint, with the checksum that belongs."""
    for path in copy.output.rglob("state.json"):
        path.write_bytes(content)
        _mend_checksums(path.parent)


def _mend_checksums(folder: Path) -> None:
    checksums = json.loads((folder / "checksums.json").read_text())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("state.*")}
    (folder / "checksums.json").write_text(json.dumps({**checksums, **_put_digests(checksums, digests)}))


def _put_digests(checksums: Content, digests: dict[str, str]) -> Content:
    """The checksums of a checkpoint with other digests, wherever they are in the file."""
    return {
        name: digests.get(name, _put_digests(value, digests) if isinstance(value, dict) else value)
        for name, value in checksums.items()
    }


def _change_row_numbers(value: object, copy: HostileCopy, rng: random.Random) -> None:
    """All numbers of a file of rows, with right checksums."""

    def edit(row: Content) -> None:
        row.update({name: value for name, old in row.items() if isinstance(old, float | int)})
        for inner_row in (*row.get("rows", []), *row.get("turns", [])):
            inner_row.update({name: value for name, old in inner_row.items() if isinstance(old, float | int)})

    for name in LINE_FILES:
        rewrite_rows(copy.run_dir() / name, edit)


def _change_row_steps(value: object, copy: HostileCopy, rng: random.Random) -> None:
    for name in LINE_FILES:
        rewrite_rows(copy.run_dir() / name, lambda row: row.update(step=value))


def _change_study_numbers(value: object, copy: HostileCopy, rng: random.Random) -> None:
    def edit(content: Content) -> None:
        content["seeds"] = [value]
        content["settings"]["trainer"]["total_training_steps"] = value
        content["schema"] = value

    edit_json(copy.folder / "study.json", edit)


def _change_status_numbers(value: object, copy: HostileCopy, rng: random.Random) -> None:
    for number in (0, 1):
        edit_json(
            copy.run_dir(number) / "status.json",
            lambda content: content.update(stop_value=value, stop_threshold=value, stop_step=value, ended_at=value),
        )


def _add_many_rows(copy: HostileCopy, rng: random.Random) -> None:
    """200,000 rows of 200,000 steps, with right checksums."""
    row = {"step": 0, "run_id": copy.run_ids[0], "seed": 0, "train_success": 0.5}
    write_lines(copy.run_dir() / "metrics.jsonl", ({**row, "step": step} for step in range(1, 200_001)))


def _add_nested_rows(copy: HostileCopy, rng: random.Random) -> None:
    for name in LINE_FILES:
        (copy.run_dir() / name).write_bytes(chain_lines([b'{"step": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"]))


# Tensors.


def _write_tensors(header: object, length: int | None, copy: HostileCopy, rng: random.Random) -> None:
    """Checkpoints whose safetensors header lies, with the checksums that belong."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(encoded) if length is None else length) + encoded + bytes(64)
    for path in copy.output.rglob("state.safetensors"):
        path.unlink()
        path.write_bytes(content)
        _mend_checksums(path.parent)


def _describe_tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"actor/weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TENSORS: dict[str, tuple[object, int | None]] = {
    "long-header": (b"{}", 2**63),
    "header-beyond-the-end": (b"{}", 2**40),
    "huge-shape": (_describe_tensor([2**62, 2**62], [0, 64]), None),
    "offsets-beyond-the-end": (_describe_tensor([2**30], [0, 2**32]), None),
    "backward-offsets": (_describe_tensor([16], [64, 0]), None),
    "overlapping": ({**_describe_tensor([16], [0, 64]), "b": _describe_tensor([16], [0, 64])["actor/weight"]}, None),
    "negative-shape": (_describe_tensor([-16], [0, 64]), None),
    "unknown-type": (_describe_tensor([16], [0, 64], "F31"), None),
    "no-tensors": ({}, None),
    "nested-header": (b'{"a":' + b"[" * 500_000, None),
    "many-empty-tensors": ({f"t{number}": _describe_tensor([0], [0, 0])["actor/weight"] for number in range(99)}, None),
}


def _make_contents() -> dict[str, Change]:
    changes: dict[str, Change] = {}
    for place, change_texts in TEXT_PLACES.items():
        for name, text in TEXTS.items():
            changes[f"text/{place}/{name}"] = partial(change_texts, text)
    for name, run_id in RUN_IDS.items():
        changes[f"run-id/{name}"] = partial(_change_run_id, run_id)
    for name, path in (("parent", "../../../../home/letters"), ("absolute", "/tmp"), ("home", "~/letters")):
        changes[f"paths/{name}"] = partial(_change_run_paths, path)
    for change in (
        _add_many_runs,
        _add_many_values,
        _add_too_many_values,
        _add_many_folders,
        _add_deep_folders,
        _add_odd_names,
    ):
        changes[f"names/{change.__name__.removeprefix('_add_').replace('_', '-')}"] = change
    changes["code/modules"] = _plant_modules
    for key, value in (
        ("trainable", "evil:Evil"),
        ("family", "evil:Evil"),
        ("name", "evil"),
        ("trainable", "os:_exit"),
    ):
        changes[f"code/{key}={value}"] = partial(_name_module, key, value)
    for name, path in (("beside", "evil.py"), ("absolute", "/etc/hostname"), ("controls", "\x1b]0;evil\x07.py")):
        changes[f"code/declared-in-file-{name}"] = partial(_declare_in_file, path)
        changes[f"code/parts-{name}"] = partial(_use_parts, path)
    changes["code/pickles"] = _plant_pickles
    for pattern in ("results/*/*.parquet", "**/state.safetensors", "results/*/study.json", "**/metrics.jsonl"):
        changes[f"code/pickle-as-{pattern.rsplit('/', 1)[-1]}"] = partial(_replace_with_pickle, pattern)
    for file_name, pattern in JSON_FILES.items():
        for name, content in JSON_CONTENTS.items():
            changes[f"json/{file_name}/{name}"] = partial(_write_json, pattern, content)
    for name, content in JSON_CONTENTS.items():
        changes[f"json/state.json/{name}"] = partial(_write_state, content)
    for name, number in NUMBERS.items():
        changes[f"number/rows/{name}"] = partial(_change_row_numbers, number)
        changes[f"number/steps/{name}"] = partial(_change_row_steps, number)
        changes[f"number/study/{name}"] = partial(_change_study_numbers, number)
        changes[f"number/status/{name}"] = partial(_change_status_numbers, number)
    changes["rows/many"], changes["rows/nested"] = _add_many_rows, _add_nested_rows
    for name, (header, length) in TENSORS.items():
        changes[f"tensors/{name}"] = partial(_write_tensors, header, length)
    return changes


CONTENTS = _make_contents()
