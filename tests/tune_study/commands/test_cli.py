import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tune_study
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from search_spaces.catalog import STUDIES, SUITES
from tests.fakes.command_line import assert_refused, get_output, read_files, type_in
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study, write_started_study
from trainable.config.run_config import RunConfig, list_field_names
from trainable.files.json_lines import write_lines
from trainable.runs.study_record import StatusRecord, write_record
from tune_study.commands import preflight
from tune_study.commands.requests import LaunchRequest
from tune_study.folder.outputs import lock_folder, write_study
from tune_study.placement.model_files import find_published_sizes
from tune_study.plan.study_plan import StudyPlan, set_max_seeds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 4 --kl-values 0,0.1", "trainer.total_training_steps: 3 -> 4"),
        ("--steps 3 --kl-values 0,0.1 --set gamma=0.9", "algorithm.gamma: 1.0 -> 0.9"),
        ("--steps 3 --kl-values 0,0.2", "--kl-values: 0,0.1 -> 0,0.2"),
        ("--steps 3 --kl-values 0,0.1 --seeds 2", "--seeds: 1 -> 2"),
        ("--steps 3 --kl-values 0,0.1,0.10 --extend", "twice"),
        ("--steps 3 --kl-values 0,0.1 --max-seeds 9", "--max-seeds belongs to --until-resolved"),
        ("--steps 3 --kl-values 0,0.1 --until-resolved --max-seeds 4", "--max-seeds 4 is not a number from 5"),
        ("--steps 3 --kl-values 0.0,0.1 --baseline-seeds 2", "--baseline-seeds: 1 -> 2"),
    ],
)
def test_a_folder_with_another_study_is_left_as_it_is(work_dir: Path, options: str, message: str) -> None:
    write_started_study(work_dir)
    files_before = read_files(work_dir)
    assert_refused(
        f"run kl --preset laptop {options if '--seeds' in options.split() else options + ' --seeds 1'}", message
    )
    assert read_files(work_dir) == files_before


ENOUGH_OR_SHORT_OF_DISK = (0, 3)
"""Exit codes of a dry run with checkpoints of 74 GB: this machine's disk may be too small for them."""


def test_every_published_option_is_taken_in_both_spellings(work_dir: Path) -> None:
    options = {
        "--steps": "7",
        "--kl-values": "0,0.5",
        "--rollout_filter_include_zero": "False",
        "--gpus": "0,1",
        "--gpus-per-exp": "0.5",
        "--ray-num-cpus": "3",
        "--gpu-memory-utilization": "0.25",
        "--save-freq": "5",
    }
    start = "run kl --preset paper --dry-run "
    answer = type_in(start + " ".join(f"{name} {value}" for name, value in options.items()))
    assert answer.out.startswith("DOES NOT FIT: "), "half of an assumed 80 GiB is too little for the 3B"
    assert "6 runs: actor.kl_loss_coef in 0,0.5; seeds 0,1,2" in answer.out
    assert "Steps per run: 7," in answer.out
    assert "Each run reserves 1 CPU 0.5 GPU; 3 at once on 3 CPUs (--ray-num-cpus; the cores" in answer.out
    assert "filter_zero" in answer.out
    underscored = " ".join(f"--{name[2:].replace('-', '_')}={value}" for name, value in options.items())
    # Other processes write to the disk in the meantime.
    texts = [re.sub(r"[\d.]+ [MGT]B free", "free", out) for out in (answer.out, type_in(start + underscored).out)]
    assert texts[0] == texts[1]


HALF_GPU_LINE = "run kl --preset paper --kl-values 0.01 --seeds 1 --gpus 0 --gpus-per-exp 0.5"


def test_the_documents_show_the_plan_as_it_is_printed(work_dir: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "placement.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\npython -m tune_study (.*?)\n```", page)
    assert commands == [f"{HALF_GPU_LINE} --dry-run", f"{HALF_GPU_LINE} --set model.lora_rank=64 --dry-run"]
    for command, page_part in zip(commands, re.split(r"```bash\n", page)[1:], strict=True):
        plan_texts = re.findall(r"```text\n(.*?)\n```", page_part, re.DOTALL)
        assert plan_texts
        out = type_in(command).out
        assert all(plan_text in out for plan_text in plan_texts)


