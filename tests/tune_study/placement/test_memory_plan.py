import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.catalog import STUDIES
from tests.fakes.plans import plan_study
from trainable.config.run_config import apply_overrides
from tune_study.host.machine_checks import Gpu
from tune_study.placement import memory, resources
from tune_study.placement.memory import GIB, Allocation, sum_by_phase
from tune_study.placement.memory_plan import (
    GpuCapacity,
    MemoryPlan,
    format_memory_plan,
    format_misfit,
    plan_memory,
)
from tune_study.placement.resources import check_memory, find_gpu_capacity, preflight
from tune_study.plan.errors import MisfitError, PlanError
from tune_study.plan.study_plan import StudyPlan

NO_MODELS = {"HF_HUB_CACHE": "/nowhere"}
FOUR_GPUS = tuple(Gpu(str(i), f"GPU-{i}{i}{i}{i}", "NVIDIA H100 80GB HBM3") for i in range(4))
H100 = GpuCapacity(80 * GIB, "for a test", True)


def make_study_plan(overrides: Mapping[str, object], study: str = "kl", preset: str = "paper") -> StudyPlan:
    return plan_study(Path("/out"), None, study=study, preset=preset, **overrides)


def plan_gpu_memory(overrides: Mapping[str, object], capacity: GpuCapacity = H100, study: str = "kl") -> MemoryPlan:
    plan = make_study_plan(overrides, study)
    gpu_plan = plan_memory(plan, preflight(plan, None, FOUR_GPUS, 2, None, is_real=False), capacity, NO_MODELS)
    assert gpu_plan is not None
    return gpu_plan


HALF_GPU = {"trainer.n_gpus_per_node": 0.5}
SMALL_MODEL = {"model.path": "Qwen/Qwen2.5-0.5B"}


def make_capacity(gib: float) -> GpuCapacity:
    return GpuCapacity(int(gib * GIB), "for a test", True)


# GiB of a GPU, settings, whether the run swaps, its ZeRO stage, and GiB at the peak; memory_choices.txt has others.
PLACEMENTS: dict[str, tuple[float, Mapping[str, object], bool, int, float]] = {
    "3B on half of 80, adapters": (80, HALF_GPU | {"model.lora_rank": 64}, False, 2, 34.9),
    "3B on 1 x 24, adapters": (24, {"model.lora_rank": 64}, True, 2, 22.8),
}


