"""Plan a study: its runs with their names, settings and paths. Pure functions, without Ray."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from search_spaces.declaration.study import Study, make_value_label
from search_spaces.language_model.family import as_run_config
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import PartFile, list_part_files, pin_parts
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_field_names
from trainable.config.setting_types import flatten_settings, format_value
from trainable.families import Settings
from trainable.runs.study_record import (
    MAX_RUNS,
    MAX_SEEDS,
    ConfirmedStudy,
    ForkedStudy,
    RunEntry,
    Search,
    WandbMode,
    WandbTarget,
    is_run_id,
)
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import list_resume_options
from tune_study.plan.search import make_point_study
from tune_study.plan.storage_uri import join_uri
from tune_study.plan.typed_settings import is_same_number, parse_number

MAX_NAME_BYTES, MAX_PATH_BYTES = 240, 3800
"""Maximum bytes of a file's name and path. File systems allow 255 and 4096; the rest is for endings like `.log`."""
WANDB_MODES: tuple[WandbMode, ...] = get_args(WandbMode)
NO_WANDB = WandbTarget()


@dataclass(frozen=True)
class RunSpec:
    """One run: one arm with one seed."""

    run_id: str
    """Unique name of the run and of its folder."""
    arm: str
    """Value of the axis, as it was typed."""
    seed: int
    experiment_name: str
    """Name of the arm's experiment, the same for all seeds."""
    config: BaseRunConfig
    """All settings of the run."""
    log_path: Path
    """Path of the run's log, relative to the output folder."""
    checkpoint_dir: Path
    """Folder of the run's saved checkpoints, relative to the output folder."""

    @property
    def name(self) -> str:
        """Name of the run where a person reads it, within its study."""
        return f"arm {self.arm} seed {self.seed}"

    @property
    def ppo_config(self) -> RunConfig:
        """The settings as a RunConfig. Raises TypeError if the run does not fine-tune a language model with PPO."""
        return as_run_config(self.config)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best validation is kept. Only language models have the setting."""
        return bool(getattr(self.config.trainer, "keep_best", False))

    @property
    def keeps_last(self) -> bool:
        """Whether the last state is kept after the run's end. It always is in families without the setting."""
        return bool(getattr(self.config.trainer, "keep_last", True))

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.config.trainer.total_training_steps


class ParentRun(NamedTuple):
    """The run of another study that a run of a fork continues."""

    entry: RunEntry
    """Its entry in study.json."""
    run_dir: Path
    """Folder of its rows and rolling checkpoints."""
    checkpoint_dir: Path
    """Folder of its saved checkpoints."""
    step: int
    """The step after which it is continued."""


