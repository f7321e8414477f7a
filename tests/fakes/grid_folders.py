"""The smoke grid on disk with made-up results: k1 does not anchor the policy, and large entropy bonuses collapse."""

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from search_spaces.language_model.smoke import GROUPS, GROUPS_BY_KL_TYPE, make_arms
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

COLLAPSE = ("reward_variance_collapse", 0.09, 0.1)


def list_smoke_arms(kl_types: Mapping[str, Iterable[str]]) -> dict[str, Mapping[str, object]]:
    """Return the settings of every arm of the groups of each KL loss, by the arm's name."""
    return {
        name: settings
        for kl_type, groups in kl_types.items()
        for group in groups
        for name, settings in make_arms(group, kl_type).items()
    }


ONE_TYPE: Mapping[str, Iterable[str]] = {"low_var_kl": GROUPS}
ALL_TYPES: Mapping[str, Iterable[str]] = GROUPS_BY_KL_TYPE


def compute_anchored_kl(kl_type: str, coefficient: float) -> float:
    """Return a made-up KL to the reference, which falls with the coefficient unless the loss is k1."""
    return 0.01 if kl_type == "kl" else 0.01 / (1 + 300 * coefficient)


def make_runs(kl_types: Mapping[str, Iterable[str]], *, seeds: int = 1, steps: int = 20) -> list[FakeRun]:
    """Make the runs of the grid.

    Runs with the largest entropy bonus collapse after three quarters of the steps. One run failed, one never ran.
    """
    runs = [
        _make_run(name, settings, seed, steps)
        for name, settings in list_smoke_arms(kl_types).items()
        for seed in range(seeds)
    ]
    if len(runs) > 20:
        runs[5] = replace(runs[5], status="failed", steps=4, reason="RuntimeError", stop=None)
        runs[6] = replace(runs[6], status="", steps=0, stop=None)
    return runs


def _make_run(name: str, settings: Mapping[str, object], seed: int, steps: int) -> FakeRun:
    kl, entropy = (float(str(settings[key])) for key in ("actor.kl_loss_coef", "actor.entropy_coeff"))
    ratio, has_no_task_gradient = (
        float(str(settings["filter.rollout_filter_value"])),
        settings["algorithm.zero_task_advantage"],
    )
    noise = float(np.random.default_rng([seed, zlib.crc32(name.encode())]).normal())
    final_success = 0.35 if has_no_task_gradient else 0.5 + 0.1 * ratio - 4 * entropy + 0.02 * noise
    rows = {"entropy": 0.4 + 20 * entropy - 2 * kl, "reward_std": max(0.1, 2.5 - 60 * entropy)}
    rows["kl_to_reference"] = compute_anchored_kl(str(settings["actor.kl_loss_type"]), kl) * math.exp(0.05 * noise)
    run_fields = {
        "seed": seed,
        "success": (0.35, final_success),
        "greedy": (0.6, final_success),
        "rows": rows,
        "settings": settings,
    }
    if entropy == 0.03 and not has_no_task_gradient:
        run_fields |= {"status": "early_stopped", "steps": 3 * steps // 4, "stop": COLLAPSE}
    else:
        run_fields |= {"steps": steps}
    if not settings["actor.use_kl_loss"]:
        rows["kl_to_reference"] = None
    return FakeRun(name, **run_fields)


def make_study(*, levels: int = 60, steps: int = 20) -> FakeStudy:
    """Make what the runs share; the baseline is the arm without KL and entropy terms."""
    return FakeStudy(
        name="smoke",
        run="smoke_test_top_p_sokoban-tiny",
        setting="KL and entropy coefficients, filter",
        baseline="g3-smoke-ppo-sokoban-topk100-kl0-ent0-low_var_kl",
        levels=levels,
        test_freq=5,
        total_steps=steps,
    )


def write_grid(output: Path, kl_types: Mapping[str, Iterable[str]], *, seeds: int = 1, levels: int = 60) -> Path:
    """Write <output>/results/<run> for the grid over `kl_types` and return it."""
    return write_study(output, make_runs(kl_types, seeds=seeds), make_study(levels=levels))
