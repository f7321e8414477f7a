"""The published early stops as the training loop does them: counters that live from step to step."""

from collections import deque
from typing import Any


class LiveLoop:
    """Feed it the rows of a run one by one; it says which rules fire at that step. No row is repeated."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.baseline: list[float] = []
        self.window: deque[float] = deque(maxlen=settings.variance_window)
        self.empty = 0
        self.low = 0

    def feed(self, row: dict[str, Any]) -> list[str]:
        return self.after_filter(row) + self.after_validation(row)

    def after_filter(self, row: dict[str, Any]) -> list[str]:
        if row["groups_kept"] == 0:
            self.empty += 1
            limit = self.settings.empty_stop_steps
            return ["empty_filtered_steps"] if limit > 0 and self.empty == limit else []
        self.empty = 0
        if len(self.baseline) < self.settings.variance_baseline_steps:
            self.baseline.append(row["reward_std"])
            return []
        self.window.append(row["reward_std"])
        bound = self.settings.variance_ratio * (sum(self.baseline) / len(self.baseline))
        is_full = len(self.window) == self.settings.variance_window
        return ["reward_variance_collapse"] if is_full and all(v < bound for v in self.window) else []

    def after_validation(self, row: dict[str, Any]) -> list[str]:
        if row["val_success"] is None:
            return []
        self.low = self.low + 1 if row["val_success"] < self.settings.success_threshold else 0
        return ["low_validation_success"] if self.low == self.settings.success_patience else []
