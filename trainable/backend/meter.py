"""Sums over the mini-batches and tokens of one update, and their means, which become columns of the step's row."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainable.backend.world import World
from trainable.runs.nonfinite import find_nonfinite_losses


@dataclass
class Meter:
    """Accumulates sums over the passes and optimizer steps of one update.

    Sums stay on the device of the losses, in float64. Reading a number waits for the device, so nothing is read before
    the end of a mini-batch.

    optimizer_steps: mini-batches so far, including skipped steps. skipped_steps: steps skipped because a loss or
    gradient was not finite. tokens: trained tokens so far.
    """

    optimizer_steps: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    step_sums: dict[str, Tensor | float] = field(default_factory=dict)
    token_sums: dict[str, Tensor | float] = field(default_factory=dict)
    grad_norm_sums: dict[str, Tensor | float] = field(default_factory=dict)
    nonfinite_names: list[str] = field(default_factory=list)
    _mini_batch_losses: list[tuple[str, Tensor]] = field(default_factory=list)

    def add(self, tokens: int, loss_terms: dict[str, Tensor], token_sums: dict[str, Tensor]) -> None:
        """Add one pass.

        tokens: number of trained tokens; 0 if another call counts them. loss_terms: scalars whose sums over the passes
        of a mini-batch are its loss terms. token_sums: sums over the tokens of the pass.
        """
        self.tokens += tokens
        self._mini_batch_losses += loss_terms.items()
        for sums, terms in ((self.step_sums, loss_terms), (self.token_sums, token_sums)):
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value.double()

    @property
    def nonfinite_losses(self) -> list[str]:
        """Names of the non-finite losses of the current mini-batch."""
        return find_nonfinite_losses(self._mini_batch_losses)

    def record_step(self, grad_norm: Tensor | float, column: str) -> None:
        """Count one mini-batch and its optimizer step. column: the column of its gradient norm."""
        self.optimizer_steps += 1
        # Non-finite losses are only reported for skipped steps, and DeepSpeed does not skip because of a loss.
        self._mini_batch_losses = []
        self.grad_norm_sums[column] = self.grad_norm_sums.get(column, 0.0) + torch.as_tensor(grad_norm).double()

    def record_skipped_step(self, nonfinite_gradients: list[str]) -> None:
        """Count one mini-batch with a skipped step, and record which losses and gradients were not finite."""
        self.optimizer_steps += 1
        self.skipped_steps += 1
        self.nonfinite_names += [*self.nonfinite_losses, *nonfinite_gradients]
        self._mini_batch_losses = []

    def all_reduce(self, world: World) -> "Meter":
        """Add up the sums of all ranks. Step counts and gradient norms are equal on all ranks already."""
        if world.size == 1:
            return self
        total = Meter(self.optimizer_steps, self.skipped_steps)
        for sums in (self.step_sums, self.token_sums, self.grad_norm_sums):
            sums |= {name: float(value) for name, value in sums.items()}  # numbers can be sent to other ranks
        for rank_meter in world.all_gather_object(self):
            total.tokens += rank_meter.tokens
            total.nonfinite_names += rank_meter.nonfinite_names
            for total_sums, rank_sums in (
                (total.step_sums, rank_meter.step_sums),
                (total.token_sums, rank_meter.token_sums),
            ):
                for name, value in rank_sums.items():
                    total_sums[name] = total_sums.get(name, 0.0) + value
        # Norms are not added, since each rank has the norm of the gradient over all ranks.
        total.grad_norm_sums = self.grad_norm_sums
        return total

    def compute_means(self) -> dict[str, float]:
        """Compute means over mini-batches, over tokens, and of gradient norms over the applied steps.

        Skipped steps have no gradient norm.
        """
        applied_steps = self.optimizer_steps - self.skipped_steps
        sums_and_counts = (
            (self.step_sums, self.optimizer_steps),
            (self.token_sums, self.tokens),
            (self.grad_norm_sums, applied_steps),
        )
        # The mean of nothing is 0.
        return {name: float(value) / max(1, count) for store, count in sums_and_counts for name, value in store.items()}
