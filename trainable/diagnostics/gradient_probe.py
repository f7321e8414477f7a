"""Gradients of each term of the policy's loss, in buckets of groups by reward spread, without an optimizer step.

Each batch is measured in two ways. The published measure is the gradient norm of each mini-batch, with the token
weights of training, averaged over mini-batches. The other measures are of mean gradients, where each token has its
weight in a loss over the full batch, so that the weighted gradients of the buckets sum to the batch's gradient. Prompts
are assigned to folds, which separate signal from noise (`algo.gradient_signal`).

Each bucket assigns its groups to new folds, because with the batch's folds, some folds of a bucket would be empty.
Conversely, the batch does not combine the buckets' folds. They would have equally many groups of each spread and would
therefore differ less than independent folds, which would hide noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo import gradient_signal
from trainable.algo.batching import order_length_stratified
from trainable.algo.names import TOKEN_MEANS
from trainable.algo.reductions import compute_loss_weights
from trainable.backend.meter import Meter
from trainable.backend.world import World
from trainable.files.step_phase import STEP_PHASE
from trainable.ppo.update import ActorUpdate, PassInputs, Targets, make_passes
from trainable.rollout.episode import Batch
from trainable.runs.run_files import Row

FOLDS = 8
"""Maximum number of folds. Full gradients need memory for 2 x FOLDS x components copies of the parameters."""
ROUNDING_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1.25e-3}
"""Sizes below which a gradient counts as rounding error, by the dtype of the passes.

The size is the gradient's norm divided by its coefficient and by the norm of the task's gradient with every advantage
at 1. For k3 with equal policy and reference, whose exact gradient is 0, it was measured as 7e-8 (float32) and 2e-4
(bfloat16). float16, with three more bits than bfloat16, was not measured.
"""
ComponentGradients = dict[str, list[Tensor]]
"""One tensor per component and parameter of the model, or a single one per component if gradients are sketched."""


class ProbeResult(NamedTuple):
    """The result of a probe.

    rows: one per bucket and component (`records.GRADIENT_COLUMNS`). groups: one per group, with its bucket.
    """

    rows: list[Row]
    groups: list[Row]


def probe_gradients(
    update: ActorUpdate,
    batch: Batch,
    targets: Targets,
    reward_stds: Mapping[int, float],
    max_buckets: int,
    bucket_mode: str,
    generator: torch.Generator,
    sketch_size: int | None = None,
    dtype: str = "float32",
) -> ProbeResult:
    """Measure the gradients of `batch`, bucket by bucket. The rows of the whole batch, `all`, are last.

    update: the policy's update. Weights, `.grad` and optimizer of its model stay unchanged. batch, targets: B episodes.
    The targets, including whitened advantages, were computed over the full batch. reward_stds: standard deviation of
    the scores of each group, by group id. max_buckets: maximum number of buckets in mode `quantile`. bucket_mode:
    `quantile`, or `fixed_rv`, which leaves out empty buckets. generator: assigns groups to folds. sketch_size: entries
    of the sketch that replaces each gradient (`count_sketch`); None keeps full gradients. dtype: dtype of the model's
    passes, a key of `ROUNDING_TOLERANCE`.

    Memory on the model's device with full gradients: (2 x folds x components + 3 x components + 2) copies of its
    parameters in float32, and (folds x components) copies of its largest parameter in float64. With sketches: one
    gradient, and (2 x folds x components + 3 x components + 2) sketches in float64. Time: three passes over the batch,
    each with one backward pass per component, and one with a single backward pass. All ranks of the update's backend
    have the same batch. Each makes some of the passes, and sums are combined.
    """
    # Indices on the CPU can index a batch on any device.
    groups, group_index = torch.unique(batch.group_ids.cpu(), return_inverse=True)
    stds = torch.tensor([reward_stds[int(group)] for group in groups], dtype=torch.float32)
    bucket_numbers = (
        gradient_signal.assign_quantile_buckets(stds, max_buckets)
        if bucket_mode == "quantile"
        else gradient_signal.assign_fixed_buckets(stds)
    )
    is_trained = batch.mask.any(dim=1).cpu()
    folds = _assign_folds(group_index, is_trained, generator)
    # All sketches share a seed, because only sketches of the same random projection can be added and multiplied.
    seed = int(torch.randint(2**62, (1,), generator=generator))
    probe = _Probe(update, batch, targets, sketch_size, seed, ROUNDING_TOLERANCE[dtype])
    order = order_length_stratified(batch.lengths.cpu())
    rows: list[Row] = []
    batch_sums = probe.make_empty_sums()
    for number in sorted(set(bucket_numbers.tolist())):
        STEP_PHASE.enter(f"bucket {number + 1}")
        is_member = bucket_numbers[group_index] == number
        bucket_sums = probe.compute_fold_sums(
            is_member & is_trained, _assign_folds(group_index, is_member & is_trained, generator), folds, batch_sums
        )
        rows += probe.make_rows(
            f"bucket_{number + 1}", order[is_member[order]], bucket_sums, stds[bucket_numbers == number]
        )
    batch_sums.all_reduce(update.backend.world)
    STEP_PHASE.enter("all buckets")
    rows += probe.make_rows("all", order, batch_sums, stds)
    group_rows = [
        {"bucket": f"bucket_{number + 1}", "group": group, "reward_std": std}
        for group, number, std in zip(groups.tolist(), bucket_numbers.tolist(), stds.tolist(), strict=True)
    ]
    return ProbeResult(rows, group_rows)


def _assign_folds(group_index: Tensor, is_chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Assign chosen episodes to folds (B,) at random by `group_index` (B,); 0 where `is_chosen` (B,) is False."""
    folds = torch.zeros_like(group_index)
    folds[is_chosen] = gradient_signal.split_folds(group_index[is_chosen], FOLDS, generator)
    return folds


