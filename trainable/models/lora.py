"""LoRA: low-rank adapters on frozen weights, so that policy, critic and reference share one base model.

    y = W x + (α / r) B A x,   A (r, in) random, B (out, r) = 0 at first

W belongs to the base, has the dtype of the passes, and is frozen: only the adapters are trained. Without its adapters,
the policy is the base model, which serves as the reference. The base may be stored in 4 bits: then policy, critic,
reference and sampler all use the dequantized W. Source: Hu et al. 2021, arXiv:2106.09685. The adapters are peft's.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainable.config.sections import ModelConfig
from trainable.models.interface import LanguageModel
from trainable.models.load import M, freeze
from trainable.models.qwen2_shape import FOUR_BIT_BLOCK, find_four_bit_obstacle

N = TypeVar("N", bound=nn.Module)
ADAPTER_NAME = "default"
"""peft's default name of an adapter. Each layer has at most one here."""


class FourBitLinear(nn.Linear):
    """A frozen linear layer with a 4-bit weight (NF4), which each pass dequantizes again.

    A block of 64 weights is stored as 4-bit codes, which stand for quantiles of a normal distribution, and an 8-bit
    scale: .516 bytes per weight. The kernels are bitsandbytes', for GPUs and CPUs. Passes compute in `dtype`, also the
    dtype of the output. Source: Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Quantize the weight of `layer` on `device`. ValueError if `find_four_bit_obstacle` finds an obstacle."""
        if obstacle := find_four_bit_obstacle([layer.in_features]):
            raise ValueError(f"{obstacle}.")
        from bitsandbytes.nn import Params4bit

        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        self.dtype = dtype
        weight = Params4bit(
            layer.weight.data.float(),
            requires_grad=False,
            blocksize=FOUR_BIT_BLOCK,
            quant_type="nf4",
            compress_statistics=True,
        )
        self.weight = weight.to(device)  # quantizes
        # Dequantize to this dtype directly. By default it would be float32, which a backward pass then casts.
        cast(Any, self.weight).quant_state.dtype = dtype
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.data.to(device), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `input` (..., in) by the quantized weight and add the bias; return (..., out)."""
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(self.dtype)
        state = cast(Any, self.weight).quant_state
        return cast(Tensor, matmul_4bit(input.to(self.dtype), self.weight, state, bias=bias))

    def compute_weight(self) -> Tensor:
        """Dequantize the weight (out, in) that passes compute with, in float32."""
        from bitsandbytes.functional import dequantize_4bit

        return cast(Tensor, dequantize_4bit(self.weight.data, cast(Any, self.weight).quant_state)).float()


def make_frozen_base(model: M, settings: ModelConfig, device: torch.device) -> M:
    """Freeze `model` in place and return it. With model.load_in_4bit, quantize the linear layers of its trunk.

    device: where the model will be used; quantized layers are put there already.
    """
    if settings.load_in_4bit:
        for module in list(model.model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(module, name, FourBitLinear(layer, model.model.pass_settings.dtype, device))
    return freeze(model)


def share_parameters(network: N) -> N:
    """Copy the modules of `network`, sharing all of its parameters."""
    # `deepcopy` treats objects in its memo as already copied, so tensors are not copied.
    return deepcopy(network, {id(weight): weight for weight in network.parameters()})


def make_adapted_policy(base: M, settings: ModelConfig, rng: np.random.Generator) -> M:
    """Make a policy of trainable adapters on the frozen tensors of `base`. Before training it equals the base."""
    model: M = share_parameters(base)
    add_adapters(model.model, settings, rng)
    return model


def add_adapters(trunk: nn.Module, settings: ModelConfig, rng: np.random.Generator) -> None:
    """Add adapters to the linear layers of `trunk` named in settings.lora_target_modules and freeze everything else.

    A is drawn from U(-1/sqrt(in), 1/sqrt(in)), as in peft, but with `rng`, so that the numbers depend only on the run's
    seed. Adapters are always float32, even if the frozen weights are not. ValueError for a name that no layer has.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = _find_target_layers(trunk, settings.lora_target_modules)
    inject_adapter_in_model(
        LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=names, lora_dropout=0.0), trunk
    )
    for _, layer in find_adapters(trunk):
        # Do not let peft copy the input to float32: under autocast, products do not need it.
        layer.cast_input_dtype_enabled = False
        for projection in (layer.lora_A, layer.lora_B):
            projection.float()  # peft makes A and B in the dtype of the frozen weights
        weight = layer.lora_A[ADAPTER_NAME].weight
        with torch.no_grad():
            weight.copy_(torch.from_numpy(rng.uniform(-1.0, 1.0, weight.shape) / weight.shape[1] ** 0.5))


