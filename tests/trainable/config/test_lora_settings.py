"""Settings of adapters: accepted and refused values, and the unchanged hash of a run without adapters."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("all-linear", "all-linear"),
        ("['all-linear']", "all-linear"),
        ("q_proj", ("q_proj",)),
        ("[v_proj,q_proj,v_proj]", ("q_proj", "v_proj")),
        (["down_proj", "o_proj"], ("o_proj", "down_proj")),
    ],
)
def test_layers_are_chosen_by_name(typed: object, expected: object) -> None:
    for key in ("model.lora_target_modules", "actor_rollout_ref.model.target_modules", "lora.target_modules"):
        assert apply_overrides(RunConfig(), {key: typed}).model.lora_target_modules == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.lora_rank", -1, "greater than or equal to 0"),
        ("model.lora_alpha", 0, "greater than 0"),
        ("model.lora_target_modules", "[q_proj,embed_tokens]", "all-linear, or a list of some of q_proj, k_proj"),
        ("model.lora_target_modules", "[]", "all-linear, or a list"),
        ("model.lora_target_modules", 3, "all-linear, or a list"),
        ("model.lora_target_modules", None, "all-linear, or a list"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        apply_overrides(RunConfig(), {key: value})
    assert str(raised.value).count(": must be ") == 1


def test_a_run_without_adapters_keeps_the_hash_from_before_adapters_existed(monkeypatch: pytest.MonkeyPatch) -> None:
    default_config, rank_override = RunConfig(), {"lora_rank": 8}
    adapter_hashes = [
        apply_overrides(default_config, {**rank_override, **extra_overrides}).compute_hash()
        for extra_overrides in ({}, {"lora_alpha": 32})
    ]
    assert len({default_config.compute_hash(), *adapter_hashes}) == 3
    unused_settings_config = apply_overrides(default_config, {"lora_alpha": 32, "lora_target_modules": "q_proj"})
    assert unused_settings_config.compute_hash() == default_config.compute_hash()
    hashed_texts: list[str] = []
    monkeypatch.setattr(
        "trainable.config.run_config.json.dumps", lambda values, **_: hashed_texts.append(str(values)) or ""
    )
    default_config.compute_hash()
    assert "prompt_style" in hashed_texts[0]
    assert "lora" not in hashed_texts[0]


@pytest.mark.slow
def test_a_run_without_adapters_does_not_import_peft() -> None:
    code = (
        "import sys; from tests.fakes.trainers import make_quiet_trainer; make_quiet_trainer().step(); "
        "print('peft' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