@dataclass(frozen=True)
class StudyPlan:
    """All runs of a study, and the paths of their files."""

    study: Study
    preset: str
    preset_reason: str
    """Why the preset was chosen."""
    base_config: BaseRunConfig
    """The settings that the arms share, before the axis changes them."""
    values: tuple[str, ...]
    """Axis values, as they were typed."""
    seeds: tuple[int, ...]
    """Seeds of every arm."""
    folder: Path
    """The study's folder, which Tune uses as well: <output>/results/<run>, or wherever it was moved."""
    run: str = ""
    """Name of the study, and of its folder unless it was renamed. `plan_runs` sets it."""
    runs: tuple[RunSpec, ...] = ()
    """One entry per run, the first seed of all arms first. `plan_runs` makes them."""
    storage: str | None = None
    """URI of the parent of the study's folder in a storage; None without a storage."""
    extra_seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Further seeds of single arms (the baseline, or arms that a look left open), by axis value."""
    max_seeds: int | None = None
    """Number of seeds per arm up to which seeds are added to open arms; None if seeds are fixed."""
    source: PartFile | None = None
    """The file that declares the study, without a path if Python code does; None for a study of this package."""
    confirms: ConfirmedStudy | None = None
    """The study that this one confirms, if any."""
    forks: ForkedStudy | None = None
    """The study whose runs this one continues with other settings, if any."""
    search: Search | None = None
    """The search that adds the arms; None if the arms are chosen beforehand."""
    points: Mapping[str, Settings] = field(default_factory=dict)
    """The settings of each arm of a search, its confirmation or a fork; empty for other studies."""
    wandb: WandbTarget = NO_WANDB
    """Where this start of the study logs to W&B."""
    earlier_steps: tuple[int, ...] = ()
    """The numbers of steps before the study was made longer, ascending."""

    @property
    def has_next_round(self) -> bool:
        """Whether a search draws more points when its runs have ended."""
        return self.search is not None and len(self.points) < self.search.num_points

    @property
    def code(self) -> tuple[PartFile, ...]:
        """The plug-in files that the runs use."""
        return list_part_files(self.base_config, *(spec.config for spec in self.runs))

    @property
    def resume_options(self) -> tuple[str, ...]:
        """What `resume` needs besides the folder."""
        return list_resume_options(self.source.path if self.source else None, [file.path for file in self.code])

    @property
    def ppo_config(self) -> RunConfig:
        """`base_config` as a RunConfig. Raises TypeError if the study does not fine-tune a language model with PPO."""
        return as_run_config(self.base_config)

    @property
    def ppo_configs(self) -> list[RunConfig]:
        """The configuration of each arm, with one of its seeds; empty without a language model."""
        is_fine_tuning = self.study.family.is_fine_tuning
        return list({spec.arm: spec.ppo_config for spec in self.runs}.values()) if is_fine_tuning else []

    @property
    def model(self) -> str | None:
        """Path of the language model that is fine-tuned; None if the study trains another kind of model."""
        return self.ppo_config.model.path if self.study.family.is_fine_tuning else None

    @property
    def model_paths(self) -> tuple[str, ...]:
        """The language models that runs load, each once: policies and references."""
        return tuple(dict.fromkeys(path for config in self.ppo_configs for path in config.model_paths))

    @property
    def trials(self) -> tuple[tuple[RunSpec, ...], ...]:
        """The runs of each Tune trial: one run, or the runs of all seeds of an arm."""
        if not self.study.family.has_batched_seeds:
            return tuple((spec,) for spec in self.runs)
        return tuple(tuple(spec for spec in self.runs if spec.arm == value) for value in self.values)

    def get_trial_name(self, spec: RunSpec) -> str:
        """Return the name of the Tune trial that trains a run: its run_id, without a seed if it trains several."""
        return spec.experiment_name if self.study.family.has_batched_seeds else spec.run_id

    @property
    def max_runs_per_trial(self) -> int:
        """The number of runs of the Tune trial with the most runs."""
        return max(len(specs) for specs in self.trials)

    @property
    def num_baseline_seeds(self) -> int:
        """Number of seeds of the baseline, or of every arm if the baseline is not among the values."""
        return len(self.seeds) + len(self.extra_seeds.get(self.baseline or "", ()))

    @property
    def study_uri(self) -> str | None:
        """The URI of the study's folder in its storage, if it has one."""
        return None if self.storage is None else join_uri(self.storage, self.run)

    @property
    def output(self) -> Path:
        """Parent folder of logs/ and model_saving/; see `find_output`."""
        return find_output(self.folder, self.run)

    @property
    def summary_log(self) -> Path:
        """Path of the summary log, which has a line per ended run."""
        return self.output / "logs" / self._format_template(self.study.name_templates.summary_log)

    @property
    def wandb_project(self) -> str:
        """Name of the W&B project of the study's runs: the chosen one, or the study's."""
        return self.wandb.project or self._format_template(self.study.name_templates.wandb_project)

    @property
    def baseline(self) -> str | None:
        """The value of the study's baseline, as it was typed; None if it is not among the values."""
        name = self.baseline_name
        return next((value for value in self.values if value == name or is_same_number(value, name)), None)

    @property
    def baseline_name(self) -> str:
        """The study's baseline, which need not be among the values."""
        return self._format_template(self.study.baseline)

    def _format_template(self, template: str) -> str:
        """Fill in a template of the whole study."""
        return fill_template(template, run=self.run, **self.study.family.make_template_values(self.base_config))

    def fill_run_template(self, template: str, spec: RunSpec, **fields: object) -> str:
        """Fill in a template of a run, with the name of its arm's experiment unless `fields` has another one."""
        run_fields = make_template_values(self.study, self.run, spec.arm, spec.config, spec.seed)
        return fill_template(template, **{**run_fields, "experiment": spec.experiment_name, **fields})

    def get_run_dir(self, run_id: str) -> Path:
        """Return the folder of a run's rows, status and rolling checkpoint."""
        return self.folder / "runs" / run_id

    def find_parent(self, spec: RunSpec) -> ParentRun | None:
        """Find the run that a run of a fork continues; None in other studies."""
        if self.forks is None:
            return None
        folder = self.folder.with_name(self.forks.folder)
        entry = next(entry for entry in self.forks.parents if entry.seed == spec.seed)
        checkpoint_dir = find_output(folder, self.forks.run) / entry.checkpoints
        return ParentRun(entry, folder / "runs" / entry.run_id, checkpoint_dir, self.forks.steps[spec.arm])


