"""A study in a storage: what its driver copies there and back, and who continues it."""

import json
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import search_spaces.catalog
from tests.fakes.command_line import assert_refused, get_output, type_in, type_words
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from tests.fakes.sessions import run_here
from tests.fakes.trainer import COLLAPSES, CRASHES_ONCE, make_fake_rows, make_study
from tests.tune_study.plan.test_storage_uri import SECRET_PLACES
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, find_record, read_record, write_record
from trainable.uploads import POINTER_FILE
from tune_study.folder import locate, outputs, storage
from tune_study.folder.storage import DRIVER_FILE, StoredFolder, StoredStudy
from tune_study.placement import disk
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, add_seeds
from tune_study.tune.trials import make_trial_config

FAKE = make_study("Fake")


@pytest.fixture(autouse=True)
def _shipped_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the study of these tests as a shipped one, because a folder cannot name a Trainable."""
    monkeypatch.setitem(search_spaces.catalog.STUDIES, "kl", FAKE)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: another, empty one, as on another machine."""
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    return tmp_path / "b"


def make_plan_in(
    folder: Path, uri: str | None, values: tuple[str, ...] = ("0", "0.1"), **settings: object
) -> StudyPlan:
    overrides = {"trainer.total_training_steps": 3, "trainer.disk_patience": 0, **settings}
    return replace(plan_study(folder, values, study=FAKE, **overrides), storage=uri)


def open_folder(plan: StudyPlan) -> StoredFolder:
    return StoredFolder(plan.study_uri)


def test_runs_that_are_added_later_are_copied_too(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "here", (tmp_path / "store").as_uri())
    stored_study = StoredStudy(plan)
    outputs.write_study(plan)
    assert stored_study.push() == ""
    larger_plan = add_seeds(plan, {"0": (1,)})
    outputs.write_study(larger_plan)
    stored_study.plan = larger_plan
    assert stored_study.push() == ""
    added_run = larger_plan.runs[-1].run_id
    stored_files = {path.name for path in (tmp_path / "store" / plan.run / "runs" / added_run).iterdir()}
    assert {"run.json", "status.json"} <= stored_files


def store_rows(plan: StudyPlan, study: StoredStudy, steps: int) -> None:
    """Store what Tune stores at a checkpoint of the first run."""
    run_id, folder = plan.runs[0].run_id, open_folder(plan)
    path = plan.output / "node" / METRICS_FILE
    path.parent.mkdir()
    for step in range(1, steps + 1):
        append_record(path, {"step": step, "run_id": run_id})
    checkpoint = "start_1_01234567/checkpoint_000001"
    folder.put(f"{run_id}/{checkpoint}/0/{METRICS_FILE}", path.read_bytes())
    folder.put(f"{run_id}/checkpoint_000000/{POINTER_FILE}", json.dumps({"folder": checkpoint}).encode())
    study.follow([{"run_id": run_id, "seed": 0}], f"{folder.path}/{run_id}/checkpoint_000000")


def start_study(plan: StudyPlan, status: str = "running") -> None:
    """Write the files of a study and copy them to storage, as a driver does that then ends."""
    with StoredStudy(plan).keep_synced():
        outputs.write_study(plan)
        write_record(plan.get_run_dir(plan.runs[0].run_id), StatusRecord(plan.runs[0].run_id, status, "a test"))
        assert StoredStudy(plan).push() == ""


# One driver.


def test_a_second_driver_is_refused_and_told_who_the_first_is(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    other_plan = replace(plan, folder=tmp_path / "b" / "results" / plan.run)
    with StoredStudy(plan).keep_synced():
        assert storage.find_driver(plan.study_uri)
        with (
            pytest.raises(PlanError, match=rf"is being run by .* \(pid {os.getpid()}\), last heard of \d+ s ago"),
            StoredStudy(other_plan).keep_synced(),
        ):
            pass
        assert storage.find_driver(plan.study_uri)
    assert not (tmp_path / "b").exists()
    assert not storage.find_driver(plan.study_uri)


@pytest.mark.parametrize(
    ("age", "host", "pid", "is_running"),
    [
        (10, "elsewhere", 1, True),
        (1000, "elsewhere", 1, False),
        (10, "", 1, True),
        (10, "", 2**22 + 1, False),  # above the largest process id
    ],
)
def test_a_driver_is_gone_when_its_process_is_or_when_it_was_not_heard_of(
    tmp_path: Path, age: float, host: str, pid: int, is_running: bool
) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri())
    start_study(plan)
    content = {"user": "somebody", "host": host or socket.gethostname(), "pid": pid, "time": time.time() - age}
    open_folder(plan).put(DRIVER_FILE, json.dumps(content).encode())
    assert bool(storage.find_driver(plan.study_uri)) == is_running
    open_folder(plan).put(DRIVER_FILE, b"damaged")
    assert not storage.find_driver(plan.study_uri)


