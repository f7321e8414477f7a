import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import STUDIES
from trainable.config.run_config import apply_overrides
from tune_study.host.gpus import Gpu
from tune_study.placement import memory, memory_plan
from tune_study.placement.memory import GIB, PHASES, sum_by_phase
from tune_study.placement.memory_plan import (
    GpuCapacity,
    MemoryPlan,
    check_free_memory,
    check_memory,
    find_gpu_capacity,
    format_memory_plan,
    format_verdict,
    make_memory_table,
    plan_memory,
)
from tune_study.placement.resources import preflight
from tune_study.plan.study_plan import PlanError, StudyPlan, make_plan

NO_MODELS = {"HF_HUB_CACHE": "/nowhere"}
FOUR = tuple(Gpu(str(i), f"GPU-{i}{i}{i}{i}", "NVIDIA H100 80GB HBM3") for i in range(4))
H100 = GpuCapacity(80 * GIB, "for a test", True)


def plan_of(overrides: Mapping[str, object], study: str = "kl", preset: str = "paper") -> StudyPlan:
    return make_plan(STUDIES[study], preset, "a test", overrides, None, 1, Path("/out"))


def planned(overrides: Mapping[str, object], card: GpuCapacity = H100, study: str = "kl") -> MemoryPlan:
    plan = plan_of(overrides, study)
    found = plan_memory(plan, preflight(plan, None, FOUR, 2, None, is_real=False), card, NO_MODELS)
    assert found is not None
    return found


HALF = {"trainer.n_gpus_per_node": 0.5}
SMALL = {"model.path": "Qwen/Qwen2.5-0.5B"}


def test_a_3b_actor_and_critic_do_not_fit_half_a_card() -> None:
    found = planned(HALF)
    assert not found.fits
    said = format_verdict(found, STUDIES["kl"])
    assert said.startswith("DOES NOT FIT: policy backward takes ")
    assert "critic AdamW moments 23.0" in said
    assert "--gpus-per-exp 1 --set trainer.strategy=deepspeed --set trainer.offload_optimizer=True" in said


def test_a_3b_actor_and_critic_with_adapters_fit_half_a_card() -> None:
    assert " --set model.lora_rank=64;" in format_verdict(planned(HALF), STUDIES["kl"])
    found = planned(HALF | {"model.lora_rank": 64})
    assert found.fits
    assert format_verdict(found, STUDIES["kl"]).startswith("Fits: 30.0 of 40.0 GiB at its peak (rollout)")
    small_card = planned(HALF | {"model.lora_rank": 128}, GpuCapacity(20 * GIB, "for a test", True))
    assert "model.lora_rank" not in format_verdict(small_card, STUDIES["kl"])  # it has adapters


def test_a_small_model_fits_half_a_card() -> None:
    found = planned(HALF | SMALL)
    assert found.fits
    assert (found.budget, found.runs_per_gpu, found.runs_per_node) == (40 * GIB, 2, 6)
    assert format_verdict(found, STUDIES["kl"]).startswith("Fits: ")


WAYS: list[Mapping[str, object]] = [
    HALF,
    {},
    {"trainer.n_gpus_per_node": 4},
    {"rollout.name": "torch"},
    HALF | {"model.path": "Qwen/Qwen2.5-1.5B"},
    SMALL | {"rollout.gpu_memory_utilization": 0.01},
    HALF | SMALL | {"model.enable_gradient_checkpointing": False},
]


@pytest.mark.parametrize("overrides", WAYS, ids=range(len(WAYS)))
def test_what_is_advised_makes_it_fit(overrides: Mapping[str, object]) -> None:
    found = planned(overrides)
    assert not found.fits
    said = format_verdict(found, STUDIES["kl"])
    advised = said.partition("makes it fit: ")[2].rstrip(".").split("; ")
    assert advised != [""]
    names = {"--gpus-per-exp": "trainer.n_gpus_per_node", "--gpu-memory-utilization": "rollout.gpu_memory_utilization"}
    for way in advised:
        words = way.split()
        typed = zip(words[::2], words[1::2], strict=True)
        change = dict(value.split("=") if option == "--set" else (names[option], value) for option, value in typed)
        assert planned({**overrides, **change}).fits, way


