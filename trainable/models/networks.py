"""Make the networks of a run: policy, critic and reference, with separate weights or as adapters on one base."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainable.config.choices import EXACT_KL
from trainable.config.run_config import RunConfig
from trainable.config.seeds import make_rng
from trainable.models import load
from trainable.models.interface import LanguageModel, ValueModel
from trainable.models.load import Policy
from trainable.models.lora import add_adapters, make_adapted_policy, make_frozen_base, share_parameters


class Networks(NamedTuple):
    """The networks of a run.

    policy: the network that is trained and sampled from. reference: the untrained policy or the model at
    model.reference_path; None if no KL to it is needed. critic: a value model with a separate trunk. value_head: a
    value head on the policy's trunk, instead of a critic. Without GAE, both are None. has_own_reference: whether a
    reference exists that shares no weights with the other networks. base_fingerprint: identifies the frozen weights
    under the adapters; None without adapters. reference_fingerprint: identifies the weights at model.reference_path;
    None if they are not used.
    """

    policy: Policy
    reference: LanguageModel | None
    critic: ValueModel | None
    value_head: nn.Module | None
    has_own_reference: bool
    base_fingerprint: str | None
    reference_fingerprint: str | None


def make_networks(config: RunConfig, device: torch.device, trained_device: torch.device | None = None) -> Networks:
    """Make the networks of `config` from config.model.path, or for the reference from model.reference_path if set.

    device: where they are. trained_device: where policy and critic are, without adapters; None for `device`. Networks
    that DeepSpeed will shard are made in host memory, because a GPU may have room only for the shards.

    Raises ValueError if a model is unusable, or if the vocabularies of reference and policy differ.
    """
    trained_device, settings = trained_device or device, config.model
    # The base of adapters is cast or quantized before it is moved, because a GPU may lack room for it in float32.
    load_device = torch.device("cpu") if settings.lora_rank else trained_device
    policy = load.load_policy(settings.path, load_device, load.make_pass_settings(settings), settings.chat_format)
    model = policy.model
    if settings.lora_rank:
        make_frozen_base(policy.model, settings, device).to(device)
        model = make_adapted_policy(policy.model, settings, make_rng(config.seed, "adapters", 0))
    reference, reference_fingerprint = _make_reference(config, policy, device)
    critic: ValueModel | None = None
    if config.algorithm.estimator.needs_critic:
        rng = make_rng(config.seed, "critic")
        if not settings.lora_rank:
            critic = load.make_critic(policy, rng, trained_device)
        else:  # separate adapters on the same base
            critic = load.make_value_model(share_parameters(policy.model.model), rng, device)
            if not config.critic.shared_trunk:
                add_adapters(critic.model, settings, make_rng(config.seed, "adapters", 1))
    value_head = critic.score if critic is not None and config.critic.shared_trunk else None
    return Networks(
        policy=replace(policy, model=model),
        reference=reference,
        critic=critic if value_head is None else None,
        value_head=value_head,
        # With adapters, the initial policy shares the weights of the base.
        has_own_reference=reference is not None and not (settings.lora_rank and settings.reference_path is None),
        base_fingerprint=load.compute_fingerprint(policy.folder) if settings.lora_rank else None,
        reference_fingerprint=reference_fingerprint,
    )


def _make_reference(config: RunConfig, policy: Policy, device: torch.device) -> tuple[LanguageModel | None, str | None]:
    """Make the frozen reference, if any, and compute the fingerprint of model.reference_path; None if it is not set.

    policy: the untrained policy; with LoRA the frozen base under its adapters, which needs no copy. A reference that
    becomes a later policy has adapters of its own, which add 0 at first.
    """
    if not config.needs_reference:
        return None, None
    if config.syncs_reference and config.model.lora_rank:
        adapted = make_adapted_policy(policy.model, config.model, make_rng(config.seed, "adapters", 0))
        return adapted.requires_grad_(False), None
    if config.model.reference_path is None:
        return (policy.model if config.model.lora_rank else load.make_frozen_copy(policy.model).to(device)), None
    reference = load.load_policy(
        config.model.reference_path, device, load.make_pass_settings(config.model), config.model.chat_format
    )
    _check_own_reference(config, policy, reference)
    return load.freeze(reference.model), load.compute_fingerprint(reference.folder)


@torch.no_grad()
def move_reference(reference_weights: Iterable[Tensor], policy_weights: Iterable[Tensor], alpha: float) -> None:
    """Move each weight of the reference, in place, towards the weight of the policy of the same shape.

        reference <- alpha policy + (1 - alpha) reference

    The sum is computed in float32 and rounded to the dtype of the reference, in which its passes read it.

    Source: TR-DPO (Gorbatovski et al. 2024, arXiv:2404.09656), with TRL's names of settings; ProRL (Liu et al. 2025,
    arXiv:2505.24864) copies the policy. Degenerate case: alpha = 1 copies the policy exactly.

    Example:
        >>> reference = torch.tensor([0.0, 4.0])
        >>> move_reference([reference], [torch.tensor([1.0, 0.0])], 0.25)
        >>> reference
        tensor([0.2500, 3.0000])
    """
    for reference, policy in zip(reference_weights, policy_weights, strict=True):
        reference.copy_(torch.lerp(reference.float(), policy.float().to(reference.device), alpha))


def _check_own_reference(config: RunConfig, policy: Policy, reference: Policy) -> None:
    """Raise ValueError if the vocabularies of `reference` and policy differ, or if its context is too short."""
    name = f"model.reference_path={config.model.reference_path}"
    shape, policy_shape = reference.model.shape, policy.model.shape
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ValueError(
            f"{name} has another vocabulary than model.path={config.model.path}, and a KL compares the two token by "
            "token: type a model of the same family, or leave out model.reference_path"
        )
    # Models of one family may pad their heads to different sizes, as Qwen2.5 does with 3B and 7B.
    if config.actor.reads_reference_distribution and shape.vocab_size != policy_shape.vocab_size:
        raise ValueError(
            f"{name} has a head of {shape.vocab_size} rows and model.path={config.model.path} one of "
            f"{policy_shape.vocab_size}, and actor.kl_loss_type={EXACT_KL} compares whole distributions: set "
            "actor.kl_loss_type=mse, which reads the sampled tokens only"
        )
    context = min(policy_shape.max_position_embeddings, config.rollout.max_model_len or math.inf)
    if shape.max_position_embeddings < context:
        raise ValueError(
            f"{name} has a context of {shape.max_position_embeddings} tokens, and conversations may have {context}: "
            f"set rollout.max_model_len={shape.max_position_embeddings}"
        )
