"""The command line. What needs Ray is imported where it is used, so that every other command starts at once."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from search_spaces import STUDIES, SUITES
from trainable.config.run_config import ConfigError
from tune_study.commands import describe
from tune_study.commands import options as opt
from tune_study.commands.axis_options import VALUES, add_axis_options
from tune_study.commands.choices import Choices, chosen_studies, planned
from tune_study.commands.preflight import Asked, start, why_not_paper
from tune_study.folder import locate, outputs, study_file
from tune_study.folder.summary import DEFAULT_SKIPPED, parse_skipped
from tune_study.host.gpus import detect_gpus
from tune_study.host.terminal import protect_output
from tune_study.placement import resources
from tune_study.plan.study_plan import PlanError, StudyPlan, collect_overrides, find_study
from tune_study.tune.run import write_results

app = typer.Typer(
    name="tune_study",
    help="Run a study of RL fine-tuning: train every arm, stop what collapses, report what was found.",
    epilog="\b\nExample: python -m tune_study run kl --preset laptop",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

REPLAY_EXAMPLE = (
    "Example: python -m tune_study replay-stoppers results/kl_sweep_sokoban-tiny --set early_stop.variance_ratio=0.2"
)
PROBE_EXAMPLE = "Example: python -m tune_study probe results/gradient_analysis_sokoban_sokoban-tiny --with-val"
PICTURES_EXAMPLE = (
    "Example: python -m tune_study plot-gradients results/gradient_analysis_sokoban_sokoban-tiny --step 1,51,101"
)
RUN_EXAMPLE = "Example: python -m tune_study run kl --kl-values 0,0.01,0.1 --steps 60 --seeds 3 --output out"


def main() -> None:
    """Entry point of `python -m tune_study` and of the command `tune-study`."""
    protect_output()
    app(prog_name="python -m tune_study" if Path(sys.argv[0]).name == "__main__.py" else None)


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Bad input becomes one paragraph on stderr and exit code 2."""

    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ConfigError, PlanError) as error:
            typer.echo(f"tune_study: {error}", err=True)
            raise typer.Exit(2) from None

    return checked


@app.command("list", epilog="\b\nExample: python -m tune_study list")
def list_studies() -> None:
    """List the studies: question, axis, and grid of each preset."""
    describe.print_studies(Console(), list(STUDIES.values()), SUITES)


@app.command("settings", epilog="\b\nExample: python -m tune_study settings --all | grep kl_")
@plain_errors
def settings(study: opt.SettingsOf = "kl", every: opt.EverySetting = False) -> None:
    """List the settings that --set takes and that are changed most: default, meaning, allowed values."""
    describe.print_settings(Console(), find_study(study).family, with_all=every)


@app.command("run", epilog=f"\b\n{RUN_EXAMPLE}")
@plain_errors
@add_axis_options(STUDIES.values())
def run(
    study: opt.StudyName,
    preset: opt.Preset = None,
    model: opt.Model = None,
    steps: opt.Steps = None,
    values: opt.Values = None,
    *,
    axes: Mapping[str, str | None],
    rollout_filter_include_zero: opt.IncludeZero = None,
    kl_type: opt.KLType = None,
    rollout_filter_strategy: opt.FilterStrategy = None,
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None,
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None,
    gpus: opt.Gpus = None,
    gpus_per_exp: opt.GpusPerExp = None,
    ray_num_cpus: opt.RayNumCpus = None,
    gpu_memory_utilization: opt.GpuMemory = None,
    gpu_memory_gib: opt.GpuMemoryGib = None,
    save_freq: opt.SaveFreq = None,
    seeds: opt.Seeds = None,
    assignments: opt.Assignments = None,
    output: opt.Output = Path(),
    extend: opt.Extend = False,
    max_concurrent: opt.MaxConcurrent = None,
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED,
    smoke: opt.Smoke = False,
    dry_run: opt.DryRun = False,
    wandb: opt.Wandb = None,
    address: opt.Address = None,
    storage: opt.Storage = None,
) -> None:
    """Run a study or a suite of studies, or go on with it where the output folder holds it already."""
    visible = detect_gpus(os.environ)
    choices = Choices(
        *resources.choose_preset(preset, visible),
        numbers={
            "--steps": steps,
            "--model": model,
            "--gpus-per-exp": gpus_per_exp,
            "--ray-num-cpus": ray_num_cpus,
            "--gpu-memory-utilization": gpu_memory_utilization,
            "--save-freq": save_freq,
            "--ppo-micro-batch-size-per-gpu": ppo_micro_batch_size_per_gpu,
            "--log-prob-micro-batch-size-per-gpu": log_prob_micro_batch_size_per_gpu,
        },
        axes={VALUES: values, **axes},
        include_zero=rollout_filter_include_zero,
        strategy=rollout_filter_strategy,
        assignments=tuple(assignments or ()),
        seeds=seeds,
        smoke=smoke,
    )
    asked = Asked(gpus, gpu_memory_gib, max_concurrent, wandb, address, parse_skipped(skip_statuses))
    studies = chosen_studies(study, kl_type)

    def make_plans(choices: Choices) -> list[StudyPlan]:
        return [planned(chosen, choices, _absolute(output), storage, extend, real=not dry_run) for chosen in studies]

    plans = make_plans(choices)
    asks_for_gpus = (model, gpus, gpus_per_exp, gpu_memory_utilization, gpu_memory_gib, address) != (None,) * 6
    if preset is None and choices.preset == "paper" and not asks_for_gpus:
        reason = why_not_paper(plans, asked, visible, outputs.command_line())
        if reason:
            seen = f"{choices.preset_reason}, which preset paper does not fit: {reason}"
            plans = make_plans(choices._replace(preset="laptop", preset_reason=seen))
    raise typer.Exit(start(plans, asked, visible, dry_run, Console()))


