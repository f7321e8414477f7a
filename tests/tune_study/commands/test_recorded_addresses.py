"""Folders from somebody else that name a server, and all commands: nothing is sent, whatever a folder says."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.command_line import type_in
from tests.fakes.plans import plan_study
from trainable.files.json_values import read_object, write_object
from tune_study.commands.probe import restore
from tune_study.folder.outputs import write_study

SECRET = "the-value-of-a-secret"
VARIABLES = ("PATH", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MY_API_KEY")


class Listener:
    """A server on the loopback address that takes every connection, and keeps what it is sent."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.received: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(2)
                try:
                    self.received.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                except OSError:
                    self.received.append(b"")

    def close(self) -> None:
        self._socket.close()


class Alteration(NamedTuple):
    """What somebody wrote into the folder of a study.

    study: what is changed in study.json. settings: dotted settings, in study.json and in every run.json.
    """

    study: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}


def judge(url: str, variable: str = "OPENAI_API_KEY", **settings: object) -> Alteration:
    papers = {"score": "judge", "judge_url": url, "judge_key_variable": variable, **settings}
    return Alteration(settings={f"env.papers.{name}": value for name, value in papers.items()})


def list_alterations(port: int, home: Path) -> dict[str, Alteration]:
    host, text = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/text"
    source = {"path": text, "sha256": "0" * 64, "text": f"import urllib.request as r; r.urlopen('{text}')"}
    storages = {
        "s3": f"s3://bkt/x?endpoint_override={host}&scheme=http&region=us-east-1",
        "s3-key": f"s3://key:word@bkt/x?endpoint_override={host}&scheme=http",
        "gs": f"gs://anonymous@bkt/x?endpoint_override={host}&scheme=http&retry_limit_seconds=2",
        "abfs": f"abfs://name@account.dfs.core.windows.net/x?dfs_storage_authority={host}&dfs_storage_scheme=http",
        "fsspec-webhdfs": f"fsspec+webhdfs://{host}/x",
        "file": (home / "storage").as_uri(),
    }
    return {
        "judge": judge(f"http://{host}/v1"),
        "judge-aws": judge(f"http://{host}/v1", "AWS_SECRET_ACCESS_KEY"),
        "judge-file": judge(f"http://{host}/v1", file=str(home / "mine.jsonl")),
        "questions": Alteration(settings={"env.papers.file": str(home / "mine.jsonl")}),
        "model": Alteration(settings={"model.path": str(home / "model")}),
        "model-of-a-server": Alteration(settings={"model.path": text}),
        "reference": Alteration(settings={"model.reference_path": str(home / "model")}),
        **{f"storage-{name}": Alteration(study={"storage": uri}) for name, uri in storages.items()},
        "declaration": Alteration(study={"declaration": source}),
        "code": Alteration(study={"code": [source]}),
    }


NAMES = tuple(list_alterations(1, Path("/")))
READING = (
    "status {}", "report {}", "explain {}", "explain {} --arm {arm}", "transcripts {}", "replay-stoppers {}",
    "plot-gradients {}", "compare {} {}", "alarms {}", "stop {}", "clean {}",
)  # fmt: skip
USING = ("confirm {} --arm {arm} --seeds 2", "export {} --arm {arm} --to exported", "probe {}", "resume {} --wandb off")


def write_altered_study(folder: Path, alteration: Alteration) -> str:
    """Write results/<run> as if it came from somebody else: nobody started it here. Returns an arm of it."""
    overrides = {"trainer.total_training_steps": 2}
    plan = plan_study(folder.parent / "elsewhere", None, study="tree-grpo", **overrides)
    write_study(plan)
    shutil.move(plan.folder, folder)
    study = {**read_object(folder / "study.json"), **alteration.study}
    write_object(folder / "study.json", {**study, "settings": alter(study["settings"], alteration.settings)})
    for path in folder.glob("runs/*/run.json"):
        entry = read_object(path)
        write_object(path, {**entry, "config": alter(entry["config"], alteration.settings)})
    return plan.values[-1]


def alter(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    altered: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    for name, value in changes.items():
        *sections, last = name.split(".")
        section = altered
        for key in sections:
            section = section[key]
        section[last] = value
    return altered


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for name in VARIABLES[1:]:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = Listener()
    yield server
    server.close()


def try_everything(folder: Path, arm: str, alteration: Alteration) -> None:
    for command in READING + USING:
        answer = type_in(command.format(folder, folder, arm=arm))
        assert answer.code == 2 or command in READING, (command, answer)
        assert SECRET not in answer.out + answer.err, command
        assert answer.code == 0 or answer.err.strip(), f"{command} ended with a traceback"
    # `run` continues a study with the settings that were typed, so only others are refused.
    is_other = bool(alteration.settings or "storage" in alteration.study)
    line = "run tree-grpo --preset laptop --seeds 1 --steps 2 --output {} {}"
    answer = type_in(line.format(folder.parents[1], "" if is_other else "--dry-run"))
    assert SECRET not in answer.out + answer.err
    if is_other:
        assert answer.code == 2, answer
        assert answer.err.strip(), "`run` ended with a traceback"
    with pytest.raises(ValueError, match=r"."):
        restore(folder, arm)


@pytest.mark.parametrize(
    "name", [name if name in ("judge", "storage-s3") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
@pytest.mark.long
def test_nothing_is_sent(work_dir: Path, listener: Listener, name: str) -> None:
    home = work_dir / "home"
    (home / "model").mkdir(parents=True)
    (home / "mine.jsonl").write_text("{}")
    alteration = list_alterations(listener.port, home)[name]
    folder = work_dir / "out" / "results" / "tree_grpo_papers-tiny"
    folder.parent.mkdir(parents=True)
    arm = write_altered_study(folder, alteration)
    try_everything(folder, arm, alteration)
    assert listener.received == []
    assert sorted(path.name for path in home.rglob("*")) == ["mine.jsonl", "model"]
