"""Tests of exported policies: transformers and peft load them, and their logits are ours."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis.data.episodes import read_episodes
from tests.fakes.command_line import assert_refused, get_output, read_files, type_in
from tests.fakes.plans import SMALL_SETTINGS, plan_study, train_without_ray
from trainable.export.policy import load_trained_policy
from trainable.files.json_values import read_object, write_object
from trainable.models.codec import Codec
from trainable.models.interface import PassSettings
from trainable.models.load import find_model, load_policy
from trainable.models.lora import iter_merged_weights
from trainable.models.qwen2 import Qwen2
from trainable.runs.checkpoint import iter_checkpoints
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import METRICS_FILE, STATE_FOLDER, read_rows
from trainable.runs.study_record import STUDY_FILE, StatusRecord, write_record
from tune_study.commands import probe
from tune_study.commands.reading.export import split_first_turn
from tune_study.plan.study_plan import StudyPlan

SETTINGS = {
    **SMALL_SETTINGS,
    "env.val_env_groups": 4,
    "actor.lr": "0.01",
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 1,
    "trainer.test_freq": 2,
    "trainer.log_val_generations": 4,
}
TOKENS = torch.arange(3, 43).view(2, 20)


def train_study(output: Path, seeds: int = 1, **settings: str) -> StudyPlan:
    """Train one arm by the real Trainable, without Ray."""
    return train_without_ray(plan_study(output, values=("0.1",), seeds=seeds, **{**SETTINGS, **settings}), 2)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    return train_study(tmp_path_factory.mktemp("whole"), seeds=2)


@pytest.fixture(scope="module")
def lora_study(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    torch_settings = {"rollout.name": "torch", "model.compiled_passes": "False"}
    return train_study(tmp_path_factory.mktemp("lora"), **{"model.lora_rank": "4", **torch_settings})


def export(plan: StudyPlan, folder: Path, *options: object) -> tuple[int, str, str]:
    return type_in(shlex.join(map(str, ["export", plan.folder, "--arm", "0.1", "--to", folder, *options])))


@torch.no_grad()
def compute_logits(plan: StudyPlan, seed: int = 0, step: int | None = None) -> torch.Tensor:
    """Logits of the restored trainer, by our own passes.

    In float64, as `compute_hub_logits`: in float32 two implementations differ by rounding, up to 1e-5 in large logits.
    """
    model = probe.restore(plan.folder, plan.runs[seed].run_id, step).model.double()
    model.model.pass_settings = PassSettings()  # in the type of the weights
    hidden = model.model.compute_hidden_states(TOKENS, torch.arange(TOKENS.numel()))
    return model.lm_head(hidden).view(*TOKENS.shape, -1)


@torch.no_grad()
def compute_hub_logits(model: torch.nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model.double()(TOKENS).logits
    return logits


def test_transformers_computes_our_logits(study: StudyPlan, tmp_path: Path) -> None:
    before = read_files(study.output)
    out = get_output(export(study, tmp_path / "policy"))
    assert read_files(study.output) == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert f"{study.runs[0].run_id} after step 2: {tmp_path / 'policy'}" in out
    logits = compute_hub_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert (logits - compute_logits(study)).abs().max() < 1e-5
    base = compute_hub_logits(AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny")))
    assert (logits - base).abs().max() > 1e-2  # it was trained


def test_a_seed_and_a_step_are_chosen(study: StudyPlan, tmp_path: Path) -> None:
    assert export(study, tmp_path / "policy", "--seed", 1, "--step", 1)[0] == 0
    logits = compute_hub_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert (logits - compute_logits(study, seed=1, step=1)).abs().max() < 1e-5
    assert (logits - compute_logits(study)).abs().max() > 1e-3


@pytest.mark.long
def test_adapters_are_merged(lora_study: StudyPlan, tmp_path: Path) -> None:
    get_output(export(lora_study, tmp_path / "policy"))
    logits = compute_hub_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert (logits - compute_logits(lora_study)).abs().max() < 1e-5


@pytest.mark.long
def test_a_base_in_4_bits_is_exported_as_what_was_trained(tmp_path: Path) -> None:
    settings = {"model.lora_rank": "4", "model.load_in_4bit": "True"}
    plan = train_study(tmp_path, **settings, **{"rollout.name": "torch", "model.compiled_passes": "False"})
    get_output(export(plan, tmp_path / "policy"))
    model = probe.restore(plan.folder, plan.runs[0].run_id).model
    dense = Qwen2(model.shape)
    dense.load_state_dict(dict(iter_merged_weights(model)))
    dense.double()
    hidden = dense.model.compute_hidden_states(TOKENS, torch.arange(TOKENS.numel()))
    logits = compute_hub_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert (logits - dense.lm_head(hidden).view(*TOKENS.shape, -1)).abs().max() < 1e-5


# peft reads a name that transformers has deprecated.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_written_alone(lora_study: StudyPlan, tmp_path: Path) -> None:
    get_output(export(lora_study, tmp_path / "adapters", "--adapters"))
    base = AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny"))
    logits = compute_hub_logits(PeftModel.from_pretrained(base, tmp_path / "adapters"))
    assert (logits - compute_logits(lora_study)).abs().max() < 1e-5
    assert not (tmp_path / "adapters" / "model.safetensors").exists()


def test_weights_have_the_type_that_was_typed(study: StudyPlan, tmp_path: Path) -> None:
    assert export(study, tmp_path / "policy", "--dtype", "bfloat16")[0] == 0
    weights = load_file(tmp_path / "policy" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_chat_template_gives_the_tokens_of_the_training(study: StudyPlan, tmp_path: Path) -> None:
    assert export(study, tmp_path / "policy")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    policy = load_policy(study.runs[0].ppo_config.model.path, torch.device("cpu"))
    chat, codec = policy.chat_format, Codec(policy.tokenizer)
    episodes = read_episodes(study.get_run_dir(study.runs[0].run_id))
    assert max(len(episode.turns) for episode in episodes) > 1
    for episode in episodes:
        system_user = split_first_turn(chat, episode.turns[0].observation, "compact")
        assert system_user is not None
        messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), system_user, strict=True)]
        seen_text = ""
        for turn in episode.turns:
            if seen_text:
                user = turn.observation.removeprefix(chat.next_user_prefix)
                messages.append({"role": "user", "content": user.removesuffix(chat.reply_prefix + "<think>")})
            seen_text += turn.observation
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert prompt == codec.encode([seen_text])[0]
            seen_text += turn.reply
            messages.append({"role": "assistant", "content": turn.reply.removesuffix(chat.end_marker)})
            if not turn.reply.endswith(chat.end_marker):  # cut at its maximum length
                break
            assert tokenizer.apply_chat_template(messages, tokenize=False) == seen_text
    # Another study can train the exported policy, and forms the same prompts.
    exported = load_policy(str(tmp_path / "policy"), torch.device("cpu"))
    assert exported.chat_format == chat


def test_the_card_says_which_run_it_is_and_has_a_prompt_of_it(study: StudyPlan, tmp_path: Path) -> None:
    assert export(study, tmp_path / "policy", "--seed", 1)[0] == 0
    card = (tmp_path / "policy" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in ("| arm | actor.kl_loss_coef = 0.1 |", "| seed | 1 |", "| step | 2 of 2 |", "`actor.lr=0.01`"):
        assert line in card
    assert str(tmp_path) not in card
    assert str(study.output) not in card
    names = {"tokenizer": AutoTokenizer.from_pretrained(tmp_path / "policy")}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    (episode, *_) = read_episodes(study.get_run_dir(study.runs[1].run_id))
    assert names["prompt"] == episode.turns[0].observation
    assert episode.turns[0].reply in card


def test_a_study_from_a_file_needs_no_file(study: StudyPlan, tmp_path: Path) -> None:
    shutil.copytree(study.output, tmp_path / "out")
    folder = tmp_path / "out" / study.folder.relative_to(study.output)
    record = read_object(folder / STUDY_FILE)
    record["declaration"] = {"path": "/nowhere/mine.py", "sha256": "0" * 64, "text": "study = 1"}
    write_object(folder / STUDY_FILE, {**record, "name": "mine"})
    get_output(shlex.join(["export", str(folder), "--arm", "0.1", "--to", str(tmp_path / "policy")]))
    assert export(study, tmp_path / "other")[0] == 0
    texts = [(tmp_path / name / "README.md").read_text() for name in ("policy", "other")]
    assert texts[0] == texts[1].replace("| study | kl: ", "| study | mine: ").replace(": kl, arm", ": mine, arm")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("policy", "other")]
    assert weights[0] == weights[1]
    entry = {**record["runs"][0], "checkpoints": "../elsewhere"}
    write_object(folder / STUDY_FILE, {**record, "runs": [entry, *record["runs"][1:]]})
    assert_refused(
        f"export {shlex.quote(str(folder))} --arm 0.1 --to {tmp_path / 'third'}", "a file outside of the output folder"
    )


@pytest.mark.long
def test_the_best_validation_is_exported_and_cleaning_leaves_it(tmp_path: Path) -> None:
    plan = train_study(tmp_path, **{"trainer.keep_best": "True", "trainer.save_freq": "-1", "trainer.test_freq": "1"})
    spec = plan.runs[0]
    metrics = plan.get_run_dir(spec.run_id) / METRICS_FILE
    values = {row["step"]: row["val_success"] for row in read_rows(metrics)}
    best = max(values, key=lambda step: (values[step], -step))
    code, out, err = export(plan, tmp_path / "best", "--step", "best")
    assert (code, f"after step {best}:" in out) == (0, True), err
    expected = compute_logits(plan, step=best)
    logits = compute_hub_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "best", dtype=torch.float32))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for run in plan.runs:
        write_record(plan.get_run_dir(run.run_id), StatusRecord(run.run_id, "completed"))
    assert type_in(shlex.join(["clean", str(plan.folder), "--yes"])).code == 0
    assert [step for step, _ in iter_checkpoints(plan.get_run_dir(spec.run_id) / STATE_FOLDER)] == [best]
    assert export(plan, tmp_path / "again", "--step", "best")[0] == 0
    assert "--step bst is no step: type a number, or best." in export(plan, tmp_path / "none", "--step", "bst")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "has no checkpoint of step 7. Available steps: 1, 2."),
        (["--seed", "5"], "type --seed with one of 0, 1."),
        (["--dtype", "int8"], "type one of auto, float32, bfloat16, float16."),
        (["--adapters"], "this run has none: leave it out."),
    ],
)
def test_what_cannot_be_exported_is_refused(study: StudyPlan, tmp_path: Path, options: list[str], message: str) -> None:
    assert_refused(export(study, tmp_path / "policy", *options), message)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_touched(study: StudyPlan, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    assert_refused(export(study, tmp_path), "is there already and not empty")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "x")]


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(study: StudyPlan) -> None:
    first, second = study.runs
    checkpoint = study.output / first.checkpoint_dir / "global_step_1"
    with pytest.raises(ValueError, match="was written by another run"):
        load_trained_policy(second.ppo_config, checkpoint)
    with pytest.raises(CheckpointError):
        load_trained_policy(first.ppo_config, checkpoint.with_name("global_step_9"))
