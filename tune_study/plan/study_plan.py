"""From a study and what was typed to the list of its runs: names, settings, places. Pure; no Ray."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces import STUDIES, SUITES
from search_spaces.declaration.family import value_label
from search_spaces.declaration.study import Study
from search_spaces.language_model.family import run_config
from trainable.config.run_config import ConfigError, RunConfig, canonical_key, field_names, with_overrides
from trainable.config.setting_types import shown
from trainable.config.study_config import StudyConfig
from trainable.storage.uris import below

MOST_SEEDS = 401
"""The seeds 0 to 400, which are those that RunConfig takes."""

LONGEST_NAME, LONGEST_PATH = 240, 3800
"""Bytes of a file's name and of its path; disks allow 255 and 4096, of which some are for endings such as `.log`."""

BOOL_WORDS = {"true": True, "1": True, "yes": True, "y": True, "false": False, "0": False, "no": False, "n": False}


class PlanError(ValueError):
    """A study that cannot be run as asked; the message says what was asked, what is allowed and what to type."""


@dataclass(frozen=True)
class RunSpec:
    """One run: one arm with one seed. `log` and `checkpoints` are relative to the output folder."""

    run_id: str
    study: str
    arm: str
    label: str
    seed: int
    experiment_name: str
    config: StudyConfig
    log: Path
    checkpoints: Path

    @property
    def ppo(self) -> RunConfig:
        """Its settings, where it fine-tunes a language model with PPO; TypeError where it does not."""
        return run_config(self.config)

    @property
    def steps(self) -> int:
        """Training steps asked for."""
        return self.config.trainer.total_training_steps


@dataclass(frozen=True)
class StudyPlan:
    """All runs of a study, and where they go. `base` is what the arms share, before the axis.

    storage: the URI of the folder in which the study's own folder is, where rows and states are kept in a storage.
    """

    study: Study
    preset: str
    preset_reason: str
    base: StudyConfig
    values: tuple[str, ...]
    seeds: tuple[int, ...]
    output: Path
    run: str
    runs: tuple[RunSpec, ...]
    storage: str | None = None

    @property
    def ppo(self) -> RunConfig:
        """`base`, where the study fine-tunes a language model with PPO; TypeError where it does not."""
        return run_config(self.base)

    @property
    def model(self) -> str | None:
        """Path of the language model that is fine-tuned; None where the study trains another kind of model."""
        return self.study.family.loads(self.base) if self.study.family.fine_tunes else None

    @property
    def trials(self) -> tuple[tuple[RunSpec, ...], ...]:
        """The runs that one Tune trial carries each: one, or all seeds of an arm."""
        if not self.study.family.seeds_together:
            return tuple((spec,) for spec in self.runs)
        return tuple(tuple(spec for spec in self.runs if spec.arm == value) for value in self.values)

    @property
    def stored(self) -> str | None:
        """The URI of the study's own folder in its storage; None without one."""
        return None if self.storage is None else below(self.storage, self.run)

    @property
    def folder(self) -> Path:
        """results/<run>: the study's own folder, and Tune's."""
        return self.output / "results" / self.run

    @property
    def summary_log(self) -> Path:
        """Where the summary is written, below logs/."""
        return self.output / "logs" / self._filled(self.study.names.summary_log)

    @property
    def wandb_project(self) -> str:
        """The project of its runs in W&B."""
        return self._filled(self.study.names.wandb_project)

    @property
    def baseline(self) -> str | None:
        """The arm that is the study's baseline, as it was typed; None where the values have none."""
        name = self._filled(self.study.baseline)
        wanted = _number(name)
        same = [value for value in self.values if value == name or _is_equal(_number(value), wanted)]
        return same[0] if same else None

    def _filled(self, template: str) -> str:
        """A template of the whole study, filled in."""
        return template.format(run=self.run, **self.study.family.words(self.base))

    def run_dir(self, run_id: str) -> Path:
        """Where one run keeps its rows, status and rolling state."""
        return self.folder / "runs" / run_id


def find_study(name: str, kl_type: str | None = None) -> Study:
    """The study of that name (`top_p` finds `top-p`), or PlanError that lists all.

    kl_type: chooses one of its variants; None: the one that the study fixes.
    """
    study = STUDIES.get(name.replace("_", "-"))
    if study is None:
        raise PlanError(
            f"There is no study `{shown(name)}`. The studies are {', '.join(STUDIES)}: type one of them, "
            f"for example `python -m tune_study run kl`, or for `run` a suite of studies: {', '.join(SUITES)}."
        )
    if kl_type is None:
        return study
    if not study.variants:
        instead = "type --set actor.kl_loss_type=NAME"
        if "actor.kl_loss_type" in study.axis.swept:
            instead = f"it has all of them; one alone is `run smoke --kl-type {shown(kl_type)}`"
        raise PlanError(f"--kl-type does not belong to study {study.name}: {instead}.")
    if kl_type not in study.variants:
        raise PlanError(f"--kl-type {shown(kl_type)} is no loss of the grid: type one of {', '.join(study.variants)}.")
    return study.variant(kl_type)


