"""Damaged study folders: files of a good one torn, garbled, emptied, replaced or lost, and what is said about them."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import strategies as st

from search_spaces import STUDIES
from tests.fakes.run_folders import FakeRun, FakeStudy
from tests.fakes.run_folders import write_study as write_made_study
from tests.faults.malformed import Tally, assert_clear, hunt, json_values, one_kind, type_in
from tune_study.folder.outputs import RunStatus, write_status, write_study
from tune_study.folder.study_file import plan_from_folder
from tune_study.plan.study_plan import StudyPlan, make_plan

RUN = "out/results/kl_sweep_sokoban-tiny"
STUDY, LINES = f"{RUN}/study.json", ("metrics.jsonl", "levels.jsonl")


class Damage(NamedTuple):
    """A file of the folder and what is there instead: other bytes, a folder ("folder"), or nothing (None)."""

    name: str
    found: bytes | str | None


def write_good(folder: Path) -> StudyPlan:
    """A study of two arms in folder/out: the first ran three steps, the second none."""
    steps = {"trainer.total_training_steps": 3}
    plan = make_plan(STUDIES["kl"], "laptop", "a test", steps, ("0", "0.1"), 1, folder / "out")
    write_study(plan)
    first = plan.runs[0].run_id
    made = FakeStudy(total_steps=3, test_freq=2, levels=6)
    run = FakeRun("0", steps=3)
    rows = write_made_study(folder / "made", [run], made) / "runs" / run.run_id
    for name in LINES:
        shutil.copy(rows / name, plan.get_run_dir(first) / name)
    shutil.rmtree(folder / "made")
    status = RunStatus(first, "completed", started_at="2026-01-02T03:04:06+00:00", ended_at="2026-01-02T03:06:06+00:00")
    write_status(plan.get_run_dir(first), status)
    return plan


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, by its path relative to `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def places(data: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every part of a JSON value, itself left out."""
    steps = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for name, part in steps for found in ((*way, name), *places(part, (*way, name)))]


def changed(data: Any, way: Sequence[Any], value: Any, is_lost: bool) -> Any:
    """`data` with another value at the end of `way`, or without it."""
    new = deepcopy(data)
    target = new
    for name in way[:-1]:
        target = target[name]
    if is_lost:
        del target[way[-1]]
    else:
        target[way[-1]] = value
    return new