FakeMachine = Callable[..., None]


@pytest.fixture
def fake_h100(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """Fake a machine with one GPU of `total` MiB, of which `free` are free, and a downloaded Qwen2.5-0.5B."""

    def fake_machine(free: int, total: int = 81559) -> None:
        uuid = "GPU-5a4b"
        answers = (
            f"*memory.free*) echo '0, {uuid}, {free}, {total}';; "
            f"*query-gpu=index,uuid,name*) echo '0, {uuid}, NVIDIA H100 80GB HBM3';;"
        )
        script = work_dir / "bin" / "nvidia-smi"
        script.parent.mkdir()
        script.write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        model_folder = work_dir / "cache" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "abc"
        model_folder.mkdir(parents=True)
        config = {"architectures": ["Qwen2ForCausalLM"], **find_published_sizes("Qwen/Qwen2.5-0.5B")}
        (model_folder / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "tokenizer.json"):
            (model_folder / name).touch()
        monkeypatch.setenv("HF_HUB_CACHE", str(work_dir / "cache"))

    return fake_machine


SMALL_LINE = (
    "run kl --preset paper --model Qwen/Qwen2.5-0.5B --set rollout.name=torch --set env.val_env_groups=64 --output o"
)


@pytest.mark.parametrize(
    ("free_mib", "options", "message"),
    [
        (81000, "--gpus-per-exp 0.1", "DOES NOT FIT: "),
        (1024, "--set env.test_env_groups=64", "GPU 0 has 1.0 GiB free and the runs on it need "),
    ],
)
def test_a_real_run_that_does_not_fit_is_refused_and_writes_nothing(
    fake_h100: FakeMachine, work_dir: Path, free_mib: int, options: str, message: str
) -> None:
    fake_h100(free_mib)
    files_before = read_files(work_dir)
    answer = type_in(f"{SMALL_LINE} {options}")
    assert (answer.code, answer.out) == (3, "")
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert read_files(work_dir) == files_before


ADAPTERS = "model.lora_rank=64, model.lora_alpha=64, actor.lr=1e-05, critic.lr=0.0001"


def test_where_all_weights_do_not_fit_adapters_are_trained(fake_h100: FakeMachine) -> None:
    fake_h100(24000, total=24576)
    answer = type_in("run kl --gpus 0 --dry-run")
    assert answer.code in ENOUGH_OR_SHORT_OF_DISK, answer.err
    (reason,) = re.findall(r"^Preset paper: (.*)", answer.out, re.M)
    assert f"; adapters instead of all weights ({ADAPTERS}), which do not fit: policy backward takes 62.4 GiB" in reason
    assert re.search(r"^Fits: .*frozen base weights", answer.out, re.M)


@pytest.mark.long
def test_typed_learning_rates_and_ranks_take_precedence_over_those_for_small_gpus(fake_h100: FakeMachine) -> None:
    fake_h100(24000, total=24576)
    full_answer = type_in("run kl --preset paper --set model.lora_rank=0 --dry-run")
    assert full_answer.code == 3
    assert full_answer.out.startswith("DOES NOT FIT: policy backward takes 62.4 GiB")
    assert "Preset paper: set by --preset\n" in full_answer.out
    # The arms of this study are learning rates.
    assert "adapters instead of all weights" in type_in("run learning-rate --preset paper --dry-run").out


@pytest.mark.parametrize("name", ["remedies", "void-turns"])
def test_a_study_of_collapses_runs_by_default_where_runs_collapse(work_dir: Path, name: str) -> None:
    reason = "Preset stress: no CUDA GPU is visible; the study is declared for stress\n"
    assert reason in get_output(f"run {name} --dry-run")
    assert "preset  stress by default" in get_output(f"list {name}")
    assert "preset  " not in get_output("list kl")
    # As it was started when laptop was its default: it continues so.
    plan = plan_study(work_dir, None, study=name)
    write_study(plan)
    assert "Preset laptop: a test\n" in get_output(f"resume {plan.folder} --dry-run")
    assert "Preset laptop: set by --preset\n" in get_output(
        f"run {name} --preset laptop --seeds 1 --output {work_dir} --dry-run"
    )


def test_where_paper_does_not_fit_the_cards_laptop_runs_and_says_why(
    fake_h100: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_h100(12000, total=12288)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "run", "kl", "--dry-run"])
    output = get_output("run kl --dry-run")
    (reason,) = re.findall(r"^Preset laptop: (.*)", output, re.M)
    assert reason.startswith(
        "a CUDA GPU is visible (NVIDIA H100 80GB HBM3), but preset paper does not fit it: policy backward takes "
    )
    assert reason.endswith("no setting makes it fit")
    (reason,) = re.findall(r"^Preset stress: (.*)", get_output("run remedies --dry-run"), re.M)
    assert reason.endswith("no setting makes it fit; the study is declared for stress")