def expand(study: Study, typed: Sequence[str]) -> tuple[str, ...]:
    """The values that `typed` stand for: a group's name for its members, any other for itself.

    A value counts once, though it was typed beside its group. PlanError for no name, and for one that is given twice.
    """
    members, grid = study.axis.members, study.axis.grids["paper"]
    if not members:
        return tuple(typed)
    for word in typed:
        if word not in members and word not in grid:
            raise PlanError(
                f"{study.axis.option} {shown(word)} is no group: type some of {','.join(members)}, or names of single "
                f"arms, the column `arm` of --dry-run with the same --kl-type."
            )
    twice = [word for number, word in enumerate(typed) if word in typed[:number]]
    if twice:
        raise PlanError(f"{study.axis.option} has {shown(twice[0])} twice: give each group once.")
    wanted = {value for word in typed for value in members.get(word, (word,))}
    return tuple(value for value in grid if value in wanted)


def parse_values(text: str, option: str) -> tuple[str, ...]:
    """The entries of a comma list as they were typed, blanks around them removed."""
    values = tuple(entry.strip() for entry in text.split(","))
    if not all(values):
        raise PlanError(
            f"{option} '{shown(text)}' has an empty entry: type values with one comma between, like 0,0.01,0.1."
        )
    return values


def parse_bool(text: str, option: str) -> bool:
    """True or False from the words that the published scripts take."""
    word = text.strip().lower()
    if word not in BOOL_WORDS:
        raise PlanError(f"{option} '{shown(text)}' is neither True nor False: type {option} True or {option} False.")
    return BOOL_WORDS[word]


def collect_overrides(
    study: Study, options: Mapping[str, object], assignments: Iterable[str], axis_is_free: bool = False
) -> dict[str, object]:
    """Settings of the command line as one dict of dotted fields, each set once and none of them the study's own axis.

    options: dotted field -> value for the options that were typed. assignments: the `key=value` of each --set.
    axis_is_free: the axis may be set as well, as for a probe, which has no option for it.
    """
    overrides: dict[str, object] = dict(options)
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise PlanError(
                f"--set '{shown(assignment)}' has no value: type --set key=value, like --set actor.lr=1e-5."
            )
        name = canonical_key(key.strip(), study.family.config)
        if name == "seed":
            raise PlanError("`seed` is no setting of a study: type --seeds N to run the seeds 0 to N-1.")
        if name in overrides:
            raise PlanError(f"`{name}` is given twice (`--set {shown(assignment)}` is the second): give it once.")
        overrides[name] = value.strip()
    for name in set() if axis_is_free else study.axis.swept & overrides.keys():
        raise PlanError(
            f"`{name}` is what the arms of study {study.name} differ in: choose its values with {study.axis.option}."
        )
    return overrides


def values_said(study: Study, values: Sequence[str]) -> str:
    """The values of an axis in words; of a grid, how many there are of each group."""
    members = study.axis.members
    if not members:
        return ",".join(values)
    counts = {group: len(set(values).intersection(arms)) for group, arms in members.items()}
    return ", ".join(f"group {group} ({count} arms)" for group, count in counts.items() if count)


def make_plan(
    study: Study,
    preset: str,
    preset_reason: str,
    overrides: Mapping[str, object],
    values: Sequence[str] | None,
    n_seeds: int | None,
    output: Path,
) -> StudyPlan:
    """The plan of a new study: the family's defaults, the preset, what the study fixes, then `overrides`.

    values: axis values as typed, None for the preset's grid. n_seeds: a count, None for the preset's.
    """
    presets = study.family.presets
    if preset not in presets:
        raise PlanError(f"There is no preset `{shown(preset)}`: type --preset {' or --preset '.join(presets)}.")
    count = n_seeds if n_seeds is not None else study.seeds or study.family.seeds[preset]
    if count < 1:
        raise PlanError(f"--seeds {shown(count)} leaves nothing to run: type --seeds 1 or more.")
    if count > MOST_SEEDS:
        raise PlanError(f"--seeds {shown(count)} is more than there are: type --seeds {MOST_SEEDS} or less.")
    base = with_overrides(_defaults(study), {**presets[preset], **study.fixed, **study.presets.get(preset, {})})
    base = with_overrides(base, overrides)
    chosen = tuple(values) if values is not None else study.axis.grids[preset]
    return build_plan(study, preset, preset_reason, base, chosen, tuple(range(count)), output)


