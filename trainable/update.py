"""One step's optimizer steps: policy, critic, or both on a shared trunk. Losses from `algo`, settings as plain values.

A mini-batch is one optimizer step. Its loss is the mean over micro-batches of each one's own aggregation, as published;
because every aggregation is a weight a token, passes may be cut anywhere without changing the sum.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainable.algo.losses import entropy_from_logits, full_kl, kl_estimate, logprobs_from_logits, ppo_clip, value_clip
from trainable.algo.reductions import loss_weights
from trainable.batch import Batch, mini_batches
from trainable.nonfinite import Named, bad_gradients, bad_losses
from trainable.qwen2 import Qwen2, Trunk, ValueModel
from trainable.sections import ActorConfig, CriticConfig

ROWS_A_PASS = 16  # rows of one forward and backward pass; a choice of speed and memory only

ENTROPY_ROWS = 2048  # tokens whose distribution is worked on at once, where chunking is on (published)


class Targets(NamedTuple):
    """What the losses aim at, (B, T) each; ref_logprobs is None where no reference pass was made."""

    advantages: Tensor
    returns: Tensor
    values: Tensor
    ref_logprobs: Tensor | None

    def rows(self, index: Tensor, longest: int) -> "Targets":
        """The targets of the episodes at `index` (N,), cut to `longest` tokens."""
        advantages, returns, values = (part[index, :longest] for part in self[:3])
        ref = None if self.ref_logprobs is None else self.ref_logprobs[index, :longest]
        return Targets(advantages, returns, values, ref)


class Pass(NamedTuple):
    """The rows of one pass: episodes, their targets, and the weight of each trained token (N,)."""

    batch: Batch
    targets: Targets
    weights: Tensor

    def flat(self, part: Tensor) -> Tensor:
        """The values (N,) of a (B, T) tensor at the trained tokens."""
        return part[self.batch.mask]


@dataclass
class Meter:
    """Sums of one update: weighted losses a mini-batch, and plain sums over tokens."""

    optimizer_steps: int = 0
    skipped: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.by_step: dict[str, float] = {}
        self.by_token: dict[str, float] = {}
        self.norms: dict[str, float] = {}
        self.nonfinite: list[str] = []
        self.bad_losses: list[str] = []

    def add(self, tokens: int, weighted: dict[str, Tensor], counted: dict[str, Tensor]) -> None:
        """Add one pass: `weighted` are shares of a mini-batch's loss, `counted` are sums over `tokens`."""
        self.tokens += tokens
        self.bad_losses += bad_losses(weighted)
        for store, parts in ((self.by_step, weighted), (self.by_token, counted)):
            for name, value in parts.items():
                store[name] = store.get(name, 0.0) + float(value)

    def stepped(self, norm: Tensor, name: str) -> None:
        """Count one mini-batch whose gradient norm was `norm`."""
        self.optimizer_steps += 1
        self.norms[name] = self.norms.get(name, 0.0) + float(norm)

    def passed_over(self, gradients: list[str]) -> None:
        """Count one mini-batch that made no step, and name what was not finite in it: losses, and `gradients`."""
        self.optimizer_steps += 1
        self.skipped += 1
        self.nonfinite += [*self.bad_losses, *gradients]
        self.bad_losses = []

    def means(self) -> dict[str, float]:
        """Means over mini-batches, over tokens, and of gradient norms over the steps that were made."""
        made = self.optimizer_steps - self.skipped
        stores = ((self.by_step, self.optimizer_steps), (self.by_token, self.tokens), (self.norms, made))
        return {name: value / max(1, count) for store, count in stores for name, value in store.items()}


def passes(
    batch: Batch, targets: Targets, rows: Tensor, mode: str, micro_batch_size: int, padded_length: int
) -> Iterator[Pass]:
    """Cut the mini-batch `rows` into passes, each with its share of the loss's weights."""
    return weighted_passes(batch, targets, rows, loss_weights(batch.mask[rows], mode, micro_batch_size, padded_length))


