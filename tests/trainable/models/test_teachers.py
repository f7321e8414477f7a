"""Teachers of the shipped policies: where they are kept, and that a folder holds a whole one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.trainers import make_quiet_trainer, run_steps
from trainable.models.load import find_model
from trainable.models.teachers import find_teacher_folder, is_made
from trainable.tiny import __main__ as command
from trainable.tiny.dialogues import Habits
from trainable.tiny.policies import POLICIES
from trainable.tiny.recipe import Recipe, Stage

NAME = "sokoban-tiny-teacher"
STAGES = (Stage(32, 3e-3, 1e-3, Habits()), Stage(16, 1e-3, 1e-4, Habits(detour=1.0)))
SHORT_RECIPE = Recipe(seed=3, batch=16, stages=STAGES)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a policy whose recipe takes a second."""
    monkeypatch.setenv("TUNE_STUDY_CACHE", str(tmp_path))
    policies = {"sokoban-tiny": replace(POLICIES["sokoban-tiny"], recipe=SHORT_RECIPE)}
    monkeypatch.setattr(command, "POLICIES", {**POLICIES, **policies})
    monkeypatch.setattr(command, "evaluate", lambda path, policy: None)
    monkeypatch.setattr("sys.argv", ["trainable.tiny", "--policy", NAME])
    return tmp_path


def test_the_folder_is_in_the_cache_and_names_the_recipe() -> None:
    folder = find_teacher_folder(NAME, {"HOME": "/home/a"})
    assert re.fullmatch(r"/home/a/\.cache/tune_study/sokoban-tiny-teacher-[0-9a-f]{8}", str(folder))
    assert find_teacher_folder(NAME, {"HOME": "/home/a", "XDG_CACHE_HOME": "/b"}).parent == Path("/b/tune_study")
    assert find_teacher_folder(NAME, {"HOME": "/home/a", "TUNE_STUDY_CACHE": "/c"}).parent == Path("/c")
    # A run has another working folder, so a relative path means the same folder everywhere.
    assert find_teacher_folder(NAME, {"HOME": "/home/a", "TUNE_STUDY_CACHE": "c"}).parent == Path("/home/a/c")
    assert find_teacher_folder("frozenlake-tiny-teacher", {"HOME": "/home/a"}).name[-8:] != folder.name[-8:]


def test_a_teacher_is_the_first_stage_and_is_made_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"CPU minutes, with `python -m trainable.tiny --policy {NAME}`"):
        find_model(NAME)
    command.main()
    folder = find_model(NAME)
    assert list(cache.iterdir()) == [folder]
    assert is_made(folder)
    assert (folder / "recipe.json").read_text().count('"dialogues"') == 1
    weights = (folder / "model.safetensors").read_bytes()
    assert capsys.readouterr().out.count("stage ") == 2
    command.main()
    assert f"{NAME} is already in {folder}" in capsys.readouterr().out
    assert (folder / "model.safetensors").read_bytes() == weights


def test_the_teacher_of_a_faster_process_stays(cache: Path) -> None:
    folder = find_teacher_folder(NAME)

    def make_slowly(own_folder: Path) -> None:
        for path in (folder, own_folder):
            path.mkdir(parents=True)
            (path / "config.json").write_text("faster" if path == folder else "slower")

    command.make_in_cache(folder, make_slowly)
    assert (folder / "config.json").read_text() == "faster"
    assert list(cache.iterdir()) == [folder]


def test_half_a_teacher_is_none(cache: Path) -> None:
    folder = find_teacher_folder(NAME)

    def fail(own_folder: Path) -> None:
        own_folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.make_in_cache(folder, fail)
    assert not is_made(folder)
    assert list(cache.iterdir()) == []


def test_a_checkpoint_goes_on_with_the_teacher_that_it_had(random_folder: Path, tmp_path: Path) -> None:
    settings = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 1.0}
    trainer = make_quiet_trainer(**settings, model__reference_path=str(random_folder))
    run_steps(trainer, 1)
    tensors, values = trainer.get_state()
    make_quiet_trainer(**settings, model__reference_path=str(random_folder)).load_state(tensors, values)
    for reference in ("sokoban-tiny", None):
        with pytest.raises(ValueError, match=r"it has the reference [0-9a-f]{12}, and this run has"):
            make_quiet_trainer(**settings, model__reference_path=reference).load_state(tensors, values)
