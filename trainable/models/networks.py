"""Make the networks of a run: policy, critic and reference, with separate weights or as adapters over one base."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainable.config.run_config import RunConfig
from trainable.config.seeds import make_rng
from trainable.models.load import Policy, freeze, load_policy, make_critic, make_frozen_copy, make_pass_settings
from trainable.models.lora import add_adapters, compute_fingerprint, make_adapted_policy, make_shared_critic
from trainable.models.qwen2 import Qwen2, ValueModel

if TYPE_CHECKING:  # it imports transformers, which a Qwen2 does not need
    from trainable.models.hub_model import HubModel, HubValueModel


class Networks(NamedTuple):
    """The networks of a run.

    policy: the network that is trained and sampled from. reference: the model before training; None if no KL to it is
    needed. critic: a value model with its own trunk. value_head: a value head on the policy's trunk, instead of a
    critic. Without GAE, both are None. base_fingerprint: identifies the frozen weights under the adapters; None
    without adapters.
    """

    policy: Policy
    reference: "Qwen2 | HubModel | None"
    critic: "ValueModel | HubValueModel | None"
    value_head: nn.Module | None
    base_fingerprint: str | None


def make_networks(config: RunConfig, device: torch.device) -> Networks:
    """The networks of `config` on `device`, all from the model at config.model.path."""
    policy = load_policy(config.model.path, device, make_pass_settings(config.model), config.model.chat_format)
    if config.model.lora_rank:
        return _make_lora_networks(config, policy, device)
    reference = make_frozen_copy(policy.model) if config.needs_reference else None
    critic = make_critic(policy, make_rng(config.seed, "critic"), device) if _needs_critic(config) else None
    return Networks(policy, reference, *_split_critic(config, critic), base_fingerprint=None)


def _make_lora_networks(config: RunConfig, policy: Policy, device: torch.device) -> Networks:
    """Policy and critic with separate adapters over one frozen base, which is also the reference."""
    base, settings = freeze(policy.model), config.model
    model = make_adapted_policy(base, settings, make_rng(config.seed, "adapters", 0))
    critic = make_shared_critic(base, make_rng(config.seed, "critic"), device) if _needs_critic(config) else None
    if critic is not None and not config.critic.shared_trunk:
        add_adapters(critic.model, settings, make_rng(config.seed, "adapters", 1))
    return Networks(
        replace(policy, model=model),
        base if config.needs_reference else None,
        *_split_critic(config, critic),
        base_fingerprint=compute_fingerprint(policy.folder),
    )


def _split_critic(
    config: RunConfig, critic: "ValueModel | HubValueModel | None"
) -> tuple["ValueModel | HubValueModel | None", nn.Module | None]:
    """(critic, None), or with critic.shared_trunk (None, its head), which shares the trunk of the policy."""
    return (None, critic.score) if critic is not None and config.critic.shared_trunk else (critic, None)


def _needs_critic(config: RunConfig) -> bool:
    return config.algorithm.estimator.needs_critic
