"""Sums of one update, over mini-batches and over tokens."""

from dataclasses import dataclass

from torch import Tensor

from trainable.backend.world import World
from trainable.runs.nonfinite import bad_losses


@dataclass
class Meter:
    """Sums of one update: weighted losses a mini-batch, and plain sums over tokens."""

    optimizer_steps: int = 0
    skipped: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.by_step: dict[str, float] = {}
        self.by_token: dict[str, float] = {}
        self.norms: dict[str, float] = {}
        self.nonfinite: list[str] = []
        self.bad_losses: list[str] = []

    def add(self, tokens: int, weighted: dict[str, Tensor], counted: dict[str, Tensor]) -> None:
        """Add one pass: `weighted` are shares of a mini-batch's loss, `counted` are sums over `tokens`."""
        self.tokens += tokens
        self.bad_losses += bad_losses(weighted)
        for store, parts in ((self.by_step, weighted), (self.by_token, counted)):
            for name, value in parts.items():
                store[name] = store.get(name, 0.0) + float(value)

    def stepped(self, norm: Tensor | float, name: str) -> None:
        """Count one mini-batch whose gradient norm was `norm`."""
        self.optimizer_steps += 1
        self.bad_losses = []
        self.norms[name] = self.norms.get(name, 0.0) + float(norm)

    def passed_over(self, gradients: list[str]) -> None:
        """Count one mini-batch that made no step, and name what was not finite in it: losses, and `gradients`."""
        self.optimizer_steps += 1
        self.skipped += 1
        self.nonfinite += [*self.bad_losses, *gradients]
        self.bad_losses = []

    def over(self, world: World) -> "Meter":
        """This meter with the sums of all ranks; steps and norms are every rank's own and the same."""
        if world.size == 1:
            return self
        found = Meter(self.optimizer_steps, self.skipped)
        for part in world.gather(self):
            found.tokens += part.tokens
            found.nonfinite += part.nonfinite
            for mine, theirs in ((found.by_step, part.by_step), (found.by_token, part.by_token)):
                for name, value in theirs.items():
                    mine[name] = mine.get(name, 0.0) + value
        found.norms = self.norms
        return found

    def means(self) -> dict[str, float]:
        """Means over mini-batches, over tokens, and of gradient norms over the steps that were made."""
        made = self.optimizer_steps - self.skipped
        stores = ((self.by_step, self.optimizer_steps), (self.by_token, self.tokens), (self.norms, made))
        return {name: value / max(1, count) for store, count in stores for name, value in store.items()}