class _FoldSums(NamedTuple):
    """Sums of gradients over some episodes, for K folds and C components.

    gradient_sums: for each stored tensor, the summed gradients (K, C, ...). score_sums: for each stored tensor, the
    summed gradient (...) of the task with all advantages 1, over all folds. counts: (K,) the part of each fold in the
    loss's divisor.
    """

    components: tuple[str, ...]
    gradient_sums: list[Tensor]
    score_sums: list[Tensor]
    counts: Tensor

    def add(self, fold: int, gradients: ComponentGradients, score: Sequence[Tensor]) -> None:
        for number, name in enumerate(self.components):
            for gradient_sum, gradient in zip(self.gradient_sums, gradients[name], strict=True):
                gradient_sum[fold, number] += gradient
        for score_sum, gradient in zip(self.score_sums, score, strict=True):
            score_sum += gradient

    def all_reduce(self, world: World) -> None:
        """Sum over ranks, in place."""
        for tensor in (*self.gradient_sums, *self.score_sums, self.counts):
            world.all_reduce(tensor)

    def compute_gram(self) -> tuple[Tensor, Tensor]:
        """Compute inner products of the folds' mean gradients, (K, C + 1, K, C + 1), and the folds' counts (K,).

        The last component is `total`, the sum of the others.
        """
        # Folds without trained tokens have no mean and are left out.
        is_used = self.counts > 0
        counts = self.counts[is_used]
        gram = gradient_signal.compute_fold_gram(
            block[is_used] / counts.to(block).view(-1, *[1] * (block.dim() - 1)) for block in self.gradient_sums
        )
        gram = torch.cat((gram, gram.sum(1, keepdim=True)), dim=1)
        return torch.cat((gram, gram.sum(3, keepdim=True)), dim=3), counts


