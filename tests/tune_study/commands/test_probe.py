"""A restored run: questioned from Python and probed by the real command, on the checkpoint of a real small study."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import analysis
from search_spaces import STUDIES
from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.diagnostics.token_scores import format_transcript, score_tokens
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from trainable.runs.run_files import read_json_lines
from trainable.trial import Trial
from tune_study.commands import probe
from tune_study.commands.cli import app
from tune_study.folder import outputs
from tune_study.plan.study_plan import PlanError, StudyPlan, make_plan
from tune_study.tune.trials import make_trial_config

SMALL = {
    "env.env_groups": "2",
    "env.group_size": "4",
    "env.val_env_groups": "8",
    "env.test_env_groups": "0",
    "actor.ppo_mini_batch_size": "4",
    "critic.ppo_mini_batch_size": "4",
    "trainer.total_training_steps": "3",
    "trainer.save_freq": "2",
    "trainer.test_freq": "0",
    "trainer.val_before_train": "False",
    "trainer.gradient_analysis_env_groups": "6",
    "trainer.gradient_analysis_group_size": "4",
    "trainer.gradient_analysis_every": "2",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """A gradient-analysis study of two arms, trained by the real Trainable without Ray; kept checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("probed")
    plan = make_plan(STUDIES["gradient-analysis"], "laptop", "a test", SMALL, ("PPO", "GRPO"), 1, folder)
    outputs.write_study(plan)
    for spec in plan.runs:
        trial = Trial(make_trial_config(plan, [spec], is_finished=False))
        for _ in range(3):
            trial.step()
        trial.cleanup()
    return plan


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tune_study", "probe", *words], capture_output=True, text=True, env=environment
    )


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_probe_adds_rows_and_leaves_every_other_byte(study: StudyPlan) -> None:
    before = hashes(study.output)
    done = command(str(study.folder), "--trial", "PPO", "--with-val")
    assert done.returncode == 0, done.stderr
    after = hashes(study.output)
    run_id = study.runs[0].run_id
    log = (
        "logs/gradient_analysis_probe_sokoban_sokoban-tiny/"
        "sokoban-PPO-filter-topp09-sokoban-tiny-probe-ckpt3-withval-kl_and_entropy.log"
    )
    tables = {
        f"results/{study.run}/{name}.parquet" for name in ("trials", "steps", "levels", "gradients", "gradient_groups")
    }
    assert set(after) - set(before) <= {f"results/{study.run}/runs/{run_id}/probes.jsonl", log, *tables}
    assert {name: after[name] for name in before if name not in tables} == {
        name: value for name, value in before.items() if name not in tables
    }
    frame = analysis.load(study.output).gradients
    probed = frame[frame["source"] == "probe"]
    assert set(probed["run_id"]) == {run_id}
    assert set(probed["step"]) == {3}
    assert set(probed["component"]) == {"task", "entropy", "kl", "total"}
    assert set(probed["prefilter"]) >= {True}
    said = done.stdout
    assert "nothing is trained" in said
    assert "validation, sampled: success" in said
    assert "bucket_6" in (study.output / log).read_text()


def test_the_same_probe_gives_the_same_numbers(study: StudyPlan) -> None:
    path, found = study.get_run_dir(study.runs[1].run_id) / "probes.jsonl", []
    for _ in range(2):
        assert command(str(study.folder), "--algo", "GRPO", "--checkpoint-step", "2").returncode == 0
        found.append(list(read_json_lines(path)))
    assert found[0] == found[1]  # the second replaced the first, and said the same
    assert {line["step"] for line in found[1]} == {2}


def test_a_probe_with_other_settings_replaces_the_one_before_whole(study: StudyPlan) -> None:
    path = study.get_run_dir(study.runs[0].run_id) / "probes.jsonl"
    words = [
        str(study.folder),
        "--trial",
        "PPO",
        "--checkpoint-step",
        "2",
        "--ppo-micro-batch-size-per-gpu",
        "2",
        "--log-prob-micro-batch-size-per-gpu",
        "2",
        "--gpu-memory-utilization",
        "0.4",
        "--ray-num-cpus",
        "2",
    ]
    assert command(*words).returncode == 0
    assert next(line["prefilter"] for line in read_json_lines(path) if line["step"] == 2)
    more = [
        "--set",
        "trainer.gradient_analysis_log_prefilter=False",
        "--set",
        "actor.entropy_coeff=0",
        "--set",
        "trainer.gradient_analysis_env_groups=4",
    ]
    done = command(*words, *more)
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_json_lines(path) if line["step"] == 2]
    assert [line["prefilter"] for line in lines] == [False] * len(lines)
    assert {row["component"] for line in lines for row in line["rows"]} <= {"task", "kl", "total"}


NOTHING_KEPT = ("--set", "filter.rollout_filter_value=0.001")  # less than the linear rule's slack


