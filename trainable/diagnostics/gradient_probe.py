"""Gradients of each term of the policy's loss, in each bucket of groups by reward spread. No optimizer step is made.

Two readings of one batch. The published one is a mean over mini-batches of the norm of each one's gradient, with the
weights that training gives the tokens. The other one is of mean gradients: every token has its weight in a loss over
the whole batch, so that the buckets' gradients, each with its weight, sum to the batch's own; and prompts are dealt
into folds, from which signal and noise are told apart (`algo.gradient_signal`). A bucket's groups are dealt anew for
its own numbers: with the folds of the whole batch some would be empty. Those of the batch are not made of the buckets'
folds: folds that all have as many groups of each spread differ less than independent ones, and would hide noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo.batching import length_stratified_order
from trainable.algo.buckets import fixed_buckets, quantile_buckets
from trainable.algo.gradient_signal import (
    component_cosines,
    fold_gram,
    gradient_signal,
    published_norm,
    signal_shares,
    split_folds,
    update_shares,
)
from trainable.algo.reductions import loss_weights
from trainable.algo.sketch import count_sketch
from trainable.backend.meter import Meter
from trainable.backend.world import World
from trainable.ppo.update import ActorUpdate, Pass, Targets, passes, weighted_passes
from trainable.rollout.batch import Batch, mini_batches
from trainable.runs.run import Row

FOLDS = 8
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2}
"""By what the passes compute in: a gradient is rounding where, before its coefficient, it is at most so many times that
of the task with every advantage 1. In such units k3 where policy and reference agree measured 7e-8 and 2e-4."""
Gradients = dict[str, list[Tensor]]
"""Of each component, one tensor a parameter of the model; where gradients are sketched, one tensor in all."""


class Findings(NamedTuple):
    """rows: one a bucket and component (`records.GRADIENT_COLUMNS`). groups: one a group, with its bucket."""

    rows: list[Row]
    groups: list[Row]


def probe_gradients(
    update: ActorUpdate, batch: Batch, targets: Targets, reward_stds: Mapping[int, float], buckets: int, mode: str,
    generator: torch.Generator, sketch: int | None = None, dtype: str = "float32",
) -> Findings:  # fmt: skip
    """Measure the gradients of `batch`, the buckets in order and `all` last.

    Args:
        update: the policy's update; its model is read, and neither weights, `.grad` nor optimizer are touched.
        batch, targets: B episodes; what the losses aim at was made for the whole batch, whitening included.
        reward_stds: group id -> standard deviation of the group's scores.
        buckets, mode: how many buckets at most; quantile, or fixed_rv (then empty ones are left out).
        generator: deals the groups into folds.
        sketch: entries of the sketch that stands for each gradient (`algo.sketch`); None keeps gradients whole.
        dtype: what the model's passes compute in, a key of `ROUNDING`.

    Held at once on the model's device, whole: (2 x folds x components + 3 x components + 2) copies of its parameters in
    float32, and (folds x components) of its largest one in float64. Sketched: one gradient, and (2 x folds x
    components + 3 x components + 2) sketches in float64. Time: three passes over the batch, each with a backward pass a
    component, and one with a single backward pass. The ranks of the update's backend, all with the same batch, make
    some of the passes each and put together what they sum.
    """
    # Indices stay on the processor: a batch on any device can be indexed by them.
    groups, where = torch.unique(batch.group_ids.cpu(), return_inverse=True)
    stds = torch.tensor([reward_stds[int(group)] for group in groups], dtype=torch.float32)
    numbers = quantile_buckets(stds, buckets) if mode == "quantile" else fixed_buckets(stds)
    is_trained = batch.mask.any(dim=1).cpu()
    folds = _deal(where, is_trained, generator)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    probe = _Probe(update, batch, targets, sketch, seed, ROUNDING[dtype])
    order = length_stratified_order(batch.lengths.cpu())
    rows: list[Row] = []
    whole = probe.no_sums()
    for number in sorted(set(numbers.tolist())):
        chosen = numbers[where] == number
        sums = probe.fold_sums(chosen & is_trained, _deal(where, chosen & is_trained, generator), folds, whole)
        rows += probe.rows(f"bucket_{number + 1}", order[chosen[order]], sums, stds[numbers == number])
    whole.total(update.backend.world)
    rows += probe.rows("all", order, whole, stds)
    table = [
        {"bucket": f"bucket_{number + 1}", "group": group, "reward_std": std}
        for group, number, std in zip(groups.tolist(), numbers.tolist(), stds.tolist(), strict=True)
    ]
    return Findings(rows, table)


def _deal(where: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Fold (B,) of each episode: the groups `where` (B,) of the `chosen` ones (B,) at random, 0 for all others."""
    folds = torch.zeros_like(where)
    folds[chosen] = split_folds(where[chosen], FOLDS, generator)
    return folds


