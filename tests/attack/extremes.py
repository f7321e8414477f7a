"""Extremes of every numeric setting: each is refused with a paragraph, trains, or fails with a class and a name."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from search_spaces.catalog import STUDIES
from tests.attack.children import ChildError, call_in_child
from tests.attack.sample_study import run_command
from tests.fakes.command_line import Answer
from tests.faults.malformed import list_field_schemas
from trainable.runs.failures import NON_FINITE, Failure, RunFailedError
from trainable.runs.run_files import read_rows
from trainable.trial import PPO
from tune_study.plan.study_plan import make_plan
from tune_study.tune.trials import make_trial_config

STEPS = 2
TIME_LIMIT_S = 25.0
MAX_BYTES = 24 << 30

LARGE_NUMBERS = ("1e38", "-1e38", "1e300", "-1e300", "0", "1", "nan", "inf")
LARGE_INTEGERS = ("0", "1", "-1", "1e38", "nan", str(2**31 - 1), str(2**63), "9" * 30)


@dataclass(frozen=True)
class Extreme:
    """A value of a setting. study: a study of the setting's family that does not sweep it; arm: one of its arms."""

    study: str
    arm: str
    setting: str
    text: str


SMALL_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "ppo": {
        "trainer.total_training_steps": str(STEPS),
        "env.env_groups": "2",
        "env.group_size": "2",
        "env.val_env_groups": "2",
        "env.test_env_groups": "1",
        "actor.ppo_mini_batch_size": "4",
        "critic.ppo_mini_batch_size": "4",
        "trainer.test_freq": "1",
    },
    "update_rules": {
        "trainer.total_training_steps": str(STEPS),
        "trainer.test_freq": "1",
        "task": "token_reversal",
        "seq_len": "4",
        "d_model": "8",
        "batch_size": "4",
    },
}
SWITCHES: Mapping[str, Mapping[str, str]] = {
    "trainer.gradient_analysis": {"trainer.gradient_analysis_mode": "True"},
    "algorithm.kl_ctrl": {"algorithm.use_kl_in_reward": "True"},
    "algorithm.high_level_gamma": {"algorithm.bi_level_gae": "True"},
    "eta": {"method": "DG"},
    "tpo_eta": {"method": "TPO", "group_size": "2"},
    "grpo_beta": {"method": "GRPO", "group_size": "2"},
    "group_size": {"method": "GRPO"},
    "inner_epochs": {"method": "GRPO", "group_size": "2"},
    "clip_low": {"method": "GRPO", "group_size": "2"},
    "clip_high": {"method": "DAPO", "group_size": "2"},
    "iw_cap": {"method": "ASPO"},
    "kondo_keep": {"method": "Kondo"},
    "guard_strength": {"method": "DGEntropyGuard"},
    "uncertainty_scale": {"method": "UncertaintyDG"},
    "uncertainty_threshold": {"method": "FilteredDG"},
    "distill_alpha": {"method": "SelfDistillDG"},
    "replay_capacity": {"method": "ReplayDG"},
    "replay_age_decay": {"method": "FreshDG", "replay_capacity": "2"},
    "reward_noise": {"reward_noise_mode": "label_flip"},
    "score_len": {"task": "masked_reversal"},
}
"""Settings without which others, that begin with a name, have no effect."""
ARMS = {"kl": "0.1", "entropy": "0.1", "top-p": "0.5", "sandbox": "single"}


