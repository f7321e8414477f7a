"""What can be typed about adapters, what is refused, and what a run without them keeps."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("all-linear", "all-linear"),
        ("['all-linear']", "all-linear"),
        ("q_proj", ("q_proj",)),
        ("[v_proj,q_proj,v_proj]", ("q_proj", "v_proj")),
        (["down_proj", "o_proj"], ("o_proj", "down_proj")),
    ],
)
def test_layers_are_chosen_by_name(typed: object, wanted: object) -> None:
    for key in ("model.lora_target_modules", "actor_rollout_ref.model.target_modules", "lora.target_modules"):
        assert apply_overrides(RunConfig(), {key: typed}).model.lora_target_modules == wanted


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.lora_rank", -1, "greater than or equal to 0"),
        ("model.lora_alpha", 0, "greater than 0"),
        ("model.lora_target_modules", "[q_proj,embed_tokens]", "all-linear, or a list of some of q_proj, k_proj"),
        ("model.lora_target_modules", "[]", "all-linear, or a list"),
        ("model.lora_target_modules", 3, "all-linear, or a list"),
        ("model.lora_target_modules", None, "all-linear, or a list"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        apply_overrides(RunConfig(), {key: value})
    assert str(caught.value).count(": must be ") == 1


def test_a_run_without_adapters_keeps_the_name_that_it_had_before_there_were_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, rank = RunConfig(), {"lora_rank": 8}
    hashed = [apply_overrides(plain, {**rank, **more}).compute_hash() for more in ({}, {"lora_alpha": 32})]
    assert len({plain.compute_hash(), *hashed}) == 3
    other = apply_overrides(plain, {"lora_alpha": 32, "lora_target_modules": "q_proj"})
    assert other.compute_hash() == plain.compute_hash()
    written: list[str] = []
    monkeypatch.setattr("trainable.config.run_config.json.dumps", lambda data, **_: written.append(str(data)) or "")
    plain.compute_hash()
    assert "prompt_style" in written[0]
    assert "lora" not in written[0]


def test_a_run_without_adapters_does_not_import_peft() -> None:
    code = (
        "import sys; from tests.fakes.trainers import make_quiet_trainer; make_quiet_trainer().step(); "
        "print('peft' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
