"""Options that several commands share: groups of them, and the options for the axis values of every study.

A command receives a group as one argument. Typer reads the options of a command from its signature, in which those of
the group take the place of that argument.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_type_hints

from typer import Option

from search_spaces.declaration.study import Study
from trainable.families import Settings
from tune_study.commands.arguments import options as opt
from tune_study.commands.arguments.settings_file import merge_assignments
from tune_study.commands.preflight import LaunchOptions, PlacementChoices, names_adapters
from tune_study.commands.run_options import VALUES_OPTION, RunOptions
from tune_study.folder import outputs
from tune_study.folder.summary import DEFAULT_SKIPPED, parse_skipped_statuses
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy, load_typed_code

Command = Callable[..., None]


class StudyRequest(NamedTuple):
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

    def make_run_options(
        self,
        preset: str,
        preset_reason: str,
        axis_texts: Mapping[str, str | None],
        baseline_seeds: int | None = None,
        until_resolved: bool = False,
        max_seeds: int | None = None,
        preset_settings: Settings = MappingProxyType({}),
    ) -> RunOptions:
        """The options of a study. preset, preset_reason: --preset, or the default preset, and why it was chosen.

        preset_settings: further settings of the preset, over which those that were typed take precedence.
        """
        return RunOptions(
            preset,
            preset_reason,
            preset_settings,
            option_values={
                "--steps": self.steps,
                "--model": self.model,
                "--gpus-per-exp": self.gpus_per_exp,
                "--ray-num-cpus": self.ray_num_cpus,
                "--gpu-memory-utilization": self.gpu_memory_utilization,
                "--save-freq": self.save_freq,
                "--keep-best": self.keep_best or None,
                "--ppo-micro-batch-size-per-gpu": self.ppo_micro_batch_size_per_gpu,
                "--log-prob-micro-batch-size-per-gpu": self.log_prob_micro_batch_size_per_gpu,
            },
            axis_texts=axis_texts,
            game=self.env,
            include_zero=self.rollout_filter_include_zero,
            strategy=self.rollout_filter_strategy,
            assignments=self.list_assignments(),
            seeds=self.seeds,
            baseline_seeds=baseline_seeds,
            until_resolved=until_resolved,
            max_seeds=max_seeds,
            smoke=self.smoke,
        )

    def list_assignments(self) -> tuple[str, ...]:
        """The `key=value` of each --set and of the lines of each --config. PlanError if a file cannot be used."""
        return merge_assignments(self.config or (), self.assignments or ())

    def list_choices(self, launch: LaunchOptions) -> PlacementChoices:
        """What was typed of the preset, of adapters (also rank 0 for none) and of GPUs."""
        gpu_options = (self.model, launch.gpus, self.gpus_per_exp, self.gpu_memory_utilization, launch.gpu_memory_gib)
        return PlacementChoices(
            self.preset,
            has_adapters=names_adapters(assignment.partition("=")[0] for assignment in self.list_assignments()),
            has_gpus=(*gpu_options, launch.address) != (None,) * 6,
            command=outputs.format_command_line(),
        )


class Launch(NamedTuple):
    """The options that say where and how to run, which all commands share that train."""

    gpus: opt.Gpus = None
    gpu_memory_gib: opt.GpuMemoryGib = None
    max_concurrent: opt.MaxConcurrent = None
    max_hours: opt.MaxHours = None
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED
    wandb: opt.Wandb = None
    wandb_project: opt.WandbProject = None
    address: opt.Address = None

    def make_options(self) -> LaunchOptions:
        """The same options with the statuses as a list. PlanError for a status that does not exist, and for no time."""
        if self.max_hours == 0:
            raise PlanError("--max-hours 0 leaves no time to train: type hours, such as --max-hours 8.5.")
        return LaunchOptions(
            self.gpus,
            self.gpu_memory_gib,
            self.max_concurrent,
            self.wandb,
            self.address,
            parse_skipped_statuses(self.skip_statuses),
            self.max_hours,
            self.wandb_project,
        )


class TypedAgain(NamedTuple):
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


def add_group(name: str, group: type[Any]) -> Callable[[Command], Command]:
    """A decorator that gives a command an option per field of `group`, a NamedTuple with annotations of `options`.

    name: the parameter of the command that receives the group.
    """
    hints = get_type_hints(group, include_extras=True)
    options = [
        inspect.Parameter(
            field, inspect.Parameter.KEYWORD_ONLY, default=group._field_defaults[field], annotation=hints[field]
        )
        for field in group._fields
    ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run_with_group(**arguments: Any) -> None:
            values = {field: arguments.pop(field) for field in group._fields}
            command(**{name: group(**values)}, **arguments)

        return _replace_parameter(run_with_group, command, name, options)

    return decorate


def _replace_parameter(wrapper: Command, command: Command, name: str, options: list[inspect.Parameter]) -> Command:
    """Give `wrapper` the signature of `command` in which `options` take the place of the parameter `name`.

    All parameters become keyword-only, because one with a default may then precede one without.
    """
    signature = inspect.signature(command)
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]
    position = [parameter.name for parameter in parameters].index(name)
    parameters[position : position + 1] = options
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper


def add_axis_options(studies: Iterable[Study]) -> Callable[[Command], Command]:
    """A decorator that gives a command an option for every flag that one of `studies` declares for its axis.

    The command receives all of these options as one argument `axes`: for each flag, the text that was typed, or
    None. In the help they appear at the position of `axes` among the parameters. Each has both spellings (--kl-values,
    --kl_values).
    """
    studies_by_flag: dict[str, list[Study]] = {}
    for study in studies:
        if study.axis.option != VALUES_OPTION:  # --values is an option of the command itself
            studies_by_flag.setdefault(study.axis.option, []).append(study)
    parameter_names = {flag: flag.strip("-").replace("-", "_") for flag in studies_by_flag}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run_with_axes(**arguments: Any) -> None:
            command(axes={flag: arguments.pop(name) for flag, name in parameter_names.items()}, **arguments)

        options = []
        for flag, name in parameter_names.items():
            option = Option(*_make_spellings(flag), metavar="LIST", help=_format_help(studies_by_flag[flag]))
            annotation = Annotated[str | None, option]
            options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
        return _replace_parameter(run_with_axes, command, "axes", options)

    return decorate


def _make_spellings(flag: str) -> list[str]:
    """The flag as declared, with hyphens, and with underscores; each spelling once."""
    bare_flag = flag.removeprefix("--")
    return list(dict.fromkeys([flag, f"--{bare_flag.replace('_', '-')}", f"--{bare_flag.replace('-', '_')}"]))


def _format_help(studies: list[Study]) -> str:
    """Help text of a flag: the axis if one study declares it, else that it takes named arms."""
    axis = studies[0].axis
    example = ",".join((*axis.value_groups, *axis.grids["laptop"])[:2])
    if len(studies) == 1:
        return f"Study {studies[0].name}: values of {axis.setting}, for example {example}."
    names = f"{studies[0].name}, {studies[1].name}{', ...' * (len(studies) > 2)}"
    kinds = "arms or groups" if axis.value_groups else "arms"
    return f"Studies {names}: names of {kinds}, for example {example}."