def list_texts(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The extremes of a field: its bounds, and numbers at the ends of what numbers can be."""
    bounds = [schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    bound_texts = [repr(bound) for bound in bounds if bound is not None]
    is_integer = schema["type"] == "integer"
    if not is_integer and "exclusiveMinimum" in schema:
        bound_texts.append(repr(math.nextafter(schema["exclusiveMinimum"], math.inf)))
    return tuple(dict.fromkeys([*bound_texts, *(LARGE_INTEGERS if is_integer else LARGE_NUMBERS)]))


def list_extremes() -> dict[str, Extreme]:
    """List every extreme of every numeric setting of every family."""
    extremes = {}
    for family_name, names in (("ppo", ("kl", "entropy", "top-p")), ("update_rules", ("sandbox",))):
        studies = [STUDIES[name] for name in names]
        for setting, schema in list_field_schemas(studies[0].family.config_class).items():
            study = next((study for study in studies if setting not in study.axis.swept_fields), None)
            is_numeric = schema.get("type") in ("integer", "number")
            if study is None or not (is_numeric or setting.endswith("betas")):
                continue
            texts = list_texts(schema) if is_numeric else tuple(f"[{text}, {text}]" for text in LARGE_NUMBERS)
            for text in texts:
                extremes[f"{family_name}/{setting}={text}"] = Extreme(study.name, ARMS[study.name], setting, text)
    return extremes


def _make_settings(extreme: Extreme) -> dict[str, str]:
    """Settings of a small run with the extreme, and with what lets it have an effect."""
    small_settings = SMALL_SETTINGS[STUDIES[extreme.study].family.name]
    switches: dict[str, str] = {}
    for prefix, settings in SWITCHES.items():
        if extreme.setting.startswith(prefix):
            switches |= settings
    return {**small_settings, **switches, extreme.setting: extreme.text}


def plan_command(extreme: Extreme, folder: Path) -> Answer:
    """Plan the run by the command line."""
    assignments = [word for name, text in _make_settings(extreme).items() for word in ("--set", f"{name}={text}")]
    option = STUDIES[extreme.study].axis.option
    words = ["run", extreme.study, "--preset", "laptop", "--dry-run", "--output", str(folder / "out")]
    return run_command([*words, option, extreme.arm, *assignments], folder, folder)


def train(extreme: Extreme, folder: Path) -> Failure | list[dict[str, Any]]:
    """Train two steps in this process; return the rows, or the failure."""
    study = STUDIES[extreme.study]
    settings: dict[str, object] = dict(_make_settings(extreme))
    plan = make_plan(study, "laptop", "a test", settings, [extreme.arm], 1, folder / "out")
    spec = plan.runs[0]
    trial = PPO(make_trial_config(plan, [spec]))
    try:
        for _ in range(STEPS):
            result = trial.step()
            if result["failure_class"]:
                return Failure(result["failure_class"], result["failure"], False, result["failure_trace"][-1500:])
            if result["done"]:
                break
    except RunFailedError as error:
        return error.failure._replace(trace=error.failure.trace[-1500:])
    finally:
        trial.cleanup()
    return read_rows(plan.get_run_dir(spec.run_id) / "metrics.jsonl")


def judge_failure(failure: Failure, setting: str) -> str:
    """Return what is wrong about how a run failed; empty if a user knows what to do."""
    if failure.kind == "configuration":
        return ""
    if setting == "rollout.weight_noise" and "logprob_tolerance" in failure.message:
        return ""  # so much noise that the sampler is not the policy any more, as the message says
    if failure.kind == NON_FINITE:
        names_step = re.search(r"\bstep \d+", failure.message)
        names_tensor = re.search(
            r"\b(loss|grad|weight|logit|reward|advantage|score|actor|critic|policy)", failure.message
        )
        return "" if names_step and names_tensor else f"names no step or no tensor: {failure.message[:300]}"
    if failure.kind == "out of memory":
        pytest.skip("took more memory than it may here, and nothing refused it before the run")
    return f"failed ({failure.kind}), retried: {failure.is_retried}: {failure.message[:300]}"


def plan_and_train(extreme: Extreme, folder: Path) -> str:
    """Plan a run with the extreme, and if it is not refused, train it; return what is wrong."""
    try:
        answer = call_in_child(partial(plan_command, extreme, folder), TIME_LIMIT_S, MAX_BYTES)
        if answer.code == 2:
            is_clear = answer.err.startswith("tune_study: ") or "Error" in answer.err
            return "" if is_clear and not (folder / "out").exists() else f"refused badly: {answer.err[:300]}"
        if answer.code == 3 and ("DOES NOT FIT" in answer.out or "NOT ENOUGH" in answer.out):
            return ""  # a plan that needs more memory or disk than there is
        if answer.code:
            return f"exit code {answer.code}: {answer.err[:300]}"
        result = call_in_child(partial(train, extreme, folder), TIME_LIMIT_S, MAX_BYTES)
    except ChildError as error:
        if error.is_timeout:
            pytest.skip(f"two steps take more than {TIME_LIMIT_S:.0f} s, and nothing refused it")
        if "MemoryError" in str(error):
            pytest.skip("took more memory than it may here, and nothing refused it before the run")
        return str(error)
    if isinstance(result, Failure):
        return judge_failure(result, extreme.setting)
    return "" if result else "trained, and has no row"


EXTREMES = list_extremes()


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_extremes(tmp_path: Path, extreme: Extreme) -> None:
    assert plan_and_train(extreme, tmp_path) == ""