class ResourcePlan(NamedTuple):
    """The resources of a study."""

    bundles: tuple[dict[str, float], ...]
    """Resources that one run reserves, one dict per bundle."""
    cpus: int
    """Number of CPUs that Ray may use."""
    gpus: tuple[str, ...]
    """Ids of the GPUs that Ray may use; empty on a cluster, where Ray chooses a run's GPUs as it starts."""
    gpu_slots: tuple[str, ...]
    """The GPUs of each concurrent run, one entry per slot; empty for runs without a GPU."""
    max_concurrent: int
    """Maximum number of concurrent trials."""
    gpu_label: str
    """Label of one run's GPUs in the published form, such as 1xH100."""
    notes: tuple[str, ...] = ()
    """Remarks that the plan prints, such as settings without an effect."""
    cluster_address: str = ""
    """Address of the Ray cluster; empty for this machine, where the study starts Ray itself."""
    runs_per_node: int = 0
    """Maximum number of concurrent runs per node of the cluster; 0 without a cluster."""
    is_elastic: bool = False
    """Whether Ray places as many trials as the cluster has room for, also on nodes that join later."""
    waits_for_nodes: bool = False
    """Whether the study starts, and goes on, without a node that can hold a run."""
    avoided_nodes: tuple[str, ...] = ()
    """Ray's ids of the nodes of the cluster on which no run is placed."""
    placement_settings: Mapping[str, object] = MappingProxyType({})
    """Settings of the trials that follow from the GPUs' memory and change no result."""


def find_output(folder: Path, run: str) -> Path:
    """Find the parent of logs/ and model_saving/ of the study `run`: <output> for <output>/results/<run>.

    A folder that was moved or renamed alone contains both itself, so that it shares no file with a study beside it.
    """
    return folder.parent.parent if folder.parts[-2:] == ("results", run) else folder


def make_plan(
    study: Study,
    preset: str,
    preset_reason: str,
    overrides: Mapping[str, object],
    values: Sequence[str] | None,
    n_seeds: int | None,
    output: Path,
    n_baseline_seeds: int | None = None,
) -> StudyPlan:
    """Plan a new study. Raises PlanError or ConfigError if it cannot be run.

    Settings come from five sources, each of which overrides the ones before it: the family's defaults and preset, the
    study's fixed settings and preset, and `overrides` (values by dotted setting). None means for `values` all of the
    preset, for `n_seeds` the study's number, else the preset's, and for `n_baseline_seeds`, a minimum, the study's.
    """
    check_preset(study, preset)
    count = n_seeds if n_seeds is not None else study.n_seeds or study.family.presets[preset].n_seeds
    if count < 1:
        raise PlanError(f"--seeds {format_value(count)} leaves nothing to run: type --seeds 1 or more.")
    baseline_count = study.baseline_seeds if n_baseline_seeds is None else n_baseline_seeds
    for option, number in (("--seeds", count), ("--baseline-seeds", baseline_count)):
        if number > MAX_SEEDS:
            raise PlanError(f"{option} {format_value(number)} is above the maximum: type {option} {MAX_SEEDS} or less.")
    base_config = pin_parts(apply_overrides(make_base_config(study, preset), overrides))
    chosen_values = tuple(values) if values is not None else study.get_grid(preset)
    folder = output.absolute() / "results" / _name_study(study, base_config)
    seeds = tuple(range(count))
    plan = plan_runs(StudyPlan(study, preset, preset_reason, base_config, chosen_values, seeds, folder))
    if plan.baseline is None or baseline_count <= count:
        return plan
    return add_seeds(plan, {plan.baseline: range(count, baseline_count)})


