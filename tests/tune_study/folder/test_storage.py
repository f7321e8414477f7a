"""The folder of a study in storage: what drivers copy there and back, and that only one driver runs at a time."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import search_spaces
from tests.fakes.lines import append_record
from tests.fakes.trainer import COLLAPSES, CRASHES_ONCE, make_fake_rows, make_study
from tests.trainable.storage.test_remote import SECRET_PLACES
from trainable.files.json_values import read_object
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.storage.mirror import INTERRUPT_FILE, Mirror
from trainable.storage.remote import get_bytes, list_files, open_storage, put_bytes
from trainable.storage.uris import join_uri
from tune_study.commands.cli import app
from tune_study.commands.node_checks import check_scratch
from tune_study.folder import lease, locate, outputs, storage
from tune_study.folder.lease import LEASE_FILE, STALE_S, Lease, read_holder
from tune_study.folder.statuses import RunStatus, read_status, write_status
from tune_study.folder.storage import LAST_DRIVER, StoredStudy
from tune_study.folder.study_file import plan_from_folder
from tune_study.host.interrupt import Interrupt
from tune_study.placement import disk
from tune_study.placement.resources import preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, add_seeds, make_plan
from tune_study.tune.run import execute_study
from tune_study.tune.trials import make_trial_config

FAKE = make_study("Fake")


@pytest.fixture(autouse=True)
def _shipped_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the study of these tests as a shipped one, because a folder cannot name a Trainable."""
    monkeypatch.setitem(search_spaces.STUDIES, "kl", FAKE)


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SETTLING_S", 0.0)
    monkeypatch.setattr(storage, "_POLL_S", 0.01)