def test_python_takes_the_options_of_a_run(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, started = replace(STUDIES["kl"], name="my-kl"), list[tuple[StudyPlan, LaunchRequest]]()

    def record_start(plans: Sequence[StudyPlan], launch: LaunchRequest, *_: object) -> int:
        started.append((plans[0], launch))
        return 1

    monkeypatch.setattr(preflight, "start_studies", record_start)
    for options in ({}, {"max_hours": 2, "wandb": "offline"}):
        with pytest.raises(RuntimeError, match="ended with code 1"):
            tune_study.run(study, "laptop", values=["0"], steps=7, keep_best=True, output="o", **options)
    plan, _ = started[0]
    config = plan.ppo_config
    assert (plan.values, config.trainer.total_training_steps, config.trainer.keep_best) == (("0",), 7, True)
    assert plan.output == work_dir / "o"
    assert [(launch.max_hours, launch.wandb) for _, launch in started] == [(None, "off"), (2, "offline")]
    write_study(plan)
    assert_refused(f"resume {plan.folder}", "call tune_study.run again with the same Study and output")
    for name in ("step", "dry_run"):
        with pytest.raises(TypeError, match=f"tune_study.run has no argument {name}"):
            tune_study.run(study, "laptop", **{name: 3})


@pytest.mark.parametrize("option", ["--gpus 0", "--model Qwen/Qwen2.5-3B"])
def test_who_asks_for_gpus_gets_no_other_preset(fake_h100: FakeMachine, option: str) -> None:
    fake_h100(12000, total=12288)
    answer = type_in(f"run kl {option} --dry-run")
    assert "Preset paper: a CUDA GPU is visible (NVIDIA H100 80GB HBM3)\n" in answer.out
    assert answer.out.startswith("DOES NOT FIT: ")


def test_extending_is_planned_over_old_and_new(work_dir: Path) -> None:
    write_started_study(work_dir)
    output = get_output("run kl --preset laptop --steps 3 --kl-values 0.2 --seeds 2 --extend --dry-run")
    assert "6 runs: actor.kl_loss_coef in 0,0.1,0.2; seeds 0,1" in output


def test_further_seeds_of_the_baseline_are_planned(work_dir: Path) -> None:
    output = get_output("run kl --preset laptop --kl-values 0,0.1 --seeds 1 --baseline-seeds 3 --dry-run")
    assert "4 runs: actor.kl_loss_coef in 0,0.1; seeds 0; of the baseline also 1,2" in output
    assert "Power: one seed is too few to call an arm better, worse or equal" in output


def test_the_plan_of_added_seeds_says_from_when_on_they_decide(work_dir: Path) -> None:
    output = get_output("run kl --preset laptop --seeds 3 --until-resolved --dry-run")
    line = "Power: seeds are added to open arms, up to 20 per arm; the test at every look can decide from 6 seeds on"
    assert line in output
    # Without --max-seeds, a study that has a maximum keeps it.
    plan = write_started_study(work_dir)
    write_study(set_max_seeds(plan, 40))
    answer = type_in("run kl --preset laptop --steps 3 --kl-values 0,0.1 --seeds 1 --until-resolved --dry-run")
    assert "up to 40 per arm" in answer.out


def test_a_study_goes_on_with_other_gpus(work_dir: Path) -> None:
    folder = write_started_study(work_dir, trainer__device="auto").folder
    output = get_output(f"resume {folder} --gpus-per-exp 0.5 --gpus 0 --dry-run")
    assert "GPU slots (ids): 0 0" in output
    same_line = "run kl --preset laptop --steps 3 --kl-values 0,0.1 --seeds 1"
    get_output(f"{same_line} --gpus-per-exp 0.5 --gpus 0 --set trainer.device=cuda --dry-run")
    assert_refused(
        f"resume {folder} --gpus-per-exp -1", "trainer.n_gpus_per_node=-1.0: must be greater than or equal to 0"
    )


def test_list_shows_every_study_on_a_line() -> None:
    lines = [*map(str.split, type_in("list").out.splitlines())]
    assert [words[0] for words in lines] == ["study", *STUDIES, *SUITES, "Axis"]
    assert all(STUDIES[words[0]].question.split() == words[1:] for words in lines if words[0] in STUDIES)
    assert [" ".join(words[-6:]) for words in lines[-1:]] == ["study: python -m tune_study list kl"]
    for name, members in SUITES.items():
        lines = [*map(str.split, type_in(f"list {name}").out.splitlines())]
        assert [words[0] for words in lines] == ["study", *members, name, "Axis"]


@pytest.mark.parametrize("name", ["kl", "smoke"])
def test_list_shows_the_axis_of_a_study(name: str) -> None:
    study, out = STUDIES[name], type_in(f"list {name}").out
    assert out.startswith(f"{name}: {study.question.strip()}\n")
    assert study.axis.option in out
    grid = "group 1 (" if study.axis.value_groups else ",".join(study.axis.grids["laptop"])
    assert grid in out


def test_settings_lists_what_is_changed_most_and_says_how_to_see_the_rest() -> None:
    for study, config_class, expected_names in (
        (
            "kl",
            RunConfig,
            {"model.path", "filter.rollout_filter_value", "actor.kl_loss_coef", "early_stop.variance_ratio"},
        ),
        ("sandbox", UpdateRuleConfig, {"method", "delay", "trainer.test_freq"}),
    ):
        command = f"settings {study}".strip()
        _, *lines, last_line = type_in(command).out.splitlines()
        listed_names = [line.split()[0] for line in lines]
        all_names = [name for name in list_field_names(config_class) if name != "seed"]
        assert expected_names <= set(listed_names)
        assert listed_names == [name for name in all_names if name in listed_names]
        assert 20 <= len(listed_names) <= 40
        n_others = len(all_names) - len(listed_names)
        assert last_line == f"{n_others} more settings are rarely changed: python -m tune_study {command} --all"


def test_all_settings_are_listed_with_default_and_bounds() -> None:
    lines = {line.split()[0]: line for line in type_in("settings --all").out.splitlines()}
    assert lines.keys() - {"setting"} == set(list_field_names()) - {"seed"}
    assert re.search(
        r" 1e-06 +0\.0003 +0\.0001 +0\.002 +learning rate .* number > 0, or a schedule$", lines["actor.lr"]
    )
    assert re.search(
        r" --kl-values +--kl-values +coefficient of the KL loss.* number >= 0, or a schedule$",
        lines["actor.kl_loss_coef"],
    )
    assert re.search(r" none +.* none \| linear \| sqrt$", lines["actor.filter_loss_scaling"])
    assert re.search(r" 512 +.* whole number >= 0, <= 512$", lines["env.test_env_groups"])
    assert lines["trainer.resume_seconds"].endswith(" number >= 0, or null")
    assert lines["env.papers.file"].endswith(" text, or null")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("early_stop.variance", {"early_stop.variance_ratio"}),
        ("model.lora", {"model.lora_rank", "model.lora_alpha", "model.lora_target_modules"}),
        ("'Learning RATE' --preset laptop", {"actor.lr", "critic.lr"}),
        ("sandbox delay", {"delay"}),
    ],
)
def test_settings_finds_names_and_meanings(words: str, names: set[str]) -> None:
    heading, *lines = type_in(f"settings {words}").out.splitlines()
    assert names <= {line.split()[0] for line in lines}
    assert len(lines) < 12
    assert ("paper" in heading) == ("--preset" not in words)