def weighted_passes(batch: Batch, targets: Targets, rows: Tensor, weights: Tensor) -> Iterator[Pass]:
    """Cut the episodes at `rows` (N,) into passes; weights (N, T) of their tokens in the loss."""
    for start in range(0, len(rows), ROWS_A_PASS):
        index = rows[start : start + ROWS_A_PASS]
        part = batch.rows(index)
        longest = part.mask.shape[1]
        yield Pass(part, targets.rows(index, longest), weights[start : start + ROWS_A_PASS, :longest][part.mask])


def update_critic(
    critic: ValueModel, optimizer: torch.optim.Optimizer, batch: Batch, targets: Targets, order: Tensor,
    settings: CriticConfig, loss_agg_mode: str = "token-mean",
) -> Meter:  # fmt: skip
    """All optimizer steps of the critic for one training step, over mini-batches of `order` (B,).

    loss_agg_mode: the policy's, as published.
    """
    meter = Meter()
    for _ in range(settings.ppo_epochs):
        for rows in mini_batches(order, settings.ppo_mini_batch_size):
            for part in passes(
                batch, targets, rows, loss_agg_mode, settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1]
            ):
                values = critic.values_at(part.batch.tokens, part.batch.where())
                meter.tokens += len(values)
                value_loss(values, part, settings.cliprange_value, meter).backward()
            _step(optimizer, list(critic.named_parameters()), settings.grad_clip, meter, "critic_grad_norm")
    return meter


def value_loss(values: Tensor, part: Pass, cliprange: float, meter: Meter) -> Tensor:
    """The clipped value loss of one pass; values (N,) at its trained tokens."""
    loss = value_clip(values, part.flat(part.targets.values), part.flat(part.targets.returns), cliprange)
    total = (part.weights * loss.loss).sum()
    meter.add(0, {"vf_loss": total.detach()}, {"vf_clipfrac": loss.clipped.sum()})
    return total


@dataclass(frozen=True)
class ActorUpdate:
    """The policy's update: model, its frozen reference where the exact KL needs one, and the sampling temperature.

    On a shared trunk, `head` is the critic's and the value loss joins the policy's with weight `value_weight`.
    """

    model: Qwen2
    optimizer: torch.optim.Optimizer
    settings: ActorConfig
    temperature: float
    reference: Qwen2 | None = None
    head: nn.Module | None = None
    value_weight: float = 0.0
    cliprange_value: float = 0.5

    def run(self, batch: Batch, targets: Targets, order: Tensor) -> Meter:
        """All optimizer steps of the policy for one training step, over mini-batches of `order` (B,)."""
        meter, settings = Meter(), self.settings
        parameters = list(self.model.named_parameters())
        if self.head is not None:
            parameters += [(f"value_head.{name}", weight) for name, weight in self.head.named_parameters()]
        for _ in range(settings.ppo_epochs):
            for rows in mini_batches(order, settings.ppo_mini_batch_size):
                micro, longest = settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1]
                for part in passes(batch, targets, rows, settings.loss_agg_mode, micro, longest):
                    self._loss(part, meter).backward()
                _step(self.optimizer, parameters, settings.grad_clip, meter, "actor_grad_norm")
        return meter

    def _loss(self, part: Pass, meter: Meter) -> Tensor:
        """The whole loss of one pass."""
        return reduce(operator.add, self.components(part, meter).values())

    def components(self, part: Pass, meter: Meter) -> dict[str, Tensor]:
        """The terms of the loss of one pass, coefficients included; their sum is the loss.

        task, then, where they are on, entropy (a bonus: it is negative), kl, and value (on a shared trunk).
        """
        settings, where = self.settings, part.batch.where()
        hidden = self.model.model.hidden_at(part.batch.tokens, where)
        logits = self.model.lm_head(hidden) / self.temperature
        logprobs = logprobs_from_logits(logits, part.flat(part.batch.tokens))
        terms = {"task": self._task(part, logprobs, meter)}
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.entropy_coeff != 0):
            rows = ENTROPY_ROWS if settings.entropy_from_logits_with_chunking else max(1, len(logits))
            entropy = (part.weights * entropy_from_logits(logits, rows)).sum()
        meter.add(0, {"entropy_loss": entropy.detach()}, {})
        if settings.entropy_coeff != 0:
            terms["entropy"] = -settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            kl = (part.weights * self._kl(part, logits, logprobs, where)).sum()
            meter.add(0, {"kl_loss": kl.detach()}, {})
            terms["kl"] = settings.kl_loss_coef * kl
        if self.head is not None:
            values = self.head(hidden).squeeze(-1)
            terms["value"] = self.value_weight * value_loss(values, part, self.cliprange_value, meter)
        return terms

    def _task(self, part: Pass, logprobs: Tensor, meter: Meter) -> Tensor:
        """The clipped policy loss of one pass; logprobs (N,) of its trained tokens now."""
        settings, old = self.settings, part.flat(part.batch.logprobs)
        policy = ppo_clip(
            logprobs, old, part.flat(part.targets.advantages),
            settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c,
        )  # fmt: skip
        pg_loss = (part.weights * policy.loss).sum()
        counted = {
            "pg_clipfrac": policy.clipped.sum(),
            "pg_clipfrac_lower": policy.clipped_lower.sum(),
            "ppo_kl": (old - logprobs.detach()).sum(),
        }
        meter.add(len(old), {"pg_loss": pg_loss.detach()}, counted)
        return pg_loss

    def _kl(self, part: Pass, logits: Tensor, logprobs: Tensor, where: Tensor) -> Tensor:
        """The KL penalty of each trained token (N,)."""
        if self.settings.kl_loss_type != "full":
            assert part.targets.ref_logprobs is not None
            return kl_estimate(logprobs, part.flat(part.targets.ref_logprobs), self.settings.kl_loss_type)
        assert self.reference is not None
        with torch.no_grad():
            hidden = self.reference.model.hidden_at(part.batch.tokens, where)
            ref_logits = self.reference.lm_head(hidden) / self.temperature
        return full_kl(logits, ref_logits)


