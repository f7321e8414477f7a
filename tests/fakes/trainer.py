"""A trainer that fulfills the interface of a run without training anything, and families and studies that use it."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Study
from trainable import language_model
from trainable.config.run_config import RunConfig
from trainable.runs.failures import NonFiniteError
from trainable.runs.orphans import MARK_ENV
from trainable.runs.run import LinesByFile, TrainerState
from trainable.runs.run_files import Row
from trainable.runs.training import StepResult
from trainable.trial import PPO
from tune_study.host.interrupt import make_interrupt

COLLAPSES, CRASHES_ONCE, RAISES, FAILS_IN_SETUP, IS_WRONG, DIVERGES = "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"
DIES, IS_TOO_LARGE, HAS_A_CHILD, HANGS, STOPS_ITS_ARM = "0.9", "0.91", "0.92", "0.93", "0.94"
"""Arms (values of the KL axis) at which the fake misbehaves, until the run's folder has a file `mended`."""


class FakeTrainer:
    """A trainer whose rows are functions of (arm, seed, step) and whose state is the number of finished steps."""

    def __init__(self, config: RunConfig, seeds: Sequence[int]) -> None:
        self.config, self.seeds, self.step_index = config, tuple(seeds), 0
        self.folder, self.arm = Path(os.environ[MARK_ENV]), f"{config.actor.kl_loss_coef:g}"
        if self.arm == FAILS_IN_SETUP and not (self.folder / "mended").exists():
            raise ValueError("the fake was told not to start")
        self.was_started = (self.folder / "started").exists()
        (self.folder / "started").touch()

    def close(self) -> None:
        if self.arm == HANGS:
            time.sleep(600)

    def step(self, before_update: Callable[[], None]) -> StepResult:
        before_update()
        self.step_index += 1
        self.misbehave()
        (seed,) = self.seeds
        return StepResult({seed: make_fake_values(self.arm, seed, self.config, self.step_index)})

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        return row, {}

    def get_state(self, seed: int) -> TrainerState:
        return TrainerState({}, {"step": self.step_index})

    def load_states(self, states: Sequence[TrainerState]) -> None:
        self.step_index = states[0].values["step"]

    def misbehave(self) -> None:
        arm = "" if (self.folder / "mended").exists() else self.arm
        if arm == RAISES and self.step_index == 2:
            raise RuntimeError("the fake was told to raise")
        if arm == IS_WRONG and self.step_index == 2:
            raise KeyError("the fake was told to look for what is not there")
        if arm == IS_TOO_LARGE:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte too many")
        if arm == DIVERGES and self.step_index == 3:
            raise NonFiniteError("steps 1 to 3 skipped updates whose numbers were not finite: pg_loss")
        if arm == HAS_A_CHILD and self.step_index == 2 and not self.was_started:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            (self.folder / "child").write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if arm == DIES and self.step_index == 5:
            (self.folder / "deaths").open("a").write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        if arm == CRASHES_ONCE and self.step_index == 3 and not self.was_started:
            os._exit(7)
        if arm == STOPS_ITS_ARM and self.step_index == 4 and not self.was_started:
            make_interrupt(self.folder.parent.parent).get_arm_path(self.arm).touch()
        interrupt = self.folder / "interrupt.pid"
        if self.step_index == 4 and interrupt.exists():
            driver = int(interrupt.read_text())
            interrupt.unlink()
            os.kill(driver, signal.SIGINT)


def make_fake_row(config: Mapping[str, Any], settings: RunConfig, step: int) -> dict[str, Any]:
    """Make the row of one step: success grows, and in a collapsing arm the reward std vanishes after ten steps."""
    options, seed = config["run"], config["seed"]
    names = {"run_id": options["runs"][0]["run_id"], "study": options["study"], "arm": options["arm"], "seed": seed}
    return {**names, **make_fake_values(options["arm"], seed, settings, step)}


def make_fake_values(arm: str, seed: int, settings: RunConfig, step: int) -> dict[str, Any]:
    """Make the row without the columns that identify the run."""
    is_collapsed = arm == COLLAPSES and step > settings.early_stop.variance_baseline_steps
    values: dict[str, Any] = {
        "step": step,
        "reward_std": 0.01 if is_collapsed else 2.0 + 0.1 * seed,
        "groups": 8,
        "groups_kept": 8,
        "train_success": 1 - 1 / (step + 1),
        "kl_loss": math.nan if arm == "0" else 0.5,
        "tokens_per_second": 1000.0,
        "seconds_step": 0.5,
        "seconds_validation": 0.1,
        "seconds_total": 0.5 * step,
    }
    if step == 1:
        values["base_val_success"] = 0.25
    if step % settings.trainer.test_freq == 0 or step == settings.trainer.total_training_steps:
        values["val_success"] = 1 - 1 / (step + 1)
    return values


def make_fake_rows(config: Mapping[str, Any], settings: RunConfig, steps: int) -> list[dict[str, Any]]:
    """Make the rows on disk of a run of at most `steps` steps, which a rule may have stopped."""
    if config["run"]["arm"] != COLLAPSES:
        return [as_json(make_fake_row(config, settings, step)) for step in range(1, steps + 1)]
    rows = [as_json(make_fake_row(config, settings, step)) for step in range(1, 21)]
    threshold = settings.early_stop.variance_ratio * (2.0 + 0.1 * config["seed"])
    stop = {"stop_rule": "reward_variance_collapse", "stop_value": 0.01, "stop_threshold": threshold, "stop_step": 20}
    return [*rows[:-1], {**rows[-1], **stop}]


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with null in place of numbers that are not finite."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class PlacedTrainer(FakeTrainer):
    """A trainer that waits for the runs that should run beside it, and reports its GPUs and nodes in its row."""

    def step(self, before_update: Callable[[], None]) -> StepResult:
        result = super().step(before_update)
        return StepResult({seed: {**row, "place": self.find_place()} for seed, row in result.rows.items()})

    def find_place(self) -> str:
        ray.get(ray.get_actor("meeting").arrive.remote(), timeout=60)
        group = ray.util.get_current_placement_group()
        placement = {
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "bundles": group.bundle_count,
            "strategy": ray.util.placement_group_table(group)["strategy"],
            "other": ray.get(_get_visible_gpus.remote()) if group.bundle_count > 1 else None,
            "node": ray.get_runtime_context().get_node_id(),
            "others_node": ray.get(_get_node_id.remote()) if group.bundle_count > 1 else None,
        }
        return json.dumps(placement)


@ray.remote(num_cpus=1, num_gpus=1)
def _get_visible_gpus() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@ray.remote(num_cpus=1, num_gpus=1)
def _get_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0)
class Barrier:
    """A barrier that no run leaves before `expected` runs have arrived."""

    def __init__(self, expected: int) -> None:
        self.n_missing = expected
        self.all_arrived = asyncio.Event()

    async def arrive(self) -> None:
        self.n_missing -= 1
        if self.n_missing == 0:
            self.all_arrived.set()
        await self.all_arrived.wait()


FAKE = replace(language_model.TRAINER, make_trainer=FakeTrainer)
PLACED = replace(language_model.TRAINER, make_trainer=PlacedTrainer)


class Fake(PPO):
    family = f"{__name__}:FAKE"


class Placed(PPO):
    family = f"{__name__}:PLACED"


def make_study(trainable: str = "Fake", name: str = "kl") -> Study:
    """Make a study whose runs use a Trainable of this module."""
    study = STUDIES[name]
    return replace(study, family=replace(study.family, trainable=f"{__name__}:{trainable}"))