def test_status_says_how_far_each_run_is(work_dir: Path) -> None:
    plan = write_started_study(work_dir)
    first_run_id = plan.runs[0].run_id
    path = plan.get_run_dir(first_run_id) / "metrics.jsonl"
    write_lines(path, [{"step": 1, "val_success": 0.25}, {"step": 2}, {"step": 3}])
    path.write_bytes(path.read_bytes()[:-20])
    write_record(plan.get_run_dir(first_run_id), StatusRecord(first_run_id, "running"))
    answer = type_in(f"status {plan.folder}")
    assert answer.out.startswith("kl (laptop): unfinished; runs: 1 interrupted, 1 never_ran\n")
    assert answer.out.endswith(f"\nContinue with: python -m tune_study resume {plan.folder}\n")
    row_pattern = r"\n0 +0 +{} +2/3 +0\.250 *{} +sokoban_kl_sweep_nofilter_0-sokoban-tiny\n"
    assert re.search(
        row_pattern.format("interrupted", "the process that ran the study is gone, after step 2"), answer.out
    )
    assert re.search(
        r"\n0\.1 +0 +never_ran +0/3 +- +has not started +sokoban_kl_sweep_nofilter_01-sokoban-tiny\n", answer.out
    )
    second_run_id = plan.runs[1].run_id
    write_record(plan.get_run_dir(second_run_id), StatusRecord(second_run_id, "waiting", "has not started"))
    assert type_in(f"status {plan.folder}").out == answer.out
    with lock_folder(plan.folder):
        running_output = type_in(f"status {plan.folder}").out
    assert running_output.startswith("kl (laptop): running; runs: 1 running, 1 waiting\n")
    assert re.search(row_pattern.format("running", ""), running_output)
    for spec in plan.runs:
        append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": 3})
        write_record(plan.get_run_dir(spec.run_id), StatusRecord(spec.run_id, "completed"))
    assert type_in(f"status {plan.folder}").out.startswith("kl (laptop): finished; runs: 2 completed\n")


