"""The file of a study that is written from an example of a command and of what it wrote."""

from pathlib import Path

import pytest

from search_spaces.declaration.study import Study
from tune_study.plan.errors import PlanError
from tune_study.plan.new_command import format_command_study


def declare(text: str) -> Study:
    """Execute a file, and return its study."""
    names: dict[str, object] = {"__doc__": ""}
    exec(text, names)
    study = names["STUDY"]
    assert isinstance(study, Study)
    return study


def test_flags_become_fields_and_the_output_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,success_rate,entropy\n1,.5,1\n2,.75,.5\n")
    for step in (5, 10):
        (tmp_path / f"ckpt_{step}").mkdir()
    command = f"python 'my train.py' --lr=1e-4 --beta 0 --seed 3 --max_steps 40 --fast --out {tmp_path}"
    text = format_command_study("my-study", command, ["lr=1e-4,1e-3", "beta=0,0.5"], None)
    settings = declare(text).fixed_settings
    assert settings["command.run"] == (
        "python 'my train.py' --lr={lr} --beta {beta} --seed {seed} --max_steps {steps} --fast --out {output}"
    )
    assert settings["command.logs"] == "{output}/log.csv"
    # A name like ours is ours where no trainer is known.
    assert settings["command.columns"] == ("val_success=success_rate", "entropy=entropy")
    assert settings["command.checkpoints"] == "{output}/ckpt_{step}"
    assert settings["trainer.total_training_steps"] == 40
    assert len(declare(text).get_grid("laptop")) == 4


def test_words_of_hydra_without_an_output_folder(tmp_path: Path) -> None:
    text = format_command_study("my-study", "python train.py a.lr=1 data.seed=0 b=x", ["a.lr=1,2"], None)
    study = declare(text)
    assert study.fixed_settings["command.run"] == "python train.py a.lr={a.lr} data.seed={seed} b=x"
    assert (study.fixed_settings["command.logs"], study.get_grid("laptop")) == ("{console}", ("1", "2"))
    assert "a killed run begins anew" in text


@pytest.mark.parametrize(
    ("command", "vary", "words"),
    [
        ("python 'x", ["lr=1,2"], "No closing quotation"),
        ("python x.py", ["lr=1,2"], "is no flag of the command: type it like python -m tune_study new"),
        ("python x.py --lr 1", ["beta=1,2"], "is no flag of the command: type FLAG=VALUE,VALUE for one of lr"),
        ("python x.py --lr 1", ["lr=1"], "has no two values"),
        ("python x.py --lr 1", [], "A study varies a flag of the command"),
        ("python x.py --lr 1 --out {}", ["lr=1,2"], "which --logs FILE would name"),
    ],
)
def test_refusals(command: str, vary: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        format_command_study("my-study", command.format(tmp_path), vary, None)
