"""The optimizer steps of a training step: for the policy, the critic, or both on a shared trunk.

Each mini-batch is one optimizer step. As published, its loss is the mean over micro-batches of their aggregated losses.
Every aggregation is a weighted sum over tokens, so a mini-batch can be split anywhere into forward and backward passes
without changing its loss: the weights reproduce the published micro-batches, and memory limits the passes.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainable.algo import losses
from trainable.algo.batching import split_by_tokens
from trainable.algo.reductions import compute_loss_weights
from trainable.algo.target_policy import target_policy_loss
from trainable.algo.vocabulary import compute_token_statistics, logprobs_from_hidden
from trainable.backend.make import Backend
from trainable.backend.meter import Meter
from trainable.backend.world import SINGLE_PROCESS, World, shard_rows
from trainable.config.constants import CHUNK_ELEMENTS, TOKENS_PER_PASS
from trainable.config.own_parts import get_part, has_parameter
from trainable.config.sections import ActorConfig, CriticConfig, OptimConfig
from trainable.files.step_phase import STEP_PHASE
from trainable.models.interface import LanguageModel, Trunk, ValueModel
from trainable.rollout.episode import Batch


class Targets(NamedTuple):
    """Targets of the losses, (B, T) each.

    returns: what the critic is fitted to. values: of the critic before the update, zeros without a critic.
    ref_logprobs: None if there was no pass of the reference. sequence_weights: (B,), only for the tpo loss, where minus
    the weight of a sequence is the coefficient of its log-probs (see `ActorUpdate.make_tpo_targets`). loss_weights: the
    weight of each token, if all episodes are one mini-batch; None if the loss is aggregated by its mode.
    policy_weights: the weight of each token in the policy loss, if it differs from its weight in the other terms (see
    `ActorUpdate.silence_tokens`).
    """

    advantages: Tensor
    returns: Tensor
    values: Tensor
    ref_logprobs: Tensor | None
    sequence_weights: Tensor | None = None
    loss_weights: Tensor | None = None
    policy_weights: Tensor | None = None

    def select_rows(self, index: Tensor, longest: int) -> "Targets":
        """Select the targets of the episodes at `index` (N,), cut to `longest` tokens."""
        selected = (None if tensor is None else tensor[index] for tensor in self)
        return Targets._make(rows if rows is None or rows.dim() == 1 else rows[:, :longest] for rows in selected)


class PassInputs(NamedTuple):
    """The inputs of one pass: episodes, their targets, and the loss weight (N,) of each trained token."""

    batch: Batch
    targets: Targets
    weights: Tensor

    def select_trained(self, tensor: Tensor) -> Tensor:
        """Select the values (N,) of a (B, T) tensor at the trained tokens."""
        return tensor[self.batch.mask]

    def find_episode_index(self) -> Tensor:
        """Find the episode (N,) of each trained token: its row in the pass, which has all tokens of its episodes."""
        return self.batch.mask.nonzero()[:, 0]


def make_passes(
    batch: Batch,
    targets: Targets,
    rows: Tensor,
    mode: str = "token-mean",
    micro_batch_size: int | None = None,
    padded_length: int | None = None,
    world: World = SINGLE_PROCESS,
    needs_padding: bool = False,
) -> Iterator[PassInputs]:
    """Split this rank's shard of a mini-batch into passes, with the weights of their tokens in the mini-batch's loss.

    All ranks get the same number of passes, so that they can gather sharded weights together. The last passes of a rank
    may have no trained tokens. batch: all episodes of the step. rows: (N,) indices of the mini-batch's episodes. mode:
    how to aggregate losses, one of `LOSS_AGG_MODES`. micro_batch_size: number of consecutive `rows` in a micro-batch.
    padded_length: tokens of the longest episode of `batch`, the divisor of seq-mean-token-sum-norm. These three are not
    read if `targets` has loss weights. needs_padding: see `split_by_tokens`.
    """
    # Before the mini-batch is sharded, since a micro-batch may have rows on several ranks.
    if targets.loss_weights is None:
        weights = compute_loss_weights(batch.mask[rows], mode, micro_batch_size, padded_length)
    else:
        weights = targets.loss_weights[rows]
    lengths, max_tokens = batch.lengths[rows].cpu(), TOKENS_PER_PASS[batch.tokens.device.type]
    # For all ranks, since every rank must know the largest number of passes.
    rank_passes = [
        [rank_rows[cut] for cut in split_by_tokens(lengths[rank_rows], max_tokens, needs_padding)]
        for rank_rows in shard_rows(lengths, world.size)
    ]
    for row_index in rank_passes[world.rank]:
        yield _make_pass(batch, targets, rows[row_index], weights[row_index])
    num_missing = max(map(len, rank_passes)) - len(rank_passes[world.rank])
    # With an empty mask, the loss of a pass is a sum over nothing, with gradient 0. One row is the cheapest pass.
    untrained_batch = batch._replace(mask=torch.zeros_like(batch.mask))
    for _ in range(num_missing):
        yield _make_pass(untrained_batch, targets, rows[:1], weights[:1])


def _make_pass(batch: Batch, targets: Targets, index: Tensor, weights: Tensor) -> PassInputs:
    """Make the pass of the episodes at `index` (n,). weights: (n, T) of their tokens in the loss."""
    pass_batch = batch.select_rows(index)
    longest = pass_batch.mask.shape[1]
    return PassInputs(pass_batch, targets.select_rows(index, longest), weights[:, :longest][pass_batch.mask])


def update_critic(
    critic: ValueModel,
    backend: Backend,
    batch: Batch,
    targets: Targets,
    order: Tensor,
    settings: CriticConfig,
    loss_agg_mode: str = "token-mean",
) -> Meter:
    """Make all optimizer steps of the critic for one training step. Return the meter, summed over all ranks.

    order: (B,) the order in which episodes are split into mini-batches. loss_agg_mode: how to aggregate losses. As
    published, the trainer passes the policy's mode.
    """
    meter = Meter()

    def compute_loss(inputs: PassInputs) -> Tensor:
        values = critic.compute_values(inputs.batch.tokens, inputs.batch.find_prediction_positions())
        meter.tokens += len(values)
        return compute_value_loss(values, inputs, settings.cliprange_value, meter)

    return _run_optimizer_steps(
        backend,
        batch,
        lambda rows: targets,  # the same for all steps, since they do not depend on the critic's current weights
        order,
        settings,
        loss_agg_mode,
        compute_loss,
        meter,
        norm_column="critic_grad_norm",
        needs_padding=critic.model.needs_padding,
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
    takes_all: bool = False,
) -> Meter:
    """Make an optimizer step for each mini-batch of `order` (B,), accumulating gradients over its passes.

    get_targets: called with the rows (n,) of a mini-batch just before its step, because the targets of tpo depend on
    the current weights. Returns targets for the complete batch, of which only these rows are read. compute_loss:
    computes the loss of one pass. meter: collects what `compute_loss` and the optimizer record, and is returned, summed
    over all ranks. norm_column: of the gradient norm. takes_all: whether all episodes are one mini-batch.
    """
    # The length of the batch, so that seq-mean-token-sum-norm divides all mini-batches by the same length.
    micro_batch_size, padded_length = settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1]
    mini_batches = [
        rows
        for _ in range(settings.ppo_epochs)
        for rows in ([order] if takes_all else order.split(settings.ppo_mini_batch_size))
    ]
    with backend.load_for_update():
        for rows in STEP_PHASE.track(mini_batches, "mini-batch"):
            # A list, since the backend must know which pass is last (see `TorchBackend.backward`).
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
    """Compute the clipped value loss of one pass. values: (N,) at its trained tokens."""
    token_loss = losses.value_clip_loss(
        values, inputs.select_trained(inputs.targets.values), inputs.select_trained(inputs.targets.returns), cliprange
    )
    weighted_loss = (inputs.weights * token_loss.loss).sum()
    # 0 tokens, since `update_critic`, or the policy loss on a shared trunk, has counted them already.
    meter.add(
        tokens=0, loss_terms={"vf_loss": weighted_loss.detach()}, token_sums={"vf_clipfrac": token_loss.clipped.sum()}
    )
    return weighted_loss


@dataclass(frozen=True)
class ActorUpdate:
    """The update of the policy.

    temperature: sampling temperature of the rollouts. Log-probs and entropies are of the tempered distribution.
    reference: the frozen reference, which only the exact KL reads here. value_head: the critic's head, if it is on the
    policy's trunk. If so, the value loss is added to the policy loss with the weight `value_weight`. cliprange_value:
    clip range of the value loss, in units of the return.
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
        """Make all optimizer steps of the policy for one training step, over mini-batches of `order` (B,).

        Returns the meter, summed over all ranks. If the loss needs whole groups, no mini-batch may split one.
        """
        meter, settings = Meter(), self.settings

        def compute_loss(inputs: PassInputs) -> Tensor:
            return reduce(operator.add, self.compute_loss_terms(inputs, meter).values())

        def get_targets(rows: Tensor) -> Targets:
            # The targets of tpo depend on the current weights, which change with every optimizer step.
            if settings.loss.needs_pass_before_step:
                return self.make_tpo_targets(batch, targets, rows, meter)
            return self.silence_tokens(batch, targets, rows, settings.ppo_micro_batch_size_per_gpu)

        return _run_optimizer_steps(
            self.backend,
            batch,
            get_targets,
            order,
            settings,
            settings.loss_agg_mode,
            compute_loss,
            meter,
            norm_column="actor_grad_norm",
            needs_padding=self.model.model.needs_padding,
            takes_all=targets.loss_weights is not None,
        )

    def silence_tokens(
        self, batch: Batch, targets: Targets, rows: Tensor, micro_batch_size: int | None = None
    ) -> Targets:
        """Add `policy_weights` to `targets`, without the tokens that STAPO silences in the mini-batch `rows` (n,).

        The remaining tokens are aggregated as if the others were not trained. micro_batch_size: as in `make_passes`.
        """
        settings, mask = self.settings, batch.mask[rows]
        if settings.stapo_tau_p is None:
            return targets
        is_silenced = losses.find_spurious_tokens(
            batch.logprobs[rows],
            batch.entropies[rows],
            targets.advantages[rows],
            mask,
            settings.stapo_tau_p,
            settings.stapo_entropy_quantile,
        )
        policy_weights = torch.zeros_like(batch.logprobs)
        policy_weights[rows] = compute_loss_weights(
            mask & ~is_silenced, settings.loss_agg_mode, micro_batch_size, batch.tokens.shape[1]
        )
        return targets._replace(policy_weights=policy_weights)

    def make_tpo_targets(self, batch: Batch, targets: Targets, rows: Tensor, meter: Meter) -> Targets:
        """Add `sequence_weights` to `targets` for a tpo step on the mini-batch `rows` (n,).

        The advantages in `targets` are the skills of the episodes. The loss couples all rollouts of a group, but its
        gradient with respect to the log-probs of a rollout is a single number, the same for all tokens. These numbers
        are computed in passes over the complete mini-batch without gradients, so that the passes with gradients can be
        split anywhere. `rows` must be whole groups.
        """
        mini_batch, world = batch.select_rows(rows), self.backend.world
        # The size of a pass is given in rows as long as the longest episode. An episode longer than TOKENS_PER_PASS
        # gets a pass of one row.
        rows_per_pass = max(1, TOKENS_PER_PASS[mini_batch.tokens.device.type] // mini_batch.tokens.shape[1])
        function = TokenFunction.for_logprobs(self.model, self.temperature)
        logprobs = compute_at_trained_tokens(mini_batch, rows_per_pass, function, world)
        # All trained tokens of an episode have the same skill: read it at the first one.
        skills = targets.advantages[rows, mini_batch.mask.int().argmax(1)]
        # Sum hundreds of tokens in float64, since in float32 the differences between rollouts would lose digits.
        # `logprobs` is 0 at untrained tokens, so only `old_logprobs` needs the mask.
        old_logprobs = (mini_batch.logprobs.double() * mini_batch.mask).sum(1)
        loss = target_policy_loss(
            logprobs.double().sum(1), old_logprobs, skills, mini_batch.group_ids, self.settings.tpo_eta
        )
        loss_terms = {"pg_loss": loss.loss, "tpo_target_entropy": loss.entropy, "tpo_target_top_prob": loss.top_prob}
        # Every rank has computed the complete terms, and the meter is summed over ranks later. The passes of the step
        # count the tokens.
        meter.add(tokens=0, loss_terms={name: value / world.size for name, value in loss_terms.items()}, token_sums={})
        sequence_weights = targets.advantages.new_zeros(len(batch.lengths))
        sequence_weights[rows] = loss.sequence_weights.to(sequence_weights.dtype)
        return targets._replace(sequence_weights=sequence_weights)

    def compute_loss_terms(self, inputs: PassInputs, meter: Meter) -> dict[str, Tensor]:
        """Compute the terms of the loss of one pass, including their coefficients. The loss is their sum.

        Returns scalars by name: task; entropy with an entropy_coeff (negative, since it is a bonus); kl with
        use_kl_loss; value with a value head on the trunk.
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
        # Always measured, since the entropy is a column. Its gradient is computed only if it is used.
        entropy = (inputs.weights * statistics.entropies).sum()
        meter.add(tokens=0, loss_terms={"entropy_loss": entropy.detach()}, token_sums={})
        if settings.entropy_coeff != 0:
            terms["entropy"] = -settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            token_kl = statistics.full_kl  # kl_loss_type=full: already computed, together with the log-probs
            if token_kl is None:
                assert inputs.targets.ref_logprobs is not None
                ref_logprobs = inputs.select_trained(inputs.targets.ref_logprobs)
                token_kl = losses.estimate_kl(statistics.logprobs, ref_logprobs, settings.kl_loss_type)
            kl = (inputs.weights * token_kl).sum()
            meter.add(tokens=0, loss_terms={"kl_loss": kl.detach()}, token_sums={})
            terms["kl"] = settings.kl_loss_coef * kl
        if self.value_head is not None:
            values = self.value_head(hidden).squeeze(-1)
            terms["value"] = self.value_weight * compute_value_loss(values, inputs, self.cliprange_value, meter)
        return terms

    def _compute_task_loss(self, inputs: PassInputs, logprobs: Tensor, meter: Meter) -> Tensor:
        """Compute the policy loss of one pass. logprobs: (N,) of its trained tokens under the current policy."""
        settings, old_logprobs = self.settings, inputs.select_trained(inputs.batch.logprobs)
        ppo_kl_sum = -losses.compute_log_ratio(logprobs.detach(), old_logprobs).sum()
        if settings.loss.needs_pass_before_step:  # tpo: the weights of sequences were computed before this step
            meter.add(len(old_logprobs), loss_terms={}, token_sums={"ppo_kl": ppo_kl_sum})
            assert inputs.targets.sequence_weights is not None
            # Without `inputs.weights`, because the sequence weights include the mean over groups. This sum has the
            # gradient of the loss, but not its value, which `make_tpo_targets` has recorded already.
            token_weights = inputs.targets.sequence_weights[:, None].expand(inputs.batch.mask.shape)
            return -(inputs.select_trained(token_weights) * logprobs).sum()
        token_loss, clip_sums = self._compute_token_loss(inputs, logprobs, old_logprobs)
        token_sums, weights = {"ppo_kl": ppo_kl_sum, **clip_sums}, inputs.weights
        if inputs.targets.policy_weights is not None:
            weights = inputs.select_trained(inputs.targets.policy_weights)
            token_sums["stapo_silenced_fraction"] = (weights == 0).sum()
        # An engine's log-probs differ from the trainer's by rounding, for which these weights correct the loss of the
        # sampled tokens. RunConfig rejects them for tpo, which weights sequences.
        if settings.tis_imp_ratio_cap is not None:
            batch, (unit, kind) = inputs.batch, settings.tis_mode.split("_")
            engine_weights, is_clipped = losses.compute_importance_weights(
                batch.logprobs,
                batch.engine_logprobs,
                batch.mask,
                settings.tis_imp_ratio_cap,
                settings.tis_imp_ratio_floor,
                is_sequence=unit == "sequence",
                is_mask=kind == "mask",
            )
            weights = weights * inputs.select_trained(engine_weights)
            token_sums["tis_clipfrac"] = inputs.select_trained(is_clipped).sum()
        pg_loss = (weights * token_loss).sum()
        meter.add(len(old_logprobs), {"pg_loss": pg_loss.detach()}, token_sums)
        return pg_loss

    def _compute_token_loss(
        self, inputs: PassInputs, logprobs: Tensor, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the policy loss (N,) of each token, and the number of tokens that it clips, by column."""
        settings = self.settings
        tokens = (logprobs, old_logprobs, inputs.select_trained(inputs.targets.advantages))
        clip_range = (settings.clip_ratio_low, settings.clip_ratio_high)
        formulas: dict[str, Callable[[], losses.PolicyLoss]] = {
            "ppo_clip": lambda: losses.ppo_clip_loss(*tokens, *clip_range, settings.clip_ratio_c),
            "gspo": lambda: losses.gspo_loss(*tokens, inputs.find_episode_index(), *clip_range),
            "cispo": lambda: losses.cispo_loss(*tokens, *clip_range),
            "cppo": lambda: losses.cppo_loss(
                *tokens,
                inputs.find_episode_index(),
                settings.cppo_delta,
                settings.cppo_delta_b,
                settings.cppo_w_min,
            ),
        }
        if settings.policy_loss not in formulas:  # a plug-in, of which it is unknown what it clips
            own_loss = get_part(settings.policy_loss)
            index = {"episode_index": inputs.find_episode_index()} if has_parameter(own_loss, "episode_index") else {}
            return own_loss(*tokens, **index), {}
        policy_loss = formulas[settings.policy_loss]()
        clipped_tokens = {"pg_clipfrac": policy_loss.clipped, "pg_clipfrac_lower": policy_loss.clipped_lower}
        return policy_loss.loss, {name: mask.sum() for name, mask in clipped_tokens.items() if mask is not None}

    def _compute_reference_inputs(self, inputs: PassInputs, flat_positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the reference's hidden states (N, hidden) for the exact KL, and return them with its head.

        Returns None if the exact KL is not used. It needs the reference's distribution over the vocabulary, which is
        too large to store per token, so the reference runs again in each pass.
        """
        if not self.settings.reads_reference_distribution:
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
    """Evaluate `function` at every trained token, without gradients: (B, T) float32, 0 at other tokens.

    A pass has at most as many tokens as `rows_per_pass` rows of the longest episode. Each rank computes some rows, and
    all ranks get the complete result.
    """
    values = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    lengths = batch.lengths.cpu()
    # Every n-th row by length, so that all ranks have about equally much work.
    local_rows = torch.argsort(lengths, stable=True)[world.rank :: world.size]
    passes = split_by_tokens(lengths[local_rows], rows_per_pass * int(lengths.max()), function.trunk.needs_padding)
    for row_index in STEP_PHASE.track(passes, "pass"):
        rows = local_rows[row_index]
        pass_batch = batch.select_rows(rows)
        pass_values = values.new_zeros(pass_batch.mask.shape)
        pass_values[pass_batch.mask] = function(
            pass_batch.tokens, pass_batch.find_prediction_positions(), pass_batch.tokens[pass_batch.mask]
        ).to(pass_values.dtype)
        values[rows, : pass_batch.mask.shape[1]] = pass_values
    return world.all_reduce(values)  # each row is 0 on all ranks but one, so the sum is a gather


class TokenFunction(NamedTuple):
    """A function of trained tokens: their log-probs under a model, or the values of the states before them.

    temperature: sampling temperature of the log-probs, or None for values.
    """

    trunk: Trunk
    head: nn.Module
    temperature: float | None = None

    @staticmethod
    def for_logprobs(model: LanguageModel, temperature: float) -> "TokenFunction":
        """Make the function that computes the log-prob of each trained token at `temperature`, in nats."""
        return TokenFunction(model.model, model.lm_head, temperature)

    def __call__(self, tokens: Tensor, flat_positions: Tensor, targets: Tensor) -> Tensor:
        """Evaluate at flat positions (n,) in `tokens` (b, t), whose next tokens are `targets` (n,)."""
        hidden = self.trunk.compute_hidden_states(tokens, flat_positions)
        if self.temperature is None:
            return self.head(hidden).squeeze(-1)
        return self.head(
            hidden,
            partial(logprobs_from_hidden, tokens=targets, temperature=self.temperature, chunk_elements=CHUNK_ELEMENTS),
        )