def set_max_seeds(plan: StudyPlan, max_seeds: int, least_seeds: int = 2) -> StudyPlan:
    """Let a study add seeds to open arms, up to `max_seeds` per arm; with fewer than `least_seeds`, no test decides.

    Raises PlanError if that is of no use.
    """
    if plan.baseline is None or len(plan.values) < 2:
        problem = "and the study has no other arm" if plan.baseline else "which is not among the study's arms"
        raise PlanError(
            f"--until-resolved compares arms with the baseline {plan.study.baseline}, {problem}: choose other values "
            f"of {plan.study.axis.option}."
        )
    least = max(len(plan.seeds) + 1, least_seeds)
    if not least <= max_seeds <= MAX_SEEDS:
        raise PlanError(
            f"--max-seeds {format_value(max_seeds)} is not a number from {least} to {MAX_SEEDS}: all arms get "
            f"{len(plan.seeds)} seeds, and the test decides nothing with fewer than {least_seeds}."
        )
    return replace(plan, max_seeds=max_seeds)


def add_seeds(plan: StudyPlan, extra_seeds: Mapping[str, Iterable[int]]) -> StudyPlan:
    """Add seeds of single arms, by axis value, to those that the arms have."""
    all_seeds = {value: (*plan.extra_seeds.get(value, ()), *extra_seeds.get(value, ())) for value in plan.values}
    return plan_runs(replace(plan, extra_seeds=all_seeds))


def set_points(plan: StudyPlan, points: Mapping[str, Settings]) -> StudyPlan:
    """Replace the arms of a search or of its confirmation by `points`."""
    study = make_point_study(plan.study, points)
    return plan_runs(replace(plan, study=study, values=tuple(points), points=points))


def plan_runs(plan: StudyPlan) -> StudyPlan:
    """Plan the runs of the values x seeds of a plan, and of its extra seeds; those among the seeds are left out.

    The first seed of all arms comes first, so that an interrupted study has about as many runs of every arm.
    """
    study, values, seeds = plan.study, plan.values, plan.seeds
    check_values(study, values)
    further = {value: tuple(sorted({*plan.extra_seeds.get(value, ())} - {*seeds})) for value in values}
    further = {value: added for value, added in further.items() if added}
    all_seeds = sorted({*seeds}.union(*further.values()))
    if not seeds or len(set(seeds)) < len(seeds) or not set(all_seeds) <= set(range(MAX_SEEDS)):
        raise PlanError(f"The seeds {format_value(all_seeds)} are not distinct numbers from 0 to {MAX_SEEDS - 1}.")
    run = _name_study(study, plan.base_config)
    arms = {value: make_arm_config(study, plan.base_config, value) for value in values}
    num_runs = len(values) * len(seeds) + sum(map(len, further.values()))
    if num_runs > MAX_RUNS:
        raise PlanError(
            f"{len(values)} values of {study.axis.option} and {len(seeds)} seeds are {num_runs} runs, "
            f"and a study may have at most {MAX_RUNS}. Type fewer values or fewer --seeds."
        )
    # The order of `seeds` is kept, since study.json of an earlier start may have another one.
    runs, templates = list[RunSpec](), study.name_templates
    for seed, value in itertools.product(dict.fromkeys((*seeds, *all_seeds)), values):
        if seed in seeds or seed in further.get(value, ()):
            fields = make_template_values(study, run, value, arms[value], seed)
            name = fill_template(templates.experiment, **fields)
            fields["experiment"] = run_id = name + fields["seed"]
            log_path = Path("logs") / fill_template(templates.log, **fields)
            checkpoint_dir = Path("model_saving") / fill_template(templates.checkpoints, **fields)
            config = arms[value].model_copy(update={"seed": seed})
            runs.append(RunSpec(run_id, value, seed, name, config, log_path, checkpoint_dir))
    plan = replace(plan, run=run, runs=tuple(runs), extra_seeds=further)
    _check_names(plan)
    return plan