@app.command("resume", epilog="\b\nExample: python -m tune_study resume results/kl_sweep_sokoban-tiny")
@plain_errors
def resume(
    run: opt.RunPlace,
    gpus: opt.Gpus = None,
    gpus_per_exp: opt.GpusPerExp = None,
    gpu_memory_gib: opt.GpuMemoryGib = None,
    max_concurrent: opt.MaxConcurrent = None,
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED,
    dry_run: opt.DryRun = False,
    wandb: opt.Wandb = None,
    address: opt.Address = None,
) -> None:
    """Go on with the study in RUN: finished runs stay as they are, all others continue."""
    placed = {} if gpus_per_exp is None else {"trainer.n_gpus_per_node": gpus_per_exp}
    plan = locate.resumed(run, placed, real=not dry_run)
    asked = Asked(gpus, gpu_memory_gib, max_concurrent, wandb, address, parse_skipped(skip_statuses))
    raise typer.Exit(start([plan], asked, detect_gpus(os.environ), dry_run, Console()))


@app.command("status", epilog="\b\nExample: python -m tune_study status results/kl_sweep_sokoban-tiny")
@plain_errors
def status(run: opt.RunPlace) -> None:
    """Show how far each run in RUN is, and why those that ended did."""
    with locate.looked_at(run) as (folder, is_running):
        describe.print_status(Console(), folder, study_file.read_study(folder), is_running)


@app.command("report", epilog="\b\nExample: python -m tune_study report results/kl_sweep_sokoban-tiny")
@plain_errors
def report(run: opt.RunPlace) -> None:
    """Write the tables and the report of RUN again from its rows."""
    folder = _absolute(locate.copied(run))
    outputs.check_writable(folder)
    problem = " ".join(filter(None, (write_results(folder, Console()), locate.copied_back(folder))))
    if problem:
        typer.echo(problem, err=True)
        raise typer.Exit(1)


@app.command("replay-stoppers", epilog=f"\b\n{REPLAY_EXAMPLE}")
@plain_errors
def replay_stoppers(run: opt.RunPlace, assignments: opt.Thresholds = None) -> None:
    """Apply the stop rules again to the rows of RUN: when each would have fired, and whether it was right to."""
    from tune_study.commands import replay

    with locate.looked_at(run) as (folder, _):
        replay.print_replay(Console(), replay.replay_folder(folder, assignments or []))


@app.command("probe", epilog=f"\b\n{PROBE_EXAMPLE}")
@plain_errors
def probe(
    run: opt.RunPlace,
    trial: opt.Trial = None,
    algo: opt.ProbeAlgo = None,
    checkpoint_step: opt.CheckpointStep = None,
    checkpoint_root: opt.CheckpointRoot = None,
    resume_from_path: opt.ResumeFromPath = None,
    with_val: opt.WithVal = False,
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None,
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None,
    gpus: opt.Gpus = None,
    gpu_memory_utilization: opt.GpuMemory = None,
    ray_num_cpus: opt.RayNumCpus = None,
    assignments: opt.Assignments = None,
) -> None:
    """Measure the gradients of one checkpoint of a run, in this process; nothing is trained."""
    typed = {
        "actor.ppo_micro_batch_size_per_gpu": ppo_micro_batch_size_per_gpu,
        "rollout.log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "rollout.ref_log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "rollout.gpu_memory_utilization": gpu_memory_utilization,
        "trainer.ray_num_cpus": ray_num_cpus,
    }
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(resources.parse_gpus(gpus))  # before torch looks
    from tune_study.commands import probe as probing

    path = probing.checkpoint_path(checkpoint_root, checkpoint_step, resume_from_path)
    folder = locate.copied(run)
    target = probing.find(folder, trial, checkpoint_step, path, algo)
    given = {name: value for name, value in typed.items() if value is not None}
    settings = collect_overrides(target.plan.study, given, assignments or [], axis_is_free=True)
    probing.probe(target, settings, with_val, Console())
    if problem := locate.copied_back(folder):
        typer.echo(problem, err=True)
        raise typer.Exit(1)


@app.command("plot-gradients", epilog=f"\b\n{PICTURES_EXAMPLE}")
@plain_errors
def plot_gradients(
    run: opt.RunPlace,
    list_steps: opt.ListSteps = False,
    steps: opt.AnalysedSteps = None,
    output_dir: opt.Pictures = None,
    trial: opt.Trial = None,
    source: opt.Source = None,
) -> None:
    """Draw the gradients that were measured in RUN: pictures and numbers of each analysed step."""
    folder = locate.copied(run)
    from tune_study.commands import gradients

    frames = gradients.read_analyses(folder)
    chosen = gradients.choose(frames, trial, source, gradients.parse_steps(steps or []))
    if list_steps:
        gradients.print_steps(Console(), frames, chosen)
    else:
        gradients.write_pictures(Console(), folder, frames, chosen, output_dir)


@app.command("doctor", epilog="\b\nExample: python -m tune_study doctor --output out")
@plain_errors
def doctor(output: opt.Output = Path(), preset: opt.Preset = None) -> None:
    """Try out what a run needs of this machine, and say what to do about each problem."""
    from tune_study.commands.doctor import diagnose

    raise typer.Exit(diagnose(Console(), _absolute(output), preset, os.environ))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