@dataclass(frozen=True)
class _Probe:
    """Measures one batch with one update."""

    update: ActorUpdate
    batch: Batch
    targets: Targets
    sketch_size: int | None
    seed: int
    rounding_tolerance: float

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.update.model.parameters() if weight.requires_grad]

    def make_rows(self, bucket: str, episode_indices: Tensor, sums: _FoldSums, stds: Tensor) -> list[Row]:
        """Make the rows of one bucket. episode_indices: (N,), its episodes in mini-batch order."""
        common_columns = {
            "sample_count": len(episode_indices),
            "sample_pct": 100 * len(episode_indices) / len(self.batch.lengths),
            "token_count": int(self.batch.mask[episode_indices].sum()),
            "group_count": len(stds),
            "reward_std_mean": float(stds.mean()),
            "reward_std_min": float(stds.min()),
            "reward_std_max": float(stds.max()),
            "bucket": bucket,
            "weight": float(sums.counts.sum() / self._compute_divisors().sum()),
        }
        published_rows, signal_rows = self._measure_published(episode_indices), _measure_signal(sums)
        for name in self._find_rounded(sums, signal_rows):
            signal_rows[name] |= _make_rounding_row(signal_rows[name])
            # The direction of a rounding error is meaningless, so other components have no cosine with it either.
            for row in signal_rows.values():
                row |= {f"cosine_{name}": None} if f"cosine_{name}" in row else {}
        return [
            {**common_columns, "component": name, **published_rows.get(name, {}), **signal_rows[name]}
            for name in (*sums.components, "total")
        ]

    def _find_rounded(self, sums: _FoldSums, signal_rows: Mapping[str, Row]) -> list[str]:
        """Find the components whose gradient is rounding error; `total` is among them if all components are.

        Non-finite gradients are not, since a comparison with NaN is False.
        """
        settings = self.update.settings
        min_norm = self.rounding_tolerance * float(torch.nn.utils.get_total_norm(sums.score_sums) / sums.counts.sum())
        factors = {"entropy": settings.entropy_coeff, "kl": settings.kl_loss_coef, "value": self.update.value_weight}
        rounded_names = [
            name for name in sums.components if signal_rows[name]["mean_norm"] <= min_norm * abs(factors.get(name, 1.0))
        ]
        return [*rounded_names, "total"] if len(rounded_names) == len(sums.components) else rounded_names

    # ------------------------------------------------------------------ the published measure

    def _measure_published(self, episode_indices: Tensor) -> dict[str, Row]:
        """Measure norms and losses by component, mini-batch by mini-batch."""
        settings = self.update.settings
        mini_batch_size, micro_batch_size = settings.ppo_mini_batch_size, settings.ppo_micro_batch_size_per_gpu
        norms: dict[str, list[float]] = {}
        losses: dict[str, float] = {}
        mini_batch_indices = episode_indices.split(mini_batch_size)
        world = self.update.backend.world
        # Rank r measures mini-batches r, r + world.size, ...
        rank_results = world.all_gather_object(
            [
                self._measure_mini_batch(index)
                for index in STEP_PHASE.track(mini_batch_indices[world.rank :: world.size], "norms of mini-batch")
            ]
        )
        for number, index in enumerate(mini_batch_indices):
            for name, (mini_batch_norm, loss) in rank_results[number % world.size][number // world.size].items():
                norms.setdefault(name, []).append(mini_batch_norm)
                # The loss of a mini-batch is a mean over its micro-batches, of which the last may be short. Weighting
                # by their number gives a mean over all micro-batches of the bucket.
                losses[name] = losses.get(name, 0.0) + loss * -(-len(index) // micro_batch_size)
        tokens = int(self.batch.mask[episode_indices].sum())
        sequences = torch.tensor([len(index) for index in mini_batch_indices])
        num_micro_batches = sum(-(-len(index) // micro_batch_size) for index in mini_batch_indices)
        published_rows: dict[str, Row] = {"total": {"loss": sum(losses.values()) / num_micro_batches}}
        for name, values in norms.items():
            bucket_norm = gradient_signal.compute_published_norm(
                torch.tensor(values), sequences, tokens, mini_batch_size, micro_batch_size
            )
            published_rows[name] = dict(zip(("norm", "norm_per_sample", "norm_per_token"), bucket_norm, strict=True))
            published_rows[name]["loss"] = losses[name] / num_micro_batches
        return published_rows

    def _measure_mini_batch(self, index: Tensor) -> dict[str, tuple[float, float]]:
        """Measure gradient norm and value of each term of one mini-batch's loss."""
        mode, micro_batch_size = self.update.settings.loss_agg_mode, self.update.settings.ppo_micro_batch_size_per_gpu
        padded_length, needs_padding = self.batch.tokens.shape[1], self.update.model.model.needs_padding
        targets = self.update.silence_tokens(self.batch, self.targets, index, micro_batch_size)
        pass_inputs = make_passes(
            self.batch, targets, index, mode, micro_batch_size, padded_length, needs_padding=needs_padding
        )
        gradient_sums: ComponentGradients = {}
        losses: dict[str, float] = {}
        for gradients, terms in map(self._compute_gradients, pass_inputs):
            for name, tensors in gradients.items():
                gradient_sums[name] = (
                    [a + b for a, b in zip(gradient_sums[name], tensors, strict=True)]
                    if name in gradient_sums
                    else tensors
                )
                losses[name] = losses.get(name, 0.0) + terms[name]
        return {
            name: (float(torch.nn.utils.get_total_norm(tensors)), losses[name])
            for name, tensors in gradient_sums.items()
        }

    def _compute_gradients(self, inputs: PassInputs) -> tuple[ComponentGradients, dict[str, float]]:
        """Compute gradient and value of each term in one pass, without changing `.grad`."""
        terms = self.update.compute_loss_terms(inputs, Meter())
        last_number = len(terms) - 1
        gradients = {
            # All terms share one forward pass, so its graph is kept until the last term. Gradients of parameters that a
            # term does not depend on, such as the value head for the policy loss, are 0.
            name: self._compress_gradient(self._differentiate(term, retain_graph=number < last_number))
            for number, (name, term) in enumerate(terms.items())
        }
        return gradients, {name: float(term.detach()) for name, term in terms.items()}

    def _differentiate(self, loss: Tensor, retain_graph: bool = False) -> list[Tensor]:
        """Compute the gradient of a loss, scaled in the backward pass as in an update."""
        scale = self.update.backend.loss_scale
        gradients = torch.autograd.grad(
            loss * scale, self._parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        return list(gradients) if scale == 1 else list(torch._foreach_div(gradients, scale))

    def _compress_gradient(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        """Convert a gradient to its stored form: float32, or a sketch."""
        if self.sketch_size is None:
            return [tensor.float() for tensor in gradient]
        return [gradient_signal.count_sketch(gradient, self.sketch_size, self.seed)]

    # ------------------------------------------------------------------ the mean gradient

    def _compute_divisors(self) -> Tensor:
        """Compute each episode's part (B,) in the divisor of the batch's loss: its trained tokens, or 1."""
        tokens = self.batch.mask.sum(1)
        # Sequence means leave out episodes without trained tokens (see `compute_loss_weights`).
        return (tokens if self.update.settings.loss_agg_mode in TOKEN_MEANS else (tokens > 0)).double()

    def make_empty_sums(self) -> _FoldSums:
        """Make sums of 0 for every fold and every active term of the loss.

        Full gradients are summed in float32 to save memory, and sketches, which are small, in float64.
        """
        settings, has_value = self.update.settings, self.update.value_head is not None
        is_active = {"entropy": settings.entropy_coeff != 0, "kl": settings.use_kl_loss, "value": has_value}
        names = ("task", *(name for name, is_on in is_active.items() if is_on))
        shapes = (
            [parameter.shape for parameter in self._parameters]
            if self.sketch_size is None
            else [torch.Size((self.sketch_size,))]
        )
        dtype, device = torch.float32 if self.sketch_size is None else torch.float64, self._parameters[0].device
        gradient_sums = [torch.zeros((FOLDS, len(names), *shape), dtype=dtype, device=device) for shape in shapes]
        score_sums = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        return _FoldSums(names, gradient_sums, score_sums, torch.zeros(FOLDS, dtype=torch.float64))

    def compute_fold_sums(
        self, is_chosen: Tensor, bucket_folds: Tensor, batch_folds: Tensor, batch_sums: _FoldSums
    ) -> _FoldSums:
        """Sum gradients of the chosen episodes (B,) by `bucket_folds` (B,), and by `batch_folds` into `batch_sums`.

        The returned sums are over all ranks. `batch_sums` gets only this rank's gradients, because it is reduced once,
        after the last bucket. Summed over all episodes, gradients are the gradient of the batch's loss times the
        divisor. Each pair of a bucket fold and a batch fold is processed separately, so that every gradient is
        computed only once.
        """
        divisors, bucket_sums, world = self._compute_divisors(), self.make_empty_sums(), self.update.backend.world
        weights = divisors.sum() * compute_loss_weights(self.batch.mask, self.update.settings.loss_agg_mode)
        targets = self.targets._replace(loss_weights=weights.float())
        targets = self.update.silence_tokens(self.batch, targets, torch.arange(len(divisors)))
        if targets.policy_weights is not None:
            targets = targets._replace(policy_weights=(divisors.sum() * targets.policy_weights).float())
        # A cell is a pair of folds; -1 for episodes that are not chosen.
        cells = torch.where(is_chosen, bucket_folds * FOLDS + batch_folds, -1)
        chosen_cells = sorted(set(cells[is_chosen].tolist()))[world.rank :: world.size]
        for cell in STEP_PHASE.track(chosen_cells, "sums of fold"):
            index = (cells == cell).nonzero().squeeze(-1)
            destinations = ((bucket_sums, cell // FOLDS), (batch_sums, cell % FOLDS))
            needs_padding = self.update.model.model.needs_padding
            for inputs in make_passes(self.batch, targets, index, needs_padding=needs_padding):
                gradients, score_gradient = self._compute_gradients(inputs)[0], self._compute_score_gradient(inputs)
                for destination, fold in destinations:
                    destination.add(fold, gradients, score_gradient)
            for destination, fold in destinations:
                destination.counts[fold] += divisors[index].sum().cpu()
        bucket_sums.all_reduce(world)
        return bucket_sums

    def _compute_score_gradient(self, inputs: PassInputs) -> list[Tensor]:
        """Compute the task's gradient with all advantages 1, a scale that does not depend on rewards."""
        unit_targets = inputs.targets._replace(advantages=torch.ones_like(inputs.targets.advantages))
        task_loss = self.update.compute_loss_terms(inputs._replace(targets=unit_targets), Meter())["task"]
        return self._compress_gradient(self._differentiate(task_loss))


def _make_rounding_row(row: Row) -> Row:
    """Make the signal columns of a component whose gradient is rounding error: 0, without ratios and directions.

    row: the measured columns. If the whole step has no signal, the component's share is missing, not 0.
    """
    has_fraction = row["signal_share"] is not None and math.isfinite(row["signal_share"])
    fraction_columns = ("signal_share", "signal_share_low", "signal_share_high") if has_fraction else ()
    missing_columns = ("snr", "snr_low", "snr_high", "cosine_task", "cosine_entropy", "cosine_kl")
    return {
        **dict.fromkeys(("mean_norm", "signal", "noise", "share", *fraction_columns), 0.0),
        **dict.fromkeys(missing_columns),
    }


def _measure_signal(sums: _FoldSums) -> dict[str, Row]:
    """Measure norm, signal, noise, cosines and shares of each component's mean gradient, including `total`."""
    gram, counts = sums.compute_gram()
    names = (*sums.components, "total")
    cosines, component_gram = gradient_signal.compute_component_cosines(gram, counts), gram[:, :-1, :, :-1]
    update_fractions = gradient_signal.compute_update_fractions(component_gram, counts)
    signal_fractions = gradient_signal.estimate_signal_fractions(component_gram, counts)
    rows: dict[str, Row] = {}
    for number, name in enumerate(names):
        signal = gradient_signal.estimate_gradient_signal(gram[:, number, :, number], counts)
        # The share of `total` is 1, unless the update has no signal and shares do not exist.
        total_fraction = 1.0 if bool(signal_fractions.fraction.isfinite().all()) else None
        fractions = (
            (1.0, total_fraction, total_fraction, total_fraction)
            if name == "total"
            else [float(values[number]) for values in (update_fractions, *signal_fractions[1:])]
        )
        rows[name] = {
            **dict(zip(("mean_norm", "signal", "noise", "snr", "snr_low", "snr_high"), signal, strict=True)),
            **dict(zip(("share", "signal_share", "signal_share_low", "signal_share_high"), fractions, strict=True)),
            "fold_count": len(counts),
            **{
                f"cosine_{other}": float(cosines[number, names.index(other)]) if other in names else None
                for other in ("task", "entropy", "kl")
            },
        }
    return rows