class _FoldSums(NamedTuple):
    """blocks: per kept tensor the summed gradients (K, C, ...). counts: (K,) what each fold adds to the divisor.

    score: per kept tensor the summed gradient (...) of the task with every advantage 1, over all folds.
    """

    components: tuple[str, ...]
    blocks: list[Tensor]
    score: list[Tensor]
    counts: Tensor

    def add(self, fold: int, gradients: Gradients, score: Sequence[Tensor]) -> None:
        for number, name in enumerate(self.components):
            for block, part in zip(self.blocks, gradients[name], strict=True):
                block[fold, number] += part
        for whole, part in zip(self.score, score, strict=True):
            whole += part

    def total(self, world: World) -> None:
        """Sum over ranks, in place."""
        for part in (*self.blocks, *self.score, self.counts):
            world.total(part)

    def score_norm(self) -> float:
        """Norm of the mean gradient of the task with every advantage 1."""
        return float(torch.nn.utils.get_total_norm(self.score) / self.counts.sum())

    def gram(self) -> tuple[Tensor, Tensor]:
        """Products of the folds' mean gradients with `total` as the last component, (K, C + 1, K, C + 1); counts."""
        used = self.counts > 0
        counts = self.counts[used]
        gram = fold_gram(_mean(block[used], counts) for block in self.blocks)
        gram = torch.cat((gram, gram.sum(1, keepdim=True)), dim=1)
        return torch.cat((gram, gram.sum(3, keepdim=True)), dim=3), counts


def _mean(block: Tensor, counts: Tensor) -> Tensor:
    """Sums (K, C, ...) as means over each fold's share of the divisor."""
    return block / counts.to(block).view(-1, *[1] * (block.dim() - 1))