def _name_study(study: Study, base_config: BaseRunConfig) -> str:
    return fill_template(study.name_templates.run, **study.family.make_template_values(base_config))


def check_preset(study: Study, preset: str) -> None:
    """Raise PlanError for an unknown preset, and for one under which a study from a file has no axis values."""
    presets = study.family.presets
    if preset not in presets:
        raise PlanError(f"There is no preset `{format_value(preset)}`: type --preset {' or --preset '.join(presets)}.")
    try:
        study.get_grid(preset)
    except KeyError:
        raise PlanError(
            f"Study {study.name} has no values of {study.axis.setting} under preset {preset}: type --preset "
            f"{next(iter(study.axis.grids))}, or add values to its axis."
        ) from None


def make_base_config(study: Study, preset: str) -> BaseRunConfig:
    """Make the settings that the arms share under a preset, before the command line and the axis change them."""
    return apply_overrides(study.family.config_class.model_validate({}), study.make_preset_settings(preset))


def make_arm_config(study: Study, base_config: BaseRunConfig, value: str) -> BaseRunConfig:
    """Make the settings of the arm `value`. Raises ConfigError, naming the option, for an invalid value."""
    # Only an axis over a single setting takes values without a name in the study.
    if value not in study.axis.named_settings and study.axis.setting not in list_field_names(study.family.config_class):
        raise ConfigError(
            f"{study.axis.option} {format_value(value)} is not an arm of study {study.name}. {_describe_values(study)}"
        )
    try:
        return pin_parts(apply_overrides(base_config, study.axis.make_settings(value, base_config)))
    except ConfigError as error:
        raise ConfigError(f"{study.axis.option} {format_value(value)}: {error} {_describe_values(study)}") from None


def _describe_values(study: Study) -> str:
    """Describe the allowed values of a study's axis in a sentence, with an example to type."""
    named_values = ", ".join(study.axis.named_settings)
    if not any(parse_number(value) is not None for grid in study.axis.grids.values() for value in grid):
        return f"A value is one of {named_values}."
    kinds = f"a number or one of {named_values}" if named_values else "a number"
    return f"A value is {kinds}. Try {study.axis.option} {','.join(list(study.axis.grids.values())[-1][:2])}."


def check_values(study: Study, values: Sequence[str]) -> None:
    """Raise PlanError if there is no value, or if values cannot name arms, are equal or would share their files."""
    option = study.axis.option
    if not values:
        raise PlanError(f"{option} has no value: type at least one, like {study.baseline}.")
    # 0.1 and 0.10 are one number, and would be two arms with the same settings.
    numbers: dict[float | str, str] = {}
    labels: dict[str, str] = {}
    for value in values:
        quoted, label, number = format_value(value), make_value_label(value), parse_number(value)
        if not label.strip():
            raise PlanError(f"{option} has the value `{quoted}`, which cannot name an arm: it needs letters or digits.")
        key = value if number is None else number
        if key in numbers:
            raise PlanError(
                f"{option} has the value {quoted} twice ({format_value(numbers[key])} and {quoted}): give "
                "each value once."
            )
        if label in labels:
            raise PlanError(
                f"{option} has {format_value(labels[label])} and {quoted}, whose files would share the label "
                f"`{format_value(label)}` (labels drop the dots): run one of them with another --output."
            )
        numbers[key] = labels[label] = value


