"""The groups of options that several commands share, and that the functions behind the commands take as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from search_spaces import STUDIES
from tune_study.commands.arguments import options as opt
from tune_study.commands.arguments.groups import make_axis_options
from tune_study.commands.arguments.settings_file import merge_assignments
from tune_study.folder.summary import DEFAULT_SKIPPED, parse_skipped_statuses
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy, load_typed_code


@dataclass(frozen=True)
class StudyOptions:
    """The options that say what to run, which `run` and `search` share."""

    preset: opt.Preset = None
    model: opt.Model = None
    env: opt.Env = None
    steps: opt.Steps = None
    rollout_filter_include_zero: opt.IncludeZero = None
    kl_type: opt.KLType = None
    rollout_filter_strategy: opt.FilterStrategy = None
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None
    gpus_per_exp: opt.GpusPerExp = None
    ray_num_cpus: opt.RayNumCpus = None
    gpu_memory_utilization: opt.GpuMemoryUtilization = None
    save_freq: opt.SaveFreq = None
    keep_best: opt.KeepBest = False
    seeds: opt.Seeds = None
    assignments: opt.Assignments = None
    config: opt.ConfigFiles = None
    output: opt.Output = Path()
    storage: opt.Storage = None
    extend: opt.Extend = False
    smoke: opt.Smoke = False
    code: opt.Code = None
    accept_changed_file: opt.AcceptChangedFile = False
    dry_run: opt.DryRun = False

    def list_assignments(self) -> tuple[str, ...]:
        """The `key=value` of each --set and of the lines of each --config. PlanError if a file cannot be used."""
        return merge_assignments(self.config or (), self.assignments or ())


@dataclass(frozen=True)
class RunOptions(StudyOptions):
    """The options of `run` that say what to run."""

    axis_texts: Annotated[Mapping[str, str | None], make_axis_options(STUDIES.values())] = field(default_factory=dict)
    """The text of each option for the values of an axis, by option; None for an option that was not typed."""
    baseline_seeds: opt.BaselineSeeds = None
    until_resolved: opt.UntilResolved = False
    max_seeds: opt.MaxSeeds = None


@dataclass(frozen=True)
class SearchOptions:
    """The options of `search` that say what to look for."""

    trials: opt.NumPoints
    vary: opt.SearchSpace = None
    objective: opt.Objectives = "success"
    points_per_round: opt.PointsPerRound = 4
    search_seed: opt.SearchSeed = 0
    confirm_seeds: opt.ConfirmSeeds = 5
    asha: opt.Asha = None


@dataclass(frozen=True)
class LaunchOptions:
    """The options that say where and how to run, which all commands share that train.

    Raises PlanError for a status that does not exist, and for no time.
    """

    gpus: opt.Gpus = None
    gpu_memory_gib: opt.GpuMemoryGib = None
    max_concurrent: opt.MaxConcurrent = None
    max_hours: opt.MaxHours = None
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED
    wandb: opt.Wandb = None
    wandb_project: opt.WandbProject = None
    address: opt.Address = None

    def __post_init__(self) -> None:
        if self.max_hours == 0:
            raise PlanError("--max-hours 0 leaves no time to train: type hours, such as --max-hours 8.5.")
        parse_skipped_statuses(self.skip_statuses)

    @property
    def skipped_statuses(self) -> tuple[str, ...]:
        """The statuses of --skip-statuses, of runs that are not run again."""
        return parse_skipped_statuses(self.skip_statuses)


@dataclass(frozen=True)
class TypedAgain:
    """The options with which a user types again what a folder may not decide, for commands that use its runs."""

    study: opt.StudyFile = None
    code: opt.Code = None
    accept_changed_file: opt.AcceptChangedFile = False
    allow: opt.Allow = None

    @property
    def allowed(self) -> frozenset[str]:
        """What --allow names, as `plan_from_folder` takes it."""
        return frozenset(self.allow or ())

    def load(self) -> OwnStudy | None:
        """Execute the files; return the study of --study, None without it. See `load_typed_code` for the errors."""
        return load_typed_code(self.study, self.code, self.accept_changed_file)
