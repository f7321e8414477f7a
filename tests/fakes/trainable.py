"""A small real Trainable that keeps the contract of a run without training anything."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

from trainable.config.run_config import RunConfig, with_overrides
from trainable.runs.failures import NonFiniteError
from trainable.runs.records import empty_row

COLLAPSES, CRASHES_ONCE, RAISES, FAILS_IN_SETUP, IS_WRONG, DIVERGES, DIES, IS_TOO_LARGE, HAS_A_CHILD, HANGS = (
    "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.91", "0.92", "0.93",
)  # fmt: skip
"""Arms (values of the KL axis) at which the fake misbehaves, until the run's folder has a file `mended`."""


class FakeTrainable(tune.Trainable):
    """Writes rows that are functions of (arm, seed, step); its rolling state is the number of steps done."""

    def setup(self, config: dict[str, Any]) -> None:
        self.run = config
        self.folder = Path(config["run_dir"])
        if config["arm"] == FAILS_IN_SETUP and not (self.folder / "mended").exists():
            raise ValueError("the fake was told not to start")
        self.settings = with_overrides(RunConfig(), config["settings"])
        state = self.folder / "state.json"
        self.done = json.loads(state.read_text()) if state.exists() else 0
        self.was_started = (self.folder / "started").exists()
        (self.folder / "started").touch()

    def cleanup(self) -> None:
        if self.run["arm"] == HANGS:
            time.sleep(600)

    def step(self) -> dict[str, Any]:
        if self.run["finished"]:
            last = json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])
            return {**empty_row(), **last, "done": True}
        self.done += 1
        self.misbehave()
        row = fake_row(self.run, self.settings, self.done)
        with (self.folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(as_json(row)) + "\n")
        (self.folder / "state.json").write_text(json.dumps(self.done))
        done = self.done == self.settings.trainer.total_training_steps
        return {**empty_row(), **row, "done": done}

    def misbehave(self) -> None:
        arm = "" if (self.folder / "mended").exists() else self.run["arm"]
        if arm == RAISES and self.done == 2:
            raise RuntimeError("the fake was told to raise")
        if arm == IS_WRONG and self.done == 2:
            raise KeyError("the fake was told to look for what is not there")
        if arm == IS_TOO_LARGE:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte too many")
        if arm == DIVERGES and self.done == 3:
            raise NonFiniteError("steps 1 to 3 skipped updates whose numbers were not finite: pg_loss")
        if arm == HAS_A_CHILD and self.done == 2 and not self.was_started:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            (self.folder / "child").write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if arm == DIES and self.done == 5:
            (self.folder / "deaths").open("a").write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        if arm == CRASHES_ONCE and self.done == 3 and not self.was_started:
            os._exit(7)
        interrupt = self.folder / "interrupt.pid"
        if self.done == 4 and interrupt.exists():
            driver = int(interrupt.read_text())
            interrupt.unlink()
            os.kill(driver, signal.SIGINT)


def fake_row(run: dict[str, Any], settings: RunConfig, step: int) -> dict[str, Any]:
    """The row of one step: success grows, and in a collapsing arm the reward's spread dies after ten steps."""
    names = {name: run[name] for name in ("run_id", "study", "arm", "seed")}
    collapsed = run["arm"] == COLLAPSES and step > settings.early_stop.variance_baseline_steps
    values: dict[str, Any] = {
        "reward_std": 0.01 if collapsed else 2.0 + 0.1 * run["seed"],
        "groups": 8,
        "groups_kept": 8,
        "train_success": 1 - 1 / (step + 1),
        "kl_loss": math.nan if run["arm"] == "0" else 0.5,
        "tokens_per_second": 1000.0,
        "seconds_step": 0.5,
        "seconds_validation": 0.1,
        "seconds_total": 0.5 * step,
    }
    if step == 1:
        values["base_val_success"] = 0.25
    if step % settings.trainer.test_freq == 0 or step == settings.trainer.total_training_steps:
        values["val_success"] = 1 - 1 / (step + 1)
    return {**names, "step": step, **values}


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for what is no finite number."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class PlacedTrainable(tune.Trainable):
    """One step: meets the runs that should be placed beside it, then says which GPUs it was given."""

    def setup(self, config: dict[str, Any]) -> None:
        self.run = config

    def step(self) -> dict[str, Any]:
        ray.get(ray.get_actor("meeting").arrive.remote(), timeout=60)
        group = ray.util.get_current_placement_group()
        place = {
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "bundles": group.bundle_count,
            "strategy": ray.util.placement_group_table(group)["strategy"],
            "other": ray.get(_visible.remote()) if group.bundle_count > 1 else None,
            "node": ray.get_runtime_context().get_node_id(),
            "others_node": ray.get(_node.remote()) if group.bundle_count > 1 else None,
        }
        Path(self.run["run_dir"], "place.json").write_text(json.dumps(place))
        return {**empty_row(), "run_id": self.run["run_id"], "step": 1, "done": True}


@ray.remote(num_cpus=1, num_gpus=1)
def _visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@ray.remote(num_cpus=1, num_gpus=1)
def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0)
class Meeting:
    """Nobody leaves before `expected` have arrived."""

    def __init__(self, expected: int) -> None:
        self.missing = expected
        self.complete = asyncio.Event()

    async def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.complete.set()
        await self.complete.wait()
