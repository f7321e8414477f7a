"""The Ray that a study starts is reachable from this machine only, with a token, and its files are private."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tune_study.host.machine_checks import FOLDER_PREFIX, RAY_SUBFOLDER, make_session_folder, remove_abandoned_folders

ROOT = Path(__file__).parents[3]
REFUSED = "InvalidAuthToken"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture(scope="module")
def observations() -> Iterator[dict[str, Any]]:
    """The observations of `listening_study` with a short folder for Ray's files, and the content of the home folder."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short_folder:
        base, home = Path(short_folder, "b"), Path(short_folder, "h")
        home.mkdir()
        Path(short_folder).chmod(0o755)
        home.chmod(0o777)
        process = subprocess.run(
            [sys.executable, "-m", "tests.tune_study.tune.listening_study", str(base), str(home)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        yield {**json.loads(process.stdout.splitlines()[-1]), "home": [path.name for path in home.iterdir()]}


def test_every_port_is_on_the_loopback_address(observations: dict[str, Any]) -> None:
    assert observations["address"].startswith("127.0.0.1:")
    assert len(observations["listeners"]) >= 5  # GCS, raylet (2), agent, driver
    assert set(observations["listeners"]) <= LOOPBACK


@pytest.mark.parametrize("stranger", ["without a token", "with a wrong token", "another user"])
def test_who_has_not_the_token_does_not_join(observations: dict[str, Any], stranger: str) -> None:
    if stranger not in observations["answers"]:
        pytest.skip("only root can become another user")
    assert REFUSED in observations["answers"][stranger]
    assert "ran as" not in observations["answers"][stranger]


def test_who_has_the_token_joins(observations: dict[str, Any]) -> None:
    assert observations["answers"]["with its token"].endswith(f"ran as {os.geteuid()}")


def test_the_token_is_in_the_environment_of_rays_processes_alone(observations: dict[str, Any]) -> None:
    assert observations["token in files"] == []
    assert not observations["driver has the token"]
    assert observations["home"] == []
    assert observations["workers in advance"] == []
    assert observations["again"] == 7  # a second start in one process works


def test_rays_files_are_private_and_go_with_it(observations: dict[str, Any]) -> None:
    assert observations["mode"] == "700"
    assert observations["after"] == []


# The session folder


def test_a_session_folder_is_for_its_owner_and_is_removed(tmp_path: Path) -> None:
    with make_session_folder(tmp_path / "base") as folder:
        assert folder.name == RAY_SUBFOLDER
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        folder.mkdir()
        (folder / "log").write_text("x")
        with make_session_folder(tmp_path / "base") as second:  # does not remove the first, which is locked
            assert second.parent != folder.parent
        assert (folder / "log").exists()
    assert list((tmp_path / "base").iterdir()) == []


def test_after_an_error_the_logs_stay_until_the_next_start(tmp_path: Path) -> None:
    def fail() -> None:
        with make_session_folder(tmp_path) as folder:
            folder.mkdir()
            (folder / "log").write_text("why")
            raise RuntimeError("Ray did not start")

    with pytest.raises(RuntimeError):
        fail()
    assert [path.read_text() for path in tmp_path.glob(f"{FOLDER_PREFIX}*/{RAY_SUBFOLDER}/log")] == ["why"]
    with make_session_folder(tmp_path):
        assert list(tmp_path.glob(f"{FOLDER_PREFIX}*/{RAY_SUBFOLDER}/log")) == []


def test_only_abandoned_folders_of_this_user_are_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("ts-1", "ts-2", "ts-3", "home", "tsar"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    (tmp_path / "ts-3" / ".lock").unlink()  # a folder without a lock was not made by a driver
    (tmp_path / "ts-4").symlink_to(home)
    (tmp_path / "ts-5").touch()
    with (tmp_path / "ts-2" / ".lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        remove_abandoned_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "ts-2", "ts-3", "ts-4", "ts-5", "tsar"]
    assert (home / ".lock").exists()