@dataclass(frozen=True)
class _Probe:
    """One batch under one update."""

    update: ActorUpdate
    batch: Batch
    targets: Targets
    sketch: int | None
    seed: int
    rounding: float

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.update.model.parameters() if weight.requires_grad]

    def rows(self, bucket: str, members: Tensor, sums: _FoldSums, stds: Tensor) -> list[Row]:
        """The rows of one bucket; members (N,) its episodes in the order of their mini-batches."""
        shared = self._counts(members, stds) | {
            "bucket": bucket, "weight": float(sums.counts.sum() / self._divisors().sum()),
        }  # fmt: skip
        published, trusted = self._published(members), _trusted(sums)
        for name in self._rounded(sums, trusted):
            trusted[name] |= _of_nothing(trusted[name])
            for row in trusted.values():
                row |= {f"cosine_{name}": None} if f"cosine_{name}" in row else {}
        return [
            {**shared, "component": name, **published.get(name, {}), **trusted[name]}
            for name in (*sums.components, "total")
        ]

    def _rounded(self, sums: _FoldSums, trusted: Mapping[str, Row]) -> list[str]:
        """The components that are rounding, and total where all are. A gradient that is not finite is none of them."""
        settings, least = self.update.settings, self.rounding * sums.score_norm()
        factors = {"entropy": settings.entropy_coeff, "kl": settings.kl_loss_coef, "value": self.update.value_weight}
        found = [name for name in sums.components if trusted[name]["mean_norm"] <= least * abs(factors.get(name, 1.0))]
        return [*found, "total"] if len(found) == len(sums.components) else found

    def _counts(self, members: Tensor, stds: Tensor) -> Row:
        return {
            "sample_count": len(members),
            "sample_pct": 100 * len(members) / len(self.batch.lengths),
            "token_count": int(self.batch.mask[members].sum()),
            "group_count": len(stds),
            "reward_std_mean": float(stds.mean()),
            "reward_std_min": float(stds.min()),
            "reward_std_max": float(stds.max()),
        }

    # ------------------------------------------------------------------ the published reading

    def _published(self, members: Tensor) -> dict[str, Row]:
        """Norms and losses by component, mini-batch by mini-batch."""
        settings = self.update.settings
        mini, micro = settings.ppo_mini_batch_size, settings.ppo_micro_batch_size_per_gpu
        norms: dict[str, list[float]] = {}
        losses: dict[str, float] = {}
        cut, world = list(mini_batches(members, mini)), self.update.backend.world
        dealt = world.gather([self._of_mini_batch(index) for index in cut[world.rank :: world.size]])
        for number, index in enumerate(cut):
            for name, (norm_found, loss) in dealt[number % world.size][number // world.size].items():
                norms.setdefault(name, []).append(norm_found)
                losses[name] = losses.get(name, 0.0) + loss * -(-len(index) // micro)
        tokens, sequences = int(self.batch.mask[members].sum()), torch.tensor([len(index) for index in cut])
        parts_made = sum(-(-len(index) // micro) for index in cut)
        found: dict[str, Row] = {"total": {"loss": sum(losses.values()) / parts_made}}
        for name, values in norms.items():
            norm = published_norm(torch.tensor(values), sequences, tokens, mini, micro)
            found[name] = {
                "norm": norm.norm, "norm_per_sample": norm.per_sample, "norm_per_token": norm.per_token,
                "loss": losses[name] / parts_made,
            }  # fmt: skip
        return found

    def _of_mini_batch(self, index: Tensor) -> dict[str, tuple[float, float]]:
        """Norm of the gradient, and value, of each term of one mini-batch's loss."""
        settings, longest = self.update.settings, self.batch.tokens.shape[1]
        micro = settings.ppo_micro_batch_size_per_gpu
        pads = self.update.model.model.pads
        cut = passes(self.batch, self.targets, index, settings.loss_agg_mode, micro, longest, pads=pads)
        total: Gradients = {}
        losses: dict[str, float] = {}
        for gradients, terms in map(self._gradients, cut):
            for name, parts in gradients.items():
                total[name] = [a + b for a, b in zip(total[name], parts, strict=True)] if name in total else parts
                losses[name] = losses.get(name, 0.0) + terms[name]
        return {name: (float(torch.nn.utils.get_total_norm(parts)), losses[name]) for name, parts in total.items()}

    def _gradients(self, part: Pass) -> tuple[Gradients, dict[str, float]]:
        """Gradient and value of each term in one pass. `.grad` stays as it is."""
        terms = self.update.components(part, Meter())
        parameters, last = self._parameters, len(terms) - 1
        gradients = {
            name: self._kept(torch.autograd.grad(
                term, parameters, retain_graph=number < last, allow_unused=True, materialize_grads=True
            ))
            for number, (name, term) in enumerate(terms.items())
        }  # fmt: skip
        return gradients, {name: float(term.detach()) for name, term in terms.items()}

    def _kept(self, gradient: Sequence[Tensor]) -> list[Tensor]:
        """What is kept of a gradient: itself in float32, or its sketch."""
        if self.sketch is None:
            return [part.float() for part in gradient]
        return [count_sketch(gradient, self.sketch, self.seed)]

    # ------------------------------------------------------------------ the mean gradient

    def _divisors(self) -> Tensor:
        """What each episode (B,) adds to the divisor of the batch's loss: its trained tokens, or itself."""
        tokens = self.batch.mask.sum(1)
        return (tokens if self.update.settings.loss_agg_mode == "token-mean" else (tokens > 0)).double()

    def no_sums(self) -> _FoldSums:
        """Nothing in any fold of any term of the loss."""
        settings = self.update.settings
        on = {"task": True, "entropy": settings.entropy_coeff != 0, "kl": settings.use_kl_loss}
        names = tuple(name for name, is_on in {**on, "value": self.update.head is not None}.items() if is_on)
        shapes = [part.shape for part in self._parameters] if self.sketch is None else [torch.Size((self.sketch,))]
        kind, device = torch.float32 if self.sketch is None else torch.float64, self._parameters[0].device
        blocks = [torch.zeros((FOLDS, len(names), *shape), dtype=kind, device=device) for shape in shapes]
        score = [torch.zeros(shape, dtype=kind, device=device) for shape in shapes]
        return _FoldSums(names, blocks, score, torch.zeros(FOLDS, dtype=torch.float64))

    def fold_sums(self, chosen: Tensor, own: Tensor, folds: Tensor, whole: _FoldSums) -> _FoldSums:
        """Summed gradients of the episodes `chosen` (B,) by their `own` fold (B,); added to `whole` by `folds` (B,).

        Of all ranks; what is added to `whole` is this rank's part.

        Sums over all episodes of the batch are gradients that add up to that of the batch's whole loss, times the
        divisor. Each pair of folds is worked on apart, so that every gradient is made once.
        """
        divisors, sums, world = self._divisors(), self.no_sums(), self.update.backend.world
        weights = divisors.sum() * loss_weights(self.batch.mask, self.update.settings.loss_agg_mode)
        cells = torch.where(chosen, own * FOLDS + folds, -1)
        for cell in sorted(set(cells[chosen].tolist()))[world.rank :: world.size]:
            index = (cells == cell).nonzero().squeeze(-1)
            places = ((sums, cell // FOLDS), (whole, cell % FOLDS))
            pads = self.update.model.model.pads
            for part in weighted_passes(self.batch, self.targets, index, weights[index].float(), pads):
                gradients, score = self._gradients(part)[0], self._score(part)
                for each, fold in places:
                    each.add(fold, gradients, score)
            for each, fold in places:
                each.counts[fold] += divisors[index].sum().cpu()
        sums.total(world)
        return sums

    def _score(self, part: Pass) -> list[Tensor]:
        """The task's gradient with every advantage 1: how far the policy's log-probs can pull, whatever the rewards."""
        ones = part.targets._replace(advantages=torch.ones_like(part.targets.advantages))
        task = self.update.components(part._replace(targets=ones), Meter())["task"]
        return self._kept(torch.autograd.grad(task, self._parameters, allow_unused=True, materialize_grads=True))


def _of_nothing(row: Row) -> Row:
    """The trusted numbers of a component whose gradient is rounding: those of 0, and no ratio or direction.

    row: its numbers. It has no share in a step without signal either.
    """
    has_share = row["signal_share"] is not None and math.isfinite(row["signal_share"])
    shares = ("signal_share", "signal_share_low", "signal_share_high") if has_share else ()
    unknown = ("snr", "snr_low", "snr_high", "cosine_task", "cosine_entropy", "cosine_kl")
    return {**dict.fromkeys(("mean_norm", "signal", "noise", "share", *shares), 0.0), **dict.fromkeys(unknown)}


def _trusted(sums: _FoldSums) -> dict[str, Row]:
    """Norm, signal, noise, cosines and shares of each component's mean gradient, `total` included."""
    gram, counts = sums.gram()
    names = (*sums.components, "total")
    cosines, parts = component_cosines(gram, counts), gram[:, :-1, :, :-1]
    shares, expected = update_shares(parts, counts), signal_shares(parts, counts)
    found: dict[str, Row] = {}
    for number, name in enumerate(names):
        signal = gradient_signal(gram[:, number, :, number], counts)
        whole = 1.0 if bool(expected.share.isfinite().all()) else None
        part: Row = {"share": 1.0, "signal_share": whole, "signal_share_low": whole, "signal_share_high": whole}
        if name != "total":
            numbers = (shares, expected.share, expected.low, expected.high)
            part = {column: float(values[number]) for column, values in zip(part, numbers, strict=True)}
        found[name] = {
            "mean_norm": signal.norm, "signal": signal.signal, "noise": signal.noise, "snr": signal.snr,
            "snr_low": signal.low, "snr_high": signal.high, **part, "fold_count": len(counts),
            **{
                f"cosine_{other}": float(cosines[number, names.index(other)]) if other in names else None
                for other in ("task", "entropy", "kl")
            },
        }  # fmt: skip
    return found