def check_level_seeds(plan: StudyPlan) -> None:
    """Raise PlanError if a run of a game would be validated on levels with seeds that it trains on.

    The bounds of the settings keep test levels apart. The column val_success_unseen leaves out levels that are equal
    by chance.
    """
    for spec in plan.runs if plan.study.family.is_fine_tuning else ():
        config = spec.ppo_config
        validated, free = config.validation_level_seeds, config.env.seed_train + len(config.training_level_seeds)
        for trained in (config.training_level_seeds, config.refill_level_seeds):
            if max(trained.start, validated.start) >= min(trained.stop, validated.stop):
                continue
            raise PlanError(
                f"env.seed_val={validated.start}: the validation levels have the seeds {validated.start} to "
                f"{validated.stop - 1}, and those from {trained.start} to {trained.stop - 1} are training levels of "
                f"{spec.run_id}, so its validation would measure what it was trained on: leave env.seed_train and "
                f"env.seed_val out, or type --set env.seed_val={free}."
            )


def _check_names(plan: StudyPlan) -> None:
    """Raise PlanError if a name or a path cannot be a file's, or if a template cannot be filled in."""
    _ = plan.summary_log, plan.wandb_project, plan.baseline_name  # each fills in a template
    plan.fill_run_template(plan.study.name_templates.summary, plan.runs[0])
    for name, arm in ((plan.run, ""), *((spec.run_id, spec.arm) for spec in plan.runs)):
        if not is_run_id(name):
            subject = f"The arm {format_value(arm)} of {plan.study.axis.option}" if arm else "The study"
            example = arm.replace("/", "-").strip("-.") or "my-arm"
            raise PlanError(
                f"{subject} would name a folder {format_value(name)}, and such a name has no `/`, no character that "
                f"cannot be shown, and no `.` at its start: type another name, such as {format_value(example)}."
            )
    for spec in plan.runs:
        for path in (plan.get_run_dir(spec.run_id), plan.output / spec.log_path, plan.output / spec.checkpoint_dir):
            try:
                name_bytes, path_bytes = [len(name.encode()) for name in path.parts], len(str(path).encode())
            except UnicodeEncodeError:
                raise PlanError(
                    f"The path {format_value(plan.folder)} is not in UTF-8: type another --output, or move the study."
                ) from None
            if max(name_bytes) > MAX_NAME_BYTES or path_bytes > MAX_PATH_BYTES:
                raise PlanError(
                    f"The name {format_value(path.name)} or the path to it is longer than file systems allow: type "
                    f"shorter values, a shorter --model or --output, or move the study to a shorter path."
                )


def find_changed_settings(config: BaseRunConfig) -> dict[str, Any]:
    """Find the settings, without the seed, that differ from the defaults, as JSON values by dotted name.

    Those that the study declares itself are among them, since another process does not know their defaults.
    """
    changed = config.model_dump(mode="json", exclude_defaults=True, exclude={"seed"})
    return flatten_settings({**changed, **config.model_dump(mode="json", include=set(config.declared_sections))})


def fill_template(template: str, **values: object) -> str:
    """Fill in a template of a study. Raises PlanError for a field that is not among `values`."""
    try:
        return template.format(**values)
    except (LookupError, ValueError, AttributeError):
        raise PlanError(
            f"The study declares {format_value(template)!r}, which is a template here and may have the fields "
            f"{', '.join(f'{{{name}}}' for name in values)}: correct it, or double the braces that are meant as text."
        ) from None


def make_template_values(study: Study, run: str, value: str, config: BaseRunConfig, seed: int) -> dict[str, str]:
    """Make the values for the templates of one run; see `NameTemplates`."""
    return {
        **study.family.make_template_values(config),
        "run": run,
        "arm": value,
        "label": make_value_label(value),
        "seed": f"-seed{seed}" if seed else "",  # seed 0 has the published names, which contain no seed
    }
