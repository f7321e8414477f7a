"""Numbers that are not finite: which tensors hold them, and when a run has to end for them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainable.runs.failures import NonFiniteError

_MAX_NAMES_SHOWN = 3
"""Names in a message; a broken update touches most tensors of a model."""

NamedParameters = list[tuple[str, nn.Parameter]]


def find_nonfinite_gradients(parameters: NamedParameters) -> list[str]:
    """`gradient of <name>` for every parameter whose gradient holds a NaN or an infinity."""
    return [
        f"gradient of {name}"
        for name, parameter in parameters
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]


def find_nonfinite_weights(parameters: NamedParameters) -> list[str]:
    """`weight <name>` for every parameter that holds a NaN or an infinity; one pass over all where none does."""
    if bool(torch.isfinite(nn.utils.get_total_norm([parameter.detach() for _, parameter in parameters]))):
        return []
    return [f"weight {name}" for name, parameter in parameters if not bool(torch.isfinite(parameter).all())]


def check_finite(
    step: int, consecutive_skips: int, patience: int, nonfinite_names: Iterable[str], nonfinite_weights: Iterable[str]
) -> None:
    """NonFiniteError where the run cannot go on after training step `step`.

    in_a_row: training steps up to this one in which an optimizer step was skipped; `patience` of them are too many.
    skipped: what was not finite in them. weights: weights that are not finite now: a step that was made cannot be
    taken back, so one is enough; the state before it is still on disk.
    """
    weight_names = list(nonfinite_weights)
    if weight_names:
        raise NonFiniteError(f"step {step} left weights that are not finite: {_format_names(weight_names)}")
    if consecutive_skips >= patience:
        raise NonFiniteError(
            f"step {step} is number {consecutive_skips} in a row of the steps that trained whose updates were skipped, since "
            f"numbers were not finite: {_format_names(list(dict.fromkeys(nonfinite_names)))} (trainer.nonfinite_patience={patience})"
        )


def _format_names(names: list[str]) -> str:
    hidden_count = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def find_nonfinite_losses(losses: dict[str, Tensor]) -> list[str]:
    """The names of those losses, scalars, that are not finite."""
    return [name for name, value in losses.items() if not bool(torch.isfinite(value))]
