"""The networks of one run: policy, critic, reference; each with weights of its own, or adapters over one base."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainable.config.run_config import RunConfig
from trainable.config.seeds import stream
from trainable.models.load import Policy, frozen, frozen_copy, load_policy, make_critic, pass_settings
from trainable.models.lora import adapt, adapted, critic_over, fingerprint
from trainable.models.qwen2 import Qwen2, ValueModel

if TYPE_CHECKING:  # it loads transformers, which a Qwen2 does without
    from trainable.models.hub_model import HubModel, HubValueModel


class Networks(NamedTuple):
    """policy: what is trained and sampled from. reference: the model as it was loaded; None where nothing needs it.

    critic: a value model with a trunk of its own, or head: a value head on the policy's; without GAE neither. base:
    which frozen weights adapters stand beside; None without adapters.
    """

    policy: Policy
    reference: "Qwen2 | HubModel | None"
    critic: "ValueModel | HubValueModel | None"
    head: nn.Module | None
    base: str | None


def make_networks(config: RunConfig, device: torch.device) -> Networks:
    """The networks of `config` on `device`, all from the model at config.model.path."""
    policy = load_policy(config.model.path, device, pass_settings(config.model), config.model.chat_format)
    if config.model.lora_rank:
        return _over_one_base(config, policy, device)
    reference = frozen_copy(policy.model) if _needs_reference(config) else None
    critic = make_critic(policy, stream(config.seed, "critic"), device) if _has_values(config) else None
    return Networks(policy, reference, *_on_a_trunk(config, critic), None)


def _over_one_base(config: RunConfig, policy: Policy, device: torch.device) -> Networks:
    """Policy and critic with adapters of their own; base and reference are one."""
    base, settings = frozen(policy.model), config.model
    model = adapted(base, settings, stream(config.seed, "adapters", 0))
    critic = critic_over(base, stream(config.seed, "critic"), device) if _has_values(config) else None
    if critic is not None and not config.critic.shared_trunk:
        adapt(critic.model, settings, stream(config.seed, "adapters", 1))
    return Networks(
        replace(policy, model=model), base if _needs_reference(config) else None,
        *_on_a_trunk(config, critic), fingerprint(policy.folder),
    )  # fmt: skip


def _on_a_trunk(
    config: RunConfig, critic: "ValueModel | HubValueModel | None"
) -> tuple["ValueModel | HubValueModel | None", nn.Module | None]:
    """The critic, or of it the head alone where that stands on the policy's trunk."""
    return (None, critic.score) if critic is not None and config.critic.shared_trunk else (critic, None)


def _needs_reference(config: RunConfig) -> bool:
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def _has_values(config: RunConfig) -> bool:
    return config.algorithm.estimator.needs_critic
