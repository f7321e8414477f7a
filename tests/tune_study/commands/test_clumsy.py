"""What people type: every row is answered with what to type instead, exits with 2, and leaves nothing behind.

Correct forms of what looks wrong exit with 0. Commands that need a running study or a full disk are tried elsewhere
(tests/faults, tests/attack).
"""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tune_study.commands.cli import app

NOTHING = "contains no study (no study.json): type the folder results/<run> of a study"
SANDBOX = "run influence --dry-run"
LAPTOP = "run kl --preset laptop --dry-run"
WRONG: list[tuple[str, str]] = [
    ("rn kl", "Did you mean 'run'?"),
    ("version", "type python -m tune_study --version"),
    ("help", "type python -m tune_study --help"),
    ("run", "Example: python -m tune_study run kl"),
    ("run kll", "Nearest: kl."),
    ("run kl,entropy", "One command runs one study or one suite."),
    ("run kl entropy", "Besides options, run takes STUDY"),
    ("run .", "type one of them, for example `python -m tune_study run kl`"),
    ("run kl.py", "There is no file kl.py: type the path of a Python file that declares a study"),
    ("run nofile.py", "`python -m tune_study new NAME --vary actor.lr=1e-4,3e-4` writes"),
    ("run kl --preset labtop --preset laptop", "--preset is typed 2 times: type it once."),
    ("run kl --steps 3 --steps 4", "--steps is typed 2 times: type it once."),
    ("run kl --preset labtop", "type --preset paper or --preset laptop or --preset stress"),
    ("run kl --preset Laptop", "type --preset paper or --preset laptop or --preset stress"),
    ("run kl --preset", "requires an argument"),
    ("run kl --stpes 3", "Possible options: --seeds, --set, --steps"),
    ("run kl --model-path x", "Possible options: --model"),
    ("run kl --steps 1.5", "Example: python -m tune_study run kl --kl-values 0,0.01,0.1 --steps 60"),
    (f"{LAPTOP} --steps 0", "--steps 0: must be greater than or equal to 1"),
    (f"{LAPTOP} --steps 99999999999999999999", "must be less than or equal to 100000"),
    (f"{LAPTOP} --seeds 0", "type --seeds 1 or more"),
    (f"{LAPTOP} --seeds -1", "type --seeds 1 or more"),
    (f"{LAPTOP} --seeds 1000000", "type --seeds 401 or less"),
    (f"{LAPTOP} --seeds three", "Example: python -m tune_study run kl"),
    (f"{LAPTOP} --seeds 1,2,3", "--seeds 1,2,3: type a number of seeds, like --seeds 3 for 0,1,2."),
    (f"{LAPTOP} --kl-values 0,0.1,0.1", "give each value once"),
    (f"{LAPTOP} --kl-values 0.1,0.10", "give each value once"),
    (f"{LAPTOP} --kl-values 0,abc", "A value is a number. Try --kl-values 0,0.01."),
    (f"{LAPTOP} --kl-values nan,inf", "must be a finite number"),
    (f"{LAPTOP} --kl-values -0.1", "must be greater than or equal to 0"),
    (f"{LAPTOP} --kl-values ０,0.1", "A value is a number. Try --kl-values 0,0.01."),
    (f"{LAPTOP} --kl-values 0 0.1", "type --kl-values 0,0.1"),
    (f"{LAPTOP} --kl-values '0;0.1'", "A value is a number. Try --kl-values 0,0.01."),
    (f"{LAPTOP} --kl-values ''", "type values separated by single commas, like 0,0.01,0.1"),
    (f"{LAPTOP} --kl-values 0,,0.1", "type values separated by single commas, like 0,0.01,0.1"),
    (f"{LAPTOP} --kl-values 1.0,10", "run one of them with another --output"),
    (f"{LAPTOP} --arms 0", "type --kl-values"),
    ("run entropy --preset laptop --dry-run --kl-values 0", "type --entropy-values"),
    ("run top-p --preset laptop --dry-run --rollout_filter_value 0.9,nofliter", "a number or one of nofilter"),
    (f"{LAPTOP} --algo SAC", "type --kl-values"),
    (f"{LAPTOP} --set actor.learning_rate=1e-4", "Nearest: actor.lr."),
    (f"{LAPTOP} --set data.train_batch_size=64", "env.env_groups prompts with env.group_size rollouts each"),
    (f"{LAPTOP} --set lr_scheduler_type=cosine", "The learning rate is constant, without warm-up and schedule"),
    (f"{LAPTOP} --set actor..lr=1", "Nearest: actor.lr"),
    (f"{LAPTOP} --set actor=1", "Nearest: actor.lr"),
    (f"{LAPTOP} --set =1", "`python -m tune_study settings --all` lists all with their meaning"),
    (f"{LAPTOP} --set lr=1e-4", "type one of actor.lr, critic.lr"),
    (f"{LAPTOP} --set actor.lr=fast", "actor.lr=fast: must be a valid number"),
    (f"{LAPTOP} --set actor.lr=", "actor.lr=: must be a valid number"),
    (f"{LAPTOP} --set actor.lr=-1", "actor.lr=-1: must be greater than 0"),
    (f"{LAPTOP} --set actor.lr=1e400", "must be a finite number"),
    (f"{LAPTOP} --set actor.lr=1e-4,3e-4", "python -m tune_study new my-lr --vary actor.lr=1e-4,3e-4"),
    (f"{LAPTOP} --set actor.lr", "type --set key=value, like --set actor.lr=1e-5"),
    (f"{LAPTOP} --set actor.lr=1e-4 --set actor.lr=1e-3", "is given twice"),
    (f"{LAPTOP} --set trainer.total_training_steps=5 --steps 5", "is given twice"),
    (f"{LAPTOP} --set actor.kl_loss_coef=0.1", "choose its values with --kl-values"),
    (f"{LAPTOP} --set seed=5", "type --seeds N to run the seeds 0 to N-1"),
    (
        f"{LAPTOP} --set env.seed_train=123 --set env.seed_val=123",
        "would measure what it was trained on",
    ),
    (f"{LAPTOP} --set env.seed_val=10000", "leave env.seed_train and env.seed_val out, or type --set env.seed_val="),
    (f"{LAPTOP} --set env.seed_val=1010000 --seeds 2", "-seed1, so its validation would measure"),
    (f"{LAPTOP} --set env.seed_train=10", "env.seed_val=123: the validation levels have the seeds 123 to"),
    (f"{LAPTOP} --set trainer.device=gpu", "must be 'auto', 'cpu' or 'cuda'"),
    (
        f"{LAPTOP} --set env.name=chess",
        "must be 'sokoban', 'frozenlake', 'mastermind', 'countdown', 'papers' or a part of yours",
    ),
    (f"{LAPTOP} --env chess", "type one of sokoban, frozenlake, mastermind, countdown"),
    (f"{LAPTOP} --env frozen_lake", "is not a game (nearest: frozenlake)"),
    (f"{LAPTOP} --config nofile.txt", "type a text file with a line key=value per setting"),
    (f"{LAPTOP} --config CONFIG", "line 1: actor.lr 1e-4 is not key=value, such as actor.lr=1e-5"),
    (f"{LAPTOP} --wandb maybe", "choose from offline, online, off"),
    (f"{LAPTOP} --model nosuch", "type --model sokoban-tiny or a folder"),
    (f"{LAPTOP} --gpus a,b", "type --gpus-per-exp 1, or leave --gpus out"),
    (f"{LAPTOP} --gpus-per-exp 0.7", "type `run` with --set trainer.device=cuda, or --gpus-per-exp 0"),
    (f"{LAPTOP} --max-concurrent 0", "type 1 or more"),
    (f"{LAPTOP} --max-hours -1", "must be greater than or equal to 0"),
    (f"{LAPTOP} --max-hours soon", "must be a valid number"),
    (f"{LAPTOP} --max-hours 0", "--max-hours 0 leaves no time to train: type hours, such as --max-hours 8.5."),
    (f"{LAPTOP} --output ''", "--output is empty, as an unset variable is: type a path, or . for the current folder."),
    (f"{LAPTOP} --output FILE", "FILE is a file: type the name of a folder."),
    (f"{LAPTOP} --output /dev/null/x", "/dev/null/x cannot be written (/dev/null does not allow it): type another"),
    (f"{LAPTOP} --steps 1_000", "--steps 1_000: type numbers without `_`, like 1000."),
    (f"{LAPTOP} --set actor.lr=1_000", "actor.lr=1_000: type numbers without `_`, like 1000 or 1e-3."),
    (f"{LAPTOP} --set actor.betas=[0.9,0.9_9]", "actor.betas=[0.9,0.9_9]: type numbers without `_`"),
    (f"{LAPTOP} --set early_stop.success_threshold=1.5", "success_threshold=1.5: must be less than or equal to 1"),
    (f"{LAPTOP} --set trainer.disk_patience=1e30", "must be less than or equal to 31536000"),
    (f"{LAPTOP} --set rollout.max_model_len=1", "set a longer rollout.max_model_len"),
    (f"{LAPTOP} --set rollout.response_length=1000000", "the context of sokoban-tiny has 512 tokens"),
    (f"{SANDBOX} --set trainer.disk_patience=1e30", "must be less than or equal to 31536000"),
    ("status ''", "RUN is empty, as an unset variable is"),
    *(
        (f"{words} {'x' * 3000}{end}", "longer than a name of a file may be: type a shorter word.")
        for words in ("status", "report", "resume", "explain", "transcripts", "probe", "alarms", "watch")
        for end in ("", "/y")
    ),
    (f"run {'x' * 3000}.py", "longer than a name of a file may be: type a shorter word."),
    (f"run {'x' * 3000}", "There is no study `xxx"),
    (f"{LAPTOP} --env {'x' * 3000}.py:Game", "longer than a name of a file may be: type a shorter word."),
    ("clean '' --yes", "RUN is empty, as an unset variable is"),
    ("compare a ''", "RUN... is empty, as an unset variable is"),
    ("alarms ''", "FOLDER... is empty, as an unset variable is"),
    (f"{LAPTOP} --skip-statuses done", "type completed,early_stopped"),
    (f"{LAPTOP} --storage ftp://x/y", "Type it like s3://name/folder"),
    (f"{LAPTOP} --storage s3://me:secret@bucket/x", "contains a user name with a password"),
    (f"{LAPTOP} --output {'x' * 300}", "type shorter values, a shorter --model or --output"),
    (f"{LAPTOP} --max-seeds 3", "--max-seeds belongs to --until-resolved: type both, or neither."),
    (f"{LAPTOP} --kl-type k9", "type --set actor.kl_loss_type=NAME"),
    (f"{LAPTOP} --accept-changed-file", "which no file declares: leave it out"),
    ("run kl --preset laptop --address nowhere:1", "type the address that `ray start` printed"),
    ("run kl --preset laptop --output FILE/x", "type another folder"),
    ("list kll", "Nearest: kl."),
    ("list kl entropy", "Besides options, list takes STUDY"),
    ("list --jsno", "Possible options: --json"),
    ("settings --al", "Possible options: --all"),
    ("settings nosuchword", "type one of them, for example `python -m tune_study run kl`"),
    ("run k1", "Nearest: kl."),
    ("run kl-sweep", "Nearest: kl."),
    ("status", "Example: python -m tune_study status results/"),
    ("status nothing", NOTHING),
    ("report .", NOTHING),
    ("resume kl", NOTHING),
    ("resume results", NOTHING),
    ("confirm", "Example: python -m tune_study confirm results/"),
    ("confirm nothing --arm 0", NOTHING),
    ("compare nothing", "takes from 2 to 26 studies, and 1 was typed: type for example"),
    (f"compare {'nothing ' * 27}", "takes from 2 to 26 studies, and 27 were typed: type for example"),
    ("compare nothing nowhere", NOTHING),
    ("export nothing --arm 0", "Missing option '--to'. Example: python -m tune_study export results/"),
    ("export nothing --arm 0 --to x", NOTHING),
    ("stop nothing", NOTHING),
    ("clean nothing", NOTHING),
    ("watch nothing", NOTHING),
    ("watch nothing --port 99999", "must be less than or equal to 65535"),
    ("transcripts nothing", NOTHING),
    ("transcripts nothing --failed --solved", "type one of them, or none for both kinds"),
    ("explain nothing", NOTHING),
    ("alarms nothing", "give an output folder that contains results/, or a results/<run> folder"),
    ("replay-stoppers nothing", NOTHING),
    ("plot-gradients nothing", NOTHING),
    ("probe nothing --trial 0", NOTHING),
    ("new", "Example: python -m tune_study new my-lr --vary actor.lr=1e-4,3e-4,1e-3"),
    ("new my-lr", "type --vary KEY=VALUES, like --vary actor.lr=1e-4,3e-4"),
    ("new my-lr --vary actor.lr", "type --vary KEY=VALUE,VALUE, like --vary actor.lr=1e-4,3e-4,1e-3"),
    ("new kl --vary actor.lr=1e-4,1e-3", "type another one, of lower-case words joined by hyphens, like my-lr"),
    ("new my/lr --vary actor.lr=1e-4,1e-3", "type another one, of lower-case words joined by hyphens, like my-lr"),
    ("search kl", "Missing option '--trials'. Example: python -m tune_study search kl"),
    ("search kl --trials 0", "must be greater than or equal to 2"),
    ("search kl --preset laptop --trials 4 --vary actor.lr=1:0 --dry-run", "like actor.lr=1e-5:1e-3:log"),
    ("search kl --preset laptop --trials 4 --objective speed --dry-run", "type --objective success, or success,cost"),
    ("doctor --preset labtop", "type --preset paper or --preset laptop or --preset stress"),
]
RIGHT = [
    "--version",
    "-h",
    "run --help",
    "list --json",
    "settings epochs",
    "run KL --preset laptop --dry-run",
    f"{LAPTOP} -o x",
    "run kl --preset laptop --dry_run",
    f"{LAPTOP} --extend",
    "run --preset laptop kl --dry-run --",
    "search kl --preset laptop --trials 4 --vary actor.lr --dry-run",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file and a file of settings that is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (tmp_path / "CONFIG").write_text("actor.lr 1e-4\n")
    return tmp_path


@pytest.mark.parametrize(("typed", "advice"), WRONG, ids=[typed[:80] for typed, _ in WRONG])
def test_what_is_wrong_is_answered_with_what_to_type(folder: Path, typed: str, advice: str) -> None:
    result = CliRunner().invoke(app, shlex.split(typed), prog_name="python -m tune_study")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert advice in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["CONFIG", "FILE"]


@pytest.mark.parametrize("typed", RIGHT)
def test_what_looks_wrong_may_be_right(folder: Path, typed: str) -> None:
    result = CliRunner().invoke(app, shlex.split(typed), prog_name="python -m tune_study")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["CONFIG", "FILE"]


def test_a_folder_above_studies_is_answered_with_their_paths(folder: Path) -> None:
    for number in range(4):
        (folder / "out" / "results" / f"study{number}").mkdir(parents=True)
        (folder / "out" / "results" / f"study{number}" / "study.json").touch()
    expected = "such as out/results/study0 or out/results/study1 or out/results/study2 or 1 more."
    for typed in ("out", "out/results"):
        result = CliRunner().invoke(app, ["status", typed])
        assert result.exit_code == 2
        assert expected in " ".join(result.stderr.split())
