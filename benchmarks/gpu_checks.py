"""Check a machine with a GPU, and measure what the plans of the paper preset assume. Prints a JSON line per check.

Every check runs in a process of its own with a time limit, so that one that hangs or runs out of memory ends no other.
A check whose packages or GPU are missing is skipped with the reason: on a machine with torch and CUDA alone, those of
the group `torch` run. Each line has the check's name, status (ok, failed, skipped, timeout), seconds and figures, and
`expected`, what was assumed before any measurement.
Run: python benchmarks/gpu_checks.py --output checks.jsonl; python benchmarks/gpu_checks.py --groups torch --device cpu
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
GB, GIB = 10**9, 2**30
OWN_PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers")
"""What the trainer imports."""

Figures = dict[str, Any]


class Check(NamedTuple):
    """A check of one thing.

    Attributes:
        group: torch (needs torch alone), step (one training step), system (a run and its checkpoints), engines (vLLM
            and DeepSpeed).
        measure: function of the options that returns figures.
        limit: seconds after which it is ended.
        needs: packages that it imports.
        needs_gpu: whether it makes sense on a GPU only.
        expected: what was assumed before any measurement, on an H100 or H200.
    """

    group: str
    measure: Callable[[argparse.Namespace], Figures]
    limit: int
    needs: tuple[str, ...] = ("torch",)
    needs_gpu: bool = False
    expected: str = ""


def synchronize(device: str) -> None:
    """Wait until the GPU has finished its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(call: Callable[[], object], device: str, count: int) -> float:
    """Median seconds of a call, after one that is not timed."""
    call()
    seconds = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_versions(options: argparse.Namespace) -> Figures:
    """Versions, the GPU, and whether attention over packed rows is there."""
    import torch

    figures: Figures = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    if options.device == "cuda":
        figures |= {
            "name": torch.cuda.get_device_name(),
            "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / GIB, 1),
            "cudnn": torch.backends.cudnn.version(),
        }
    figures["has_varlen_attention"] = find_spec("torch.nn.attention.varlen") is not None
    return figures


