"""Damaged study folders: one file is cut, garbled, emptied, replaced or removed, and the commands must report it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import strategies as st

from search_spaces.catalog import STUDIES
from tests.fakes.command_line import read_files
from tests.fakes.run_folders import FakeRun, FakeStudy
from tests.fakes.run_folders import write_study as write_fake_study
from tests.faults.malformed import Tally, assert_clear, check_examples, draw_equally, type_in
from trainable.files.json_values import CHECKSUM_KEY, format_object
from trainable.runs.study_record import StatusRecord, write_record
from tune_study.folder.outputs import write_study
from tune_study.folder.study_file import plan_from_folder
from tune_study.plan.study_plan import StudyPlan, make_plan

RUN = "out/results/kl_sweep_sokoban-tiny"
STUDY, LINE_FILES = f"{RUN}/study.json", ("metrics.jsonl", "levels.jsonl")


class Damage(NamedTuple):
    """A file of the folder and what replaces it: other bytes, or nothing (None)."""

    name: str
    content: bytes | None


def write_valid_study(folder: Path) -> StudyPlan:
    """Write a study of two arms to folder/out, of which the first ran three steps and the second none."""
    steps = {"trainer.total_training_steps": 3}
    plan = make_plan(STUDIES["kl"], "laptop", "a test", steps, ("0", "0.1"), 1, folder / "out")
    write_study(plan)
    first_run_id = plan.runs[0].run_id
    fake_study = FakeStudy(total_steps=3, test_freq=2, levels=6)
    run = FakeRun("0", steps=3)
    fake_run_dir = write_fake_study(folder / "made", [run], fake_study) / "runs" / run.run_id
    for name in LINE_FILES:
        shutil.copy(fake_run_dir / name, plan.get_run_dir(first_run_id) / name)
    shutil.rmtree(folder / "made")
    status = StatusRecord(
        first_run_id, "completed", started_at="2026-01-02T03:04:06+00:00", ended_at="2026-01-02T03:06:06+00:00"
    )
    write_record(plan.get_run_dir(first_run_id), status)
    return plan


def change_value(document: Any, path: Sequence[Any], value: Any, is_lost: bool) -> Any:
    """Return a copy of `document` with another value at `path`, or without that value."""
    changed_document = deepcopy(document)
    target = changed_document
    for name in path[:-1]:
        target = target[name]
    if is_lost:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return changed_document


def draw_damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw a file that is cut at any byte, empty, has changed or inserted bytes, or has unrelated content."""
    ends = st.integers(0, len(content))
    replaced_ranges = st.tuples(ends, ends, st.binary(max_size=8)).map(
        lambda cut: content[: cut[0]] + cut[2] + content[cut[1] :]
    )
    flipped_bytes = st.tuples(st.integers(0, len(content) - 1), st.integers(1, 255)).map(
        lambda flip: content[: flip[0]] + bytes([content[flip[0]] ^ flip[1]]) + content[flip[0] + 1 :]
    )
    unrelated_contents = st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b'{"step": ' + b"[" * 5000, b"9" * 5000, b"\0" * 40]
    )
    return st.one_of(
        ends.map(lambda end: content[:end]), replaced_ranges, flipped_bytes, st.binary(max_size=40), unrelated_contents
    )


def encode_document(document: Any) -> bytes:
    """Encode a JSON document, an object with its checksum."""
    text = format_object(document) if isinstance(document, dict) else json.dumps(document)
    return text.encode(errors="surrogatepass")


def drop_checksum(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != CHECKSUM_KEY}


def draw_damages(files: Mapping[str, bytes], names: Sequence[str]) -> st.SearchStrategy[Damage]:
    """Draw a damage of any kind to one of the files `names`."""
    return draw_equally(
        [
            st.one_of(st.none(), *[draw_damaged_bytes(files[name])] * 3).map(
                lambda content, name=name: Damage(name, content)
            )
            for name in names
        ]
    )


def write_damaged_copy(folder: Path, valid_folder: Path, damage: Damage) -> None:
    """Write a copy of the valid folder with the damage."""
    shutil.copytree(valid_folder, folder, dirs_exist_ok=True)
    path = folder / damage.name
    path.unlink()
    if damage.content is not None:
        path.write_bytes(damage.content)


def check_reading(valid_folder: Path, plan: StudyPlan, damage: Damage) -> str:
    """Check that commands that only read write nothing, and that few damages stop them.

    Those are a damaged study.json, a run.json of the wrong shape, and for a replay a levels.jsonl whose counts differ.
    `resume` continues exactly the runs that were started, or is refused.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_damaged_copy(folder, valid_folder, damage)
        contents_before = read_files(folder)
        commands = (["status", RUN], ["resume", "--dry-run", RUN], ["replay-stoppers", RUN])
        status, resume, replay = answers = [type_in(command, folder) for command in commands]
        assert read_files(folder) == contents_before
        for answer in answers:
            assert answer.code in (0, 2), answer
            if answer.code == 2:
                assert_clear(answer.err)
                # Like a report, a replay reads all tables, and counts in levels.jsonl must agree.
                names = ("study.json", "run.json", *(["levels.jsonl"] if answer is replay else []))
                assert damage.name.endswith(names), answer
        assert status.code == 0 or damage.name == STUDY, status
        if status.code == 2:
            assert type_in(["report", RUN], folder).code == 2
            assert read_files(folder) == contents_before
        assert "completed" in status.out or damage.name.endswith(("study.json", "status.json", "s.jsonl")), status
        # The planned steps are those of run.json.
        done = "3/" if damage.name.endswith("run.json") else "3/3"
        assert done in status.out or damage.name.endswith(("study.json", "metrics.jsonl")), status
        if resume.code == 0:
            assert _list_run_identities(plan_from_folder(folder / RUN)) == _list_run_identities(plan)
    return f"status {status.code}, resume {resume.code}, replay {replay.code}"


def _list_run_identities(plan: StudyPlan) -> list[tuple[object, ...]]:
    return [(spec.run_id, spec.arm, spec.seed, spec.log_path, spec.config.compute_hash()) for spec in plan.runs]


def check_folders(examples: int, seed: int | None = None) -> Tally:
    """Check `status`, `resume --dry-run` and `replay-stoppers` of folders in which one file is damaged."""
    with TemporaryDirectory() as name:
        plan = write_valid_study(Path(name))
        files = read_files(Path(name))
        damages = draw_damages(files, [*files, STUDY, STUDY])
        return check_examples(damages, lambda damage: check_reading(Path(name), plan, damage), examples, seed)
