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

from trainable.algo.batching import split_by_tokens
from trainable.algo.losses import estimate_kl, ppo_clip_loss, value_clip_loss
from trainable.algo.reductions import compute_loss_weights
from trainable.algo.target_policy import target_policy_loss
from trainable.algo.vocabulary import TokenStatistics, compute_token_statistics, logprobs_from_hidden
from trainable.backend.meter import Meter
from trainable.backend.one_device import Backend
from trainable.backend.world import SINGLE_PROCESS, World, shard_rows
from trainable.config.constants import CHUNK_ELEMENTS, TOKENS_PER_PASS
from trainable.config.sections import ActorConfig, CriticConfig, OptimConfig
from trainable.models.interface import Critic, LanguageModel, Trunk
from trainable.rollout.agreement import importance_weights
from trainable.rollout.batch import Batch, split_mini_batches


class Targets(NamedTuple):
    """What the losses aim at, (B, T) each; ref_logprobs is None where no reference pass was made."""

    advantages: Tensor
    returns: Tensor
    values: Tensor
    ref_logprobs: Tensor | None

    def select_rows(self, index: Tensor, longest: int) -> "Targets":
        """The targets of the episodes at `index` (N,), cut to `longest` tokens."""
        advantages, returns, values = (tensor[index, :longest] for tensor in self[:3])
        ref_logprobs = None if self.ref_logprobs is None else self.ref_logprobs[index, :longest]
        return Targets(advantages, returns, values, ref_logprobs)


class PassInputs(NamedTuple):
    """The rows of one pass: episodes, their targets, and the weight of each trained token (N,)."""

    batch: Batch
    targets: Targets
    weights: Tensor

    def select_trained(self, tensor: Tensor) -> Tensor:
        """The values (N,) of a (B, T) tensor at the trained tokens."""
        return tensor[self.batch.mask]


def make_passes(
    batch: Batch,
    targets: Targets,
    rows: Tensor,
    mode: str,
    micro_batch_size: int,
    padded_length: int,
    world: World = SINGLE_PROCESS,
    needs_padding: bool = False,
) -> Iterator[PassInputs]:
    """Cut this rank's part of the mini-batch `rows` into passes, each with its share of the whole loss's weights.

    Every rank gets equally many passes; one that has less to do gets passes without a trained token. pads: see
    `cut_by_tokens`.
    """
    weights = compute_loss_weights(batch.mask[rows], mode, micro_batch_size, padded_length)
    lengths, max_tokens = batch.lengths[rows].cpu(), TOKENS_PER_PASS[batch.tokens.device.type]
    rank_passes = [
        [rank_rows[cut] for cut in split_by_tokens(lengths[rank_rows], max_tokens, needs_padding)]
        for rank_rows in shard_rows(lengths, world.size)
    ]
    for row_index in rank_passes[world.rank]:
        yield _make_pass(batch, targets, rows[row_index], weights[row_index])
    num_missing = max(map(len, rank_passes)) - len(rank_passes[world.rank])
    untrained_batch = batch._replace(mask=torch.zeros_like(batch.mask))
    for _ in range(num_missing):
        yield _make_pass(untrained_batch, targets, rows[:1], weights[:1])


def make_weighted_passes(
    batch: Batch, targets: Targets, rows: Tensor, weights: Tensor, needs_padding: bool = False
) -> Iterator[PassInputs]:
    """Cut the episodes at `rows` (N,) into passes; weights (N, T) of their tokens in the loss. pads: as in `passes`."""
    for row_index in split_by_tokens(
        batch.lengths[rows].cpu(), TOKENS_PER_PASS[batch.tokens.device.type], needs_padding
    ):
        yield _make_pass(batch, targets, rows[row_index], weights[row_index])


def _make_pass(batch: Batch, targets: Targets, index: Tensor, weights: Tensor) -> PassInputs:
    """The pass of the episodes at `index` (n,); weights (n, T) of their tokens in the loss."""
    pass_batch = batch.select_rows(index)
    longest = pass_batch.mask.shape[1]
    return PassInputs(pass_batch, targets.select_rows(index, longest), weights[:, :longest][pass_batch.mask])