def _find_target_layers(trunk: nn.Module, target_modules: str | tuple[str, ...]) -> list[str]:
    """Find the full names of the linear layers to adapt. `all-linear` selects all of the trunk, without the head."""
    linear_names = [name for name, module in trunk.named_modules() if isinstance(module, nn.Linear)]
    if not linear_names:
        raise ValueError("This model has no linear layer to adapt: set model.lora_rank=0.")
    if target_modules == "all-linear":
        return linear_names
    suffixes = {name.rsplit(".", 1)[-1] for name in linear_names}
    missing_suffixes = [name for name in target_modules if name not in suffixes]
    if missing_suffixes:
        raise ValueError(
            f"This model has no linear layer {missing_suffixes[0]}: set model.lora_target_modules to some of "
            f"{', '.join(sorted(suffixes))}, or all-linear."
        )
    return [name for name in linear_names if name.rsplit(".", 1)[-1] in target_modules]


def find_adapters(network: nn.Module) -> list[tuple[str, Any]]:
    """Find the name and module of every layer with an adapter."""
    return [(name, module) for name, module in network.named_modules() if hasattr(module, "lora_A")]


@torch.no_grad()
def iter_merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) for every weight, under its name without adapters: W + (α / r) B A where adapted.

    The sums are float32, and computed one at a time, so that only one is in memory. A weight without an adapter is
    yielded as it is, and a 4-bit weight dequantized.
    """
    layers = dict(find_adapters(network))
    quantized_layers = {
        f"{name}.weight": module for name, module in network.named_modules() if isinstance(module, FourBitLinear)
    }
    for name, value in network.state_dict().items():
        if name in quantized_layers:
            value = quantized_layers[name].compute_weight()
        layer_name, is_base, suffix = name.partition(".base_layer.")
        if is_base:
            name, layer = f"{layer_name}.{suffix}", layers[layer_name]
            value = value + layer.get_delta_weight(ADAPTER_NAME) if suffix == "weight" else value
        if ".lora_" not in name:
            yield name, value


def iter_hub_weights(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, weight) with the hub's names and adapters merged. A tied head is a separate entry."""
    return ((model.to_hub_name(name), weight) for name, weight in iter_merged_weights(model))


def get_base_weights(model: LanguageModel) -> dict[str, Tensor]:
    """Return the model's unmerged tensors under the names that `iter_hub_weights` yields, without copies."""
    return {
        model.to_hub_name(name.replace(".base_layer.", ".")): weight
        for name, weight in model.state_dict().items()
        if ".lora_" not in name
    }


def write_adapters(policy: LanguageModel, settings: ModelConfig, folder: Path) -> None:
    """Write the adapters of `policy` in peft's format, for `peft.PeftModel.from_pretrained(model, folder)`."""
    from peft import LoraConfig

    layers = find_adapters(policy)
    weights = {
        f"base_model.model.{policy.to_module_name(name)}.{matrix}.weight": (
            getattr(layer, matrix)[ADAPTER_NAME].weight.detach().cpu().contiguous()
        )
        for name, layer in layers
        for matrix in ("lora_A", "lora_B")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=sorted({name.rsplit(".", 1)[-1] for name, _ in layers}),
        inference_mode=True,
        base_model_name_or_path=settings.path,
    ).save_pretrained(str(folder))
