"""The losses of one optimizer step as published: full padded forward passes of transformers, one micro-batch at a time,
with shifted labels and masked sums. Shapes: B sequences, T tokens. The numbers of a micro-batch are (b, T - 1)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainable.config.sections import ActorConfig, CriticConfig
from trainable.ppo.update import Targets
from trainable.rollout.episode import Batch


def published_agg_loss(loss: Tensor, mask: Tensor, mode: str, padded_length: int) -> Tensor:
    m = mask.float()
    if mode.startswith("token-mean"):
        return (loss * m).sum() / (m.sum() + 1e-8)
    by_sequence = (loss * m).sum(-1)
    has_tokens = (m.sum(-1) > 0).float()
    if mode == "seq-mean-token-sum":
        return by_sequence.sum() / has_tokens.sum()
    if mode == "seq-mean-token-mean":
        return (by_sequence / (m.sum(-1) + 1e-8)).sum() / has_tokens.sum()
    assert mode == "seq-mean-token-sum-norm"
    return by_sequence.sum() / padded_length


def policy_loss(
    logprob: Tensor, old: Tensor, advantage: Tensor, settings: ActorConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and where the clip and the dual clip are active."""
    ratio = (logprob - old).clamp(-20, 20).exp()
    unclipped_loss = -advantage * ratio
    clipped_loss = -advantage * torch.clamp(ratio, 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    pessimistic_loss = torch.where(clipped_loss > unclipped_loss, clipped_loss, unclipped_loss)
    dual_clip_bound = -advantage * settings.clip_ratio_c
    is_dual_clipped = (advantage < 0) & (pessimistic_loss > dual_clip_bound)
    return (
        torch.where(is_dual_clipped, dual_clip_bound, pessimistic_loss),
        clipped_loss > unclipped_loss,
        is_dual_clipped,
    )


def kl_term(logprob: Tensor, reference: Tensor, kl_loss_type: str) -> Tensor:
    d = logprob - reference
    k3 = torch.clamp(torch.exp(-d) + d - 1, -10, 10)
    value = {
        "kl": d,
        "k1": d,
        "abs": d.abs(),
        "mse": d * d / 2,
        "k2": d * d / 2,
        "low_var_kl": k3,
        "k3": k3,
    }[kl_loss_type.removesuffix("+")]
    return value.detach() + d * d / 2 - (d * d / 2).detach() if kl_loss_type.endswith("+") else value


@dataclass
class Step:
    """Gradients and losses of one mini-batch."""

    gradients: dict[str, Tensor]
    losses: dict[str, float]


def compute_norm(step: Step) -> float:
    """Total norm of the step's gradients."""
    return float(torch.cat([gradient.flatten() for gradient in step.gradients.values()]).norm())


def _split_micro_batches(rows: Tensor, size: int, mode: str) -> Iterator[Tensor]:
    size = len(rows) if mode == "token-mean-global" else size
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _zero_gradients(twin: torch.nn.Module) -> torch.nn.Module:
    twin.zero_grad()
    return twin


def _collect_step(model: torch.nn.Module, losses: dict[str, float]) -> Step:
    return Step({name: weight.grad.clone() for name, weight in model.named_parameters()}, losses)


def compute_actor_step(
    twin: torch.nn.Module,
    reference: torch.nn.Module | None,
    batch: Batch,
    targets: Targets,
    rows: Tensor,
    settings: ActorConfig,
    temperature: float,
) -> Step:
    """Compute a mini-batch of the policy: policy loss - entropy_coeff * entropy + kl_loss_coef * KL."""
    _zero_gradients(twin)
    micro_batches = list(_split_micro_batches(rows, settings.ppo_micro_batch_size_per_gpu, settings.loss_agg_mode))
    sums = dict.fromkeys(("pg_loss", "entropy_loss", "kl_loss"), 0.0)
    counts = dict.fromkeys(("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"), 0.0)
    for index in micro_batches:
        tokens, mask = batch.tokens[index], batch.mask[index][:, 1:]
        logs = (twin(input_ids=tokens).logits[:, :-1] / temperature).log_softmax(-1)
        logprob = logs.gather(-1, tokens[:, 1:, None])[..., 0]
        old, advantage = batch.logprobs[index][:, 1:], targets.advantages[index][:, 1:]
        pg, is_clipped, is_dual_clipped = policy_loss(logprob, old, advantage, settings)
        terms = {"pg_loss": pg, "entropy_loss": -(logs.exp() * logs).sum(-1)}
        if settings.use_kl_loss and settings.kl_loss_type == "full":
            assert reference is not None
            with torch.no_grad():
                reference_logs = (reference(input_ids=tokens).logits[:, :-1] / temperature).log_softmax(-1)
            terms["kl_loss"] = (logs.exp() * (logs - reference_logs)).sum(-1)
        elif settings.use_kl_loss:
            assert targets.ref_logprobs is not None
            terms["kl_loss"] = kl_term(logprob, targets.ref_logprobs[index][:, 1:], settings.kl_loss_type)
        width = batch.tokens.shape[1]
        means = {
            name: published_agg_loss(term, mask, settings.loss_agg_mode, width) / len(micro_batches)
            for name, term in terms.items()
        }
        loss = means["pg_loss"] - settings.entropy_coeff * means["entropy_loss"]
        if "kl_loss" in means:
            loss = loss + settings.kl_loss_coef * means["kl_loss"]
        loss.backward()
        for name, mean in means.items():
            sums[name] += float(mean.detach())
        minus_log_ratio = -torch.clamp(logprob - old, min=-20, max=20)
        for name, x in (
            ("pg_clipfrac", is_clipped),
            ("pg_clipfrac_lower", is_dual_clipped),
            ("ppo_kl", minus_log_ratio),
        ):
            counts[name] += float(x[mask].detach().sum())
    tokens_trained = int(batch.mask[rows].sum())
    return _collect_step(twin, sums | {name: count / tokens_trained for name, count in counts.items()})


def compute_critic_step(
    twin: torch.nn.Module,
    head: torch.nn.Linear,
    batch: Batch,
    targets: Targets,
    rows: Tensor,
    settings: CriticConfig,
    mode: str = "token-mean",
    micro_size: int | None = None,
) -> Step:
    """Compute a mini-batch of the critic. Gradients have the names of a module with `model` and `score`."""
    critic = torch.nn.ModuleDict({"model": twin.model, "score": head})  # type: ignore[dict-item]
    _zero_gradients(critic)
    micro_batches = list(_split_micro_batches(rows, micro_size or settings.ppo_micro_batch_size_per_gpu, mode))
    total = n_clipped = 0.0
    for index in micro_batches:
        tokens, mask = batch.tokens[index], batch.mask[index][:, 1:]
        values = head(twin.model(input_ids=tokens).last_hidden_state)[:, :-1, 0]
        old, returns = targets.values[index][:, 1:], targets.returns[index][:, 1:]
        clipped_values = torch.minimum(
            torch.maximum(values, old - settings.cliprange_value), old + settings.cliprange_value
        )
        unclipped_loss, clipped_loss = (values - returns) ** 2, (clipped_values - returns) ** 2
        loss = published_agg_loss(
            0.5 * torch.maximum(unclipped_loss, clipped_loss), mask, mode, batch.tokens.shape[1]
        ) / len(micro_batches)
        loss.backward()
        total += float(loss.detach())
        n_clipped += float((clipped_loss > unclipped_loss)[mask].sum())
    return _collect_step(critic, {"vf_loss": total, "vf_clipfrac": n_clipped / int(batch.mask[rows].sum())})
