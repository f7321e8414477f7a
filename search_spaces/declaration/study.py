"""What a study is: one question, one base configuration, one axis or a few, and where its files go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from search_spaces.declaration.family import Family, Settings
from trainable.config.study_config import BaseRunConfig

Contrasts = Mapping[str, tuple[tuple[str, str], ...]]
"""What is compared, in words -> pairs of arms that differ in it alone: the first minus the second."""


def _make_empty_settings() -> Settings:
    return MappingProxyType({})


def keep_settings(settings: Settings, base: BaseRunConfig) -> Settings:
    """An arm's settings, whatever the study's base configuration is."""
    return settings


@dataclass(frozen=True)
class Axis:
    """What the arms of a study differ in: one setting, or the points of a grid by name.

    setting: the dotted field, or what the points differ in, in words. grids: preset -> values, as
    they are typed. option: the published flag for its values, where there is one. along: what else every value sets.
    named: values that are words, and what each sets instead. members: words that may be typed for several values at
    once. adapt: what an arm's settings are under a base configuration.
    """

    setting: str
    grids: Mapping[str, tuple[str, ...]]
    option: str = "--values"
    extra_settings: Settings = field(default_factory=_make_empty_settings)
    named_settings: Mapping[str, Settings] = field(default_factory=dict)
    value_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adapt: Callable[[Settings, Any], Settings] = keep_settings

    def make_settings(self, value: str, base: BaseRunConfig) -> dict[str, object]:
        """The settings of the arm at `value`, a number or one of `named`, in a study of base configuration `base`."""
        value_settings = self.named_settings.get(value, {**self.extra_settings, self.setting: value})
        return dict(self.adapt(value_settings, base))

    @property
    def swept_fields(self) -> frozenset[str]:
        """The dotted fields that the arms differ in."""
        named_fields = frozenset[str]().union(*self.named_settings.values())
        return (
            named_fields
            if set(self.named_settings) >= set().union(*self.grids.values())
            else named_fields | {self.setting, *self.extra_settings}
        )


@dataclass(frozen=True)
class NameTemplates:
    """Templates of what a study's runs are called and of where their files go.

    run: the folder below results/. experiment: a run. title: the heading of the summary log. summary: what its lines
    say of a run before its times, the first field being its name. wandb_project: of W&B. log: of a run, below logs/.
    checkpoints: of a run, below model_saving/. summary_log: below logs/. summary_times: the times of a summary line,
    see `tune_study.folder.summary.run_times`. probe_log: of a probe, below logs/.

    A template may use the words of the study's family. Of language models: {model} (last part of the model's path),
    {size} (its billions of parameters, like 3B; the model where its name has none), {tag} (nofilter or filter_zero, by
    rollout_filter_include_zero), {strategy} (of the filter), {kl_type} (kl_loss_type), {collapse} (the diagnostics that
    are on: ftmt, ft, mt, nocd), {mass} (rollout_filter_value without dots), {train} and {analysis} (groups x rollouts
    of a step and of a gradient analysis), {every} (steps between two analyses), and for summaries {include_zero},
    {filter_value}, {share} (the same, 1 for 1.0), {kl}, {entropy}, {first}, {multi} and {samples}. Templates of one run
    also have {arm} (the axis value), {label} (the same without dots, lower case), {run} and {experiment}; run,
    summary_log and wandb_project are of the whole study. probe_log has {seed} (-seed1, or nothing for seed 0), {step}
    (of the checkpoint) and {val} (withval or noval).
    """

    run: str
    experiment: str
    title: str
    summary: str
    wandb_project: str
    log: str = "{run}/{experiment}.log"
    checkpoints: str = "{run}/{experiment}"
    summary_log: str = "{run}.log"
    summary_times: tuple[str, ...] = ("train", "eval", "total")
    probe_log: str = "gradient_analysis_probe_sokoban_{model}/{experiment}-probe-ckpt{step}-{val}-kl_and_entropy.log"


@dataclass(frozen=True)
class Study:
    """A question and all that is needed to run it; data only.

    name, family, question, axis, fixed (what all arms set) and baseline (the arm that others are compared with; a
    template as in `Names`) declare a study; the rest has defaults. published: the names that documents or other studies
    of its kind have given its files; without it they follow from the study's name. presets: what a preset sets for this
    study. seeds: of each arm where nobody asks for a number; None: the preset's. smoke: what --smoke sets, to try out
    the study in seconds. contrasts: what the question compares, declared before anything is run.
    strategies: published names of filter strategies that --rollout_filter_strategy may choose -> names here; none: the
    option is not this study's. variants: value of `variant_setting` -> the same question under that value, where names
    and arms depend on it; --kl-type chooses one.

    Example: a sweep over the learning rate, of which no other file needs to know more than its module::

        STUDY = Study(
            name="lr",
            family=PPO,
            question="Which learning rate of the policy breaks training?",
            axis=Axis("actor.lr", {"paper": ("1e-7", "1e-6"), "laptop": ("1e-6", "3e-4", "1e-3")}),
            fixed=SWEEP_SETTINGS,
            baseline="1e-6",
        )
    """

    name: str
    family: Family
    question: str
    axis: Axis
    fixed_settings: Settings
    baseline: str
    published_templates: NameTemplates | None = None
    stop_rules: tuple[str, ...] = ("reward_variance_collapse", "low_validation_success", "empty_filtered_steps")
    presets: Mapping[str, Settings] = field(default_factory=dict)
    n_seeds: int | None = None
    has_include_zero_option: bool = True
    smoke_settings: Settings = field(default_factory=_make_empty_settings)
    contrasts: Contrasts = field(default_factory=dict)
    strategy_aliases: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, "Study"] = field(default_factory=dict)
    variant_setting: str = ""

    def get_variant(self, value: str) -> "Study":
        """The study under `value` of `variant_setting`; itself under the value that it fixes. KeyError for no value."""
        return self if value == self.fixed_settings[self.variant_setting] else self.variants[value]

    @property
    def name_templates(self) -> NameTemplates:
        """The published templates, or those that follow from the study's name."""
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