def update_critic(
    critic: Critic,
    backend: Backend,
    batch: Batch,
    targets: Targets,
    order: Tensor,
    settings: CriticConfig,
    loss_agg_mode: str = "token-mean",
) -> Meter:
    """All optimizer steps of the critic for one training step, over mini-batches of `order` (B,).

    loss_agg_mode: the policy's, as published.
    """
    meter = Meter()

    def compute_loss(inputs: PassInputs) -> Tensor:
        values = critic.compute_values(inputs.batch.tokens, inputs.batch.find_prediction_positions())
        meter.tokens += len(values)
        return compute_value_loss(values, inputs, settings.cliprange_value, meter)

    needs_padding = critic.model.needs_padding
    return _run_optimizer_steps(
        backend,
        batch,
        lambda rows: targets,
        order,
        settings,
        loss_agg_mode,
        compute_loss,
        meter,
        "critic_grad_norm",
        needs_padding,
    )


def _run_optimizer_steps(
    backend: Backend,
    batch: Batch,
    get_targets: Callable[[Tensor], Targets],
    order: Tensor,
    settings: OptimConfig,
    mode: str,
    compute_loss: Callable[[PassInputs], Tensor],
    meter: Meter,
    norm_column: str,
    needs_padding: bool,
) -> Meter:
    """An optimizer step for each mini-batch of `order`, each over passes whose losses sum to that of the mini-batch.

    targets_of: those (B, T) that hold for the mini-batch of the rows (n,), asked for just before its optimizer step.
    """
    micro_batch_size, padded_length = settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1]
    for _ in range(settings.ppo_epochs):
        for rows in split_mini_batches(order, settings.ppo_mini_batch_size):
            pass_inputs = list(
                make_passes(
                    batch, get_targets(rows), rows, mode, micro_batch_size, padded_length, backend.world, needs_padding
                )
            )
            for number, inputs in enumerate(pass_inputs, 1):
                backend.backward(partial(compute_loss, inputs), number == len(pass_inputs))
            backend.step(meter, norm_column)
    return meter.all_reduce(backend.world)