def measure_products(options: argparse.Namespace) -> Figures:
    """Rate of large matrix products in bfloat16."""
    import torch

    size = 256 if options.short else 8192
    left, right = (torch.randn(size, size, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = time_calls(lambda: left @ right, options.device, 10)
    return {"size": size, "tflops_per_s": round(2 * size**3 / seconds / 1e12, 2)}


def measure_attention(options: argparse.Namespace) -> Figures:
    """Milliseconds of attention calls whose number of keys grows by one each time, with cuDNN's kernels and without."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    figures: Figures = {}
    rows, calls = (2, 3) if options.short else (8, 40)
    for uses_cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        seconds = []
        for extra in range(calls):
            keys = 1024 + extra + 100 * uses_cudnn  # other lengths than before: a plan is built once per shape
            shape, dtype = (rows, 2, 8, 128), torch.bfloat16
            query = torch.randn(shape, device=options.device, dtype=dtype)
            key, value = (torch.randn(rows, 2, keys, 128, device=options.device, dtype=dtype) for _ in range(2))
            mask = torch.ones(rows, 1, 8, keys, device=options.device, dtype=torch.bool)
            synchronize(options.device)
            start = time.perf_counter()
            scaled_dot_product_attention(query, key, value, attn_mask=mask)
            synchronize(options.device)
            seconds.append(time.perf_counter() - start)
        figures["cudnn_ms" if uses_cudnn else "other_ms"] = round(1000 * statistics.median(seconds[1:]), 3)
    return figures


def measure_adamw(options: argparse.Namespace) -> Figures:
    """Milliseconds of an AdamW step: over tensors at once, and in one kernel."""
    import torch

    count, size = (4, 10_000) if options.short else (62, 50_000_000)
    figures: Figures = {"parameters": count * size}
    for name, settings in {"foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        weights = [torch.nn.Parameter(torch.zeros(size, device=options.device)) for _ in range(count)]
        optimizer = torch.optim.AdamW(weights, lr=1e-6, **settings)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        figures[f"{name}_ms"] = round(1000 * time_calls(optimizer.step, options.device, 3), 2)
        del weights, optimizer
    return figures


def measure_copies(options: argparse.Namespace) -> Figures:
    """GB per second between host memory and the device, from pinned and from pageable memory."""
    import torch

    size = 10**6 if options.short else 4 * GB
    on_device = torch.zeros(size, dtype=torch.uint8, device=options.device)
    figures: Figures = {}
    for name, pins in (("pinned", options.device == "cuda"), ("pageable", False)):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=pins)
        for direction, source, target in (("to_device", host, on_device), ("to_host", on_device, host)):
            seconds = time_calls(lambda a=source, b=target: b.copy_(a, non_blocking=True), options.device, 3)
            figures[f"{name}_{direction}_gb_per_s"] = round(size / seconds / 1e9, 1)
    return figures


def measure_swap(options: argparse.Namespace) -> Figures:
    """Seconds to bring a network of 3B float32 parameters to the device and back, as `trainer.swap_to_host` does."""
    import torch

    from trainable.backend.host_swap import HostSwap

    count, size = (4, 10_000) if options.short else (62, 50_000_000)
    weights = [torch.nn.Parameter(torch.ones(size, device=options.device)) for _ in range(count)]
    swap = HostSwap(lambda: weights, torch.device(options.device))

    def load_and_leave() -> None:
        with swap.load(has_changed=True):
            pass

    seconds = time_calls(load_and_leave, options.device, 3)
    return {"gb": round(4 * count * size / GB, 3), "seconds_both_ways": float(f"{seconds:.3g}")}


def measure_share(options: argparse.Namespace) -> Figures:
    """Whether a process that is capped at half of the GPU gets an error of its own, while the other half stays free."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.5)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return {"is_capped": True, "free_gib": round(torch.cuda.mem_get_info()[0] / GIB, 1)}
    raise AssertionError("a process with half of the GPU's memory got more")


PIN = """
import sys, torch
def read_rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
torch.empty(1, pin_memory=True)
before = read_rss()
buffer = torch.empty(int(1.25 * 2**30), dtype=torch.uint8, pin_memory=True).fill_(1)
print((read_rss() - before) / 2**20)
"""


def measure_pinned(options: argparse.Namespace) -> Figures:
    """Host memory of a pinned tensor of 1.25 GiB, with torch's settings and with those of a run: 2 and 1.25 GiB."""
    from trainable.backend.gpus import ALLOCATOR_SETTINGS, ALLOCATOR_VARIABLES

    figures: Figures = {}
    for name, value in (("default_gib", ""), ("run_gib", ALLOCATOR_SETTINGS)):
        environment = {**os.environ, ALLOCATOR_VARIABLES[0]: value}
        result = subprocess.run(
            [sys.executable, "-c", PIN], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        figures[name] = round(float(result.stdout), 2)
    return figures


def run_script(arguments: list[str], limit: int) -> Figures:
    """The JSON object that a script of this folder prints."""
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    if process.returncode:
        raise RuntimeError(process.stderr[-1500:])
    figures: Figures = json.loads(process.stdout)
    return figures


def run_tests(*arguments: str) -> Figures:
    """The last line that pytest prints. RuntimeError with the end of its output if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError((process.stdout + process.stderr)[-1500:])
    return {"result": process.stdout.strip().splitlines()[-1]}


def measure_tests(options: argparse.Namespace) -> Figures:
    """The tests of tests/gpu."""
    return run_tests("tests/gpu")


def measure_deepspeed(options: argparse.Namespace) -> Figures:
    """The tests of DeepSpeed over processes, which compare with torch."""
    return run_tests("-m", "engines", "tests/engines/test_deepspeed.py")


def make_step_check(shape: str, *extra: str) -> Callable[[argparse.Namespace], Figures]:
    """A check that runs gpu_step.py."""

    def measure(options: argparse.Namespace) -> Figures:
        used_shape = "tiny" if options.short else shape
        short_options = ["--episodes", "16", "--tokens", "4"] if options.short else []
        arguments = ["--shape", used_shape, "--device", options.device, *extra, *short_options]
        figures = run_script([str(FOLDER / "gpu_step.py"), *arguments], 900)
        return {name: figures[name] for name in ("shape", "conversation_tokens", "peak_tflops_per_s", "phases")}

    return measure


def measure_trainer(options: argparse.Namespace) -> Figures:
    """Rows of a small run on the device: the same twice, with swapping, and continued from its state."""
    import torch

    from trainable.config.run_config import RunConfig, apply_overrides
    from trainable.ppo.trainer import PPOTrainer

    settings = {
        "model.path": "sokoban-tiny",
        "model.prompt_style": "compact",
        "model.dtype": "float32",
        "rollout.name": "torch",
        "rollout.max_model_len": None,
        "rollout.response_length": 24,
        "trainer.n_gpus_per_node": 1 if options.device == "cuda" else 0,
        "trainer.device": options.device,
        "trainer.val_before_train": False,
        "trainer.test_freq": 0,
        "env.env_groups": 2,
        "env.group_size": 4,
        "env.val_env_groups": 8,
        "env.test_env_groups": 0,
        "actor.ppo_mini_batch_size": 4,
        "critic.ppo_mini_batch_size": 4,
        "actor.use_kl_loss": True,
        "trainer.total_training_steps": 3,
    }

    def make_trainer(swaps: bool) -> PPOTrainer:
        return PPOTrainer(apply_overrides(RunConfig(), {**settings, "trainer.swap_to_host": swaps}))

    def compare(rows: list[Figures], others: list[Figures]) -> float:
        names = ("pg_loss", "vf_loss", "kl_loss", "entropy", "actor_grad_norm", "critic_grad_norm")
        return max(abs(row[name] - other[name]) for row, other in zip(rows, others, strict=True) for name in names)

    trainer = make_trainer(swaps=False)
    rows = [trainer.step().row]
    tensors, values = trainer.get_state()
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    rows += [trainer.step().row for _ in range(2)]
    repeated, swapped, continued = make_trainer(swaps=False), make_trainer(swaps=True), make_trainer(swaps=True)
    repeated_rows, swapped_rows = ([other.step().row for _ in range(3)] for other in (repeated, swapped))
    continued.load_state(tensors, values)
    continued_rows = [continued.step().row for _ in range(2)]
    largest = {
        "repeated": compare(rows, repeated_rows),
        "swapped": compare(rows, swapped_rows),
        "continued": compare(rows[1:], continued_rows),
    }
    if max(largest.values()) > 1e-2:
        raise AssertionError(f"rows differ: {largest}")
    return {"largest_difference": largest, "device": str(trainer.device), "threads": torch.get_num_threads()}


def measure_checkpoint(options: argparse.Namespace) -> Figures:
    """GB per second of writing a checkpoint and reading it again, with its checksums."""
    import torch

    from trainable.runs.checkpoint import read_checkpoint, write_checkpoint

    size = 10**6 if options.short else GB // 4
    tensors = {str(number): torch.zeros(size, device=options.device) for number in range(4)}
    total = 4 * size * 4 / GB
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "state", time.perf_counter()
        write_checkpoint(path, tensors, {"step": 1})
        written = time.perf_counter()
        read_tensors, _ = read_checkpoint(path)
        number_sum = sum(float(tensor.sum()) for tensor in read_tensors.values())
        read = time.perf_counter()
    return {
        "gb": round(total, 3),
        "write_gb_per_s": round(total / (written - start), 2),
        "read_gb_per_s": round(total / (read - written), 2),
        "sum": number_sum,
    }


def sync_weights(sampler: Any, model: Any) -> None:
    """Copy the weights of `model` to vLLM."""
    from trainable.models.lora import iter_hub_weights

    sampler.update_weights(iter_hub_weights(model))


def measure_vllm(options: argparse.Namespace) -> Figures:
    """Seconds of vLLM's start, replies, weight sync, sleep and wake, with CUDA graphs and without; what sleep frees.

    The model is that of --model, a folder or an id in the local hub cache.
    """
    import numpy as np
    import torch

    from trainable.models.load import load_policy
    from trainable.rollout.sampler import SamplingParams
    from trainable.rollout.vllm_sampler import VllmSampler

    device = torch.device(options.device)
    policy = load_policy(options.model, device)
    prompt = list(range(5, 69))
    rows, length = (2, 8) if options.short else (128, 200)
    figures: Figures = {"model": options.model}
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    for name, is_eager in (("eager", True), ("graphs", False)):
        start = time.perf_counter()
        cache_bytes = 64 * 2**20 if options.short else 8 * GIB
        sampler = VllmSampler(
            policy.folder,
            device,
            dtype=dtype,
            max_model_len=512,
            gpu_memory_utilization=0.01,
            kv_cache_memory_bytes=cache_bytes,
            enforce_eager=is_eager,
            enable_sleep_mode=True,
        )
        figures[f"{name}_start_s"] = round(time.perf_counter() - start, 1)

        def sample(sampler: VllmSampler = sampler) -> None:
            params = SamplingParams(1.0, length, policy.stop_token)
            conversation = sampler.start_conversation([prompt], params, np.random.default_rng(0).spawn(rows))
            conversation.sample_replies(range(rows), [[] for _ in range(rows)])

        figures[f"{name}_s_for_{rows}_replies"] = round(time_calls(sample, options.device, 2), 2)
        figures[f"{name}_sync_s"] = round(
            time_calls(partial(sync_weights, sampler, policy.model), options.device, 2), 3
        )
        if options.device == "cuda":
            free_before, start = torch.cuda.mem_get_info()[0], time.perf_counter()
            sampler.sleep()
            figures[f"{name}_sleep_s"] = round(time.perf_counter() - start, 3)
            figures[f"{name}_sleep_frees_gib"] = round((torch.cuda.mem_get_info()[0] - free_before) / GIB, 2)
            start = time.perf_counter()
            sync_weights(sampler, policy.model)  # a sleeping engine has no weights
            figures[f"{name}_wake_and_sync_s"] = round(time.perf_counter() - start, 3)
        sampler.close()
    return figures


CHECKS: dict[str, Check] = {
    "versions": Check("torch", measure_versions, 60),
    "products": Check("torch", measure_products, 120, expected="770 to 800 TFLOP/s"),
    "attention": Check("torch", measure_attention, 120, expected="cuDNN 25 to 35 ms per new length, others below 0.1"),
    "adamw": Check("torch", measure_adamw, 180, expected="3.1e9 parameters: 70 to 90 ms over tensors, 22 to 28 fused"),
    "copies": Check("torch", measure_copies, 120, expected="about 50 GB/s pinned, 3 to 8 pageable"),
    "swap": Check("torch", measure_swap, 180, ("torch", "numpy"), expected="12.4 GB both ways: 0.5 s"),
    "pinned": Check("torch", measure_pinned, 120, needs_gpu=True, expected="2 GiB by default, 1.25 in a run"),
    "share": Check("torch", measure_share, 60, needs_gpu=True, expected="an error of the capped process alone"),
    "gpu tests": Check("step", measure_tests, 300, (*OWN_PACKAGES, "pytest", "hypothesis"), needs_gpu=True),
    "step 0.5b": Check(
        "step", make_step_check("0.5b"), 300, OWN_PACKAGES, expected="MFU: forward passes .45, updates .25 to .38"
    ),
    "step 3b": Check(
        "step",
        make_step_check("3b"),
        500,
        OWN_PACKAGES,
        expected="values 3, reference 3.2, critic 11 to 14, policy 13 to 16 s; collapse 13 to 21 s",
    ),
    "step 3b without recomputation": Check(
        "step",
        make_step_check("3b", "--keep-activations"),
        500,
        OWN_PACKAGES,
        needs_gpu=True,
        expected="20 to 25 % less for the updates, if it fits",
    ),
    "trainer": Check("system", measure_trainer, 300, OWN_PACKAGES, expected="rows agree to 1e-3, not bit for bit"),
    "checkpoint": Check("system", measure_checkpoint, 300, OWN_PACKAGES, expected="writing 1 to 2, hashing 1.1 GB/s"),
    "deepspeed": Check("engines", measure_deepspeed, 1200, (*OWN_PACKAGES, "pytest", "deepspeed")),
    "vllm": Check(
        "engines",
        measure_vllm,
        600,
        (*OWN_PACKAGES, "vllm"),
        expected="3B: sync 1 to 1.5 s, sleep frees 95 % of weights and cache, 5 to 6 ms per token of 128 rows (graphs)",
    ),
}
"""The checks, in the order in which they run."""


def find_obstacle(check: Check, device: str) -> str:
    """Why a check cannot run on this machine; empty if it can."""
    missing = [package for package in check.needs if find_spec(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "it is about GPUs" if check.needs_gpu and device != "cuda" else ""


def run_check(name: str, check: Check, arguments: list[str], device: str) -> Figures:
    """Run a check in a process of its own; return its line."""
    line: Figures = {"check": name, "group": check.group, "device": device, "expected": check.expected}
    if obstacle := find_obstacle(check, device):
        return {**line, "status": "skipped", "reason": obstacle}
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__)), *arguments, "--only", name]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=check.limit, check=False)
    except subprocess.TimeoutExpired:
        return {**line, "status": "timeout", "seconds": check.limit}
    seconds = round(time.perf_counter() - start, 1)
    if process.returncode:
        return {**line, "status": "failed", "seconds": seconds, "reason": process.stderr.strip()[-1500:]}
    return {**line, "status": "ok", "seconds": seconds, "figures": json.loads(process.stdout.strip().splitlines()[-1])}


def has_gpu() -> bool:
    """Whether torch is there and sees a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    groups = tuple(dict.fromkeys(check.group for check in CHECKS.values()))
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=groups, default=list(groups), help="groups of checks to run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--model", default="sokoban-tiny", help="model for vLLM, such as Qwen/Qwen2.5-3B")
    parser.add_argument("--short", action="store_true", help="smallest sizes, to see that the checks run")
    parser.add_argument("--output", type=Path, help="append the lines to this file, too")
    parser.add_argument("--only", choices=tuple(CHECKS), help="print the figures of one check, in this process")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu():
        parser.error("--device cuda: torch sees no GPU here; type --device cpu, or look at `nvidia-smi`")
    return options


def main() -> int:
    """Run the checks; return 1 if one failed."""
    options = parse_options()
    if options.only is not None:
        sys.path[:0] = [str(ROOT), str(FOLDER)]
        print(json.dumps(CHECKS[options.only].measure(options)))
        return 0
    arguments = ["--device", options.device, "--model", options.model, *["--short"] * options.short]
    lines = []
    for name, check in CHECKS.items():
        if check.group in options.groups:
            lines.append(run_check(name, check, arguments, options.device))
            print(json.dumps(lines[-1]), flush=True)
            if options.output is not None:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    return int(any(line["status"] in ("failed", "timeout") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