# Copies.


def test_rows_come_and_go_with_the_statuses(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    run_id, study = plan.runs[0].run_id, StoredStudy(plan)
    store_rows(plan, study, 2)
    study.pull()
    assert [row["step"] for row in read_rows(plan.get_run_dir(run_id) / METRICS_FILE)] == [1, 2]
    assert not (plan.get_run_dir(plan.runs[1].run_id) / METRICS_FILE).exists()
    assert study.push() == ""
    names = open_folder(plan).list_files()
    assert {f"runs/{run_id}/status.json", f"runs/{run_id}/{METRICS_FILE}", "study.json"} <= names.keys()


def test_all_states_of_complete_checkpoints_are_listed_also_the_best(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    run_id, folder = plan.runs[0].run_id, open_folder(plan)
    stored = "start_1_01234567/checkpoint_00000"
    for name in (
        *(f"{stored}2/0/state/step_{step}/checksums.json" for step in (2, 7)),
        f"{stored}2/1/state/step_9/checksums.json",  # of another seed
        f"{stored}2/complete",
        f"{stored}3/0/state/step_8/checksums.json",
    ):
        folder.put(f"{run_id}/{name}", b"{}")
    folder.put(f"runs/{run_id}/global_step_5/checksums.json", b"{}")
    assert storage.list_checkpoints(plan.study_uri, plan.runs[0], run_id) == {
        **{step: f"{run_id}/{stored}2/0/state/step_{step}" for step in (2, 7)},
        5: f"runs/{run_id}/global_step_5",
    }


def test_what_was_not_copied_before_is_not_overwritten_by_what_is_stored(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri())
    start_study(plan)
    run_id = plan.runs[0].run_id
    write_record(plan.get_run_dir(run_id), StatusRecord(run_id, "failed", "and the last copy failed"))
    with StoredStudy(plan).keep_synced():
        status = read_record(StatusRecord, plan.get_run_dir(run_id))
    assert status.status == "failed"


def test_a_checkpoint_that_cannot_be_read_now_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri())
    start_study(plan)
    study = StoredStudy(plan)
    store_rows(plan, study, 2)

    def fail(name: str, path: Path) -> None:
        raise OSError("the storage does not respond")

    with monkeypatch.context() as patch:
        patch.setattr(study._folder, "fetch", fail)
        with pytest.raises(OSError, match="does not respond"):
            study.pull()
    study.pull()
    assert len(read_rows(plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE)) == 2


@pytest.mark.long
def test_a_study_goes_on_on_a_machine_that_has_never_seen_it(uri: str, tmp_path: Path, elsewhere: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan, "completed")
    study = StoredStudy(plan)
    store_rows(plan, study, 3)
    study.pull()
    study.push()
    resumed_plan = locate.plan_resume(plan.study_uri, is_real=True)
    assert resumed_plan == replace(plan, folder=elsewhere / "results" / plan.run)
    assert list(elsewhere.iterdir()) == []  # nothing is written before it starts
    resumed_plan.folder.mkdir(parents=True)
    with StoredStudy(resumed_plan).keep_synced():
        pass
    status = find_record(StatusRecord, resumed_plan.get_run_dir(plan.runs[0].run_id))
    assert status == StatusRecord(plan.runs[0].run_id, "completed", "a test")
    assert len(read_rows(resumed_plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE)) == 3
    write_record(resumed_plan.get_run_dir(plan.runs[1].run_id), StatusRecord(plan.runs[1].run_id, "failed", "in b"))
    StoredStudy(resumed_plan).push()
    for path in plan.folder.rglob("*.json"):  # a bucket tells whole seconds, and this test takes less than one
        os.utime(path, (path.stat().st_atime - 2, path.stat().st_mtime - 2))
    with StoredStudy(plan).keep_synced():
        pass
    assert find_record(StatusRecord, plan.get_run_dir(plan.runs[1].run_id)) == StatusRecord(
        plan.runs[1].run_id, "failed", "in b"
    )


def test_who_only_reads_a_study_copies_no_old_status_back(tmp_path: Path, elsewhere: Path) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    start_study(plan)
    run_id = plan.runs[0].run_id
    folder = locate.fetch_for_writing(plan.study_uri)
    write_record(plan.get_run_dir(run_id), StatusRecord(run_id, "completed", "while b made its report"))
    assert StoredStudy(plan).push() == ""
    (folder / "report.html").write_text("of b")
    assert storage.push_results(folder, plan.study_uri) == ""
    assert json.loads(open_folder(plan).read(f"runs/{run_id}/status.json"))["status"] == "completed"
    assert open_folder(plan).read("report.html") == b"of b"


def test_logs_are_fetched_to_their_place(tmp_path: Path, elsewhere: Path) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    start_study(plan)
    log_path = plan.output / plan.runs[0].log_path
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text("a line")
    StoredStudy(plan).push()
    log_path.unlink()
    locate.fetch_for_writing(plan.study_uri)
    assert (elsewhere / plan.runs[0].log_path).read_text() == "a line"


def test_an_error_about_a_copy_names_the_study(tmp_path: Path) -> None:
    uri = (tmp_path / "shelf").as_uri()
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    with pytest.raises(PlanError) as raised:
        locate.merge_with_existing(make_plan_in(tmp_path / "b", uri, ("0.2",)), extend=False, is_real=True)
    assert str(raised.value).startswith(f"{plan.study_uri} contains this study with other runs")
    assert f"`python -m tune_study resume {plan.study_uri}`" in str(raised.value)


def test_without_its_storage_the_local_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    start_study(plan, "completed")
    shutil.rmtree(tmp_path / "shelf")
    with locate.open_for_reading(str(plan.folder)) as (folder, is_running):
        assert (folder, is_running) == (plan.folder, False)
    assert f"The folder is read. The storage of the study, {plan.storage}, may be newer" in capsys.readouterr().err
    assert locate.fetch_for_writing(str(plan.folder)) == plan.folder
    with pytest.raises(PlanError, match="contains no study"), locate.open_for_reading(plan.study_uri):
        pass


@pytest.mark.long
def test_an_extended_study_is_seen_by_the_machine_that_started_it(tmp_path: Path) -> None:
    uri = (tmp_path / "shelf").as_uri()
    start_study(make_plan_in(tmp_path / "a", uri))
    extended_plan = locate.merge_with_existing(make_plan_in(tmp_path / "b", uri, ("0.2",)), extend=True, is_real=True)
    assert extended_plan.values == ("0", "0.1", "0.2")
    assert extended_plan.output == tmp_path / "b"
    start_study(extended_plan)
    resumed_plan = locate.plan_resume(str(make_plan_in(tmp_path / "a", uri).folder), is_real=True)
    assert resumed_plan == replace(extended_plan, folder=tmp_path / "a" / "results" / extended_plan.run)
    with pytest.raises(PlanError, match="contains this study with other settings"):
        locate.merge_with_existing(make_plan_in(tmp_path / "c", uri, **{"actor.lr": 1e-3}), extend=False, is_real=True)
    assert not (tmp_path / "c").exists()


def test_another_storage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = (tmp_path / "shelf").as_uri()
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    with pytest.raises(PlanError, match="keeps its runs in"):
        locate.merge_with_existing(replace(plan, storage="file:///somewhere"), extend=False, is_real=True)
    assert (
        locate.merge_with_existing(replace(plan, storage=None), extend=False, is_real=True) == plan
    )  # the storage of the first start is kept
    local_plan = make_plan_in(tmp_path / "plain", None)
    outputs.write_study(local_plan)
    with pytest.raises(PlanError, match="was started without --storage"):
        locate.merge_with_existing(replace(local_plan, storage=uri), extend=False, is_real=True)
    monkeypatch.chdir(tmp_path / "plain")
    with pytest.raises(PlanError, match="was started without --storage"):
        locate.plan_resume(plan.study_uri, is_real=True)


def test_what_a_storage_does_not_take_is_said(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri())
    start_study(plan)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").write_text("no folder any more")
    problem = StoredStudy(plan).push()
    assert problem.startswith(f"Statuses, tables and report could not be copied to {plan.study_uri}: ")
    assert problem.endswith(f"`python -m tune_study resume {plan.folder}` copies them.")
    with pytest.raises(PlanError, match="cannot be used"), StoredStudy(plan).keep_synced():
        pass


@pytest.mark.long
def test_while_a_study_runs_rows_come_and_statuses_go_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SYNC_SECONDS", 0.01)
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    rows_name = f"runs/{plan.runs[0].run_id}/{METRICS_FILE}"
    study = StoredStudy(plan)
    with study.keep_synced():
        outputs.write_study(plan)
        store_rows(plan, study, 2)
        while not {rows_name, "study.json", DRIVER_FILE} <= open_folder(plan).list_files().keys():
            pass
        assert len(read_rows(plan.folder / rows_name)) == 2
    assert DRIVER_FILE not in open_folder(plan).list_files()


def test_states_need_room_on_the_node() -> None:
    disk.check_scratch("This machine", 2, 2, 1, "use a larger disk")
    message = "^This machine has 1 byte free for .* up to 2 runs .* which take 2 bytes: use a larger disk, or"
    with pytest.raises(PlanError, match=message):
        disk.check_scratch("This machine", 1, 2, 1, "use a larger disk")


# Through Ray, with the runs on this machine and a folder as storage.


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_study_goes_on_elsewhere_to_the_rows_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "shared").as_uri()
    plan = make_plan_in(
        tmp_path / "a",
        uri,
        (COLLAPSES, CRASHES_ONCE, "0.2"),
        **{"trainer.total_training_steps": 22, "trainer.resume_every": 2},
    )
    follow = StoredStudy.follow

    def interrupt_at_the_second_checkpoint(study: StoredStudy, runs: list[dict[str, Any]], path: str) -> None:
        follow(study, runs, path)
        if path.endswith("checkpoint_000002"):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(StoredStudy, "follow", interrupt_at_the_second_checkpoint)
        code, text = run_here(plan)
    assert code == 130, text
    assert f"From another machine: python -m tune_study resume {shlex.quote(plan.study_uri)}" in text
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    resumed_plan = locate.plan_resume(plan.study_uri, is_real=True)
    code, text = run_here(resumed_plan)
    assert code == 0, text
    for spec in resumed_plan.runs:
        status = read_record(StatusRecord, resumed_plan.get_run_dir(spec.run_id))
        assert status.status == ("early_stopped" if spec.arm == COLLAPSES else "completed")
        config = make_trial_config(resumed_plan, [spec])
        assert read_rows(resumed_plan.get_run_dir(spec.run_id) / METRICS_FILE) == make_fake_rows(
            config, spec.config, 22
        )
    assert open_folder(plan).read("report.html") == (resumed_plan.folder / "report.html").read_bytes()
    assert DRIVER_FILE not in open_folder(plan).list_files()


