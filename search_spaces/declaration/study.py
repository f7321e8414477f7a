"""Declaration of a study: its question, base configuration, axis, contrasts and file names."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import shorten_part_name
from trainable.config.schedules import shorten_schedule
from trainable.families import Family, Settings

Contrasts = Mapping[str, tuple[tuple[str, str], ...]]
"""Pairs of arms that differ in one respect, by description of the comparison; a difference is first minus second."""


def keep_settings(settings: Settings, base: BaseRunConfig) -> Settings:
    """Return an arm's settings unchanged. This is the default of `Axis.adapt`: arms do not depend on `base`."""
    return settings


@dataclass(frozen=True)
class Axis:
    """The axis along which the arms of a study differ: one setting, or a set of named arms."""

    setting: str
    """The dotted setting, or a description of how named arms differ."""
    grids: Mapping[str, tuple[str, ...]]
    """For each preset, the axis values as they are typed. Variants of a preset may be omitted."""
    option: str = "--values"
    """The command-line flag for values of the axis; the published flag where there is one."""
    extra_settings: Settings = field(default_factory=dict)
    """Additional settings of every numeric value."""
    named_settings: Mapping[str, Settings] = field(default_factory=dict)
    """For each value that is a name, the settings that replace it."""
    value_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of values, by name; typing the name selects all of them."""
    adapt: Callable[[Settings, Any], Settings] = keep_settings
    """Adapts an arm's settings to the study's base configuration."""
    dose: str = ""
    """A numeric setting of the arms that breaks training if it is large. The report estimates the value at which half
    of the runs collapse, for each combination of the other settings. Empty if there is none."""
    factors: tuple[str, ...] = ()
    """Settings whose combinations are the arms. The report says which matters more."""

    def make_settings(self, value: str, base: BaseRunConfig) -> dict[str, object]:
        """Make the settings of the arm at `value` (a number or a key of `named_settings`) under the base config."""
        value_settings = self.named_settings.get(value, {**self.extra_settings, self.setting: value})
        return dict(self.adapt(value_settings, base))

    @property
    def swept_fields(self) -> frozenset[str]:
        """Dotted settings in which the arms differ."""
        named_fields = frozenset[str]().union(*self.named_settings.values())
        # If every value of the grids is a name, `setting` is a description rather than a field.
        has_only_names = set(self.named_settings) >= set().union(*self.grids.values())
        return named_fields if has_only_names else named_fields | {self.setting, *self.extra_settings}


def make_arms_axis(setting: str, arms: Mapping[str, Settings], **others: Any) -> Axis:
    """Make an axis of named arms, the same on a laptop and on paper. See `Axis` for `setting` and `others`."""
    return Axis(setting, dict.fromkeys(("laptop", "paper"), tuple(arms)), "--arms", named_settings=arms, **others)


def make_grid_axis(factors: Mapping[str, Sequence[str]]) -> Axis:
    """Make an axis over all combinations of the values of several settings.

    An arm is named after its values: `lr1e-4-ppo_epochs4`. factors: values by dotted setting, as they are typed.

    Example:
        >>> make_grid_axis({"actor.lr": ("1e-4", "1e-3"), "actor.ppo_epochs": ("1", "4")}).grids["laptop"][1]
        'lr1e-4-ppo_epochs4'
    """
    points = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return make_arms_axis(
        " x ".join(factors), {name_grid_point(point): point for point in points}, factors=tuple(factors)
    )


def make_grid_contrasts(factors: Mapping[str, Sequence[str]]) -> Contrasts:
    """Make the main-effect contrasts between the arms of `make_grid_axis(factors)`.

    A main effect compares a value of a factor with its first value, in pairs of arms that are otherwise equal.

    Example:
        >>> list(make_grid_contrasts({"actor.lr": ("1e-4", "1e-3"), "actor.ppo_epochs": ("1", "4")}))
        ['lr 1e-3 against 1e-4', 'ppo_epochs 4 against 1']
    """
    return {
        f"{_shorten_key(key)} {value} against {values[0]}": tuple(
            (name_grid_point({**point, key: value}), name_grid_point({**point, key: values[0]}))
            for point in _list_points(factors, key)
        )
        for key, values in factors.items()
        for value in values[1:]
    }


def make_grid_interactions(factors: Mapping[str, Sequence[str]]) -> Contrasts:
    """Make the interaction contrasts between the arms of `make_grid_axis(factors)`.

    An interaction is, as in factorial designs, half the difference between the effect of one factor at a value of the
    other and its effect at the other's first value.

    Example:
        >>> interactions = make_grid_interactions({"actor.lr": ("1e-4", "1e-3"), "actor.ppo_epochs": ("1", "4")})
        >>> interactions["lr 1e-3 x ppo_epochs 4"][0]
        ('lr1e-3-ppo_epochs4', 'lr1e-4-ppo_epochs4')
    """
    return {
        f"{_shorten_key(key)} {value} x {_shorten_key(other)} {other_value}": tuple(
            pair
            for point in _list_points(factors, key, other)
            for pair in (
                (
                    name_grid_point({**point, key: value, other: other_value}),
                    name_grid_point({**point, key: factors[key][0], other: other_value}),
                ),
                (
                    name_grid_point({**point, key: factors[key][0], other: factors[other][0]}),
                    name_grid_point({**point, key: value, other: factors[other][0]}),
                ),
            )
        )
        for key, other in itertools.combinations(factors, 2)
        for value in factors[key][1:]
        for other_value in factors[other][1:]
    }


def _shorten_key(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def name_grid_point(point: Mapping[str, str]) -> str:
    """Name the arm at a point of a grid after its values, such as `lr1e-4-ppo_epochs4`."""
    return "-".join(f"{_shorten_key(key)}{shorten_schedule(shorten_part_name(value))}" for key, value in point.items())


def _list_points(factors: Mapping[str, Sequence[str]], *without: str) -> list[dict[str, str]]:
    """List all combinations of the factors, holding those in `without` at their first value."""
    axes = [values[:1] if key in without else values for key, values in factors.items()]
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*axes)]


@dataclass(frozen=True)
class NameTemplates:
    """Templates for the names of a study's runs and for the paths of their files.

    `run`, `summary_log` and `wandb_project` describe the whole study and may use only the values of its family.
    Language models have these:

    * {env}: name of the game; {model}: last part of the model's path, followed by the game if the model is from the hub
      and the game is not Sokoban, whose published names contain no game; {size}: its billions of parameters, like 3B
      (the model if its name has none);
    * {tag}: nofilter or filter_zero, from rollout_filter_include_zero; {strategy}: filter strategy; {mass}:
      rollout_filter_value without dots;
    * {kl_type}: kl_loss_type; {collapse}: the diagnostics that are on (ftmt, ft, mt or nocd);
    * {lr}: learning rate of the policy, like 3e-4;
    * {train}, {analysis}: groups x rollouts of a step and of a gradient analysis; {every}: steps between two analyses;
    * for summaries: {include_zero}, {filter_value}, {share} (the same number, 1 for 1.0), {kl}, {entropy}, {first},
      {multi} and {samples}.

    Templates of one run may also use {arm} (the axis value), {label} (the same without dots, in lower case), {run} and
    {experiment}. `probe_log` may also use {seed} (-seed1; empty for seed 0), {step} (of the checkpoint) and {val}
    (withval or noval).
    """

    run: str
    """Folder of the study below results/."""
    experiment: str
    """Name of a run."""
    title: str
    """Heading of the summary log."""
    summary: str
    """Start of a run's line in the summary log, before its times; the first field is the run's name."""
    wandb_project: str
    """Project in W&B."""
    log: str = "{run}/{experiment}.log"
    """Log of a run, below logs/."""
    checkpoints: str = "{run}/{experiment}"
    """Checkpoints of a run, below model_saving/."""
    summary_log: str = "{run}.log"
    """Path of the summary log, below logs/."""
    summary_times: tuple[str, ...] = ("train", "eval", "total")
    """Times in a line of the summary log, see `tune_study.folder.statuses.format_run_times`."""
    probe_log: str = "gradient_analysis_probe_{env}_{model}/{experiment}-probe-ckpt{step}-{val}-kl_and_entropy.log"
    """Log of a probe, below logs/."""


@dataclass(frozen=True)
class Study:
    """A question and everything needed to run it; data only.

    Example: a sweep over the learning rate. Only `search_spaces/catalog.py` has to import it::

        STUDY = Study(
            name="lr",
            family=PPO,
            question="Which learning rate of the policy breaks training?",
            axis=Axis("actor.lr", {"paper": ("1e-7", "1e-6"), "laptop": ("1e-6", "3e-4", "1e-3")}),
            fixed_settings=SWEEP_SETTINGS,
            baseline="1e-6",
        )
    """

    name: str
    """Name of the study on the command line."""
    family: Family
    """The family that trains the study's runs."""
    question: str
    """One sentence that ends with a question mark."""
    axis: Axis
    """The axis along which the arms differ."""
    fixed_settings: Settings
    """Settings of all arms."""
    baseline: str
    """The arm that the others are compared with; a template as in `NameTemplates`."""
    published_templates: NameTemplates | None = None
    """Names of the study's files in published documents or in related studies; by default derived from the study's
    name."""
    stop_rules: tuple[str, ...] = ("reward_variance_collapse", "low_validation_success", "empty_filtered_steps")
    """Rules that may stop a run early, see `trainable.runs.stop_rules.RULES`."""
    presets: Mapping[str, Settings] = field(default_factory=dict)
    """For each preset, the settings that this study changes."""
    cpu_preset: str = "laptop"
    """Default preset where the GPUs cannot hold `paper`, or there are none."""
    n_seeds: int | None = None
    """Default number of seeds per arm; None for the preset's number."""
    baseline_seeds: int = 1
    """Minimum number of seeds of the baseline. With 1, in a study of one seed per arm, all arms are compared with the
    luck of a single baseline run."""
    game: str = ""
    """The study's only game, if its names contain a game; empty if --env may choose one."""
    smoke_settings: Settings = field(default_factory=dict)
    """Settings of --smoke, which runs the study in seconds; empty if the study has no --smoke."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """Differences within which two arms count as equal, by outcome, where they differ from the family's."""
    contrasts: Contrasts = field(default_factory=dict)
    """The comparisons that answer the question, declared before anything is run."""
    interactions: Contrasts = field(default_factory=dict)
    """Contrasts that are meaningful only over all of their pairs."""
    strategy_aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps the names that --rollout_filter_strategy takes to filter strategies, where they differ."""
    variants: Mapping[str, "Study"] = field(default_factory=dict)
    """For each value of `variant_setting`, the study of the same question under that value, if names and arms depend on
    it. --kl-type chooses one."""
    variant_setting: str = ""
    """The dotted setting that the variants fix."""
    sections: Sequence[object] = ()
    """Sections with which the report of the study ends: `analysis.report.section.Section`, from a file of yours."""

    def get_grid(self, preset: str) -> tuple[str, ...]:
        """Return the axis values under a preset of the family, as they are typed."""
        return self.axis.grids[self._resolve_preset(preset, self.axis.grids)]

    def make_preset_settings(self, preset: str) -> dict[str, object]:
        """Make the settings of all arms under a preset: the preset's, overridden by the study's, and its own scale."""
        study_settings = self.presets.get(self._resolve_preset(preset, self.presets), {})
        scale = self.family.presets[preset].own_scale
        return {**self.family.presets[preset].settings, **self.fixed_settings, **study_settings, **scale}

    def _resolve_preset(self, preset: str, entries: Mapping[str, object]) -> str:
        """Return the name under which `entries` has the preset: its name, or the preset of which it is a variant."""
        return preset if preset in entries else self.family.presets[preset].variant_of

    def get_variant(self, value: str) -> "Study":
        """Return the study (possibly this one) with `value` of `variant_setting`. Raise KeyError if there is none."""
        return self if value == self.fixed_settings[self.variant_setting] else self.variants[value]

    @property
    def name_templates(self) -> NameTemplates:
        """Published templates, or templates derived from the study's name."""
        if self.published_templates is not None:
            return self.published_templates
        stem = self.name.replace("-", "_")
        return NameTemplates(
            run=stem + self.family.name_suffix,
            experiment=f"{stem}_{{label}}{self.family.name_suffix}",
            title=self.name.replace("-", " ").capitalize(),
            summary=f"{stem}={{arm}}",
            wandb_project=f"tune_study_{stem}",
            log="{run}/{label}/{experiment}.log",
            checkpoints="{run}/{label}/{experiment}",
        )


def make_value_label(value: str) -> str:
    """Make the published label of an axis value: no dots, lower case ("0.001" -> "0001", "1.0" -> "10").

    A plug-in is labeled by its name, without its file, and a schedule without its punctuation.
    """
    return shorten_schedule(shorten_part_name(value)).replace(".", "").lower()
