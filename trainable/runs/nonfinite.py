"""Find tensors that are not finite, and end a run that cannot recover from them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainable.runs.failures import NonFiniteError

_MAX_NAMES_SHOWN = 3
"""Maximum number of tensors that a message names. An update that breaks one usually breaks most."""

NamedParameters = list[tuple[str, nn.Parameter]]


def find_nonfinite_gradients(gradients: Iterable[tuple[str, Tensor]], norm: Tensor) -> list[str]:
    """Find all gradients with a NaN or an infinity, named `gradient of <name>`. Empty if only a loss is not finite.

    norm: norm of all gradients. It squares the entries, so it can overflow although all are finite. If so, it is named,
    with the parameter that has the largest entry.
    """
    named_gradients = list(gradients)
    names = [f"gradient of {name}" for name, gradient in named_gradients if not bool(torch.isfinite(gradient).all())]
    if names or bool(torch.isfinite(norm)):
        return names
    if not named_gradients:
        return ["norm of the gradient"]
    largest_entry, name = max((float(gradient.abs().max()), name) for name, gradient in named_gradients)
    return [f"norm of the gradient (its largest entry is {largest_entry:.3g}, of {name})"]


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
