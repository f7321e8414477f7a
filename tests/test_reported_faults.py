"""Faults that users of this and of other trainers reported, tried again as they were typed.

Each probe has a command, what it did when the fault was found (2603989e), and what it does now. Further probes need
more than a command: W&B after a kill is in tests/faults/test_kills.py, phases of long steps are in
tests/trainable/test_trial.py, memory of GPUs in tests/trainable/backend and benchmarks/gpu_checks.py.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

import analysis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAPTOP = "run kl --preset laptop --dry-run"


class Probe(NamedTuple):
    """command: after `python -m tune_study`. before: what it did. now: a regular expression of its output."""

    command: str
    before: str
    now: str
    code: int = 0


PROBES = {
    "copies in the plan": Probe(
        f"{LAPTOP} --set actor.ppo_mini_batch_size=256",
        "nothing was said of 128 random copies",
        "filled up with 128 random copies",
    ),
    "turns that do not fit": Probe(
        "run kl --preset paper --gpus 0 --gpu-memory-gib 80 --dry-run --set rollout.response_length=2000",
        "the plan was that of 200 tokens",
        "max_model_len=3600 has no room for the env.max_turn=5 replies of rollout.response_length=2000 tokens",
        3,
    ),
    "which token-mean": Probe(
        LAPTOP,
        "the plan did not say that the loss depends on the micro-batch",
        "Loss: token-mean as published, the mean over micro-batches of 4",
    ),
    "a hint at the micro-batch": Probe(
        f"{LAPTOP} --set gradient_accumulation_steps=4",
        "pointed at the micro-batch size, which changes the loss, without a word on that",
        "The size of a micro-batch changes the loss, unless",
        2,
    ),
    "verl's batch size": Probe(
        f"{LAPTOP} --set data.train_batch_size=64",
        "Nearest: actor.ppo_mini_batch_size",
        "type, for example, --set env.env_groups=8 --set env.group_size=16",
        2,
    ),
    "a schedule": Probe(
        f"{LAPTOP} --set lr_scheduler_type=cosine", "Nearest: model.head_dtype", "The learning rate is constant", 2
    ),
    "a published model": Probe(
        f"{LAPTOP} --model Qwen/Qwen2.5-0.5B",
        "it runs Qwen2 models only, and Qwen/Qwen2.5-0.5B is another",
        "torch instead of compiled code: its hidden size of 896 is above 512",
        3,
    ),
    "no key": Probe(
        f"{LAPTOP} --wandb online", "no word before the study had ended", "--wandb online needs a login", 2
    ),
    "time of a sandbox": Probe("run influence --dry-run", "no line", r"Time: about .* for these 9 runs"),
    "another Tree-GRPO": Probe(
        "run tree-grpo --preset laptop --dry-run",
        "took the name of arXiv 2509.21240 without a word",
        "arXiv 2509.21240",
    ),
}


def run(command: str, folder: Path) -> tuple[int, str]:
    words = [sys.executable, "-m", "tune_study", *shlex.split(command)]
    env = {**os.environ, "NETRC": str(folder / "none"), "HOME": str(folder)}
    env.pop("WANDB_API_KEY", None)
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROBES)
def test_a_reported_fault_is_answered(name: str, tmp_path: Path) -> None:
    probe = PROBES[name]
    code, output = run(probe.command, tmp_path)
    assert (code, bool(re.search(probe.now, output))) == (probe.code, True), output


GRPO = "run kl --preset laptop --kl-values 0 --seeds 1 --steps 1 --wandb off --set algorithm.adv_estimator=grpo"


def measure_losses(folder: Path, mode: str) -> list[float]:
    """`pg_loss` of one update of one batch, with micro-batches of 1, 4 and 32."""
    losses = []
    for size in (1, 4, 32):
        out = folder / f"{mode}-{size}"
        code, text = run(
            f"{GRPO} --set actor.ppo_mini_batch_size=128 --set actor.loss_agg_mode={mode} "
            f"--set actor.ppo_micro_batch_size_per_gpu={size} --output {out}",
            folder,
        )
        assert code == 0, text
        losses.append(float(analysis.load(out).steps["pg_loss"].iloc[-1]))
    return losses


def test_token_mean_global_does_not_depend_on_the_micro_batch(tmp_path: Path) -> None:
    # Before: there was the published form alone, with 0, -.0066 and +.046 on one batch.
    published = measure_losses(tmp_path, "token-mean")
    assert max(published) - min(published) > 1e-3
    over_all_tokens = measure_losses(tmp_path, "token-mean-global")
    assert max(over_all_tokens) - min(over_all_tokens) < 1e-6


def test_a_study_that_was_too_short_is_trained_on(tmp_path: Path) -> None:
    # Before: refused, also with --extend; the only offer was a new output and all steps again.
    command = "run kl --preset laptop --kl-values 0,0.1 --seeds 1 --wandb off --output {} --steps {}"
    assert run(command.format("a", 5), tmp_path)[0] == 0
    code, text = run(command.format("a", 10), tmp_path)
    assert (code, "Add --extend to train its runs up to step 10" in text) == (2, True)
    code, text = run(f"{command.format('a', 10)} --extend", tmp_path)
    assert (code, "training continues after step 5" in text) == (0, True), text
    assert run(command.format("b", 10), tmp_path)[0] == 0
    longer, straight = (
        analysis.load(tmp_path / name).steps.query("step > 5").drop(columns=["val_success_unseen"]) for name in "ab"
    )
    times = [name for name in longer if re.search("second|time|mfu|peak_flops", name)]
    pd.testing.assert_frame_equal(longer.drop(columns=times), straight.drop(columns=times), check_exact=True)
