"""Any causal LM of transformers, with the interface of `trainable.models.interface`.

Passes over whole sequences are the architecture's own. Sampling and scoring give it explicit additive masks, positions
and a cache that is ours. That this gives the numbers of the model's own forward is checked when a model is loaded.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from trainable.models.hub_config import HubShape, check_parts, read_config, refusal, shape_of
from trainable.models.kv_cache import KVCache
from trainable.models.qwen2 import LanguageHead, PassSettings, ValueHead
from trainable.runs.failures import is_memory


class _Growing(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Our cache as an architecture sees it while tokens are appended."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        super().__init__()
        self.cache, self.dtype = cache, dtype

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Keep a layer's new keys and values; all of them."""
        return self.cache.write(layer_idx, key_states.to(self.dtype), value_states.to(self.dtype))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots used."""
        return self.cache.used


class _Read(_Growing):
    """Our cache while tokens branch off: it stays as it is."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """A layer's keys and values, and the new ones after them."""
        stores = self.cache.keys[layer_idx], self.cache.values[layer_idx]
        return tuple(
            torch.cat((store[:, :, : self.cache.used], new.to(self.dtype)), dim=2)
            for store, new in zip(stores, (key_states, value_states), strict=True)
        )


class HubTrunk(nn.Module):
    """The base model of an architecture (see `trainable.models.interface.Trunk`)."""

    def __init__(self, base: Any, shape: HubShape) -> None:
        super().__init__()
        self.shape = shape
        self.passes = PassSettings()
        self.base = base.eval()
        self.blocks: list[Any] = [part for part in base.modules() if isinstance(part, GradientCheckpointingLayer)]
        for block in self.blocks:  # they recompute in training mode only: see `_recomputing`
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The table of the tokens' embeddings."""
        table: nn.Embedding = self.base.get_input_embeddings()
        return table

    @property
    def pads(self) -> bool:
        """Rows are read as a rectangle."""
        return True

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """What every pass runs under: nothing, where it computes in the type of its weights."""
        dtype = self.passes.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype, cache_enabled=False)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever wraps the model: nothing is dropped, and caches are kept."""
        return self

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Blocks in training mode, in which they keep their input only, where passes ask for it; nothing is dropped."""
        for block in self.blocks:
            block.training = self.passes.recompute and torch.is_grad_enabled()
        try:
            yield
        finally:
            for block in self.blocks:
                block.training = False

    def hidden_at(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Hidden states (N, hidden) at flat positions `where` (N,) of right-padded sequences `tokens` (B, T)."""
        with self._recomputing(), self._autocast(tokens.device):
            found: Tensor = self.base(input_ids=tokens, use_cache=False).last_hidden_state
        return found.flatten(0, 1)[where].to(self._type(found))

    def _type(self, found: Tensor) -> torch.dtype:
        """What hidden states are given in: the type of the passes, or that of the weights where they are wider."""
        return found.dtype if self.passes.dtype == torch.float32 else self.passes.dtype

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache of `rows` rows, with room for `slots` tokens of each."""
        return KVCache(rows, slots, self.embed_tokens.weight)

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (see `trainable.models.interface.Trunk.extend`)."""
        bias = cache.admit(valid).expand(-1, tokens.shape[1], -1)
        found = self._cached(tokens, positions, bias, _Growing(cache, self._type(self.embed_tokens.weight)))
        cache.used += tokens.shape[1]
        return found[:, -1]

    def branch(self, tokens: Tensor, depths: Tensor, sees: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """Hidden states of a tree after every row (see `trainable.models.interface.Trunk.branch`)."""
        rows = len(lengths)
        seen = _Read(cache, self._type(self.embed_tokens.weight))
        return self._cached(tokens.expand(rows, -1), lengths[:, None] + depths, cache.bias_after(sees, rows), seen)

    def _cached(self, tokens: Tensor, positions: Tensor, bias: Tensor, seen: _Growing) -> Tensor:
        """Hidden states (B, q, hidden) of tokens (B, q) over a cache, under `bias` (B, q, used + q)."""
        with self._autocast(tokens.device):
            found: Tensor = self.base(
                input_ids=tokens, position_ids=positions, attention_mask=bias[:, None], past_key_values=seen,
                use_cache=True,
            ).last_hidden_state  # fmt: skip
        return found.to(self._type(found))


class HubModel(nn.Module):
    """Trunk and language-model head (see `trainable.models.interface.LanguageModel`) of a model of transformers.

    causal: the model, whose weights it shares. names: those that its files give to the model's weights.
    """

    def __init__(self, causal: Any, shape: HubShape, names: Iterable[str] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.model = HubTrunk(causal.base_model, shape)
        head = causal.get_output_embeddings()
        self.lm_head = LanguageHead(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
        self.lm_head.weight = head.weight
        self._hub_names = _hub_names(causal, self, set(names))
        self._prefix = causal.base_model_prefix

    def module_name(self, name: str) -> str:
        """What transformers calls the module `name` of the trunk."""
        return f"{self._prefix}.{name.removeprefix('model.base.')}"

    def hub_name(self, name: str) -> str:
        """What the model's files call the weight `name`; a tied head has a name of its own."""
        return self._hub_names[name]


class HubValueModel(nn.Module):
    """A trunk with a head of one output: the critic."""

    def __init__(self, trunk: HubTrunk) -> None:
        super().__init__()
        self.shape = trunk.shape
        self.model = trunk
        self.score = ValueHead(trunk.shape.hidden_size, 1)

    def values_at(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Values (N,) at flat positions `where` (N,) of `tokens` (B, T)."""
        values: Tensor = self.score(self.model.hidden_at(tokens, where))
        return values.squeeze(-1)


def _hub_names(causal: Any, model: HubModel, in_files: set[str]) -> dict[str, str]:
    """For each name of `model`'s state what the files call it: with the trunk's prefix, or, as of GPT-2, without."""
    prefix = f"{causal.base_model_prefix}."
    head = next(name for name, part in causal.named_modules() if part is causal.get_output_embeddings())
    found = {}
    for name in model.state_dict():
        hub = f"{head}.weight" if name == "lm_head.weight" else prefix + name.removeprefix("model.base.")
        bare = hub.removeprefix(prefix)
        found[name] = bare if bare in in_files and hub not in in_files else hub
    left = in_files - set(found.values())
    is_tied = causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
    if not is_tied and len(left) == 1 and found["lm_head.weight"] not in in_files:  # GPT-NeoX's files name it otherwise
        found["lm_head.weight"] = left.pop()
    return found


def load_hub_model(folder: Path, names: Iterable[str]) -> HubModel:
    """The model in `folder`, in float32, whose safetensors files hold `names`; ValueError where it is not run exactly.

    Only safetensors are read; no code of the folder is run, nothing is fetched.
    """
    config = read_config(folder)
    with _quiet():
        causal, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    missing = sorted(found["missing_keys"]) + sorted(str(entry[0]) for entry in found["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"The model in {folder} is not whole: {len(missing)} of its tensors are missing from its safetensors files "
            f"or have another shape ({shown}). Fetch it again."
        )
    check_parts(causal, folder)
    for weight in causal.parameters():
        weight.data = weight.data.clone()  # they may be a map of the file, which could change under a run
    model = HubModel(causal.eval(), shape_of(causal, folder), names)
    check_exact(causal, model, folder)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its report of what it loaded, which is raised here where it matters."""
    was_shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_shown:
            logging.enable_progress_bar()


# ---------------------------------------------------------------------------- whether it is exact

TOLERANCE = 1e-3
"""Largest difference of hidden states over their largest entry: float32 passes that are one differ by about 1e-6."""


@torch.no_grad()
def check_exact(causal: Any, model: HubModel, folder: Path) -> None:
    """ValueError unless our three ways through the model give what its own forward gives, on a few tokens.

    The head's output, replaced by large numbers, has to come out as the logits: no cap and no scale is after it. What
    the head reads in the model's own forward has to be what `hidden_at`, `extend` and `branch` give.
    """
    found = f"a {type(causal).__name__}"
    device = model.lm_head.weight.device
    tokens = (torch.arange(1, 15, device=device).view(2, 7) * 37 + 5) % model.shape.vocab_size
    try:
        logits, wanted = _own_forward(causal, tokens)
        if not torch.equal(logits, _planted(logits)):
            raise refusal(folder, found, "its logits are not its head's output (they are capped or scaled after it)")
        for name, ours, theirs in _routes(model, tokens, wanted):
            if not _is_close(ours, theirs):
                raise refusal(folder, found, f"{name} does not give the hidden states of its own forward")
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        if is_memory(error):
            raise
        raise refusal(
            folder, found, f"does not take masks, positions and a cache from outside ({type(error).__name__}: {error})"
        ) from error


def _planted(logits: Tensor) -> Tensor:
    """Numbers of the size of large logits, by place."""
    return torch.linspace(-300.0, 300.0, logits.numel(), device=logits.device).view(logits.shape)


def _own_forward(causal: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (B, T, V) of a forward whose head gives planted numbers, and what the head read (B, T, hidden)."""
    read: list[Tensor] = []

    def plant(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        read.append(given[0])
        return _planted(made)

    handle = causal.get_output_embeddings().register_forward_hook(plant)
    try:
        logits: Tensor = causal(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    return logits, read[0]


def _routes(model: HubModel, tokens: Tensor, wanted: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each route's name, its hidden states, and those wanted: a pass; a cache with fillers; a tree after it."""
    trunk, device = model.model, tokens.device
    # With what follows a token changed: a forward that looks ahead would see it.
    where = torch.tensor([0, 3, 7, 12], device=device)
    later = tokens.clone()
    later[:, 6:] = 1
    yield "a pass over other tokens after those asked about", trunk.hidden_at(later, where), wanted.flatten(0, 1)[where]
    cache = trunk.new_cache(2, 2)
    first = tokens[:, :4].clone()
    first[1] = torch.cat((tokens[1, :1] * 0, tokens[1, :3]))
    valid = torch.tensor([[True] * 4, [False] + [True] * 3], device=device)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]], device=device)
    lengths, rows = torch.tensor([4, 3], device=device), torch.arange(2, device=device)
    yield "reading into a cache", trunk.extend(first, positions, valid, cache), wanted[rows, lengths - 1]
    sees = torch.tensor([[True, False, False], [True, True, False], [True, False, True]], device=device)
    depths = torch.tensor([0, 1, 1], device=device)
    tree = torch.stack((tokens[0, 4], tokens[0, 5] * 0, tokens[0, 5]))
    grown = trunk.branch(tree, depths, sees, lengths, cache)
    yield "scoring a tree after a cache", grown[0, [0, 2]], wanted[0, 4:6]
    step = trunk.extend(tokens[rows, lengths][:, None], lengths[:, None], valid[:, -1:], cache)
    yield "appending to a cache", step, wanted[rows, lengths]


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they differ by `TOLERANCE` of the largest entry at most; numbers that are not finite do not agree."""
    return bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max())
