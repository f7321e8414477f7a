"""Keep unused tensors in host memory, so that the networks of a run can take turns on its GPU."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class HostSwap:
    """Keeps tensors in host memory, except within `load`. Nothing is computed on the host.

    The tensors stay the same objects; only their data moves. Host buffers are made once. With a GPU they are pinned, so
    that copies use the full bandwidth of the bus. If a pass on a GPU reads a tensor outside of `load`, torch raises an
    error, because the data is on the CPU.

    list_tensors: returns the tensors, none if nothing is swapped. Tensors that are made within `load`, such as AdamW's
    moments in its first step, are moved to the host when it ends. device: where the tensors are used.

    Example:
        >>> weight = torch.ones(2)
        >>> swap = HostSwap(lambda: [weight], torch.device("cpu"))
        >>> with swap.load(has_changed=True):
        ...     weight *= 3
        >>> weight
        tensor([3., 3.])
    """

    def __init__(self, list_tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._list_tensors, self._device = list_tensors, device
        self._depth, self._has_changed = 0, True
        # Weak keys: when an optimizer loads a state, it replaces its tensors, and the old buffers must be freed.
        self._buffers = WeakIdKeyDictionary()
        self._move_out()

    @contextmanager
    def load(self, has_changed: bool) -> Iterator[None]:
        """Return a context in which the tensors are on the device. Contexts may be nested; the outermost moves them.

        has_changed: whether values change in the context. If not, nothing is copied on exit.
        """
        if self._depth == 0:
            self._move_in()
        self._depth += 1
        self._has_changed |= has_changed
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._move_out()

    def _move_in(self) -> None:
        for tensor in self._list_tensors():
            if self._is_out(tensor):
                buffer = self._buffers[tensor]
                tensor.data = torch.empty_like(buffer, device=self._device).copy_(buffer, non_blocking=True)

    def _move_out(self) -> None:
        is_cuda, tensors = self._device.type == "cuda", list(self._list_tensors())
        for tensor in tensors:
            if self._is_out(tensor):
                continue
            buffer = self._buffers.get(tensor)
            is_new = buffer is None
            if buffer is None:
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=is_cuda)
                self._buffers[tensor] = buffer
            if is_new or self._has_changed:
                buffer.copy_(tensor.detach(), non_blocking=True)
            tensor.data = buffer
        self._has_changed = False
        if is_cuda and tensors:
            torch.cuda.synchronize(self._device)  # after this, the host may read the buffers

    def _is_out(self, tensor: Tensor) -> bool:
        buffer = self._buffers.get(tensor)
        return buffer is not None and bool(tensor.data_ptr() == buffer.data_ptr())