def test_a_probe_whose_filter_keeps_nothing_says_so(study: StudyPlan) -> None:
    run = study.runs[0]
    path = study.get_run_dir(run.run_id) / "probes.jsonl"
    done = command(str(study.folder), "--trial", "PPO", *NOTHING_KEPT)
    assert done.returncode == 0, done.stderr
    assert "the filter kept none of the 6 groups of 4 episodes" in done.stdout
    lines = {line["prefilter"]: line for line in read_json_lines(path) if line["step"] == 3}
    assert [row["empty_after_filter"] for row in lines[False]["rows"]] == [1]
    assert lines[True]["groups"]
    before = hashes(study.output)
    done = command(
        str(study.folder), "--trial", "PPO", *NOTHING_KEPT, "--set", "trainer.gradient_analysis_log_prefilter=False"
    )
    assert done.returncode == 2
    assert "kept none of the 6 groups of 4 episodes" in done.stderr
    assert "leave out --set trainer.gradient_analysis_log_prefilter=False" in done.stderr
    assert hashes(study.output) == before  # the probe from before is still there


def test_what_is_set_otherwise_is_in_the_log_and_in_the_rows(study: StudyPlan) -> None:
    words = (
        "--set",
        "rollout.temperature=0.7",
        "--set",
        "env.max_turn=3",
        "--set",
        "actor.use_kl_loss=False",
        "--set",
        "rollout.name=torch",
    )
    done = command(str(study.folder), "--trial", "GRPO", *words)
    assert done.returncode == 0, done.stderr
    said = "rollout.temperature=0.7, env.max_turn=3"
    rows = analysis.load(study.output).gradients
    probed = rows[(rows["source"] == "probe") & (rows["arm"] == "GRPO") & (rows["step"] == 3)]
    assert set(probed["overrides"]) == {said}
    assert set(rows.loc[rows["source"] == "train", "overrides"]) == {""}
    (log,) = (study.output / "logs").rglob("*GRPO*ckpt3-noval-entropy.log")  # no KL was measured
    assert f"settings changed from the run: {said}" in log.read_text()


def test_training_wrote_the_analyses_that_were_due(study: StudyPlan) -> None:
    for spec in study.runs:
        lines = list(read_json_lines(study.get_run_dir(spec.run_id) / "gradients.jsonl"))
        assert {line["step"] for line in lines} == {1, 3}
        assert {row["component"] for line in lines for row in line["rows"]} == {"task", "entropy", "total"}


def test_a_restored_trainer_is_the_one_that_was_saved(study: StudyPlan) -> None:
    restored = probe.restore(study.folder, "PPO", 2)
    assert restored.step_index == 2
    row = restored.step().row
    straight = list(read_json_lines(study.get_run_dir(study.runs[0].run_id) / "metrics.jsonl"))[2]
    for name in ("train_reward", "pg_loss", "entropy", "actor_grad_norm", "vf_loss"):
        assert row[name] == straight[name]
    newest = probe.restore(study.folder, study.runs[0].run_id)
    assert newest.step_index == 3


def test_a_restored_policy_answers(study: StudyPlan) -> None:
    trainer = probe.restore(study.folder, "PPO")
    episodes = trainer.roll_out(trainer.val_levels[:3], 2, make_rng(0, "sampling", 9))
    assert len(episodes) == 6
    text = format_transcript(episodes[0], trainer.codec)
    assert text.startswith(f"level {episodes[0].level_seed}: {episodes[0].stop_reason.value} after ")
    assert all(reply in text for reply in episodes[0].texts)
    answers = score_tokens(trainer, episodes)
    for episode, sampled in zip(episodes, answers, strict=True):
        assert [answer.token for answer in sampled] == episode.tokens[episode.mask].tolist()
        np.testing.assert_allclose([answer.logprob for answer in sampled], episode.logprobs[episode.mask], atol=1e-4)
        np.testing.assert_allclose([answer.entropy for answer in sampled], episode.entropies[episode.mask])
        assert all(answer.value is not None and np.isfinite(answer.value) for answer in sampled)
    assert all(answer.value is None for answer in score_tokens(probe.restore(study.folder, "GRPO"), episodes)[0])
    for mode in ("sampled", "greedy"):
        assert 0 <= trainer.evaluate("val", mode).success <= 1


def other_run(plan: StudyPlan) -> dict[str, object]:
    return {"path": plan.output / plan.runs[1].checkpoint_dir / "global_step_2"}


BAD: list[tuple[Callable[[StudyPlan], dict[str, object]], str]] = [
    (lambda _: {}, "There are several runs"),
    (lambda _: {"trial": "TRPO"}, "There is no run `TRPO`"),
    (lambda _: {"trial": "PPO", "step": 1}, "no checkpoint of step 1. Available steps: 2, 3."),
    (lambda _: {"trial": "PPO", "path": "/nowhere/global_step_2"}, "is not a checkpoint"),
    (lambda plan: {"trial": "PPO", **other_run(plan)}, "was written by another run"),
    (lambda _: {"trial": "PPO", "settings": {"actor.lr": 1.0}}, "`actor.lr` cannot be set for a probe"),
    (lambda _: {"trial": "PPO", "settings": {"algorithm.adv_estimator": "rloo"}}, "cannot be set for a probe"),
]


