"""What a user asks for: the fields are options of the command line, and arguments of `tune_study.run` in Python."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Option

from tune_study.commands.arguments import options as opt
from tune_study.commands.arguments.options import Setting, option
from tune_study.folder.statuses import DEFAULT_SKIPPED, parse_skipped_statuses
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy, load_typed_code
from tune_study.plan.typed_settings import merge_assignments


@dataclass(frozen=True)
class StudyRequest:
    """What `run` and `search` train."""

    preset: opt.Preset = None
    model: Annotated[
        str | None, option("PATH", "Model to train: sokoban-tiny, a folder, or a hub id."), Setting("model.path")
    ] = None
    env: opt.Env = None
    steps: Annotated[int | None, option("N", "Training steps per run."), Setting("trainer.total_training_steps")] = None
    seeds: Annotated[int | None, option("N", "Number of seeds per arm: seeds 0 to N-1.")] = None
    assignments: opt.Assignments = None
    config: Annotated[
        list[Path] | None,
        option("FILE", "A file with a line KEY=VALUE per setting, repeatable; --set takes precedence."),
    ] = None
    kl_type: Annotated[str | None, option("NAME", "Study smoke: low_var_kl (default), kl or mse.")] = None
    rollout_filter_include_zero: Annotated[
        str | None,
        option("BOOL", "Keep groups whose rewards are all equal; default in the studies kl and entropy: True."),
        Setting("filter.rollout_filter_include_zero"),
    ] = None
    rollout_filter_strategy: Annotated[
        str | None,
        option(
            "NAME",
            "top_p (default), top_k (in the studies smoke and smoke-all a count of groups), min_p or top_f.",
        ),
        Setting("filter.rollout_filter_strategy"),
    ] = None
    smoke: Annotated[
        bool, Option("--smoke", help="Smoke run: one seed, a few steps, small batches. Results are meaningless.")
    ] = False
    code: opt.Code = None
    accept_changed_file: opt.AcceptChangedFile = False
    output: opt.Output = Path()
    storage: Annotated[
        str | None, option("URI", "Also copy results and checkpoints to s3://, gs://, or a shared path.")
    ] = None
    extend: opt.Extend = False
    save_freq: Annotated[
        int | None, option("N", "Save a checkpoint every N steps; -1: never."), Setting("trainer.save_freq")
    ] = None
    keep_best: Annotated[
        bool,
        Option("--keep-best", help="Also keep the checkpoint of each run's best validation, for `export --step best`."),
        Setting("trainer.keep_best"),
    ] = False
    dry_run: opt.DryRun = False
    gpus_per_exp: opt.GpusPerExp = None
    ray_num_cpus: opt.RayNumCpus = None
    gpu_memory_utilization: opt.GpuMemoryUtilization = None
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None

    def list_assignments(self) -> tuple[str, ...]:
        """List the `key=value` of each --set and each line of --config. Raises PlanError if a file cannot be used."""
        return merge_assignments(self.config or (), self.assignments or ())


@dataclass(frozen=True)
class RunRequest(StudyRequest):
    """What `run` trains. The options that catalog studies declare for their axes are fields of the same names."""

    values: Annotated[str | None, option("LIST", "Values of the study's axis, for any study; see `list`.")] = None
    kl_values: Annotated[str | None, option("LIST", "Study kl: values of actor.kl_loss_coef, such as 0,0.01.")] = None
    entropy_values: Annotated[
        str | None, option("LIST", "Study entropy: values of actor.entropy_coeff, such as 0,0.003.")
    ] = None
    rollout_filter_value: Annotated[
        str | None, option("LIST", "Study top-p: values of filter.rollout_filter_value, such as 1.0,0.98.")
    ] = None
    algo: Annotated[
        str | None, option("LIST", "Study gradient-analysis: values of algorithm.adv_estimator, PPO,GRPO.")
    ] = None
    arms: Annotated[
        str | None, option("LIST", "Other studies: names of arms, such as ppo-kl0-lr1e-4,ppo-kl0-lr3e-4.")
    ] = None
    groups: Annotated[str | None, option("LIST", "Studies smoke and smoke-all: groups of arms, such as 1,2.")] = None
    baseline_seeds: Annotated[int | None, option("N", "Least number of seeds of the baseline arm.")] = None
    until_resolved: Annotated[
        bool, Option("--until-resolved", help="Add seeds to open arms and the baseline until every arm has a verdict.")
    ] = False
    max_seeds: Annotated[int | None, option("N", "Seeds per arm at which --until-resolved ends; default 20.")] = None


@dataclass(frozen=True)
class SearchRequest:
    """What `search` looks for."""

    trials: Annotated[int, option("N", "Number of points to try; the first is the default settings.", min=2)]
    vary: Annotated[
        list[str] | None,
        option(
            "SPEC",
            "A setting to change: KEY=LOW:HIGH (:log or :linear), KEY=VALUE,VALUE, or KEY alone; 'SPEC if "
            "KEY=VALUE' for a setting that depends on another; repeatable. Default: rate, KL, entropy, clip range and "
            "filter.",
        ),
    ] = None
    objective: Annotated[str, option("LIST", "success, or success,cost (cost: tokens) for a Pareto front.")] = "success"
    points_per_round: Annotated[int, option("N", "Points that are drawn from the same results.", min=1)] = 4
    search_seed: Annotated[int, option("S", "Seed of the draws of points.", min=0)] = 0
    confirm_seeds: Annotated[
        int,
        option(
            "N",
            "Fresh seeds to compare the best point with the default at the end; 0: no comparison.",
            min=0,
        ),
    ] = 5
    asha: Annotated[
        int | None,
        option(
            "N",
            "Successive halving: at steps N, 3N, 9N, ... stop runs that are not in the best third. They are "
            "censored: their points have no outcome.",
            min=1,
        ),
    ] = None


@dataclass(frozen=True)
class LaunchRequest:
    """Where and how a command that trains runs. Raises PlanError for an unknown status and for --max-hours 0."""

    gpus: opt.Gpus = None
    gpu_memory_gib: Annotated[
        float | None,
        option("N", "Plan for GPUs with N GiB of memory; default: the memory of the visible GPUs, else 80."),
    ] = None
    max_concurrent: Annotated[int | None, option("N", "Maximum number of concurrent runs.")] = None
    address: Annotated[
        str | None, option("A", "Ray cluster to run on (host:port, or auto); default: this machine.")
    ] = None
    wait_for_nodes: Annotated[
        bool, Option("--wait-for-nodes", help="With --address: start although no node can hold a run yet.")
    ] = False
    max_hours: Annotated[
        float | None, option("H", "Stop after H hours, like Ctrl-C: steps are saved.", min=0, max=10_000)
    ] = None
    skip_statuses: Annotated[
        str,
        option(
            "LIST",
            "Skip runs that have one of these statuses; the list may also include failed and interrupted.",
        ),
    ] = DEFAULT_SKIPPED
    wandb: Annotated[
        str | None,
        option(
            "MODE",
            "offline (to disk), online, or off; default: as the study was last started, or offline if "
            "trainer.logger contains wandb, else off.",
        ),
    ] = None
    wandb_project: Annotated[
        str | None,
        option("NAME", "Project in W&B; default: that of the last start, WANDB_PROJECT, or that of the study."),
    ] = None

    def __post_init__(self) -> None:
        if self.max_hours == 0:
            raise PlanError("--max-hours 0 leaves no time to train: type hours, such as --max-hours 8.5.")
        parse_skipped_statuses(self.skip_statuses)

    @property
    def skipped_statuses(self) -> tuple[str, ...]:
        """The statuses of --skip-statuses; runs with one of them are not run again."""
        return parse_skipped_statuses(self.skip_statuses)


@dataclass(frozen=True)
class ProbeRequest:
    """Which checkpoint `probe` measures, and how."""

    trial: opt.Trial = None
    algo: Annotated[str | None, option("NAME", "Study gradient-analysis: choose the run of PPO or of GRPO.")] = None
    checkpoint_step: Annotated[int | None, option("N", "Step of the checkpoint; default: the newest.")] = None
    checkpoint_root: Annotated[
        Path | None, option("DIR", "Folder that contains global_step_<N>; default: the run's.")
    ] = None
    resume_from_path: Annotated[Path | None, option("DIR", "Path of the checkpoint folder global_step_<N>.")] = None
    with_val: Annotated[bool, Option("--with-val", help="First validate the run, sampled and greedy.")] = False
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None
    gpus: opt.Gpus = None
    gpu_memory_utilization: opt.GpuMemoryUtilization = None
    ray_num_cpus: opt.RayNumCpus = None
    assignments: opt.Assignments = None


@dataclass(frozen=True)
class TypedAgain:
    """What a user must type again to use the runs of a folder, because the folder may not decide it."""

    study: Annotated[str | None, option("FILE", "The file of a study that was run from a file, like lr.py.")] = None
    code: opt.Code = None
    accept_changed_file: opt.AcceptChangedFile = False
    allow: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "An address, environment variable, file or model that the folder of somebody else names and that may "
            "be used, as the command prints it; repeatable.",
        ),
    ] = None

    @property
    def allowed(self) -> frozenset[str]:
        """The entries of --allow, as `plan_from_folder` takes them."""
        return frozenset(self.allow or ())

    def load(self) -> OwnStudy | None:
        """Execute the files and return the study of --study, if typed. See `load_typed_code` for the errors."""
        return load_typed_code(self.study, self.code, self.accept_changed_file)


def list_assigned_settings(request: object) -> Iterator[tuple[str, str, Any]]:
    """Yield (option, setting, value) for each setting that a typed option of a request assigns."""
    for name, hint in get_type_hints(type(request), include_extras=True).items():
        _, *markers = hint.__metadata__
        value = getattr(request, name)
        if value is not None and value is not False:
            yield from ((f"--{name.replace('_', '-')}", marker.name, value) for marker in markers)