def test_what_nothing_helps_is_said() -> None:
    found = planned({"model.path": "Qwen/Qwen2.5-72B", "trainer.n_gpus_per_node": 4})
    assert "choose a smaller model with --model, or larger GPUs" in format_verdict(found, STUDIES["kl"])


def test_what_the_arms_differ_in_is_not_advised() -> None:
    study = STUDIES["kl"]
    axis = replace(study.axis, setting="model.lora_rank")
    said = format_verdict(planned({"trainer.n_gpus_per_node": 4}), replace(study, axis=axis))
    assert "model.lora_rank" in format_verdict(planned({"trainer.n_gpus_per_node": 4}), study)
    assert "model.lora_rank" not in said


def test_the_run_that_takes_most_is_shown() -> None:
    found = planned({})
    assert found.spec.config.actor.use_kl_loss, "the arm without a reference takes less"
    everyone = plan_of({}).runs
    assert found.peak == max(
        max(sum_by_phase(memory.list_allocations(found.shape, spec.config, found.budget))) for spec in everyone
    )


@given(st.floats(0.05, 1), st.floats(8, 200), st.floats(0.05, 1))
def test_vllm_holds_a_conversation_or_the_plan_does_not_fit(share: float, gib: float, utilization: float) -> None:
    overrides = SMALL | {"trainer.n_gpus_per_node": share, "rollout.gpu_memory_utilization": utilization}
    found = planned(overrides, GpuCapacity(int(gib * GIB), "for a test", True))
    given_to_vllm = int(utilization * int(share * int(gib * GIB)))
    engine = sum(part.gpu_bytes[memory.ROLLOUT] for part in found.allocations if part.name.startswith("vLLM"))
    assert (found.max_conversations == 0) == (found.cache_shortfall > 0)
    if found.max_conversations:
        assert engine == given_to_vllm
    assert found.fits == (found.peak <= found.budget and found.max_conversations > 0)


def test_the_table_adds_up_and_leaves_out_what_is_not_there() -> None:
    columns, rows = make_memory_table(planned({"algorithm.adv_estimator": "grpo"}))
    assert columns == ("GiB on each GPU", "rollout", "values", "policy backward", "policy step", "host")
    columns, rows = make_memory_table(planned(HALF))
    assert columns[1:-1] == PHASES[:-1]
    *parts, sums, over = [[0.0 if cell in ("", "-") else float(cell.split()[0]) for cell in row[1:]] for row in rows]
    for column, total in enumerate(sums):
        assert abs(sum(part[column] for part in parts) - total) < 0.05 * len(parts)
        if column < len(PHASES):
            assert abs(max(total - 40.0, 0.0) - over[column]) < 0.11


