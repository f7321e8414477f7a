"""A Trainer of transformers that trains one weight, and validates with given successes."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments


class Line(torch.nn.Module):
    """A line through the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        values = self.slope(x)
        return {"loss": (values - labels).square().mean(), "logits": values}


def make_trainer(folder: Path, successes: Iterable[float], seed: int = 1, max_steps: int = 4) -> Trainer:
    """Make a trainer that logs each step, and validates and saves every second one, first before step 1."""
    points, values = [{"x": torch.ones(1) * x, "labels": torch.ones(1) * 2 * x} for x in range(4)], iter(successes)
    arguments = TrainingArguments(
        str(folder),
        max_steps=max_steps,
        seed=seed,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        hub_token="hf_0123456789abcdef",
    )
    return Trainer(
        Line(),
        arguments,
        train_dataset=points,
        eval_dataset=points,
        compute_metrics=lambda _: {"reward": next(values)},
    )
