"""What a study is: one question, one base configuration, one axis or a few, and where its files go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Settings = Mapping[str, object]
"""Dotted fields of `trainable.config.RunConfig` and their values."""


def _nothing() -> Settings:
    return MappingProxyType({})


@dataclass(frozen=True)
class Axis:
    """One setting that the arms of a study differ in.

    setting: the dotted field. option: the command line's flag for its values. grids: preset -> values, as they are
    typed. along: what else every value sets. named: values that are words, and what each sets instead.
    """

    setting: str
    option: str
    grids: Mapping[str, tuple[str, ...]]
    along: Settings = field(default_factory=_nothing)
    named: Mapping[str, Settings] = field(default_factory=dict)

    def settings(self, value: str) -> dict[str, object]:
        """The settings of the arm at `value`, a number or one of `named`."""
        if value in self.named:
            return dict(self.named[value])
        return {**self.along, self.setting: value}


@dataclass(frozen=True)
class Study:
    """A question and all that is needed to run it; data only.

    title and summary_key are the published words of the summary log: its heading and the name of the axis value.
    Templates may use {model} (last part of the model's path), {tag} (nofilter or filter_zero, by
    rollout_filter_include_zero), {arm} (the axis value), {label} (the same without dots, lower case), {run} and
    {experiment}; and, of the settings, {mass} (rollout_filter_value without dots), {train} and {analysis} (groups x
    rollouts of a step and of a gradient analysis) and {every} (steps between two analyses). probe_log also has {seed}
    (-seed1, or nothing for seed 0), {step} (of the checkpoint) and {val} (withval or noval).
    """

    name: str
    title: str
    question: str
    axis: Axis
    summary_key: str
    fixed: Settings
    run: str
    experiment: str
    log: str
    checkpoints: str
    wandb_project: str
    baseline: str
    probe_log: str = "gradient_analysis_probe_sokoban_{model}/{experiment}-probe-ckpt{step}-{val}-kl_and_entropy.log"
    trainable: str = "trainable.ppo_trainable:PPOTrainable"
    stop_rules: tuple[str, ...] = ("reward_variance_collapse", "low_validation_success", "empty_filtered_steps")
    include_zero_option: bool = True


def value_label(value: str) -> str:
    """The published label of an axis value: no dots, lower case ("0.001" -> "0001", "1.0" -> "10")."""
    return value.replace(".", "").lower()