def build_plan(
    study: Study,
    preset: str,
    preset_reason: str,
    base: StudyConfig,
    values: tuple[str, ...],
    seeds: tuple[int, ...],
    output: Path,
) -> StudyPlan:
    """The plan of `values` x `seeds`, the first seed of every arm first, so that a study cut short is balanced."""
    check_values(study, values)
    if not seeds or len(set(seeds)) < len(seeds) or not set(seeds) <= set(range(MOST_SEEDS)):
        raise PlanError(f"The seeds {shown(list(seeds))} are not different numbers from 0 to {MOST_SEEDS - 1}.")
    run = study.names.run.format(**study.family.words(base))
    arms = {value: arm_config(study, base, value) for value in values}
    runs = tuple(_spec(study, run, value, arms[value], seed) for seed in seeds for value in values)
    plan = StudyPlan(study, preset, preset_reason, base, values, seeds, output.absolute(), run, runs)
    _check_paths(plan)
    return plan


def _defaults(study: Study) -> StudyConfig:
    """The settings of the study's family when nothing is said."""
    return study.family.config.model_validate({})


def arm_config(study: Study, base: StudyConfig, value: str) -> StudyConfig:
    """The settings of the arm at `value`, or ConfigError that names the option."""
    if value not in study.axis.named and study.axis.setting not in field_names(study.family.config):
        raise ConfigError(
            f"{study.axis.option} {shown(value)} is no arm of study {study.name}. {_kinds_of_values(study)}"
        )
    try:
        return with_overrides(base, study.axis.settings(value, base))
    except ConfigError as error:
        raise ConfigError(f"{study.axis.option} {shown(value)}: {error} {_kinds_of_values(study)}") from None


def _kinds_of_values(study: Study) -> str:
    words = ", ".join(study.axis.named)
    if not any(_number(value) is not None for grid in study.axis.grids.values() for value in grid):
        return f"A value is one of {words}."
    return f"A value is a number or one of the words {words}." if words else "A value is a number."


def check_values(study: Study, values: Sequence[str]) -> None:
    """PlanError if there is none, one holds `_`, or two are the same number or would share their files."""
    option = study.axis.option
    if not values:
        raise PlanError(f"{option} has no value: type at least one, like {study.baseline}.")
    numbers: dict[float | str, str] = {}
    labels: dict[str, str] = {}
    for value in values:
        now = shown(value)
        if "_" in value and value not in study.axis.named:
            raise PlanError(f"{option} has the value {now}: type numbers without `_`, like 0,0.1.")
        number, label = _number(value), value_label(value)
        key = value if number is None else number
        if key in numbers:
            raise PlanError(
                f"{option} has the value {now} twice ({shown(numbers[key])} and {now}): give each value once."
            )
        if label in labels:
            raise PlanError(
                f"{option} has {shown(labels[label])} and {now}, whose files would share the label `{shown(label)}` "
                f"(labels drop the dots): run one of them with another --output."
            )
        numbers[key] = labels[label] = value


def _check_paths(plan: StudyPlan) -> None:
    """PlanError if a run's files would have names that a disk does not take, or that no JSON file could hold."""
    for spec in plan.runs:
        for place in (plan.run_dir(spec.run_id), plan.output / spec.log, plan.output / spec.checkpoints):
            try:
                sizes = [len(part.encode()) for part in place.parts]
            except UnicodeEncodeError:
                raise PlanError(f"--output {shown(plan.output)} is not in UTF-8: type another folder.") from None
            if max(sizes) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH:
                raise PlanError(
                    f"The name {shown(place.name)} or the path to it is longer than disks allow: type shorter values, "
                    f"or a shorter --model or --output."
                )


def changed_settings(config: StudyConfig) -> dict[str, Any]:
    """Dotted fields of `config` that differ from the defaults of its kind, as JSON; the seed left out."""
    kind = type(config)
    ours = flat_settings(config.model_dump(mode="json"))
    defaults = flat_settings(kind.model_validate({}).model_dump(mode="json"))
    return {name: ours[name] for name in field_names(kind) if name != "seed" and ours[name] != defaults[name]}


def flat_settings(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict of dotted fields."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _spec(study: Study, run: str, value: str, config: StudyConfig, seed: int) -> RunSpec:
    """One run with its templates filled in; a seed above 0 is part of every name."""
    words = template_words(study, run, value, config, seed)
    name = study.names.experiment.format(**words)
    words["experiment"] = run_id = name + words["seed"]
    return RunSpec(
        run_id=run_id,
        study=study.name,
        arm=value,
        label=words["label"],
        seed=seed,
        experiment_name=name,
        config=config.model_copy(update={"seed": seed}),
        log=Path("logs") / study.names.log.format(**words),
        checkpoints=Path("model_saving") / study.names.checkpoints.format(**words),
    )


def template_words(study: Study, run: str, value: str, config: StudyConfig, seed: int) -> dict[str, str]:
    """What the templates of one run may use; see `Study`. value: of the axis, as it was typed."""
    return {
        **study.family.words(config),
        "run": run,
        "arm": value,
        "label": value_label(value),
        "seed": f"-seed{seed}" if seed else "",
    }


def _number(text: str) -> float | None:
    """The number that `text` spells, or None for a word."""
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _is_equal(left: float | None, right: float | None) -> bool:
    return left is not None and left == right