def test_the_status_of_a_run_knows_the_steps_of_its_arm(work_dir: Path) -> None:
    study = STUDIES["matched-updates"]
    plan = plan_study(work_dir, study.get_grid("laptop"), study=study)
    write_study(plan)
    assert len({spec.steps for spec in plan.runs}) > 1
    for spec in plan.runs:
        append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": spec.steps})
        write_record(plan.get_run_dir(spec.run_id), StatusRecord(spec.run_id, "completed"))
    output = type_in(f"status {plan.folder}").out
    assert f": finished; runs: {len(plan.runs)} completed\n" in output
    assert all(f" {spec.steps}/{spec.steps} " in output for spec in plan.runs)
    (plan.get_run_dir(plan.runs[0].run_id) / "run.json").write_text("{}")
    assert type_in(f"status {plan.folder}").code == 0


def test_a_file_of_a_study_is_answered_with_its_folder(work_dir: Path) -> None:
    folder = write_started_study(work_dir).folder
    assert_refused(
        f"report {folder / 'figures/curves.svg'}",
        f"contains no study (no study.json): type the folder results/<run> of a study, such as {folder}.",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "slow_packages"),
    [
        (["settings", "kl"], {"torch", "ray", "pandas", "scipy", "wandb", "analysis"}),
        # What the seeds resolve takes the statistics of a report, but no package that takes seconds.
        (["run", "kl", "--preset", "laptop", "--dry-run"], {"torch", "ray", "wandb", "altair", "vl_convert"}),
    ],
)
def test_the_command_line_starts_without_slow_packages(arguments: list[str], slow_packages: set[str]) -> None:
    code = (
        f"import sys; from tune_study.commands.cli import app; app({arguments}, standalone_mode=False); "
        f"print(sorted(set({sorted(slow_packages)}) & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"


def test_an_interpreter_without_the_packages_says_what_to_type() -> None:
    # -S: without site-packages, as in a new terminal whose environment is not activated.
    command = [sys.executable, "-S", "-m", "tune_study", "list"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert f"{sys.executable} has no package typer. Run `make setup`" in process.stderr
    assert len(process.stderr.splitlines()) == 1
