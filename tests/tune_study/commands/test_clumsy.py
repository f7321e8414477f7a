"""What people type: every row is answered with what to type instead, exits with 2, and leaves nothing behind.

Correct forms of what looks wrong exit with 0. Commands that need a running study or a full disk are tried elsewhere
(tests/faults, tests/attack).
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tune_study.commands.cli import app

NOTHING = "contains no study (no study.json): type the folder results/<run> of a study"
SEARCH = "search influence --trials 4 --vary lr=1e-4:1e-2"
LAPTOP = "run kl --preset laptop --dry-run"
JUDGE = "run tree-grpo --dry-run --set env.papers.score=judge --set"
WRONG: list[tuple[str, str]] = [
    ("run kll", "There is no study `kll`. Nearest: kl. All studies with their questions: python -m tune_study list"),
    (
        "run kl --preset desk",
        "There is no preset `desk`: type --preset paper or --preset laptop or --preset small or --preset stress.",
    ),
    ("run kl --set actor.kl_loss_coeff=1", "There is no setting `actor.kl_loss_coeff`. Nearest: actor.kl_loss_coef"),
    ("settings no-such-word", "No setting of study kl has no-such-word in its name or meaning: type other words, or"),
    ("settings kl --preset tiny", "There is no preset `tiny`: type --preset paper or --preset laptop"),
    ("run kl --set actor.lr", "--set 'actor.lr' has no value"),
    ("run kl --steps 0", "--steps 0: must be greater than or equal to 1"),
    ("run kl --kl-values 0,-1", "--kl-values -1: actor.kl_loss_coef=-1: must be greater than or equal to 0"),
    ("run kl --seeds 0", "--seeds 0 leaves nothing to run"),
    ("run smoke --groups 6", "--groups 6 is not a group: type one or more of 1,2,3,4,5, or names of arms"),
    ("run kl --groups 1", "--groups does not belong to study kl, whose axis is actor.kl_loss_coef: type --kl-values."),
    ("run grpo-entropy-sokoban --arms std", "std is not an arm of study grpo-entropy-sokoban. A value is one of std-"),
    ("run grpo-entropy-sokoban --set group_size=12", "--arms tpo: actor.policy_loss=tpo is a loss of whole groups"),
    ("run grpo-entropy-sokoban --set actor.clip_ratio_low=0.1", "sokoban differ in `actor.clip_ratio_low`"),
    ("run kl --kl-type mse", "--kl-type does not belong to study kl: type --set actor.kl_loss_type=NAME."),
    ("run top-p --kl-values 0", "type --rollout_filter_value."),
    ("run top-p --rollout_filter_include_zero True", "in `filter.rollout_filter_include_zero`: choose its values"),
    ("run kl --rollout_filter_include_zero maybe", "--rollout-filter-include-zero maybe: must be True or False"),
    ("run kl --preset paper --gpus 0,1,2 --gpus-per-exp 2 --dry-run", "3 GPUs do not divide into runs of 2"),
    ("run kl --preset paper", "The study asks for 1 GPU per run and no GPU is visible"),
    ("run kl --preset laptop --json", "type it with --dry-run"),
    ("run kl --max-concurrent 0", "--max-concurrent 0 leaves nothing to run"),
    ("run kl --wandb maybe", "--wandb maybe is not a mode: choose from offline, online, off."),
    ("run kl --model Qwen/Qwen2.5-3B", "Download it with `hf download Qwen/Qwen2.5-3B`"),
    ("run kl --model weights", "weights is not a model: it has no config.json"),
    ("run sandbox --set task=lm_bandit --set model_name=no/such", "or type --set model_name=sokoban-tiny or a folder."),
    (
        "run sandbox --set mnist_folder=digits",
        "`mnist_folder=digits` does not exist: type an existing path, or leave it",
    ),
    ("stop s3://shelf/study", NOTHING),
    ("search kl --trials 4 --objective speed", "--objective speed is no objective: type --objective success, or"),
    ("search kl --trials 4 --confirm-seeds 1", "--confirm-seeds 1 gives no interval"),
    ("search influence --trials 4", "A search over this study needs the settings to change: type --vary"),
    (f"{SEARCH} --objective success,cost", "counts tokens, which the runs of study influence do not: leave it out."),
    (f"{SEARCH} --asha 5", "to study influence, which trains all seeds of an arm together: leave it out."),
    ("search sandbox-evidence --trials 4", "sandbox-evidence is a suite, and a search is over the settings of"),
    ("status s3:KEY:SECRET@bucket/kl", "The storage is no URI that is accepted"),
    ("run influence --model sokoban-tiny", "--model does not belong to study influence, which has no setting model"),
    ("run influence --gpus-per-exp 1", "--gpus-per-exp 1.0: must be less than or equal to 0"),
    ("run influence --set method=CE", "The arms of study influence differ in `method`: choose its values with"),
    ("run influence --set lrr=1", "`python -m tune_study settings sandbox --all` lists all with their meaning"),
    ("run sandbox --set method=GRPO --set group_size=1", "there is nothing to compare: set group_size=2 or more"),
    ("run influence --env sokoban", "--env does not belong to study influence, which plays no game: leave it out."),
    (
        "run kl --env chess",
        "--env chess is not a game: type one of sokoban, frozenlake, mastermind, countdown, dataset, papers",
    ),
    ("run smoke --env frozenlake", "--env does not belong to study smoke, whose arms are named after sokoban"),
    (f"{LAPTOP} --set env.name=frozenlake", "set model.path=frozenlake-tiny, or type --env frozenlake, which chooses"),
    (f"{LAPTOP} --env countdown --model sokoban-tiny --set model.prompt_style=compact", "to a model of the hub"),
    ("run kl --smoke", "--smoke does not belong to study kl: type --steps N"),
    ("run zz", "There is no study `zz`. The studies are kl, entropy, top-p,"),
    ("run kl -o a --output b", "--output is typed 2 times: type it once."),
    ("run kl --kl-values 0, 0.1, 1", "The values of a list have commas between them and no spaces, like --kl-values"),
    ("run kl --set 'algorithm.adv_estimator=gae, grpo'", "--vary algorithm.adv_estimator=gae,grpo"),
    ("run kl --set actor.learning_rate=1e-4", "no setting `actor.learning_rate`. Nearest: actor.lr. The section has"),
    ("run kl --set beta=0.1", "There is no setting `beta`. Nearest: actor.kl_loss_coef."),
    ("run kl --set kl_loss_coef=0,0.1", "differ in `actor.kl_loss_coef`: choose its values with --kl-values"),
    ("rn kl", "Did you mean 'run'?"),
    ("help", "Try 'python -m tune_study -h' for help."),
    ("run", "Example: python -m tune_study run kl"),
    ("run kl entropy", "Besides options, run takes STUDY"),
    ("run .", "type one of them, for example `python -m tune_study run kl`"),
    ("run nofile.py", "`python -m tune_study new NAME --vary actor.lr=1e-4,3e-4` writes"),
    ("run kl --preset", "requires an argument"),
    ("run kl --stpes 3", "Possible options: --seeds, --set, --steps"),
    ("run kl --steps 1.5", "Example: python -m tune_study run kl --kl-values 0,0.01,0.1 --steps 60"),
    (f"{LAPTOP} --seeds 1000000", "type --seeds 401 or less"),
    (f"{LAPTOP} --kl-values ０,0.1", "A value is a number. Try --kl-values 0,0.01."),
    (f"{LAPTOP} --kl-values 1.0,10", "run one of them with another --output"),
    ("run top-p --preset laptop --dry-run --rollout_filter_value 0.9,nofliter", "a number or one of nofilter"),
    (f"{LAPTOP} --set gradient_accumulation_steps=4", "The size of a micro-batch changes the loss, unless"),
    (f"{LAPTOP} --set =1", "`python -m tune_study settings --all` lists all with their meaning"),
    (f"{LAPTOP} --set actor.lr=1e-4,3e-4", "python -m tune_study new my-lr --vary actor.lr=1e-4,3e-4"),
    (f"{LAPTOP} --set seed=5", "type --seeds N to run the seeds 0 to N-1"),
    (f"{LAPTOP} --set env.seed_train=123 --set env.seed_val=123", "would measure what it was trained on"),
    (f"{LAPTOP} --set env.seed_val=1010000 --seeds 2", "-seed1, so its validation would measure"),
    (f"{LAPTOP} --set env.seed_train=10", "env.seed_val=123: the validation levels have the seeds 123 to"),
    (f"{LAPTOP} --set env.name=chess", "'mastermind', 'countdown', 'dataset', 'papers' or a part of yours"),
    (f"{LAPTOP} --gpus-per-exp 0.7", "type `run` with --set trainer.device=cuda, or --gpus-per-exp 0"),
    (f"{LAPTOP} --max-hours 0", "must be greater than or equal to 0.001"),
    (f"{LAPTOP} --output ''", "--output is empty, as an unset variable is: type a path, or . for the current folder."),
    (f"{LAPTOP} --output FILE", "FILE is a file: type the name of a folder."),
    (f"{LAPTOP} --output /dev/null/x", "/dev/null/x cannot be written (/dev/null: Not a directory): type another"),
    (f"{LAPTOP} --set rollout.max_model_len=1", "set a longer rollout.max_model_len"),
    (f"{LAPTOP} --set rollout.response_length=1000000", "the context of sokoban-tiny has 512 tokens"),
    ("status ''", "RUN is empty, as an unset variable is"),
    (f"status {'x' * 3000}/y", "longer than a name of a file may be: type a shorter word."),
    (f"run {'x' * 3000}.py", "longer than a name of a file may be: type a shorter word."),
    (f"run {'x' * 3000}", "There is no study `xxx"),
    (f"{LAPTOP} --storage ftp://x/y", "Type it like s3://name/folder"),
    ("run kl --preset laptop --address nowhere:1", "type host:port, as `ray start` printed it"),
    ("status", "Example: python -m tune_study status results/"),
    ("status nothing", NOTHING),
    ("export nothing --arm 0 --to x", NOTHING),
    ("compare nothing", "takes from 2 to 26 studies, and 1 was typed: type for example"),
    ("export nothing --arm 0", "Missing option '--to'. Example: python -m tune_study export results/"),
    ("transcripts nothing --failed --solved", "type one of them, or none for both kinds"),
    ("alarms nothing", "give an output folder that contains results/, or a results/<run> folder"),
    ("new", "Example: python -m tune_study new my-lr --vary actor.lr=1e-4,3e-4,1e-3"),
    ("new my-lr", "type --vary KEY=VALUES, like --vary actor.lr=1e-4,3e-4"),
    ("new my-lr --vary actor.lr", "type --vary KEY=VALUE,VALUE, like --vary actor.lr=1e-4,3e-4,1e-3"),
    ("new my/lr --vary actor.lr=1e-4,1e-3", "type another one, of lower-case words joined by hyphens, like my-lr"),
    ("search kl", "Missing option '--trials'. Example: python -m tune_study search kl"),
    ("search kl --trials 0", "must be greater than or equal to 2"),
    ("new sandbox-all --vary actor.lr=1e-4,1e-3", "is a study of this package"),
    ("new my-lr --vary actor.lr=1e-4,high", "--vary: actor.lr=high cannot be used"),
    ("new my-lr --vary actor.lr=1,2 --vary actor.lr=3,4", "the setting actor.lr twice"),
    ("new my-lr --vary seed=1,2", "type --seeds N"),
    ("new my-lr --vary actor.lr=1e-4,1e-3 --to study.txt", "does not end in .py"),
    ("new my-lr --vary actor.lr=1e-4,1e-3 --to no/such/folder.py", "cannot be written"),
    *(
        (f"{JUDGE} 'env.papers.judge_{assignment}'", problem)
        for assignment, problem in (
            ("url=http://127.0.0.1.example.org/v1", "must begin with https:// unless it is this machine"),
            ("url=http://10.0.0.1/v1", "must begin with https:// unless it is this machine"),
            ("url=https://", "must begin with https:// and a host"),
            ("url=https://user:word@example.org/v1", "must have no user, password, query or fragment"),
            ("url=https://example.org/v1?api-key=word", "must have no user, password, query or fragment"),
            ("key_variable=AWS_SECRET_ACCESS_KEY", "such as OPENAI_API_KEY, or begin with TUNE_STUDY_"),
            ("key_variable=A\nB_API_KEY", "such as OPENAI_API_KEY, or begin with TUNE_STUDY_"),
        )
    ),
    ("status 's3://shelf/x?endpoint_override=http://example.org'", "would send credentials without encryption"),
    ("doctor --preset labtop", "type --preset paper or --preset laptop or --preset small or --preset stress"),
]
RIGHT = [
    "--version",
    "-h",
    "run KL --preset laptop --dry-run",
    "run Top_P --preset laptop --dry-run",
    f"{LAPTOP} --set actor.lr=1e-4 --set actor.grad_clip=2",
    f"{LAPTOP} --set 'actor.betas=[0.9, 0.99]' --dry-run",
    "run kl --steps 3 --steps 4 --help",
    "run kl --preset laptop --dry_run",
    "run --preset laptop kl --dry-run --",
    "search kl --preset laptop --trials 4 --vary actor.lr --dry-run",
]


@pytest.fixture(autouse=True)
def folder(work_dir: Path) -> Path:
    """The current folder, with a file and a folder."""
    (work_dir / "FILE").touch()
    (work_dir / "weights").mkdir()
    return work_dir


@pytest.mark.parametrize(("typed", "advice"), WRONG, ids=[typed[:80] for typed, _ in WRONG])
def test_what_is_wrong_is_answered_with_what_to_type(folder: Path, typed: str, advice: str) -> None:
    result = CliRunner().invoke(app, shlex.split(typed), prog_name="python -m tune_study")
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    assert advice in " ".join(result.stderr.split())
    assert not re.search(r"Traceback|\bSECRET\b", result.stderr)
    # The answer is one paragraph, or follows the usage of the command.
    assert result.stderr.startswith("Usage: ") or result.stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["FILE", "weights"]


@pytest.mark.parametrize("typed", RIGHT)
def test_what_looks_wrong_may_be_right(folder: Path, typed: str) -> None:
    result = CliRunner().invoke(app, shlex.split(typed), prog_name="python -m tune_study")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["FILE", "weights"]


def test_a_folder_above_studies_is_answered_with_their_paths(folder: Path) -> None:
    for number in range(2):
        (folder / "out" / "results" / f"study{number}").mkdir(parents=True)
        (folder / "out" / "results" / f"study{number}" / "study.json").touch()
    expected = "such as out/results/study0."
    for typed in ("out", "out/results"):
        result = CliRunner().invoke(app, ["status", typed])
        assert result.exit_code == 2
        assert expected in " ".join(result.stderr.split())