def other_bytes(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file torn at any byte, empty, with bytes flipped or between, or of something else altogether."""
    ends = st.integers(0, len(whole))
    between = st.tuples(ends, ends, st.binary(max_size=8)).map(lambda cut: whole[: cut[0]] + cut[2] + whole[cut[1] :])
    flipped = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 255)).map(
        lambda flip: whole[: flip[0]] + bytes([whole[flip[0]] ^ flip[1]]) + whole[flip[0] + 1 :]
    )
    nested = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b'{"step": ' + b"[" * 5000, b"9" * 5000, b"\0" * 40])
    return st.one_of(ends.map(lambda end: whole[:end]), between, flipped, st.binary(max_size=40), nested)


def other_json(data: Any) -> st.SearchStrategy[Any]:
    """Right JSON of the wrong shape: a part lost, or something else in its place, or something else altogether."""
    strange = [math.nan, math.inf, 10**400, -1, 0, 2**63, True, None, "", "\ud800", [], {}, "../..", "a/b", "\0"]
    values = st.one_of(st.sampled_from(strange), json_values.filter(_is_json))
    parts = st.tuples(st.sampled_from(places(data)), values, st.booleans())
    return st.one_of(parts.map(lambda part: changed(data, *part)), parts.map(lambda part: changed(data, *part)), values)


def _is_json(value: object) -> bool:
    """Whether json writes `value`; it refuses numbers of thousands of digits."""
    try:
        json.dumps(value)
    except ValueError:
        return False
    return True


def other_object(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file of right JSON of the wrong shape."""
    return other_json(json.loads(whole)).map(lambda data: json.dumps(data).encode())


def other_lines(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file of JSON lines in which one is right JSON of the wrong shape."""
    lines = whole.splitlines()
    others = [other_json(json.loads(line)).map(lambda data, at=at: (at, data)) for at, line in enumerate(lines)]
    found = one_kind(others).map(
        lambda other: [*lines[: other[0]], json.dumps(other[1]).encode(), *lines[other[0] + 1 :]]
    )
    return found.map(lambda rows: b"\n".join(rows) + b"\n")


def damages(files: Mapping[str, bytes], names: Sequence[str]) -> st.SearchStrategy[Damage]:
    """One file of `names`, damaged in any way."""
    kinds = []
    for name in names:
        shapes = other_object(files[name]) if name.endswith(".json") else other_lines(files[name])
        gone: st.SearchStrategy[bytes | str | None] = st.sampled_from([None, "folder"])
        kinds.append(
            one_kind([shapes, shapes, other_bytes(files[name]), gone]).map(lambda new, name=name: Damage(name, new))
        )
    return one_kind(kinds)


def damage_in(folder: Path, good: Path, damage: Damage) -> None:
    """A copy of the good folder with the damage done."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    path = folder / damage.name
    path.unlink()
    if isinstance(damage.found, bytes):
        path.write_bytes(damage.found)
    elif damage.found == "folder":
        path.mkdir()


def check_reading(good: Path, plan: StudyPlan, damage: Damage) -> str:
    """What only reads writes nothing. Rows and statuses never stop it; study.json and run.json may.

    `resume` continues the very runs that were started, or with none.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        damage_in(folder, good, damage)
        before = contents(folder)
        commands = (["status", RUN], ["resume", "--dry-run", RUN], ["replay-stoppers", RUN])
        status, resume, replay = answers = [type_in(command, folder) for command in commands]
        assert contents(folder) == before
        for answer in answers:
            assert answer.code in (0, 2), answer
            if answer.code == 2:
                assert_clear(answer.err)
                assert damage.name.endswith(("study.json", "run.json")), answer
        assert status.code == 0 or damage.name == STUDY, status
        assert "completed" in status.out or damage.name.endswith(("study.json", "status.json")), status
        assert "3/3" in status.out or damage.name.endswith(("study.json", "metrics.jsonl")), status
        if resume.code == 0:
            assert _named(plan_from_folder(folder / RUN)) == _named(plan)
    return f"status {status.code}, resume {resume.code}, replay {replay.code}"


def _named(plan: StudyPlan) -> list[tuple[object, ...]]:
    return [(spec.run_id, spec.arm, spec.seed, spec.log_path, spec.config.compute_hash()) for spec in plan.runs]


def check_report(good: Path, damage: Damage) -> str:
    """`report` is written, or says which file it cannot be written from; it changes no file that a run wrote."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        damage_in(folder, good, damage)
        before = contents(folder)
        answer = type_in(["report", RUN], folder)
        after = contents(folder)
        assert {path: after.get(path) for path in before} == before
        assert (answer.code == 0) == (f"{RUN}/report.html" in after), answer
        if answer.code == 1:
            assert answer.err.startswith("The rows are saved in "), answer
            assert damage.name.endswith(("run.json", "status.json", "levels.jsonl")), answer
            assert f"{Path(damage.name).name} " in answer.err, answer
        elif answer.code == 2:
            assert damage.name == STUDY, answer
            assert_clear(answer.err)
            assert after == before
        else:
            assert answer.code == 0, answer
    return f"exit {answer.code}"


@contextmanager
def good_study() -> Iterator[tuple[Path, StudyPlan, Mapping[str, bytes]]]:
    """A good study in a folder of its own, and its files."""
    with TemporaryDirectory() as name:
        plan = write_good(Path(name))
        yield Path(name), plan, contents(Path(name))


def check_folders(examples: int, derandomize: bool = True) -> Tally:
    """`status`, `resume --dry-run` and `replay-stoppers` of folders in which one file is damaged."""
    with good_study() as (good, plan, files):
        found = damages(files, [*files, STUDY, STUDY])
        return hunt(found, lambda damage: check_reading(good, plan, damage), examples, derandomize)


def check_reports(examples: int, derandomize: bool = True) -> Tally:
    """`report` of folders in which one file is damaged."""
    with good_study() as (good, _, files):
        found = damages(files, [*files, STUDY, STUDY])
        return hunt(found, lambda damage: check_report(good, damage), examples, derandomize)
