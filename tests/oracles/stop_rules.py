"""The published early stops as in the training loop, with counters that are updated at every step."""

from collections import deque
from typing import Any


class LiveStopRules:
    """Takes the rows of a run one by one and returns which rules fire at each step. No row may be repeated."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.baseline: list[float] = []
        self.window: deque[float] = deque(maxlen=settings.variance_window)
        self.empty_steps = 0
        self.low_validations = 0

    def feed(self, row: dict[str, Any]) -> list[str]:
        return self.check_after_filter(row) + self.check_after_validation(row)

    def check_after_filter(self, row: dict[str, Any]) -> list[str]:
        if row["groups_kept"] == 0:
            self.empty_steps += 1
            limit = self.settings.empty_stop_steps
            return ["empty_filtered_steps"] if limit > 0 and self.empty_steps == limit else []
        self.empty_steps = 0
        if len(self.baseline) < self.settings.variance_baseline_steps:
            self.baseline.append(row["reward_std"])
            return []
        self.window.append(row["reward_std"])
        threshold = self.settings.variance_ratio * (sum(self.baseline) / len(self.baseline))
        is_full = len(self.window) == self.settings.variance_window
        return ["reward_variance_collapse"] if is_full and all(v < threshold for v in self.window) else []

    def check_after_validation(self, row: dict[str, Any]) -> list[str]:
        if row["val_success"] is None:
            return []
        self.low_validations = self.low_validations + 1 if row["val_success"] < self.settings.success_threshold else 0
        return ["low_validation_success"] if self.low_validations == self.settings.success_patience else []
