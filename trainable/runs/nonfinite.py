"""Numbers that are not finite: which tensors hold them, and when a run has to end for them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainable.runs.failures import NonFiniteError

_SHOWN = 3
"""Names in a message; a broken update touches most tensors of a model."""

Named = list[tuple[str, nn.Parameter]]


def bad_gradients(parameters: Named) -> list[str]:
    """`gradient of <name>` for every parameter whose gradient holds a NaN or an infinity."""
    return [
        f"gradient of {name}"
        for name, parameter in parameters
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]


def bad_weights(parameters: Named) -> list[str]:
    """`weight <name>` for every parameter that holds a NaN or an infinity; one pass over all where none does."""
    if bool(torch.isfinite(nn.utils.get_total_norm([parameter.detach() for _, parameter in parameters]))):
        return []
    return [f"weight {name}" for name, parameter in parameters if not bool(torch.isfinite(parameter).all())]


def check_finite(step: int, in_a_row: int, patience: int, skipped: Iterable[str], weights: Iterable[str]) -> None:
    """NonFiniteError where the run cannot go on after training step `step`.

    in_a_row: training steps up to this one in which an optimizer step was skipped; `patience` of them are too many.
    skipped: what was not finite in them. weights: weights that are not finite now: a step that was made cannot be
    taken back, so one is enough; the state before it is still on disk.
    """
    broken = list(weights)
    if broken:
        raise NonFiniteError(f"step {step} left weights that are not finite: {_listed(broken)}")
    if in_a_row >= patience:
        raise NonFiniteError(
            f"step {step} is number {in_a_row} in a row of the steps that trained whose updates were skipped, since "
            f"numbers were not finite: {_listed(list(dict.fromkeys(skipped)))} (trainer.nonfinite_patience={patience})"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def bad_losses(parts: dict[str, Tensor]) -> list[str]:
    """The names of those losses, scalars, that are not finite."""
    return [name for name, value in parts.items() if not bool(torch.isfinite(value))]
