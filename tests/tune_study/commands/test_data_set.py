"""A file of prompts and answers on the command line: the plan, a run, and what is read and exported from it."""

import json
from pathlib import Path

import pytest

from tests.fakes.command_line import Answer, assert_refused, get_output, type_words
from tests.fakes.data_files import write_sums
from tests.fakes.hub_models import write_small_model
from tests.fakes.plans import plan_study, train_without_ray
from trainable.config.games import GAMES
from trainable.runs.run_files import METRICS_FILE, read_rows

pytestmark = pytest.mark.long

SETTINGS = {
    "env.dataset.score": "regex",
    "env.dataset.instructions": "Sum up.",
    "env.val_env_groups": "8",
    "env.test_env_groups": "4",
    "env.env_groups": "2",
    "env.group_size": "2",
    "rollout.response_length": "4",
    "trainer.total_training_steps": "2",
    "trainer.test_freq": "1",
    "trainer.log_train_generations": "2",
}


@pytest.fixture
def model(work_dir: Path) -> str:
    """A model with random weights, beside a file of sums."""
    write_sums(Path("sums.jsonl"), 10, answer="solution")
    return str(write_small_model(work_dir / "model"))


def type_dry_run(model: str, file: str = "sums.jsonl", **changes: str) -> Answer:
    settings = {**SETTINGS, "env.dataset.answer": "solution", **changes}
    words = ["run", "kl", "--env", file, "--preset", "small", "--kl-values", "0", "--seeds", "1", "--model", model]
    assignments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return type_words(*words, *assignments, "--dry-run")


def test_a_plan_says_how_many_rows_each_set_has(model: str) -> None:
    text = get_output(type_dry_run(model))
    (line,) = [line for line in text.splitlines() if line.startswith("Data: ")]
    counts = [int(word) for word in line.split() if word.isdigit()]
    assert sum(counts) == 100
    assert line.endswith("rows, by the hash of the prompt")
    assert "kl_sweep_model_dataset" in text


def test_a_file_or_setting_that_does_not_fit_is_refused(model: str) -> None:
    for changes, message in (
        ({"file": "gone.jsonl"}, "--env gone.jsonl: "),
        ({"file": "sums.csv"}, "a data set of prompts and answers (.jsonl or .parquet), or a game of yours"),
        ({"env.dataset.answer": "answer"}, "in a field 'answer' (its fields: prompt, solution)"),
        (
            {"env.val_env_groups": "99"},
            "rows for validation, and env.val_env_groups=99: type --set env.val_env_groups=",
        ),
        ({"env.seed_train": "5000"}, "does not fit a data set"),
    ):
        assert_refused(type_dry_run(model, **changes), message)


def test_a_run_trains_on_a_data_set_and_its_policy_is_exported_with_its_prompt(work_dir: Path) -> None:
    rows = [{"prompt": f"{left} + {right} =", "answer": "[a-zA-Z0-9]"} for left in range(10) for right in range(10)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **GAMES["dataset"].settings,
        **SETTINGS,
        "env.name": "dataset",
        "env.dataset.file": str(work_dir / "sums.jsonl"),
        "model.path": str(write_small_model(work_dir / "model")),
    }
    plan = train_without_ray(plan_study(work_dir, ("0",), preset="small", **settings), 2)
    last_row = read_rows(plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE)[-1]
    assert last_row["step"] == 2
    assert 0 < last_row["val_success"] < 1
    assert last_row["val_success_unseen"] == last_row["val_success"]  # no row is in two sets
    assert "test_success" in last_row
    assert "critic_loss" not in last_row
    transcript = get_output(type_words("transcripts", plan.folder, "--arm", "0"))
    assert "Sum up." in transcript
    assert "<think>" not in transcript
    get_output(type_words("export", plan.folder, "--arm", "0", "--to", "policy"))
    template = json.loads(Path("policy/tokenizer_config.json").read_text())["chat_template"]
    assert 'set thought = ""' in template