@pytest.mark.parametrize(("asked", "said"), BAD, ids=[said for _, said in BAD])
def test_what_cannot_be_restored_is_said(
    study: StudyPlan, asked: Callable[[StudyPlan], dict[str, object]], said: str
) -> None:
    with pytest.raises(PlanError, match=said.replace("`", ".").replace("(", ".")):
        probe.restore(study.folder, **asked(study))  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_said(study: StudyPlan, tmp_path: Path) -> None:
    folder = study.output / study.runs[0].checkpoint_dir / "global_step_2"
    target = tmp_path / "global_step_2"
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    values = json.loads((target / "state.json").read_text())
    (target / "state.json").write_text(json.dumps({**values, "step": 7}))
    with pytest.raises(PlanError, match="checksum"):
        probe.restore(study.folder, "PPO", path=target)


def test_bad_words_of_the_command_are_one_paragraph_and_write_nothing(study: StudyPlan) -> None:
    before = hashes(study.output)
    bad = (
        ["--trial", "nobody"],
        ["--algo", "PPO", "--checkpoint-step", "17"],
        ["--checkpoint-root", "/nowhere"],
        ["--trial", "PPO", "--set", "actor.lr=1"],
        ["--algo", "PPO", "--trial", "GRPO"],
        ["--trial", "PPO", "--set", "trainer.device=cuda", "--set", "trainer.n_gpus_per_node=1"],
        ["--trial", "PPO", "--gpus", "all"],
        ["--trial", "PPO", "--set", "trainer.gradient_analysis_env_groups=null"],
        ["--trial", "PPO", "--set", "trainer.gradient_analysis_group_size=None"],
        ["--trial", "PPO", "--set", "rollout.name=vllm"],
    )
    for words in bad:
        done = CliRunner().invoke(app, ["probe", str(study.folder), *words])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("tune_study: ")
        assert len(done.stderr.strip().splitlines()) == 1
    assert hashes(study.output) == before


def test_a_probe_switches_kl_and_entropy_on_where_they_are_off() -> None:
    run = apply_overrides(RunConfig(), {**PRESETS["laptop"]})
    on = apply_overrides(run, probe.make_probe_settings(run, {}))
    assert (on.actor.use_kl_loss, on.actor.kl_loss_coef, on.actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (on.actor.entropy_coeff, on.trainer.gradient_analysis_env_groups) == (0.001, 128)
    assert (on.trainer.gradient_analysis_group_size, on.trainer.gradient_analysis_log_prefilter) == (16, True)
    with pytest.raises(PlanError, match="leave it out for 16, or type a number"):
        probe.make_probe_settings(run, {"trainer.gradient_analysis_group_size": None})
    strong = apply_overrides(run, {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.3, "actor.entropy_coeff": -0.1})
    kept = apply_overrides(strong, probe.make_probe_settings(strong, {}))
    assert (kept.actor.kl_loss_coef, kept.actor.entropy_coeff) == (0.3, -0.1)


def test_the_checkpoint_is_asked_for_by_root_or_folder(study: StudyPlan) -> None:
    root = study.output / study.runs[0].checkpoint_dir
    assert probe.find_checkpoint_path(root, None, None) == root / "global_step_3"
    assert probe.find_checkpoint_path(root, 2, None) == root / "global_step_2"
    assert probe.find_checkpoint_path(root, None, root / "global_step_2") == root / "global_step_2"
    assert probe.find_checkpoint_path(None, 2, None) is None
    target = probe.find_target(study.folder, None, None, root / "global_step_2", "PPO")
    assert (target.step, target.spec.arm) == (2, "PPO")
    for run in study.runs:  # a checkpoint names its run
        path = study.output / run.checkpoint_dir / "global_step_3"
        assert probe.find_target(study.folder, None, None, path) == probe.ProbeTarget(study, run, 3, path)


def test_a_checkpoint_of_no_run_of_the_study_is_said(study: StudyPlan, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    folder.mkdir()
    with pytest.raises(PlanError, match=r"does not say which run wrote it .*: type --trial as well"):
        probe.find_target(study.folder, None, None, folder)
    values = json.loads((study.output / study.runs[0].checkpoint_dir / "global_step_2" / "state.json").read_text())
    for changed in ({"seed": 7}, {"seed": "x"}):
        (folder / "state.json").write_text(json.dumps({**values, "settings": {**values["settings"], **changed}}))
        with pytest.raises(PlanError, match=r"was written by no run of|does not say which run wrote it"):
            probe.find_target(study.folder, None, None, folder)


def test_restoring_reads_no_pickle_and_moves_no_weight(study: StudyPlan) -> None:
    one, two = (probe.restore(study.folder, "PPO", 2) for _ in range(2))
    one.evaluate("val", "sampled")
    batch = one.prepare_batch(
        one.roll_out(one.val_levels[:2], 4, make_rng(0, "sampling", 1)), 2, 2, make_rng(0, "duplicates", 1)
    ).batch
    compute_at_trained_tokens(batch, 4, TokenFunction.for_logprobs(one.model, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(one.get_state()[0].values(), two.get_state()[0].values(), strict=True))
