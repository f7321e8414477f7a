"""Wrap any causal LM of transformers in the interface of `trainable.models.interface`.

Whole sequences run through the architecture's forward. Sampling and scoring pass explicit additive masks, positions
and our cache to it. When a model is loaded, the results are checked against its unmodified forward.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from trainable.models.hub_config import check_parts, make_refusal_error, make_shape, read_config
from trainable.models.interface import HubShape, KVCache, LanguageHead, LanguageModel, Trunk
from trainable.runs.failures import is_out_of_memory


class _AppendCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Our cache behind the interface of transformers, for appending tokens."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        super().__init__()
        self.cache, self.dtype = cache, dtype

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store a layer's new keys and values; return all keys and values of the layer."""
        return self.cache.write(layer_idx, key_states.to(self.dtype), value_states.to(self.dtype))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of used slots."""
        return self.cache.used_slots


class _ReadOnlyCache(_AppendCache):
    """Our cache behind the interface of transformers, for scoring a tree of tokens without changing the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Return a layer's keys and values followed by the new ones, without storing these."""
        return self.cache.read(layer_idx, key_states.to(self.dtype), value_states.to(self.dtype))


class HubTrunk(Trunk):
    """The base model of an architecture (see `trainable.models.interface.Trunk`)."""

    needs_padding = True
    """Rows are padded to a rectangle."""

    def __init__(self, base: Any, shape: HubShape) -> None:
        super().__init__(shape)
        self.base = base.eval()
        # From transformers 5.24 on, some models have renamed the argument and warn about the old name.
        arguments = inspect.signature(base.forward).parameters
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self.blocks: list[Any] = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
        # With these attributes, blocks recompute activations in training mode, which `_enable_recompute` switches on.
        # Blocks are deterministic (dropout is 0), so the generator's state need not be saved.
        for block in self.blocks:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

    @property
    def embed_tokens(self) -> nn.Embedding:  # type: ignore[override]  # an attribute would give its weight two names
        """The token embedding table."""
        table: nn.Embedding = self.base.get_input_embeddings()
        return table

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, even if a wrapper such as DeepSpeed calls this: no dropout, and caches work."""
        return self

    @contextmanager
    def _enable_recompute(self) -> Iterator[None]:
        """Switch blocks to training mode if gradient checkpointing is on: transformers ignores it in eval mode."""
        for block in self.blocks:
            block.training = self.pass_settings.recompute and torch.is_grad_enabled()
        try:
            yield
        finally:
            for block in self.blocks:
                block.training = False

    def compute_hidden_states(self, tokens: Tensor, flat_positions: Tensor) -> Tensor:
        """Compute hidden states (N, hidden) at `flat_positions` (N,) of right-padded sequences `tokens` (B, T)."""
        with self._enable_recompute(), self.pass_settings.autocast(tokens.device):
            hidden: Tensor = self.base(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[flat_positions].to(self._get_output_dtype(hidden))

    def _get_output_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of output states: the passes' dtype, but for float32 passes the dtype of `hidden` itself."""
        return hidden.dtype if self.pass_settings.dtype == torch.float32 else self.pass_settings.dtype

    def extend(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: KVCache) -> Tensor:
        """Append tokens (see `trainable.models.interface.Trunk.extend`)."""
        bias = cache.append_slots(valid).expand(-1, tokens.shape[1], -1)
        hidden = self._forward_cached(
            tokens, positions, bias, _AppendCache(cache, self._get_output_dtype(self.embed_tokens.weight))
        )
        cache.used_slots += tokens.shape[1]
        return hidden[:, -1]

    def forward_tree(
        self, tokens: Tensor, depths: Tensor, tree_mask: Tensor, lengths: Tensor, cache: KVCache
    ) -> Tensor:
        """Score a tree of tokens after every row (see `trainable.models.interface.Trunk.forward_tree`)."""
        rows = len(lengths)
        cache_view = _ReadOnlyCache(cache, self._get_output_dtype(self.embed_tokens.weight))
        return self._forward_cached(
            tokens.expand(rows, -1), lengths[:, None] + depths, cache.make_tree_bias(tree_mask, rows), cache_view
        )

    def _forward_cached(self, tokens: Tensor, positions: Tensor, bias: Tensor, cache_view: _AppendCache) -> Tensor:
        """Compute hidden states (B, q, hidden) of tokens (B, q) over a cache, under `bias` (B, q, used + q)."""
        with self.pass_settings.autocast(tokens.device):
            hidden: Tensor = self.base(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=bias[:, None],
                use_cache=True,
                **{self.cache_argument: cache_view},
            ).last_hidden_state
        return hidden.to(self._get_output_dtype(hidden))


