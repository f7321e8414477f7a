"""Hostile texts, names and code in the files of a study that are no tables."""

import hashlib
import json
import pickle
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


Change = Callable[[HostileCopy], None]
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
    "bidirectional": "\u202egnp.evil\u2066x",
    "markup": f"<script>{MARKER}</script><img src=x onerror={MARKER}><svg onload={MARKER}>\"'></script></style>",
    "console-markup": "[link=file:///etc/passwd]x[/link][bold red]y[/][/]",
    "mathtext": r"$\frac{$ $x_{$ \(",
    "formula": "=cmd|'/c calc'!A0,@SUM(1)",
    "long": "x" * 300_000,
}


def _change_study_texts(text: str, copy: HostileCopy) -> None:
    """Texts of study.json that no command compares with anything."""

    def edit(content: Content) -> None:
        content.update(question=text, preset_reason=text, command=f"python {text}", created_at=text)
        content["contrasts"] = [{"name": text, "pairs": [["PPO", "GRPO"]]}]
        for start in content["starts"]:
            start.update(at=text, command=text, versions={text: text}, git={"commit": text, "dirty": True})

    edit_json(copy.folder / "study.json", edit)


def _change_arm_texts(text: str, copy: HostileCopy) -> None:
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


def _change_status_texts(text: str, copy: HostileCopy) -> None:
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


def _change_row_texts(text: str, copy: HostileCopy) -> None:
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


TEXT_PLACES: dict[str, Callable[[str, HostileCopy], None]] = {
    "study": _change_study_texts,
    "arms": _change_arm_texts,
    "status": _change_status_texts,
    "rows": _change_row_texts,
}


# Names of runs and of files.

RUN_IDS: dict[str, object] = {
    "parent": "../../../home/letters",
    "absolute": "/etc",
    "dots": "..",
    "empty": "",
    "long": "x" * 300,
    "hidden": ".ssh",
}


def _change_run_id(run_id: object, copy: HostileCopy) -> None:
    edit_json(copy.folder / "study.json", lambda content: content["runs"][1].update(run_id=run_id))
    edit_json(copy.run_dir(1) / "run.json", lambda content: content.update(run_id=run_id))


def _change_run_paths(path: str, copy: HostileCopy) -> None:
    """The paths of logs and checkpoints, of which a plan knows better."""
    for run in (0, 1):
        edit_json(copy.run_dir(run) / "run.json", lambda content: content.update(log=path, checkpoints=path))

    def edit(content: Content) -> None:
        content.update(run=path, model=path, storage=None)
        for run in content["runs"]:
            run.update(log=path, checkpoints=path, experiment_name=path)

    edit_json(copy.folder / "study.json", edit)


def _add_many_runs(copy: HostileCopy) -> None:
    """A list of 100,000 runs in study.json."""

    def edit(content: Content) -> None:
        content["runs"] += [{**content["runs"][0], "run_id": f"run-{number}"} for number in range(100_000)]

    edit_json(copy.folder / "study.json", edit)


# Code.

CODE = "import pathlib\npathlib.Path({!r}).touch()\n"


def _plant_modules(copy: HostileCopy) -> None:
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


def _name_module(key: str, value: str, copy: HostileCopy) -> None:
    _plant_modules(copy)
    edit_json(copy.folder / "study.json", lambda content: content.update({key: value}))


def _declare_in_file(path: str, copy: HostileCopy) -> None:
    """A study that says it was declared in a file, with code that makes a file; the file exists where it points to."""
    _plant_modules(copy)
    code = CODE.format(str(copy.home / "ran"))
    declaration = {"path": path, "sha256": hashlib.sha256(code.encode()).hexdigest(), "text": code + "\x1b[31m\x07"}
    edit_json(copy.folder / "study.json", lambda content: content.update(name="my-lr", declaration=declaration))


def _use_parts(path: str, copy: HostileCopy) -> None:
    """A study whose runs use parts of a file that exists where it points to, and whose text makes a file."""
    _plant_modules(copy)
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


def _plant_pickles(copy: HostileCopy) -> None:
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


def _replace_with_pickle(pattern: str, copy: HostileCopy) -> None:
    for path in copy.output.glob(pattern):
        path.unlink()
        path.write_bytes(pickle.dumps(Toucher(copy.home / "ran")))


# JSON: encodings and sizes.
JSON_CONTENTS: dict[str, bytes] = {
    "nested-lists": b"[" * 1_000_000,
    "other-encoding": '{"schema": 1}'.encode("utf-16"),
    "equal-keys": b'{"schema": 1, "schema": 2, "name": "a", "name": []}',
    "large": b'{"a": "' + b"x" * 60_000_000 + b'"}',
}
JSON_FILES = {
    "study.json": "results/*/study.json",
    "run.json": "results/*/runs/*PPO*/run.json",
    "status.json": "results/*/runs/*PPO*/status.json",
    "checksums.json": "results/*/runs/*/state/*/checksums.json",
}


def _write_json(pattern: str, content: bytes, copy: HostileCopy) -> None:
    for path in copy.output.glob(pattern):
        path.write_bytes(content)


def _add_many_rows(copy: HostileCopy) -> None:
    """200,000 rows of 200,000 steps, with right checksums."""
    row = {"step": 0, "run_id": copy.run_ids[0], "seed": 0, "train_success": 0.5}
    write_lines(copy.run_dir() / "metrics.jsonl", ({**row, "step": step} for step in range(1, 200_001)))


def _make_contents() -> dict[str, Change]:
    changes: dict[str, Change] = {}
    for place, change_texts in TEXT_PLACES.items():
        for name, text in TEXTS.items():
            changes[f"text/{place}/{name}"] = partial(change_texts, text)
    for name, run_id in RUN_IDS.items():
        changes[f"run-id/{name}"] = partial(_change_run_id, run_id)
    for name, path in (("parent", "../../../../home/letters"), ("absolute", "/tmp"), ("home", "~/letters")):
        changes[f"paths/{name}"] = partial(_change_run_paths, path)
    changes["names/many-runs"] = _add_many_runs
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
    changes["rows/many"] = _add_many_rows
    return changes


CONTENTS = _make_contents()
