"""Sums over the mini-batches and tokens of an update, and the tensors of a step that are not finite."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainable.backend.world import World
from trainable.runs.failures import NonFiniteError

_MAX_NAMES_SHOWN = 3
"""Maximum number of tensors that a message names. An update that breaks one usually breaks most."""

NamedParameters = list[tuple[str, nn.Parameter]]


def find_nonfinite_gradients(gradients: Iterable[tuple[str, Tensor]], norm: Tensor) -> list[str]:
    """Find all gradients with a NaN or an infinity, named `gradient of <name>`. Empty if only a loss is not finite.

    norm: norm of all gradients. It squares the entries, so it can overflow although all are finite, and is then named.
    """
    names = [f"gradient of {name}" for name, gradient in gradients if not bool(torch.isfinite(gradient).all())]
    return names or ([] if bool(torch.isfinite(norm)) else ["norm of the gradient"])


def find_nonfinite_weights(parameters: NamedParameters) -> list[str]:
    """Find all parameters with a NaN or an infinity, named `weight <name>`."""
    # In the common case, this costs one reduction instead of one per tensor: if the norm is finite, all weights are.
    # If only the norm overflows, the list below is empty, and the run continues.
    if bool(torch.isfinite(nn.utils.get_total_norm([parameter.detach() for _, parameter in parameters]))):
        return []
    return [f"weight {name}" for name, parameter in parameters if not bool(torch.isfinite(parameter).all())]


@contextmanager
def add_step(where: str) -> Iterator[None]:
    """Add `where`, such as "in step 3", to the message of a NonFiniteError from code that does not know the step."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}, {where}") from error


def check_finite(
    step: int, consecutive_skips: int, patience: int, nonfinite_names: Iterable[str], nonfinite_weights: Iterable[str]
) -> None:
    """Raise NonFiniteError if the run cannot continue after training step `step`.

    consecutive_skips: number of consecutive training steps, up to this one, that skipped an optimizer step. At
    `patience`, the run ends. nonfinite_names: the losses and gradients that were not finite in these steps.
    nonfinite_weights: the weights that are not finite now. A single one ends the run, because an optimizer step cannot
    be undone. The checkpoint before the step is still on disk.
    """
    weight_names = list(nonfinite_weights)
    if weight_names:
        raise NonFiniteError(f"the weights after step {step} are not finite: {format_names(weight_names)}")
    if consecutive_skips >= patience:
        unique_names = list(dict.fromkeys(nonfinite_names))  # the same names recur in every step
        raise NonFiniteError(
            f"updates were skipped in {consecutive_skips} consecutive training steps, up to step {step}, because of "
            f"values that are not finite: {format_names(unique_names)} (trainer.nonfinite_patience={patience})"
        )


def format_names(names: list[str]) -> str:
    """Format the first few of `names`, and the number of others."""
    hidden_count = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def find_nonfinite_losses(losses: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Find the names of the losses (scalars) that are not finite."""
    # In the common case, this waits for the device once: if the sum is finite, all losses are. If only the sum
    # overflows, the list below is empty.
    if not losses or bool(torch.isfinite(torch.stack([value for _, value in losses]).sum())):
        return []
    return [name for name, value in losses if not bool(torch.isfinite(value))]


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
