"""Measure what a checkpoint of Ray Tune costs beside the state that a run writes anyway. Prints a JSON object.

A Trainable with a state of a given size, of random numbers, is saved by Tune: as a run of a study, whose checkpoint
names the folder of the run; into a local storage_path; and, with --uri, into a bucket. Each state is written to the
run's own folder first, which is timed by itself.
Run: python benchmarks/checkpoint_copies.py [--gigabytes 2] [--repetitions 3] [--uri s3://bucket/folder]
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from machine import describe
from options import make_parser, parse_count
from pyarrow.fs import FileSystem
from ray import tune

from trainable.runs.run import LinesByFile, Row, TrainerState
from trainable.runs.training import StepResult, TrainerFamily, TrainingLoop
from trainable.trial import PPO

TENSORS = 8


class SizedTrainer:
    """A trainer that only has a state, of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        count = num_bytes // (4 * TENSORS)
        self.tensors = {f"layer.{number}": torch.randn(count) for number in range(TENSORS)}
        self.seeds, self.step_index = (0,), 0

    def step(self, before_update: Callable[[], None]) -> StepResult:
        """Do nothing but count."""
        self.step_index += 1
        return StepResult({0: {"step": self.step_index}})

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """Nothing is evaluated."""
        return row, {}

    def get_state(self, seed: int) -> TrainerState:
        """The tensors."""
        return TrainerState(self.tensors, {"step": self.step_index})

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Nothing is loaded."""

    def close(self) -> None:
        """Nothing is open."""


class SizedTrial(PPO):
    """A run of a SizedTrainer, which reports the seconds of its last state and of its last checkpoint."""

    num_bytes, seconds_state, seconds_save = 0, 0.0, 0.0

    def begin(self) -> TrainingLoop:
        """The loop over a SizedTrainer."""
        if self.training is None:
            family = TrainerFamily(lambda settings, seeds: SizedTrainer(self.num_bytes))
            settings = self.make_config(self._configuration)
            self.training = TrainingLoop(family, settings, self._runs, self._options)
        return self.training

    def step(self) -> dict[str, Any]:
        """A step, without a state, so that saving writes it."""
        result = super().step()
        return {**result, "seconds_state": self.seconds_state, "seconds_save": self.seconds_save}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Write the state into the run's own folder, then save as Tune does."""
        started_at = time.perf_counter()
        self.begin().write_states()
        written_at = time.perf_counter()
        result = super().save(checkpoint_dir)
        self.seconds_state, self.seconds_save = written_at - started_at, time.perf_counter() - written_at
        return result


def measure(num_bytes: int, repetitions: int, folder: str, storage: dict[str, Any], is_study: bool) -> dict[str, float]:
    """Median seconds of the state and of Tune's checkpoint."""
    settings = {
        "trainer.total_training_steps": repetitions + 2,
        "trainer.resume_every": 1_000,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 0,
    }
    run = {"run_id": "run", "seed": 0}
    if is_study:
        run |= {"run_dir": f"{folder}/runs/run", "checkpoint_dir": f"{folder}/saved"}
    tuner = tune.Tuner(
        type("SizedTrial", (SizedTrial,), {"num_bytes": num_bytes}),
        param_space={**settings, "run": {"runs": [run]}},
        run_config=tune.RunConfig(
            name="sized",
            verbose=0,
            **storage,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1, checkpoint_at_end=False),
        ),
    )
    with contextlib.redirect_stdout(sys.stderr):  # Tune prints beside its reporter
        rows = tuner.fit()[0].metrics_dataframe
    # The first row precedes every checkpoint, and the first checkpoint warms up.
    return {name: float(rows[name][2:].median()) for name in ("seconds_state", "seconds_save")}


def main() -> None:
    """Measure each place once, with several checkpoints."""
    parser = make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state")
    parser.add_argument("--repetitions", type=parse_count, default=3, help="checkpoints of each kind")
    parser.add_argument("--uri", help="folder in a bucket, as pyarrow names it; left out without it")
    parser.add_argument("--folder", type=Path, help="folder for local files; a temporary one by default")
    args = parser.parse_args()
    num_bytes = int(args.gigabytes * 1e9)
    figures = {}
    ray.init(log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        places: dict[str, tuple[dict[str, Any], bool]] = {
            "study_on_this_machine": ({"storage_path": folder}, True),
            "local_storage_path": ({"storage_path": folder}, False),
        }
        if args.uri is not None:
            filesystem, path = FileSystem.from_uri(args.uri)
            places["bucket"] = ({"storage_path": path, "storage_filesystem": filesystem}, False)
        for name, (storage, is_study) in places.items():
            figures[name] = measure(num_bytes, args.repetitions, folder, storage, is_study)
    report = {"benchmark": "checkpoint_copies", "gigabytes": args.gigabytes, **figures, **describe()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
