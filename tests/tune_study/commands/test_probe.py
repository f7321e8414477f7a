"""A restored run, used from Python and probed by the real command, on the checkpoint of a small real study."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import analysis
from search_spaces.declaration.presets import PRESETS
from tests.fakes.command_line import assert_refused, read_files, type_in
from tests.fakes.forked_python import run_python
from tests.fakes.plans import SMALL_SETTINGS, plan_study, train_without_ray
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.files.json_lines import read_lines
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from tune_study.commands import probe
from tune_study.folder import run_checkpoints
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan

SETTINGS = {
    **SMALL_SETTINGS,
    "trainer.total_training_steps": 3,
    "trainer.save_freq": 2,
    "trainer.gradient_analysis_env_groups": 6,
    "trainer.gradient_analysis_group_size": 4,
    "trainer.gradient_analysis_every": 3,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """A gradient-analysis study of two arms, trained by the real Trainable without Ray, with checkpoints 2 and 3."""
    plan = plan_study(tmp_path_factory.mktemp("probed"), ("PPO", "GRPO"), study="gradient-analysis", **SETTINGS)
    return train_without_ray(plan, 3)


def run_probe(study: StudyPlan, words: str) -> "CompletedProcess[str]":
    return run_python(["-m", "tune_study", "probe", str(study.folder), *words.split()], Path.cwd())


@pytest.mark.long
def test_a_probe_adds_rows_and_leaves_every_other_byte(study: StudyPlan) -> None:
    files_before = read_files(study.output)
    process = run_probe(study, "--trial PPO --with-val")
    assert process.returncode == 0, process.stderr
    files_after = read_files(study.output)
    run_id = study.runs[0].run_id
    log = (
        "logs/gradient_analysis_probe_sokoban_sokoban-tiny/"
        "sokoban-PPO-filter-topp09-sokoban-tiny-probe-ckpt3-withval-kl_and_entropy.log"
    )
    tables = {
        f"results/{study.run}/{name}.parquet" for name in ("trials", "steps", "levels", "gradients", "gradient_groups")
    }
    assert set(files_after) - set(files_before) <= {f"results/{study.run}/runs/{run_id}/probes.jsonl", log, *tables}
    assert {name: files_after[name] for name in files_before if name not in tables} == {
        name: value for name, value in files_before.items() if name not in tables
    }
    frame = analysis.load(study.output).gradients
    probe_rows = frame[frame["source"] == "probe"]
    assert set(probe_rows["run_id"]) == {run_id}
    assert set(probe_rows["step"]) == {3}
    assert set(probe_rows["component"]) == {"task", "entropy", "kl", "total"}
    assert set(probe_rows["prefilter"]) >= {True}
    output = process.stdout
    assert "nothing is trained" in output
    assert "validation, sampled: success" in output
    assert "bucket_6" in (study.output / log).read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_probe_replaces_the_one_before_whole(study: StudyPlan) -> None:
    path, probes = study.get_run_dir(study.runs[1].run_id) / "probes.jsonl", []
    words = (
        "--algo GRPO --checkpoint-step 2 --ppo-micro-batch-size-per-gpu 2 --log-prob-micro-batch-size-per-gpu 2 "
        "--gpu-memory-utilization 0.4 --ray-num-cpus 2"
    )
    for _ in range(2):
        assert run_probe(study, words).returncode == 0
        probes.append([line for line in read_lines(path).records if line["step"] == 2])
    assert probes[0] == probes[1]  # the second probe gives the same numbers
    assert probes[1][0]["prefilter"]
    more_words = (
        "--set trainer.gradient_analysis_log_prefilter=False --set actor.entropy_coeff=0 "
        "--set trainer.gradient_analysis_env_groups=4"
    )
    process = run_probe(study, f"{words} {more_words}")
    assert process.returncode == 0, process.stderr
    lines = [line for line in read_lines(path).records if line["step"] == 2]
    assert [line["prefilter"] for line in lines] == [False] * len(lines)
    assert {row["component"] for line in lines for row in line["rows"]} <= {"task", "kl", "total"}


KEEPS_NOTHING = "--trial PPO --set filter.rollout_filter_value=0.001"  # less than the tolerance of the linear rule


@pytest.mark.long
@pytest.mark.slow
def test_a_probe_whose_filter_keeps_nothing_says_so(study: StudyPlan) -> None:
    run = study.runs[0]
    path = study.get_run_dir(run.run_id) / "probes.jsonl"
    process = run_probe(study, KEEPS_NOTHING)
    assert process.returncode == 0, process.stderr
    assert "the filter kept none of the 6 groups of 4 episodes" in process.stdout
    lines = {line["prefilter"]: line for line in read_lines(path).records if line["step"] == 3}
    assert [row["empty_after_filter"] for row in lines[False]["rows"]] == [1]
    assert lines[True]["groups"]
    process = run_probe(study, f"{KEEPS_NOTHING} --set trainer.gradient_analysis_log_prefilter=False")
    assert process.returncode == 0, process.stderr
    assert [line["groups"] for line in read_lines(path).records if line["step"] == 3] == [[]]


@pytest.mark.long
@pytest.mark.slow
def test_what_is_set_otherwise_is_in_the_log_and_in_the_rows(study: StudyPlan) -> None:
    words = (
        "--set rollout.temperature=0.7 --set env.max_turn=3 --set actor.use_kl_loss=False --set rollout.name=compiled"
    )
    process = run_probe(study, f"--trial GRPO {words}")
    assert process.returncode == 0, process.stderr
    overrides = "rollout.temperature=0.7, env.max_turn=3"
    rows = analysis.load(study.output).gradients
    probe_rows = rows[(rows["source"] == "probe") & (rows["arm"] == "GRPO") & (rows["step"] == 3)]
    assert set(probe_rows["overrides"]) == {overrides}
    assert set(rows.loc[rows["source"] == "train", "overrides"]) == {""}
    (log,) = (study.output / "logs").rglob("*GRPO*ckpt3-noval-entropy.log")  # no KL was measured
    assert f"settings changed from the run: {overrides}" in log.read_text()


@pytest.mark.long
def test_a_restored_trainer_is_the_one_that_was_saved(study: StudyPlan) -> None:
    restored_trainer = probe.restore(study.folder, "PPO", 2)
    assert restored_trainer.step_index == 2
    row = restored_trainer.step().row
    expected_row = read_lines(study.get_run_dir(study.runs[0].run_id) / "metrics.jsonl").records[2]
    for name in ("train_reward", "pg_loss", "entropy", "actor_grad_norm", "vf_loss"):
        assert row[name] == expected_row[name]
    newest_trainer = probe.restore(study.folder, study.runs[0].run_id)
    assert newest_trainer.step_index == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "There are several runs"),
        ("--trial TRPO", "There is no run `TRPO`"),
        ("--trial PPO --checkpoint-step 1", "no checkpoint of step 1. Available steps: 2, 3."),
        ("--trial PPO --resume-from-path /nowhere/global_step_2", "is not a checkpoint"),
        ("--checkpoint-root /nowhere", "contains no folder global_step_<N>"),
        ("--trial PPO --set actor.lr=1", "`actor.lr` cannot be set for a probe"),
        ("--algo PPO --trial GRPO", "--trial names the run already"),
        ("--trial PPO --set trainer.device=cuda --set trainer.n_gpus_per_node=1", "it runs on the CPU only"),
        ("--trial PPO --gpus all", "is not a list of distinct GPU ids"),
        ("--trial PPO --set trainer.gradient_analysis_env_groups=null", "leave it out for 6, or type a number"),
        ("--trial PPO --set rollout.name=vllm", "vllm"),
    ],
)
def test_what_cannot_be_probed_is_one_paragraph_and_writes_nothing(study: StudyPlan, words: str, message: str) -> None:
    files_before = read_files(study.output)
    other = study.output / study.runs[1].checkpoint_dir
    answer = type_in(f"probe {study.folder} {words.format(other=other)}")
    assert_refused(answer, message)
    assert answer.err.startswith("tune_study: ")
    assert answer.err.count("\n") == 1
    assert read_files(study.output) == files_before


def test_an_arm_of_several_seeds_is_its_smallest_seed(tmp_path: Path) -> None:
    settings = {"trainer.total_training_steps": 3}
    plan = plan_study(tmp_path, seeds=2, **settings)
    spec = run_checkpoints._find_run(plan, "0.1")
    assert (spec.arm, spec.seed) == ("0.1", 0)
    last_run = plan.runs[-1]
    assert run_checkpoints._find_run(plan, last_run.run_id) is last_run
    with pytest.raises(PlanError, match=r"The arms are 0, 0\.1; a run is \S+-seed1\."):
        run_checkpoints._find_run(plan, None)


def test_a_probe_switches_kl_and_entropy_on_where_they_are_off() -> None:
    run_config = apply_overrides(RunConfig(), {**PRESETS["laptop"].settings})
    probe_config = apply_overrides(run_config, probe.make_probe_settings(run_config, {}))
    actor, trainer = probe_config.actor, probe_config.trainer
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (actor.entropy_coeff, trainer.gradient_analysis_env_groups) == (0.001, 128)
    assert (trainer.gradient_analysis_group_size, trainer.gradient_analysis_log_prefilter) == (16, True)
    with pytest.raises(PlanError, match="leave it out for 16, or type a number"):
        probe.make_probe_settings(run_config, {"trainer.gradient_analysis_group_size": None})
    # A run may sample further batches in a step, and a probe has one of its own.
    refill_config = apply_overrides(
        run_config, {"filter.max_num_gen_batches": 3, "filter.rollout_filter_include_zero": False}
    )
    assert apply_overrides(refill_config, probe.make_probe_settings(refill_config, {})).further_batches == 0
    strong_config = apply_overrides(
        run_config, {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.3, "actor.entropy_coeff": -0.1}
    )
    strong_probe_config = apply_overrides(strong_config, probe.make_probe_settings(strong_config, {}))
    assert (strong_probe_config.actor.kl_loss_coef, strong_probe_config.actor.entropy_coeff) == (0.3, -0.1)


@pytest.mark.long
def test_the_checkpoint_is_asked_for_by_root_or_folder(study: StudyPlan) -> None:
    root = study.output / study.runs[0].checkpoint_dir
    assert run_checkpoints.find_checkpoint_path(root, None, None) == root / "global_step_3"
    assert run_checkpoints.find_checkpoint_path(root, 2, None) == root / "global_step_2"
    assert run_checkpoints.find_checkpoint_path(root, None, root / "global_step_2") == root / "global_step_2"
    assert run_checkpoints.find_checkpoint_path(None, 2, None) is None
    target = run_checkpoints.find_run_checkpoint(study, None, None, root / "global_step_2", "PPO")
    assert (target.step, target.spec.arm) == (2, "PPO")
    with pytest.raises(PlanError, match="There are several runs"):
        run_checkpoints.find_run_checkpoint(study, None, None, root / "global_step_2")


@pytest.mark.long
def test_restoring_reads_no_pickle_and_moves_no_weight(study: StudyPlan) -> None:
    trainer, other_trainer = (probe.restore(study.folder, "PPO", 2) for _ in range(2))
    trainer.evaluate("val", "sampled")
    batch = trainer.prepare_batch(
        trainer.roll_out(trainer.val_levels[:2], 4, "sampling"), 2, 2, make_rng(0, "duplicates", 1)
    ).batch
    compute_at_trained_tokens(batch, 4, TokenFunction.for_logprobs(trainer.model, 1.0))
    tensors, other_tensors = trainer.get_state()[0], other_trainer.get_state()[0]
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())