def compute_value_loss(values: Tensor, inputs: PassInputs, cliprange: float, meter: Meter) -> Tensor:
    """The clipped value loss of one pass; values (N,) at its trained tokens."""
    token_loss = value_clip_loss(
        values, inputs.select_trained(inputs.targets.values), inputs.select_trained(inputs.targets.returns), cliprange
    )
    weighted_loss = (inputs.weights * token_loss.loss).sum()
    meter.add(0, {"vf_loss": weighted_loss.detach()}, {"vf_clipfrac": token_loss.clipped.sum()})
    return weighted_loss


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
    value_head: nn.Module | None = None
    value_weight: float = 0.0
    cliprange_value: float = 0.5

    def run(self, batch: Batch, targets: Targets, order: Tensor) -> Meter:
        """All optimizer steps of the policy for one training step, over mini-batches of `order` (B,)."""
        meter, settings = Meter(), self.settings

        def compute_loss(inputs: PassInputs) -> Tensor:
            return self._compute_loss(inputs, meter)

        def get_targets(rows: Tensor) -> Targets:
            return (
                self.make_tpo_targets(batch, targets, rows, meter) if settings.loss.needs_pass_before_step else targets
            )

        mode, needs_padding = settings.loss_agg_mode, self.model.model.needs_padding
        return _run_optimizer_steps(
            self.backend,
            batch,
            get_targets,
            order,
            settings,
            mode,
            compute_loss,
            meter,
            "actor_grad_norm",
            needs_padding,
        )

    def make_tpo_targets(self, batch: Batch, targets: Targets, rows: Tensor, meter: Meter) -> Targets:
        """`targets` for a tpo step on the mini-batch `rows` (n,): skills as advantages become the pull on each token.

        The loss couples all rollouts of a group, but the gradient of each one's log-prob is a number, the same for all
        of its tokens. A pass without gradients over the whole mini-batch makes these numbers, so that passes with
        gradients may be cut anywhere. ValueError where `rows` splits a group.
        """
        mini_batch, world = batch.select_rows(rows), self.backend.world
        if int(torch.isin(batch.group_ids, mini_batch.group_ids).sum()) != len(rows):
            raise ValueError(
                "a mini-batch of the tpo loss splits a group: use `update_order(batch, keeps_groups=True)`"
            )
        rows_per_pass = max(1, TOKENS_PER_PASS[mini_batch.tokens.device.type] // mini_batch.tokens.shape[1])
        logprobs = compute_at_trained_tokens(
            mini_batch, rows_per_pass, TokenFunction.for_logprobs(self.model, self.temperature), world
        )
        skills = targets.advantages[rows, mini_batch.mask.int().argmax(1)]
        old_logprobs = (mini_batch.logprobs.double() * mini_batch.mask).sum(1)
        loss = target_policy_loss(
            logprobs.double().sum(1), old_logprobs, skills, mini_batch.group_ids, self.settings.tpo_eta
        )
        loss_terms = {"pg_loss": loss.loss, "tpo_target_entropy": loss.entropy, "tpo_target_top_prob": loss.top_prob}
        # Every rank has the whole of them, and a meter sums what ranks have.
        meter.add(0, {name: value / world.size for name, value in loss_terms.items()}, {})
        token_weights = torch.zeros_like(targets.advantages)
        token_weights[rows] = loss.sequence_weights.to(token_weights.dtype)[:, None] * batch.mask[rows]
        return targets._replace(advantages=token_weights)

    def _compute_loss(self, inputs: PassInputs, meter: Meter) -> Tensor:
        """The whole loss of one pass."""
        return reduce(operator.add, self.compute_loss_terms(inputs, meter).values())

    def compute_loss_terms(self, inputs: PassInputs, meter: Meter) -> dict[str, Tensor]:
        """The terms of the loss of one pass, coefficients included; their sum is the loss.

        task, then, where they are on, entropy (a bonus: it is negative), kl, and value (on a shared trunk).
        """
        settings, flat_positions = self.settings, inputs.batch.find_prediction_positions()
        hidden = self.model.model.compute_hidden_states(inputs.batch.tokens, flat_positions)
        statistics = self.model.lm_head(
            hidden,
            partial(
                compute_token_statistics,
                tokens=inputs.select_trained(inputs.batch.tokens),
                temperature=self.temperature,
                entropy_gradient=settings.entropy_coeff != 0,
                reference=self._compute_reference_inputs(inputs, flat_positions),
                chunk_elements=CHUNK_ELEMENTS if settings.entropy_from_logits_with_chunking else None,
            ),
        )
        terms = {"task": self._compute_task_loss(inputs, statistics.logprobs, meter)}
        entropy = (inputs.weights * statistics.entropies).sum()
        meter.add(0, {"entropy_loss": entropy.detach()}, {})
        if settings.entropy_coeff != 0:
            terms["entropy"] = -settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            kl = (inputs.weights * self._compute_kl(inputs, statistics)).sum()
            meter.add(0, {"kl_loss": kl.detach()}, {})
            terms["kl"] = settings.kl_loss_coef * kl
        if self.value_head is not None:
            values = self.value_head(hidden).squeeze(-1)
            terms["value"] = self.value_weight * compute_value_loss(values, inputs, self.cliprange_value, meter)
        return terms

    def _compute_task_loss(self, inputs: PassInputs, logprobs: Tensor, meter: Meter) -> Tensor:
        """The policy loss of one pass; logprobs (N,) of its trained tokens now."""
        settings, old_logprobs = self.settings, inputs.select_trained(inputs.batch.logprobs)
        if settings.loss.needs_pass_before_step:
            meter.add(len(old_logprobs), {}, {"ppo_kl": (old_logprobs - logprobs.detach()).sum()})
            return -(inputs.select_trained(inputs.targets.advantages) * logprobs).sum()
        policy_loss = ppo_clip_loss(
            logprobs,
            old_logprobs,
            inputs.select_trained(inputs.targets.advantages),
            settings.clip_ratio_low,
            settings.clip_ratio_high,
            settings.clip_ratio_c,
        )
        weights = inputs.weights
        if settings.tis_imp_ratio_cap is not None:
            weights = weights * importance_weights(
                old_logprobs, inputs.select_trained(inputs.batch.engine_logprobs), settings.tis_imp_ratio_cap
            )
        pg_loss = (weights * policy_loss.loss).sum()
        token_sums = {
            "pg_clipfrac": policy_loss.clipped.sum(),
            "pg_clipfrac_lower": policy_loss.clipped_lower.sum(),
            "ppo_kl": (old_logprobs - logprobs.detach()).sum(),
        }
        meter.add(len(old_logprobs), {"pg_loss": pg_loss.detach()}, token_sums)
        return pg_loss

    def _compute_kl(self, inputs: PassInputs, statistics: TokenStatistics) -> Tensor:
        """The KL penalty of each trained token (N,)."""
        if statistics.full_kl is not None:
            return statistics.full_kl
        assert inputs.targets.ref_logprobs is not None
        return estimate_kl(
            statistics.logprobs, inputs.select_trained(inputs.targets.ref_logprobs), self.settings.kl_loss_type
        )

    def _compute_reference_inputs(self, inputs: PassInputs, flat_positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Hidden states (N, hidden) and head of the reference, where the exact KL needs its whole distributions."""
        if not (self.settings.use_kl_loss and self.settings.kl_loss_type == "full"):
            return None
        assert self.reference is not None
        with torch.no_grad():
            return self.reference.model.compute_hidden_states(
                inputs.batch.tokens, flat_positions
            ), self.reference.lm_head.weight


@torch.no_grad()
def compute_at_trained_tokens(
    batch: Batch, rows_per_pass: int, function: "TokenFunction", world: World = SINGLE_PROCESS
) -> Tensor:
    """`of(tokens (b, t), where (n,), targets (n,)) -> (n,)` at every trained token, without gradients; (B, T).

    A pass has at most the tokens of `rows_a_pass` rows of the longest episode. Ranks work on a part each, and all get
    the whole.
    """
    values = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    lengths = batch.lengths.cpu()
    local_rows = torch.argsort(lengths, stable=True)[world.rank :: world.size]
    for row_index in split_by_tokens(
        lengths[local_rows], rows_per_pass * int(lengths.max()), function.trunk.needs_padding
    ):
        rows = local_rows[row_index]
        pass_batch = batch.select_rows(rows)
        pass_values = values.new_zeros(pass_batch.mask.shape)
        pass_values[pass_batch.mask] = function(
            pass_batch.tokens, pass_batch.find_prediction_positions(), pass_batch.tokens[pass_batch.mask]
        ).to(pass_values.dtype)
        values[rows, : pass_batch.mask.shape[1]] = pass_values
    return world.all_reduce(values)


class TokenFunction:
    """A number a trained token: log-prob under a model, or value. Two constructors, one call."""

    def __init__(self, trunk: Trunk, head: nn.Module, temperature: float | None) -> None:
        self.trunk, self.head, self.temperature = trunk, head, temperature

    @staticmethod
    def for_logprobs(model: LanguageModel, temperature: float) -> "TokenFunction":
        """Log-prob of each trained token, in nats, of the tempered distribution."""
        return TokenFunction(model.model, model.lm_head, temperature)

    @staticmethod
    def for_values(trunk: Trunk, head: nn.Module) -> "TokenFunction":
        """Value of the state before each trained token."""
        return TokenFunction(trunk, head, None)

    def __call__(self, tokens: Tensor, flat_positions: Tensor, targets: Tensor) -> Tensor:
        """Evaluate at flat positions `where` (n,), whose next tokens are `targets` (n,)."""
        hidden = self.trunk.compute_hidden_states(tokens, flat_positions)
        if self.temperature is None:
            return self.head(hidden).squeeze(-1)
        return self.head(
            hidden,
            partial(logprobs_from_hidden, tokens=targets, temperature=self.temperature, chunk_elements=CHUNK_ELEMENTS),
        )