@pytest.mark.parametrize(("gib", "overrides", "swaps", "stage", "peak"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_the_paper_preset_fits_without_flags(
    gib: float, overrides: Mapping[str, object], swaps: bool, stage: int, peak: float
) -> None:
    gpu_plan = plan_gpu_memory(overrides, make_capacity(gib))
    lines = format_memory_plan(gpu_plan)
    assert re.match(rf"Fits: (policy backward|rollout) takes {peak} GiB of {gpu_plan.budget / GIB:.1f} \(", lines[-1])
    assert ("trainer.swap_to_host=True" in lines[2]) == swaps
    settings = dict(gpu_plan.placement_settings)
    assert settings == {
        "trainer.swap_to_host": swaps,
        "trainer.zero_stage": stage,
        "rollout.kv_cache_gib": gpu_plan.cache_bytes / GIB,
    }
    # They are settings of a run, and change neither its hash nor its results.
    assert apply_overrides(gpu_plan.base, settings).compute_hash() == gpu_plan.base.compute_hash()


def test_all_arms_of_the_sweeps_fit_one_h100() -> None:
    for study in ("kl", "top-p", "entropy"):
        assert plan_gpu_memory({}, H100, study).fits, study


@pytest.mark.parametrize("swaps", [True, False])
def test_a_typed_placement_is_respected(swaps: bool) -> None:
    gpu_plan = plan_gpu_memory({"trainer.swap_to_host": swaps}, make_capacity(200))
    assert gpu_plan.config.trainer.swap_to_host == swaps
    assert plan_gpu_memory({"trainer.swap_to_host": False}).fits is False


OVERSIZED_SETTINGS: list[Mapping[str, object]] = [
    HALF_GPU,
    {"model.path": "Qwen/Qwen2.5-7B"},
    {"trainer.swap_to_host": False},
    SMALL_MODEL | {"rollout.gpu_memory_utilization": 0.01},
    SMALL_MODEL | {"rollout.kv_cache_gib": 100.0},
    HALF_GPU | SMALL_MODEL | {"model.enable_gradient_checkpointing": False, "trainer.swap_to_host": False},
]


@pytest.mark.parametrize("overrides", OVERSIZED_SETTINGS, ids=range(len(OVERSIZED_SETTINGS)))
def test_what_is_advised_makes_it_fit(overrides: Mapping[str, object]) -> None:
    gpu_plan = plan_gpu_memory(overrides)
    assert not gpu_plan.fits
    verdict = format_misfit(gpu_plan, STUDIES["kl"])
    advice = verdict.partition("makes it fit: ")[2].rstrip(".").split("; ")
    assert advice != [""]
    for option in advice:
        assignments = option.replace("--gpus-per-exp ", "--set trainer.n_gpus_per_node=").split("--set ")[1:]
        change = dict(assignment.strip().split("=") for assignment in assignments)
        assert plan_gpu_memory({**overrides, **change}).fits, option


def test_what_nothing_helps_is_said_and_what_the_arms_differ_in_is_not_advised() -> None:
    gpu_plan = plan_gpu_memory({"model.path": "Qwen/Qwen2.5-72B", "trainer.n_gpus_per_node": 4})
    assert "choose a smaller model with --model, or larger GPUs" in format_misfit(gpu_plan, STUDIES["kl"])
    gpu_plan, study = plan_gpu_memory(HALF_GPU), STUDIES["kl"]
    assert "model.lora_rank" in format_misfit(gpu_plan, study)
    study = replace(study, axis=replace(study.axis, setting="model.lora_rank"))
    assert "model.lora_rank" not in format_misfit(gpu_plan, study)
    # A rank that was chosen stays.
    small_card_plan = plan_gpu_memory(HALF_GPU | {"model.lora_rank": 128}, make_capacity(20))
    assert not small_card_plan.fits
    assert "model.lora_rank" not in format_misfit(small_card_plan, STUDIES["kl"])


def test_the_run_that_takes_most_is_shown() -> None:
    gpu_plan = plan_gpu_memory({}, make_capacity(141))
    assert gpu_plan.base.actor.use_kl_loss, "the arm without a reference takes less"
    runs = make_study_plan({}).runs
    assert gpu_plan.peak == max(
        max(sum_by_phase(memory.list_allocations(gpu_plan.shape, spec.config, gpu_plan.budget))) for spec in runs
    )


@given(st.floats(0.05, 1), st.floats(8, 200), st.floats(0.05, 1))
def test_vllm_holds_a_conversation_or_the_plan_does_not_fit(share: float, gib: float, utilization: float) -> None:
    overrides = SMALL_MODEL | {"trainer.n_gpus_per_node": share, "rollout.gpu_memory_utilization": utilization}
    gpu_plan = plan_gpu_memory(overrides, make_capacity(gib))
    vllm_budget = int(utilization * int(share * int(gib * GIB)))
    engine_bytes = sum(allocation.rollout for allocation in gpu_plan.allocations if allocation.name.startswith("vLLM"))
    if gpu_plan.max_conversations:
        assert engine_bytes == vllm_budget
    assert "rollout.kv_cache_gib" not in gpu_plan.placement_settings
    assert gpu_plan.fits == (gpu_plan.peak <= gpu_plan.budget and gpu_plan.max_conversations > 0)


def test_the_plan_states_its_sizes_and_largest_items() -> None:
    lines = format_memory_plan(plan_gpu_memory(HALF_GPU | SMALL_MODEL))
    assert "each run gets 40.0 GiB of 0.5 GPU; the run that needs most is " in lines[0]
    # 128 conversations of 3600 tokens, of which each takes 24 blocks x 2 x 2 heads x 64 channels x 2 bytes.
    assert lines[1] == "vLLM: KV cache of 5.3 GiB: 128 conversations of 3600 tokens at once"
    assert lines[-1].startswith("Fits: policy backward takes 23.8 GiB of 40.0 (logits 4.3, critic AdamW moments 3.7, ")
    offloaded_plan = plan_gpu_memory({"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True})
    host_gib = offloaded_plan.host_bytes / GIB
    assert format_memory_plan(offloaded_plan)[2] == (
        f"CPU memory: {host_gib:.1f} GiB per run, {4 * host_gib:.1f} GiB for 4 at once"
    )


def test_an_unknown_model_has_no_plan() -> None:
    plan = make_study_plan({"model.path": "some/model"})
    assert plan_memory(plan, preflight(plan, None, FOUR_GPUS, 2, None, is_real=True), H100, NO_MODELS) is None


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncase $1 in *memory.free*) printf '%s' '{memory}';; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_card_is_asked_for_or_seen_or_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(
        tmp_path, monkeypatch, "0, GPU-0000, 10, 81559\n1, GPU-1111, 10, 40960\n2, GPU-2222, [N/A], [N/A]\n"
    )
    assert find_gpu_capacity(24.0, FOUR_GPUS)[:2] == (24 * GIB, "set by --gpu-memory-gib")
    assert find_gpu_capacity(None, FOUR_GPUS[:2]) == GpuCapacity(40960 * 2**20, "from nvidia-smi", True)
    assert find_gpu_capacity(None, FOUR_GPUS[:3])[0] == 80 * GIB
    assert not find_gpu_capacity(None, FOUR_GPUS[:3]).is_known
    assumed_capacity = find_gpu_capacity(None, ())
    assert "assumed, because no GPU is visible" in assumed_capacity.source
    for invalid_size in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="is not the memory of a GPU: type it in GiB"):
            find_gpu_capacity(invalid_size, ())


def test_what_does_not_fit_a_known_card_or_the_host_is_refused_in_one_paragraph() -> None:
    plan, gpu_plan = make_study_plan(HALF_GPU), plan_gpu_memory(HALF_GPU)
    with pytest.raises(MisfitError, match=r"DOES NOT FIT: policy backward takes .* --dry-run shows") as refusal:
        check_memory(gpu_plan, plan, ())
    assert "\n" not in str(refusal.value)
    overrides = HALF_GPU | {"rollout.free_cache_engine": False, "trainer.swap_to_host": False}
    assumed_plan = plan_gpu_memory(overrides, GpuCapacity(80 * GIB, "assumed", False))
    assert (assumed_plan.fits, assumed_plan.placement_settings) == (False, {})
    check_memory(assumed_plan, plan, ())
    with pytest.raises(MisfitError, match=r"runs at once need .* type --max-concurrent"):
        check_memory(assumed_plan._replace(host_bytes=2**60), plan, ())


def test_memory_that_others_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, gpu_plan = make_study_plan({}), plan_gpu_memory({})

    def check_free_memory(gib: int, gpus: tuple[Gpu, ...]) -> None:
        check_memory(gpu_plan._replace(allocations=[Allocation("weights", gib * GIB)], host_bytes=0), plan, gpus)

    memory = "0, GPU-0000, 81000, 81559\n1, GPU-1111, 1024, 81559\n2, GPU-2222, [N/A], [N/A]\n"
    fake_nvidia_smi(tmp_path, monkeypatch, memory)
    check_free_memory(60, (FOUR_GPUS[0], FOUR_GPUS[2], FOUR_GPUS[3]))
    check_free_memory(1, FOUR_GPUS)
    with pytest.raises(MisfitError, match=r"GPU 1 has 1\.0 GiB free and the runs on it need 60\.0 GiB\. `nvidia-smi`"):
        check_free_memory(60, FOUR_GPUS)
    # Orphans of an earlier start hold it, and are terminated first.
    monkeypatch.setattr(resources, "find_orphans", lambda folder: [SimpleNamespace(pid=4242)])
    check_free_memory(60, FOUR_GPUS)


def test_two_runs_on_one_card_need_twice_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = HALF_GPU | SMALL_MODEL
    gpu_plan = plan_gpu_memory(overrides)
    free_mib = int(1.5 * gpu_plan.peak / 2**20)
    fake_nvidia_smi(tmp_path, monkeypatch, f"0, GPU-0000, {free_mib}, 81559\n")
    alone = gpu_plan._replace(resource_plan=gpu_plan.resource_plan._replace(max_concurrent=1))
    check_memory(alone, make_study_plan(overrides), FOUR_GPUS[:1])
    with pytest.raises(PlanError, match="GPU 0 has"):
        check_memory(gpu_plan, make_study_plan(overrides), FOUR_GPUS[:1])
