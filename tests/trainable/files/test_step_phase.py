from pathlib import Path

import pytest

from trainable.files.step_phase import QUIET_SECONDS, StepPhase, read_phase, remove_phase, write_phase


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_short_step_says_nothing_and_a_long_one_not_too_often() -> None:
    clock = FakeClock()
    phase, reports = StepPhase(clock), []
    with phase.reporting(reports.append):
        phase.enter("rollout")
        clock.now = QUIET_SECONDS / 2
        phase.show_share("turn 1 of 5")
        assert reports == []
        clock.now = QUIET_SECONDS
        phase.show_share("turn 2 of 5")
        phase.show_share("turn 3 of 5")  # too soon after the one before
        clock.now = 2.5 * QUIET_SECONDS
        assert list(phase.track("ab", "pass")) == ["a", "b"]
        clock.now = 4 * QUIET_SECONDS
        phase.enter("values")
    assert reports == ["rollout, turn 2 of 5", "rollout, pass 1 of 2", "values"]


def test_nobody_is_told_outside_of_a_step() -> None:
    clock = FakeClock()
    phase, reports = StepPhase(clock), []
    with pytest.raises(RuntimeError), phase.reporting(reports.append):
        raise RuntimeError("a step fails")
    clock.now = 10 * QUIET_SECONDS
    phase.enter("validation")
    assert reports == []


def test_only_the_phase_of_the_step_under_way_is_read(tmp_path: Path) -> None:
    assert read_phase(tmp_path, 3) == ""
    write_phase(tmp_path, 3, "values, pass 2 of 4")
    assert read_phase(tmp_path, 3) == "values, pass 2 of 4"
    assert read_phase(tmp_path, 4) == ""  # left behind by a process that was killed
    remove_phase(tmp_path)
    remove_phase(tmp_path)
    assert read_phase(tmp_path, 3) == ""
    (tmp_path / "file").touch()
    write_phase(tmp_path / "file", 3, "x")  # cannot be written, as on a full disk