def test_the_sampler_is_told_its_part_of_a_fraction() -> None:
    said = format_memory_plan(planned(HALF | SMALL), STUDIES["kl"])
    assert "each run gets 0.5 of it, 40.0 GiB" in said[0]
    assert said[1].startswith("vLLM: gpu_memory_utilization 0.5 of the run's memory, 20.0 GiB: ")
    offloaded = planned({"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True})
    needed = [line for line in format_memory_plan(offloaded, STUDIES["kl"]) if line.startswith("Extra CPU memory")]
    assert needed == [
        f"Extra CPU memory: {offloaded.host_bytes / GIB:.1f} GiB for each run, "
        f"{4 * offloaded.host_bytes / GIB:.1f} GiB for 4 at once."
    ]


def test_runs_without_gpus_and_unknown_models_have_no_plan() -> None:
    laptop = plan_of({}, preset="laptop")
    assert plan_memory(laptop, preflight(laptop, None, (), 2, None, is_real=True), H100, NO_MODELS) is None
    plan = plan_of({"model.path": "some/model"})
    assert plan_memory(plan, preflight(plan, None, FOUR, 2, None, is_real=True), H100, NO_MODELS) is None


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: str, processes: str = "") -> None:
    script = folder / "nvidia-smi"
    answers = f"*memory.free*) printf '%s' '{memory}';; *compute-apps*) printf '%s' '{processes}';;"
    script.write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_card_is_asked_for_or_seen_or_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(
        tmp_path, monkeypatch, "0, GPU-0000, 10, 81559\n1, GPU-1111, 10, 40960\n2, GPU-2222, [N/A], [N/A]\n"
    )
    assert find_gpu_capacity(24.0, FOUR)[:2] == (24 * GIB, "set by --gpu-memory-gib")
    assert find_gpu_capacity(None, FOUR[:2]) == GpuCapacity(40960 * 2**20, "from nvidia-smi", True)
    assert find_gpu_capacity(None, FOUR[:3])[0] == 80 * GIB
    assert not find_gpu_capacity(None, FOUR[:3]).is_known
    assumed = find_gpu_capacity(None, ())
    assert "assumed, because no GPU is visible" in assumed.source
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="is not the memory of a GPU: type it in GiB"):
            find_gpu_capacity(wrong, ())


def test_a_real_run_that_does_not_fit_is_refused_in_one_paragraph() -> None:
    with pytest.raises(PlanError, match=r"The runs do not fit: policy backward takes .* --dry-run shows") as refusal:
        check_memory(planned(HALF), plan_of(HALF), ())
    assert "\n" not in str(refusal.value)


def test_an_assumed_card_refuses_nothing() -> None:
    found = planned(HALF | {"rollout.free_cache_engine": False}, GpuCapacity(80 * GIB, "assumed", False))
    assert not found.fits
    check_memory(found, plan_of(HALF), ())


def test_more_than_the_host_has_is_refused() -> None:
    overrides = SMALL | {"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True}
    found = planned(overrides)
    with pytest.raises(PlanError, match=r"runs at once need .* type --max-concurrent"):
        check_memory(found._replace(host_bytes=2**60), plan_of(overrides), ())


def test_memory_that_others_hold_is_refused_and_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(
        tmp_path,
        monkeypatch,
        "0, GPU-0000, 81000, 81559\n1, GPU-1111, 1024, 81559\n2, GPU-2222, [N/A], [N/A]\n",
        "GPU-1111, 4242, 70000\nGPU-1111, 4243, [N/A]\n",
    )
    check_free_memory(60 * GIB, (FOUR[0], FOUR[2], FOUR[3]), set())
    check_free_memory(1 * GIB, FOUR, set())
    refusal = (
        r"GPU 1 has 1\.0 GiB free and the runs on it need 60\.0 GiB; its memory is "
        r"used by PID 4242 \(68\.4 GiB\), 4243\. End these processes if they are orphans"
    )
    with pytest.raises(PlanError, match=refusal):
        check_free_memory(60 * GIB, FOUR, set())
    check_free_memory(60 * GIB, FOUR, {4242})


def test_memory_of_processes_that_are_not_visible_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "0, GPU-0000, 1024, 81559\n")
    with pytest.raises(PlanError, match="used by processes that are not visible here"):
        check_free_memory(60 * GIB, FOUR[:1], set())


def test_two_runs_on_one_card_need_twice_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = HALF | SMALL
    found = planned(overrides)
    free = int(1.5 * found.peak / 2**20)
    fake_nvidia_smi(tmp_path, monkeypatch, f"0, GPU-0000, {free}, 81559\n")
    check_memory(found._replace(runs_per_gpu=1), plan_of(overrides), FOUR[:1])
    with pytest.raises(PlanError, match="GPU 0 has"):
        check_memory(found, plan_of(overrides), FOUR[:1])


def test_every_change_that_may_be_advised_can_be_typed() -> None:
    config = plan_of({}).base_config
    for text, change in memory_plan._CHANGES:
        assert apply_overrides(config, change) is not None
        assert all(str(value) in text for value in change.values())