def _step(optimizer: torch.optim.Optimizer, parameters: Named, clip: float, meter: Meter, name: str) -> None:
    """Clip and step, or skip the step where a loss or the gradient is not finite (published: the gradient)."""
    weights = [weight for _, weight in parameters]
    norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    if torch.isfinite(norm) and not meter.bad_losses:
        nn.utils.clip_grads_with_norm_(weights, clip, norm)
        optimizer.step()
        meter.stepped(norm, name)
    else:
        meter.passed_over(bad_gradients(parameters))
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def at_trained_tokens(batch: Batch, rows_a_pass: int, of: "TokenFunction") -> Tensor:
    """`of(tokens (b, t), where (n,), targets (n,)) -> (n,)` at every trained token, without gradients; (B, T)."""
    out = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    for rows in torch.argsort(batch.lengths, stable=True).split(rows_a_pass):
        part = batch.rows(rows)
        flat = out.new_zeros(part.mask.shape)
        flat[part.mask] = of(part.tokens, part.where(), part.tokens[part.mask]).to(flat.dtype)
        out[rows, : part.mask.shape[1]] = flat
    return out


class TokenFunction:
    """A number a trained token: log-prob under a model, or value. Two constructors, one call."""

    def __init__(self, trunk: Trunk, head: nn.Module, temperature: float | None) -> None:
        self.trunk, self.head, self.temperature = trunk, head, temperature

    @staticmethod
    def logprobs(model: Qwen2, temperature: float) -> "TokenFunction":
        """Log-prob of each trained token, in nats, of the tempered distribution."""
        return TokenFunction(model.model, model.lm_head, temperature)

    @staticmethod
    def values(trunk: Trunk, head: nn.Module) -> "TokenFunction":
        """Value of the state before each trained token."""
        return TokenFunction(trunk, head, None)

    def __call__(self, tokens: Tensor, where: Tensor, targets: Tensor) -> Tensor:
        """Evaluate at flat positions `where` (n,), whose next tokens are `targets` (n,)."""
        out = self.head(self.trunk.hidden_at(tokens, where))
        return out.squeeze(-1) if self.temperature is None else logprobs_from_logits(out / self.temperature, targets)