# The command line.


@pytest.mark.long
def test_status_and_report_read_a_study_from_its_uri(s3: str, tmp_path: Path, elsewhere: Path) -> None:
    plan = make_plan_in(tmp_path / "a", f"s3://shelf/status-and-report?{s3}")
    start_study(plan)
    study = StoredStudy(plan)
    store_rows(plan, study, 2)
    study.pull()
    study.push()
    status_output = get_output(f"status {shlex.quote(plan.study_uri)}")
    assert "kl (laptop): unfinished" in status_output
    assert "2/3" in status_output
    assert "the process that ran the study is gone" in status_output
    assert list(elsewhere.iterdir()) == []
    with StoredStudy(plan).keep_synced():
        assert "kl (laptop): running" in type_in(f"status {shlex.quote(plan.study_uri)}").out
    get_output(f"report {shlex.quote(plan.study_uri)}")
    report = elsewhere / "results" / plan.run / "report.html"
    assert open_folder(plan).read("report.html") == report.read_bytes()


SMALL = "run kl --preset laptop --steps 1 --kl-values 0"
REFUSED_LINES: list[tuple[Callable[[str], str], str]] = [
    (lambda query: f"{SMALL} --storage s3://no-such-shelf/x?{query}", "cannot be used: "),
    (lambda query: f"resume s3://shelf/nothing?{query}", "contains no study: type <storage>/<run>"),
    (lambda query: f"status s3://shelf?{query}", "names no study"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED_LINES, ids=range(len(REFUSED_LINES)))
def test_a_storage_that_cannot_be_used_is_refused_and_nothing_is_written(
    line: Callable[[str], str], message: str, s3: str, work_dir: Path
) -> None:
    answer = type_in(shlex.join(line(s3).split()))
    assert answer.code == 2, answer.out
    assert message in answer.err
    assert "word@" not in answer.err
    assert answer.err.count("\n") == 1
    assert [path for path in work_dir.rglob("*") if path.is_file()] == []


def test_a_dry_run_says_where_the_rows_would_go(work_dir: Path) -> None:
    output = get_output(f"{SMALL} --storage shared --dry-run")
    text = output.replace("\n", "")
    assert f"Storage: {work_dir.as_uri()}/shared/kl_sweep_sokoban-tiny, needs at most " in text
    assert list(work_dir.iterdir()) == []


# URIs with credentials.


@pytest.mark.parametrize("text", ["s3:LOCKED:HIDDEN@b/p", "LOCKED:HIDDEN@b/p"])
def test_a_storage_that_may_be_a_uri_is_not_taken_for_a_path(text: str, work_dir: Path) -> None:
    with pytest.raises(PlanError, match="a user name with a password") as raised:
        locate.parse_storage_uri(text)
    assert "HIDDEN" not in str(raised.value)
    assert locate.parse_storage_uri(f"./{text}").startswith("file://")


@pytest.mark.parametrize("place", SECRET_PLACES[::9])
def test_no_command_repeats_a_secret_in_a_uri(work_dir: Path, place: str) -> None:
    secret = "TOP/Y+4SECRET"
    uri = place.format(secret)
    plan = make_plan_in(work_dir / "foreign", None)
    outputs.write_study(plan)
    study_file = plan.folder / "study.json"
    study_file.write_text(json.dumps({**json.loads(study_file.read_text()), "storage": uri}))
    small_study = ("run", "kl", "--preset", "laptop", "--smoke", "--output", "out", "--storage", uri)
    commands = [small_study, (*small_study, "--dry-run")]
    for location in (f"{uri}/kl_sweep", str(plan.folder)):
        commands += [(name, location) for name in ("status", "report", "resume", "replay-stoppers", "plot-gradients")]
    for command in commands:
        assert secret not in assert_refused(type_words(*command)), command
    assert not (work_dir / "out").exists()


# Shared folders.


@pytest.mark.parametrize("name", ["study.json", "runs/r/status.json", "runs"])
def test_no_link_in_a_shared_folder_is_followed(name: str, tmp_path: Path) -> None:
    plan, foreign = make_plan_in(tmp_path / "a", tmp_path.as_uri()), tmp_path / "foreign"
    (foreign / "below").mkdir(parents=True)
    (tmp_path / plan.run / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / plan.run / name).symlink_to(foreign)
    with pytest.raises(PlanError, match="symbolic link"):
        storage.fetch_study(plan.study_uri, tmp_path / "copy")
    with pytest.raises(PlanError, match="symbolic link"), StoredStudy(plan).keep_synced():
        pass
    assert not (tmp_path / "copy").exists()
    assert list(foreign.rglob("*")) == [foreign / "below"]


def test_a_copy_that_fails_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = StoredFolder((tmp_path / "shared").as_uri()), tmp_path / "target"
    folder.put("a", b"new content")
    target.write_text("previous content")

    def fail(name: str) -> bytes:
        raise OSError("the storage does not respond")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "read", fail)
        with pytest.raises(OSError, match="does not respond"):
            folder.fetch("a", target)
    assert target.read_text() == "previous content"
    folder.fetch("a", target)
    assert target.read_text() == "new content"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "shared", "target"]