@pytest.fixture(params=["s3", "path"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    """The URI of a new storage, in S3 and in a folder."""
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://shelf/{name}?{s3}" if request.param == "s3" else (tmp_path / "shared").as_uri()


def make_plan_in(
    folder: Path, uri: str | None, values: tuple[str, ...] = ("0", "0.1"), **settings: object
) -> StudyPlan:
    overrides = {"trainer.total_training_steps": 3, "trainer.disk_patience": 0, **settings}
    return replace(make_plan(FAKE, "laptop", "a test", overrides, values, 1, folder), storage=uri)


def open_stored_study(plan: StudyPlan, messages: list[str] | None = None) -> StoredStudy:
    return StoredStudy(plan, Interrupt(plan.folder / ".interrupt"), (messages if messages is not None else []).append)


def test_runs_that_are_added_later_are_copied_too(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "here", (tmp_path / "store").as_uri())
    stored_study = open_stored_study(plan)
    outputs.write_study(plan)
    assert stored_study.push() == ""
    larger_plan = add_seeds(plan, {"0": (1,)})
    outputs.write_study(larger_plan)
    stored_study.add_runs(larger_plan)
    assert stored_study.push() == ""
    added_run = larger_plan.runs[-1].run_id
    stored_files = {path.name for path in (tmp_path / "store" / plan.run / "runs" / added_run).iterdir()}
    assert {"run.json", "status.json"} <= stored_files


def write_run_on_node(plan: StudyPlan, node: Path, steps: int) -> None:
    """Write on a node what the first run of the plan writes, and copy it to storage."""
    run_id = plan.runs[0].run_id
    mirror = Mirror(
        open_storage(plan.study_uri or "").joinpath(f"runs/{run_id}"), node, node / "kept", 0.0, lambda: False
    )
    node.mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        append_record(node / METRICS_FILE, {"step": step, "run_id": run_id})
        mirror.push()


def start_study(plan: StudyPlan, status: str = "running") -> None:
    """Write the files of a study and copy them to storage, as a driver does that then ends."""
    with open_stored_study(plan).keep_synced():
        outputs.write_study(plan)
        write_status(plan.get_run_dir(plan.runs[0].run_id), RunStatus(plan.runs[0].run_id, status, "a test"))
        assert open_stored_study(plan).push() == ""


# One driver.


def test_a_second_driver_is_refused_and_told_who_the_first_is(uri: str) -> None:
    storage_folder = open_storage(uri)
    first, second = Lease(storage_folder), Lease(storage_folder)
    first.acquire("the study")
    with pytest.raises(PlanError, match=rf"is being run by .* \(pid {os.getpid()}\), last heard of \d+ s ago"):
        second.acquire("the study")
    assert first.find_new_holder() is None
    second.release()  # it does not release the lease of the first
    assert read_holder(storage_folder) is not None
    first.release()
    assert read_holder(storage_folder) is None
    second.acquire("the study")
    assert sorted(list_files(storage_folder)) == [LEASE_FILE]


@pytest.mark.long
def test_the_lock_of_a_process_of_this_machine_that_is_gone_holds_nobody(uri: str) -> None:
    lines = ("from tune_study.folder.lease import Lease", "from trainable.storage.remote import open_storage")
    code = "\n".join([*lines, f"Lease(open_storage({uri!r})).acquire('the study')"])
    subprocess.run([sys.executable, "-c", code], check=True)
    holder = read_holder(open_storage(uri))
    assert holder is not None
    assert holder.is_gone
    Lease(open_storage(uri)).acquire("the study")


def test_a_lock_of_another_machine_counts_until_it_is_stale(tmp_path: Path) -> None:
    storage_folder = open_storage(str(tmp_path))
    other_holder = {
        "id": "x",
        "machine": "elsewhere",
        "pid": 1,
        "started": 0.0,
        "words": "somebody on elsewhere (pid 1)",
    }
    put_bytes(storage_folder.joinpath(LEASE_FILE), json.dumps(other_holder).encode())
    with pytest.raises(PlanError, match=r"run by somebody on elsewhere \(pid 1\)"):
        Lease(storage_folder).acquire("the study")
    now = (tmp_path / LEASE_FILE).stat().st_mtime
    os.utime(tmp_path / LEASE_FILE, (now, now - STALE_S - 1))
    Lease(storage_folder).acquire("the study")


def test_of_two_that_start_at_once_the_one_whose_lock_stays_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_folder = open_storage(str(tmp_path))
    other_lease = Lease(storage_folder)
    monkeypatch.setattr(
        lease.time, "sleep", lambda seconds: other_lease.refresh()
    )  # the other one had looked before we wrote
    with pytest.raises(PlanError, match="is being run by"):
        Lease(storage_folder).acquire("the study")
    other_lease.acquire("the study")


def test_a_driver_whose_study_was_taken_over_stops(tmp_path: Path) -> None:
    plan, messages = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri()), list[str]()
    plan.folder.mkdir(parents=True)
    study = open_stored_study(plan, messages)
    with study.keep_synced():
        study._refresh_lease()
        assert messages == []
        Lease(open_storage(plan.study_uri or "")).refresh()
        study._refresh_lease()
        assert study._interrupt.is_requested
    assert len(messages) == 1
    assert "has taken over this study: stopping." in messages[0]
    assert read_holder(open_storage(plan.study_uri or "")) is not None  # the lease of the other driver stays


# Copies.


def test_rows_come_and_statuses_go(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    run_id = plan.runs[0].run_id
    assert f"runs/{run_id}/status.json" in list_files(open_storage(plan.study_uri or ""))
    write_run_on_node(plan, tmp_path / "node", 2)
    open_stored_study(plan).pull(run_id)
    assert [row["step"] for row in read_rows(plan.get_run_dir(run_id) / METRICS_FILE)] == [1, 2]
    assert not (plan.get_run_dir(plan.runs[1].run_id) / METRICS_FILE).exists()


@pytest.mark.long
def test_a_study_goes_on_on_a_machine_that_has_never_seen_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan, "completed")
    write_run_on_node(plan, tmp_path / "node", 3)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    resumed_plan = locate.plan_resume(plan.study_uri or "", is_real=True)
    assert resumed_plan == replace(plan, folder=tmp_path / "b" / "results" / plan.run)
    assert list((tmp_path / "b").iterdir()) == []  # nothing is written before the lease is acquired
    resumed_plan.folder.mkdir(parents=True)
    with open_stored_study(resumed_plan).keep_synced():
        pass
    status = read_status(resumed_plan.get_run_dir(plan.runs[0].run_id))
    assert status == RunStatus(plan.runs[0].run_id, "completed", "a test")
    assert len(read_rows(resumed_plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE)) == 3
    # The study was last run in b, so the copy in a is older.
    assert storage.is_newest_folder(plan.study_uri or "", resumed_plan.folder)
    assert not storage.is_newest_folder(plan.study_uri or "", plan.folder)
    write_status(resumed_plan.get_run_dir(plan.runs[1].run_id), RunStatus(plan.runs[1].run_id, "failed", "in b"))
    open_stored_study(resumed_plan).push()
    with open_stored_study(plan).keep_synced():
        pass
    assert read_status(plan.get_run_dir(plan.runs[1].run_id)) == RunStatus(plan.runs[1].run_id, "failed", "in b")


def test_who_only_reads_a_study_copies_no_old_status_back(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    run_id = plan.runs[0].run_id
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    folder = locate.fetch_for_writing(plan.study_uri or "")
    write_status(plan.get_run_dir(run_id), RunStatus(run_id, "completed", "while b made its report"))
    assert open_stored_study(plan).push() == ""
    (folder / "report.html").write_text("of b")
    assert storage.push_results(replace(plan_from_folder(folder), storage=plan.storage)) == ""
    storage_folder = open_storage(plan.study_uri or "")
    assert json.loads(get_bytes(storage_folder.joinpath(f"runs/{run_id}/status.json")))["status"] == "completed"
    assert get_bytes(storage_folder.joinpath("report.html")) == b"of b"


def test_logs_are_fetched_to_their_place_for_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    start_study(plan)
    log_path = plan.output / plan.runs[0].log_path
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text("a line")
    open_stored_study(plan).push()
    log_path.unlink()
    (plan.folder / ".last-driver").unlink(missing_ok=True)  # so that another folder counts as the newest
    put_bytes(open_storage(plan.study_uri or "").joinpath("last-driver"), b"another")
    monkeypatch.chdir(plan.folder)
    locate.fetch_for_writing(".")
    assert log_path.read_text() == "a line"
    assert not (plan.folder / "logs").exists()


def test_an_error_about_a_copy_names_the_study(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    with pytest.raises(PlanError) as raised:
        locate.merge_with_existing(make_plan_in(tmp_path / "b", uri, ("0.2",)), extend=False, is_real=True)
    assert str(raised.value).startswith(f"{plan.study_uri} contains this study with other runs")
    assert f"`python -m tune_study resume {plan.study_uri}`" in str(raised.value)


def test_the_newest_driver_s_own_statuses_are_not_overwritten(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    run_id = plan.runs[0].run_id
    write_status(plan.get_run_dir(run_id), RunStatus(run_id, "completed", "and then the driver was killed"))
    with open_stored_study(plan).keep_synced():
        status = read_status(plan.get_run_dir(run_id))
    assert status is not None
    assert status.status == "completed"


def test_without_its_storage_the_local_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "shelf").as_uri())
    start_study(plan, "completed")
    shutil.rmtree(tmp_path / "shelf")
    with locate.open_for_reading(str(plan.folder)) as (folder, is_running):
        assert (folder, is_running) == (plan.folder, False)
    assert "contains no study" in (error := capsys.readouterr().err)
    assert "The local folder is read, which may be older." in error
    assert locate.fetch_for_writing(str(plan.folder)) == plan.folder
    with (
        pytest.raises(PlanError, match="contains no study"),
        locate.open_for_reading(plan.study_uri or ""),
    ):
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
        locate.plan_resume(plan.study_uri or "", is_real=True)


def test_what_a_storage_does_not_take_is_said(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", (tmp_path / "s").as_uri())
    start_study(plan)
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").write_text("no folder any more")
    open_stored_study(plan).pull()  # rows that cannot be copied now are copied later
    problem = open_stored_study(plan).push()
    assert problem.startswith(f"Statuses, tables and report could not be copied to {plan.study_uri}: ")
    assert problem.endswith(f"copy them with `python -m tune_study report {plan.folder}`.")
    with pytest.raises(PlanError, match="cannot be used"), open_stored_study(plan).keep_synced():
        pass


def test_a_request_to_stop_is_handed_on_and_forgotten_by_the_next_start(uri: str, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    plan.folder.mkdir(parents=True)
    storage_folder = open_storage(plan.study_uri or "")
    study = open_stored_study(plan)
    with study.keep_synced():
        study._interrupt.request()
        while INTERRUPT_FILE not in list_files(storage_folder):
            pass
    with open_stored_study(plan).keep_synced():
        assert INTERRUPT_FILE not in list_files(storage_folder)


@pytest.mark.long
def test_while_a_study_runs_rows_come_and_statuses_go_by_themselves(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "REFRESH_S", 0.01)
    plan = make_plan_in(tmp_path / "a", uri)
    run_id = plan.runs[0].run_id
    storage_folder = open_storage(plan.study_uri or "")
    with open_stored_study(plan).keep_synced():
        first_lease = get_bytes(storage_folder.joinpath(LEASE_FILE))
        outputs.write_study(plan)
        write_run_on_node(plan, tmp_path / "node", 2)
        while len(read_rows(plan.get_run_dir(run_id) / METRICS_FILE)) < 2 or "study.json" not in list_files(
            storage_folder
        ):
            pass
        assert get_bytes(storage_folder.joinpath(LEASE_FILE)) == first_lease
    assert LEASE_FILE not in list_files(storage_folder)


def test_states_need_room_on_the_node(tmp_path: Path) -> None:
    check_scratch(tmp_path.as_uri(), 2, 1)
    check_scratch(tmp_path.as_uri(), 2, None)
    with pytest.raises(
        PlanError, match=r"free for the checkpoints of up to 2 runs .* which take 2\.0 EB: set TUNE_STUDY_SCRATCH"
    ):
        check_scratch(tmp_path.as_uri(), 2, 10**18)


def test_a_node_keeps_three_states_of_a_run_and_one_to_keep(tmp_path: Path) -> None:
    for save_freq, n_checkpoints in (("-1", 3), ("1", 4)):
        plan = make_plan_in(tmp_path, None, ("0",), **{"trainer.save_freq": save_freq})
        budget = disk.estimate_disk_budget(plan, preflight(plan, None, (), 2, None, is_real=True), {})
        assert budget.checkpoint_bytes is not None
        assert disk.compute_scratch_bytes(budget) == n_checkpoints * budget.checkpoint_bytes
        assert disk.compute_scratch_bytes(budget._replace(checkpoint_bytes=None)) is None


# Through Ray, with the runs on this machine and a folder as storage.


def run_study(plan: StudyPlan) -> tuple[int, str]:
    console = Console(record=True, width=200, force_terminal=False)
    return execute_study(plan, preflight(plan, None, (), 2, None, is_real=True), console), console.export_text()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_study_goes_on_elsewhere_to_the_rows_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "shared").as_uri()
    plan = make_plan_in(tmp_path / "a", uri, (COLLAPSES, CRASHES_ONCE, "0.2"), **{"trainer.total_training_steps": 22})
    run = open_storage(plan.study_uri or "").joinpath(f"runs/{plan.runs[0].run_id}")
    put_bytes(run.joinpath("interrupt.pid"), str(os.getpid()).encode())  # at step 4 the run sends us SIGINT
    code, text = run_study(plan)
    assert code == 130
    assert f"From another machine: python -m tune_study resume {shlex.quote(plan.study_uri or '')}" in text
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    resumed_plan = locate.plan_resume(plan.study_uri or "", is_real=True)
    code, text = run_study(resumed_plan)
    assert code == 0, text
    for spec in resumed_plan.runs:
        status = read_status(resumed_plan.get_run_dir(spec.run_id))
        assert status is not None
        assert status.status == ("early_stopped" if spec.arm == COLLAPSES else "completed")
        config = make_trial_config(resumed_plan, [spec])
        assert read_rows(resumed_plan.get_run_dir(spec.run_id) / METRICS_FILE) == make_fake_rows(
            config, spec.config, 22
        )
    storage_folder = open_storage(plan.study_uri or "")
    assert get_bytes(storage_folder.joinpath("report.html")) == (resumed_plan.folder / "report.html").read_bytes()
    assert LEASE_FILE not in list_files(storage_folder)


# The command line.


def type_in(line: str) -> Any:
    return CliRunner().invoke(app, shlex.split(line), prog_name="python -m tune_study")


@pytest.mark.long
def test_status_and_report_read_a_study_from_its_uri(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_in(tmp_path / "a", uri)
    start_study(plan)
    write_run_on_node(plan, tmp_path / "node", 2)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    status_answer = type_in(f"status {shlex.quote(plan.study_uri or '')}")
    assert status_answer.exit_code == 0, status_answer.stderr
    assert "kl (laptop): unfinished" in status_answer.stdout
    assert "2/3" in status_answer.stdout
    assert "the process that ran the study is gone" in status_answer.stdout
    assert list((tmp_path / "b").iterdir()) == []
    with open_stored_study(plan).keep_synced():
        assert "kl (laptop): running" in type_in(f"status {shlex.quote(plan.study_uri or '')}").stdout
    report_answer = type_in(f"report {shlex.quote(plan.study_uri or '')}")
    assert report_answer.exit_code == 0, report_answer.stderr
    report = tmp_path / "b" / "results" / plan.run / "report.html"
    assert get_bytes(open_storage(plan.study_uri or "").joinpath("report.html")) == report.read_bytes()


SMALL = "run kl --preset laptop --steps 1 --kl-values 0"
REFUSED_LINES: list[tuple[Callable[[str], str], str]] = [
    (lambda query: f"{SMALL} --storage s3://no-such-shelf/x?{query}", "cannot be used: "),
    (lambda query: f"{SMALL} --storage s3://key:word@shelf/x?{query}", "contains a user name with a password"),
    (
        lambda query: f"{SMALL} --storage s3://key:word@shelf/x?{query} --dry-run",
        "contains a user name with a password",
    ),
    (lambda query: f"{SMALL} --storage nope://shelf/x", "type one that begins with one of s3://, gs://"),
    (lambda query: f"{SMALL} --storage nope://shelf/x --dry-run", "type one that begins with one of s3://, gs://"),
    (lambda query: f"{SMALL} --storage s3://shelf/x?scheme=http&endpoint_override=127.0.0.1:1", "cannot be "),
    (lambda query: f"resume s3://shelf/nothing?{query}", "contains no study: type <storage>/<run>"),
    (lambda query: f"status s3://shelf/nothing?{query}", "contains no study: type <storage>/<run>"),
    (lambda query: f"report s3://shelf/nothing/x?{query}", "contains no study"),
    (lambda query: f"status s3://shelf?{query}", "names no study"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED_LINES, ids=range(len(REFUSED_LINES)))
def test_a_storage_that_cannot_be_used_is_refused_and_nothing_is_written(
    line: Callable[[str], str], message: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = type_in(shlex.join(line(s3).split()))
    assert answer.exit_code == 2, answer.stdout
    assert message in answer.stderr
    assert "word@" not in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_dry_run_says_where_the_rows_would_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = type_in(f"{SMALL} --storage shared --dry-run")
    assert answer.exit_code == 0, answer.stderr
    text = answer.stdout.replace("\n", "")
    assert f"Storage: {tmp_path.as_uri()}/shared/kl_sweep_sokoban-tiny, needs at most " in text
    assert list(tmp_path.iterdir()) == []


def test_the_uri_is_written_down_without_what_reaches_it(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, "file:///x")
    outputs.write_study(plan)
    assert read_object(plan.folder / "study.json")["storage"] == "file:///x"
    assert plan.study_uri == join_uri("file:///x", plan.run)
    assert locate.plan_resume(str(plan.folder), is_real=False) == plan
    assert LAST_DRIVER not in os.listdir(plan.folder)


# URIs with credentials.


@pytest.mark.parametrize("text", ["s3:KEY:SECRET@b/p", "KEY:SECRET@b/p"])
def test_a_storage_that_may_be_a_uri_is_not_taken_for_a_path(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="before its first slash") as raised:
        locate.parse_storage_uri(text)
    assert "SECRET" not in str(raised.value)
    assert locate.parse_storage_uri(f"./{text}").startswith("file://")


@pytest.mark.parametrize("place", SECRET_PLACES[::4])
def test_no_command_repeats_a_secret_in_a_uri(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    secret = "TOP/Y+4SECRET"
    uri = place.format(secret)
    plan = make_plan_in(tmp_path / "foreign", None)
    outputs.write_study(plan)
    study_file = plan.folder / "study.json"
    study_file.write_text(json.dumps({**json.loads(study_file.read_text()), "storage": uri}))
    runner = CliRunner()
    small_study = ["kl", "--preset", "laptop", "--smoke", "--output", "out"]
    commands = [["run", *small_study, "--storage", uri], ["run", *small_study, "--dry-run", "--storage", uri]]
    for location in (f"{uri}/kl_sweep", str(plan.folder)):
        commands += [[name, location] for name in ("status", "report", "resume", "replay-stoppers", "plot-gradients")]
    for command in commands:
        result = runner.invoke(app, command)
        assert (result.exit_code, secret in result.output) == (2, False), command
    assert not (tmp_path / "out").exists()
