"""One step's optimizer steps: policy, critic, or both on a shared trunk. Losses from `algo`, settings as plain values.

A mini-batch is one optimizer step. Its loss is the mean over micro-batches of each one's own aggregation, as published;
because every aggregation is a weight a token, passes may be cut anywhere without changing the sum.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainable.algo.batching import cut_by_tokens
from trainable.algo.losses import kl_estimate, ppo_clip, value_clip
from trainable.algo.reductions import loss_weights
from trainable.algo.target_policy import target_policy
from trainable.algo.vocabulary import TokenNumbers, logprobs_from_hidden, token_numbers
from trainable.backend.meter import Meter
from trainable.backend.one_device import Backend
from trainable.backend.world import ALONE, World, dealt_rows
from trainable.config.constants import CHUNK_ELEMENTS, TOKENS_PER_PASS
from trainable.config.sections import ActorConfig, CriticConfig, OptimConfig
from trainable.models.interface import Critic, LanguageModel, Trunk
from trainable.rollout.agreement import importance_weights
from trainable.rollout.batch import Batch, mini_batches


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


def passes(
    batch: Batch, targets: Targets, rows: Tensor, mode: str, micro_batch_size: int, padded_length: int,
    world: World = ALONE, pads: bool = False,
) -> Iterator[Pass]:  # fmt: skip
    """Cut this rank's part of the mini-batch `rows` into passes, each with its share of the whole loss's weights.

    Every rank gets equally many passes; one that has less to do gets passes without a trained token. pads: see
    `cut_by_tokens`.
    """
    weights = loss_weights(batch.mask[rows], mode, micro_batch_size, padded_length)
    lengths, most = batch.lengths[rows].cpu(), TOKENS_PER_PASS[batch.tokens.device.type]
    cuts = [
        [share[cut] for cut in cut_by_tokens(lengths[share], most, pads)] for share in dealt_rows(lengths, world.size)
    ]
    for cut in cuts[world.rank]:
        yield _pass(batch, targets, rows[cut], weights[cut])
    short = max(map(len, cuts)) - len(cuts[world.rank])
    untrained = batch._replace(mask=torch.zeros_like(batch.mask))
    for _ in range(short):
        yield _pass(untrained, targets, rows[:1], weights[:1])


def weighted_passes(
    batch: Batch, targets: Targets, rows: Tensor, weights: Tensor, pads: bool = False
) -> Iterator[Pass]:
    """Cut the episodes at `rows` (N,) into passes; weights (N, T) of their tokens in the loss. pads: as in `passes`."""
    for cut in cut_by_tokens(batch.lengths[rows].cpu(), TOKENS_PER_PASS[batch.tokens.device.type], pads):
        yield _pass(batch, targets, rows[cut], weights[cut])


def _pass(batch: Batch, targets: Targets, index: Tensor, weights: Tensor) -> Pass:
    """The pass of the episodes at `index` (n,); weights (n, T) of their tokens in the loss."""
    part = batch.rows(index)
    longest = part.mask.shape[1]
    return Pass(part, targets.rows(index, longest), weights[:, :longest][part.mask])


def update_critic(
    critic: Critic, backend: Backend, batch: Batch, targets: Targets, order: Tensor, settings: CriticConfig,
    loss_agg_mode: str = "token-mean",
) -> Meter:  # fmt: skip
    """All optimizer steps of the critic for one training step, over mini-batches of `order` (B,).

    loss_agg_mode: the policy's, as published.
    """
    meter = Meter()

    def loss(part: Pass) -> Tensor:
        values = critic.values_at(part.batch.tokens, part.batch.where())
        meter.tokens += len(values)
        return value_loss(values, part, settings.cliprange_value, meter)

    pads = critic.model.pads
    return _descend(
        backend, batch, lambda rows: targets, order, settings, loss_agg_mode, loss, meter, "critic_grad_norm", pads
    )


def _descend(
    backend: Backend, batch: Batch, targets_of: Callable[[Tensor], Targets], order: Tensor, settings: OptimConfig,
    mode: str, loss: Callable[[Pass], Tensor], meter: Meter, norm: str, pads: bool,
) -> Meter:  # fmt: skip
    """An optimizer step for each mini-batch of `order`, each over passes whose losses sum to that of the mini-batch.

    targets_of: those (B, T) that hold for the mini-batch of the rows (n,), asked for just before its optimizer step.
    """
    micro, longest = settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1]
    for _ in range(settings.ppo_epochs):
        for rows in mini_batches(order, settings.ppo_mini_batch_size):
            cut = list(passes(batch, targets_of(rows), rows, mode, micro, longest, backend.world, pads))
            for number, part in enumerate(cut, 1):
                backend.backward(partial(loss, part), number == len(cut))
            backend.step(meter, norm)
    return meter.over(backend.world)


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

    model: LanguageModel
    backend: Backend
    settings: ActorConfig
    temperature: float
    reference: LanguageModel | None = None
    head: nn.Module | None = None
    value_weight: float = 0.0
    cliprange_value: float = 0.5

    def run(self, batch: Batch, targets: Targets, order: Tensor) -> Meter:
        """All optimizer steps of the policy for one training step, over mini-batches of `order` (B,)."""
        meter, settings = Meter(), self.settings

        def loss(part: Pass) -> Tensor:
            return self._loss(part, meter)

        def targets_of(rows: Tensor) -> Targets:
            return self.pulled(batch, targets, rows, meter) if settings.loss.reads_before_each_step else targets

        mode, pads = settings.loss_agg_mode, self.model.model.pads
        return _descend(self.backend, batch, targets_of, order, settings, mode, loss, meter, "actor_grad_norm", pads)

    def pulled(self, batch: Batch, targets: Targets, rows: Tensor, meter: Meter) -> Targets:
        """`targets` for a tpo step on the mini-batch `rows` (n,): skills as advantages become the pull on each token.

        The loss couples all rollouts of a group, but the gradient of each one's log-prob is a number, the same for all
        of its tokens. A pass without gradients over the whole mini-batch makes these numbers, so that passes with
        gradients may be cut anywhere. ValueError where `rows` splits a group.
        """
        part, world = batch.rows(rows), self.backend.world
        if int(torch.isin(batch.group_ids, part.group_ids).sum()) != len(rows):
            raise ValueError(
                "a mini-batch of the tpo loss splits a group: use `update_order(batch, keeps_groups=True)`"
            )
        rows_a_pass = max(1, TOKENS_PER_PASS[part.tokens.device.type] // part.tokens.shape[1])
        now = at_trained_tokens(part, rows_a_pass, TokenFunction.logprobs(self.model, self.temperature), world)
        skills = targets.advantages[rows, part.mask.int().argmax(1)]
        old = (part.logprobs.double() * part.mask).sum(1)
        found = target_policy(now.double().sum(1), old, skills, part.group_ids, self.settings.tpo_eta)
        names = {"pg_loss": found.loss, "tpo_target_entropy": found.entropy, "tpo_target_top_prob": found.top_prob}
        # Every rank has the whole of them, and a meter sums what ranks have.
        meter.add(0, {name: value / world.size for name, value in names.items()}, {})
        pull = torch.zeros_like(targets.advantages)
        pull[rows] = found.pull.to(pull.dtype)[:, None] * batch.mask[rows]
        return targets._replace(advantages=pull)

    def _loss(self, part: Pass, meter: Meter) -> Tensor:
        """The whole loss of one pass."""
        return reduce(operator.add, self.components(part, meter).values())

    def components(self, part: Pass, meter: Meter) -> dict[str, Tensor]:
        """The terms of the loss of one pass, coefficients included; their sum is the loss.

        task, then, where they are on, entropy (a bonus: it is negative), kl, and value (on a shared trunk).
        """
        settings, where = self.settings, part.batch.where()
        hidden = self.model.model.hidden_at(part.batch.tokens, where)
        numbers = self.model.lm_head(hidden, partial(
            token_numbers, tokens=part.flat(part.batch.tokens), temperature=self.temperature,
            entropy_gradient=settings.entropy_coeff != 0, reference=self._whole_reference(part, where),
            elements=CHUNK_ELEMENTS if settings.entropy_from_logits_with_chunking else None,
        ))  # fmt: skip
        terms = {"task": self._task(part, numbers.logprobs, meter)}
        entropy = (part.weights * numbers.entropies).sum()
        meter.add(0, {"entropy_loss": entropy.detach()}, {})
        if settings.entropy_coeff != 0:
            terms["entropy"] = -settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            kl = (part.weights * self._kl(part, numbers)).sum()
            meter.add(0, {"kl_loss": kl.detach()}, {})
            terms["kl"] = settings.kl_loss_coef * kl
        if self.head is not None:
            values = self.head(hidden).squeeze(-1)
            terms["value"] = self.value_weight * value_loss(values, part, self.cliprange_value, meter)
        return terms

    def _task(self, part: Pass, logprobs: Tensor, meter: Meter) -> Tensor:
        """The policy loss of one pass; logprobs (N,) of its trained tokens now."""
        settings, old = self.settings, part.flat(part.batch.logprobs)
        if settings.loss.reads_before_each_step:
            meter.add(len(old), {}, {"ppo_kl": (old - logprobs.detach()).sum()})
            return -(part.flat(part.targets.advantages) * logprobs).sum()
        policy = ppo_clip(
            logprobs, old, part.flat(part.targets.advantages),
            settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c,
        )  # fmt: skip
        weights = part.weights
        if settings.tis_imp_ratio_cap is not None:
            weights = weights * importance_weights(
                old, part.flat(part.batch.engine_logprobs), settings.tis_imp_ratio_cap
            )
        pg_loss = (weights * policy.loss).sum()
        counted = {
            "pg_clipfrac": policy.clipped.sum(),
            "pg_clipfrac_lower": policy.clipped_lower.sum(),
            "ppo_kl": (old - logprobs.detach()).sum(),
        }
        meter.add(len(old), {"pg_loss": pg_loss.detach()}, counted)
        return pg_loss

    def _kl(self, part: Pass, numbers: TokenNumbers) -> Tensor:
        """The KL penalty of each trained token (N,)."""
        if numbers.full_kl is not None:
            return numbers.full_kl
        assert part.targets.ref_logprobs is not None
        return kl_estimate(numbers.logprobs, part.flat(part.targets.ref_logprobs), self.settings.kl_loss_type)

    def _whole_reference(self, part: Pass, where: Tensor) -> tuple[Tensor, Tensor] | None:
        """Hidden states (N, hidden) and head of the reference, where the exact KL needs its whole distributions."""
        if not (self.settings.use_kl_loss and self.settings.kl_loss_type == "full"):
            return None
        assert self.reference is not None
        with torch.no_grad():
            return self.reference.model.hidden_at(part.batch.tokens, where), self.reference.lm_head.weight


@torch.no_grad()
def at_trained_tokens(batch: Batch, rows_a_pass: int, of: "TokenFunction", world: World = ALONE) -> Tensor:
    """`of(tokens (b, t), where (n,), targets (n,)) -> (n,)` at every trained token, without gradients; (B, T).

    A pass has at most the tokens of `rows_a_pass` rows of the longest episode. Ranks work on a part each, and all get
    the whole.
    """
    out = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    lengths = batch.lengths.cpu()
    mine = torch.argsort(lengths, stable=True)[world.rank :: world.size]
    for cut in cut_by_tokens(lengths[mine], rows_a_pass * int(lengths.max()), of.trunk.pads):
        rows = mine[cut]
        part = batch.rows(rows)
        flat = out.new_zeros(part.mask.shape)
        flat[part.mask] = of(part.tokens, part.where(), part.tokens[part.mask]).to(flat.dtype)
        out[rows, : part.mask.shape[1]] = flat
    return world.total(out)


class TokenFunction:
    """A number a trained token: log-prob under a model, or value. Two constructors, one call."""

    def __init__(self, trunk: Trunk, head: nn.Module, temperature: float | None) -> None:
        self.trunk, self.head, self.temperature = trunk, head, temperature

    @staticmethod
    def logprobs(model: LanguageModel, temperature: float) -> "TokenFunction":
        """Log-prob of each trained token, in nats, of the tempered distribution."""
        return TokenFunction(model.model, model.lm_head, temperature)

    @staticmethod
    def values(trunk: Trunk, head: nn.Module) -> "TokenFunction":
        """Value of the state before each trained token."""
        return TokenFunction(trunk, head, None)

    def __call__(self, tokens: Tensor, where: Tensor, targets: Tensor) -> Tensor:
        """Evaluate at flat positions `where` (n,), whose next tokens are `targets` (n,)."""
        hidden = self.trunk.hidden_at(tokens, where)
        if self.temperature is None:
            return self.head(hidden).squeeze(-1)
        return self.head(hidden, partial(
            logprobs_from_hidden, tokens=targets, temperature=self.temperature, elements=CHUNK_ELEMENTS
        ))  # fmt: skip