class HubModel(LanguageModel):
    """Trunk and head (see `trainable.models.interface.LanguageModel`) of a transformers model.

    causal_lm: the model, whose weights are shared. file_names: names of the weights in the model's files.
    """

    def __init__(self, causal_lm: Any, shape: HubShape, file_names: Iterable[str] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.model = HubTrunk(causal_lm.base_model, shape)
        head = causal_lm.get_output_embeddings()
        self.lm_head = LanguageHead(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
        self.lm_head.weight = head.weight
        self._hub_names = _map_hub_names(causal_lm, self, set(file_names))
        self._prefix = causal_lm.base_model_prefix

    def to_module_name(self, name: str) -> str:
        """Return transformers' name for the trunk's module `name`."""
        return f"{self._prefix}.{name.removeprefix('model.base.')}"

    def to_hub_name(self, name: str) -> str:
        """Return the name of weight `name` in the model's files. A tied head is named separately."""
        return self._hub_names[name]


def _map_hub_names(causal_lm: Any, model: HubModel, file_names: set[str]) -> dict[str, str]:
    """Map the name of each weight of `model` to its name in the model's files.

    In most files the trunk's weights have a prefix such as "model."; in some, as for GPT-2, they have none.
    file_names: the names in the files; if empty, the prefix is assumed.
    """
    prefix = f"{causal_lm.base_model_prefix}."
    head = next(name for name, module in causal_lm.named_modules() if module is causal_lm.get_output_embeddings())
    hub_names = {}
    for name in model.state_dict():
        full_name = f"{head}.weight" if name == "lm_head.weight" else prefix + name.removeprefix("model.base.")
        short_name = full_name.removeprefix(prefix)
        hub_names[name] = short_name if short_name in file_names and full_name not in file_names else full_name
    unmatched_names = file_names - set(hub_names.values())
    is_tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
    # GPT-NeoX's files have another name for the head: the only name in the files that matches no weight.
    if not is_tied and len(unmatched_names) == 1 and hub_names["lm_head.weight"] not in file_names:
        hub_names["lm_head.weight"] = unmatched_names.pop()
    return hub_names


def load_hub_model(folder: Path, file_names: Iterable[str]) -> HubModel:
    """Load the model in `folder` in float32. Raise ValueError if our passes do not reproduce its forward.

    file_names: names of the weights in its files. Only safetensors files are read. No code from the folder is run, and
    nothing is downloaded.
    """
    config = read_config(folder)
    with _silence_transformers():
        causal_lm, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing_names = sorted(loading_info["missing_keys"]) + sorted(
        str(entry[0]) for entry in loading_info["mismatched_keys"]
    )
    if missing_names:
        examples = ", ".join(missing_names[:3]) + (", ..." if len(missing_names) > 3 else "")
        raise ValueError(
            f"The model in {folder} is incomplete: {len(missing_names)} of its tensors are missing from its "
            f"safetensors files or have another shape ({examples}). Download it again."
        )
    check_parts(causal_lm, folder)
    for weight in causal_lm.parameters():
        weight.data = weight.data.clone()  # may be memory-mapped from a file that could change during a run
    model = HubModel(causal_lm.eval(), make_shape(causal_lm, folder), file_names)
    check_exact(causal_lm, model, folder)
    return model


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silence transformers' progress bar and loading report: `load_hub_model` raises errors for what matters."""
    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


# ---------------------------------------------------------------------------- exactness

TOLERANCE = 1e-3
"""Allowed difference of hidden states, relative to the largest entry. Equal float32 passes differ by about 1e-6."""


@torch.no_grad()
def check_exact(causal_lm: Any, model: HubModel, folder: Path) -> None:
    """Raise ValueError if our three routes through the model disagree with its forward on a few tokens.

    `compute_hidden_states`, `extend` and `forward_tree` must give the hidden states that the head receives in the
    model's forward. In that forward, the head's output is replaced by large numbers, which must come out unchanged as
    the logits: our passes would miss a cap or a scale after the head.
    """
    make_error = partial(make_refusal_error, folder, f"a {type(causal_lm).__name__}")
    # Two rows of seven tokens that differ in any usual vocabulary, so that a mixed-up position changes the result.
    tokens = torch.arange(1, 15, device=model.lm_head.weight.device).view(2, 7)
    tokens = (tokens * 37 + 5) % model.shape.vocab_size
    try:
        logits, expected_hidden = _run_planted_forward(causal_lm, tokens)
        if not torch.equal(logits, _make_planted_logits(logits)):
            raise make_error("its logits differ from the output of its head: they are capped or scaled afterwards")
        for name, actual, expected in _run_routes(model, tokens, expected_hidden):
            is_close = (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()
            if not is_close:  # also if a number is not finite
                raise make_error(f"{name} does not give the hidden states of its own forward")
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        if is_out_of_memory(error):  # a RuntimeError, too, but unrelated to the architecture
            raise
        reason = f"does not accept masks, positions and a cache from its caller ({type(error).__name__}: {error})"
        raise make_error(reason) from error


def _make_planted_logits(logits: Tensor) -> Tensor:
    """Make distinct numbers from -300 to 300 in the shape of `logits`: large enough for any cap to change them."""
    return torch.linspace(-300.0, 300.0, logits.numel(), device=logits.device).view(logits.shape)


def _run_planted_forward(causal_lm: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the head's output by planted numbers; return the logits (B, T, V) and the head's input (B, T, hidden)."""
    head_inputs: list[Tensor] = []

    def plant(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return _make_planted_logits(output)

    handle = causal_lm.get_output_embeddings().register_forward_hook(plant)
    try:
        logits: Tensor = causal_lm(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    return logits, head_inputs[0]


def _run_routes(model: HubModel, tokens: Tensor, expected_hidden: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each route's name, hidden states and expected ones: full pass, cache with fillers, tree after it."""
    trunk, device = model.model, tokens.device
    # Tokens after the requested positions are changed, to detect a forward that looks ahead.
    flat_positions = torch.tensor([0, 3, 7, 12], device=device)
    changed_tokens = tokens.clone()
    changed_tokens[:, 6:] = 1
    yield (
        "a pass with other tokens after the positions asked for",
        trunk.compute_hidden_states(changed_tokens, flat_positions),
        expected_hidden.flatten(0, 1)[flat_positions],
    )
    cache = trunk.make_cache(rows=2, slots=2)  # too few slots, so that the cache must grow
    # The second row starts with a filler, so that both rows end in the same slot.
    first_tokens = tokens[:, :4].clone()
    first_tokens[1] = torch.cat((tokens[1, :1] * 0, tokens[1, :3]))
    valid = torch.tensor([[True] * 4, [False] + [True] * 3], device=device)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]], device=device)
    lengths, rows = torch.tensor([4, 3], device=device), torch.arange(2, device=device)
    yield (
        "reading into a cache",
        trunk.extend(first_tokens, positions, valid, cache),
        expected_hidden[rows, lengths - 1],
    )
    # One token with two children. The first child is a wrong token, which the second (correct) one must not see.
    tree_mask = torch.tensor([[True, False, False], [True, True, False], [True, False, True]], device=device)
    depths = torch.tensor([0, 1, 1], device=device)
    tree_tokens = torch.stack((tokens[0, 4], tokens[0, 5] * 0, tokens[0, 5]))
    tree_hidden = trunk.forward_tree(tree_tokens, depths, tree_mask, lengths, cache)
    yield "scoring a tree after a cache", tree_hidden[0, [0, 2]], expected_hidden[0, 4:6]
    next_hidden = trunk.extend(tokens[rows, lengths][:, None], lengths[:, None], valid[:, -1:], cache)
    yield "appending to a cache", next_hidden, expected_hidden[rows, lengths]
