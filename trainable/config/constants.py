"""Constants that both the trainer and the planner use; this module is free of torch, so that plans can import it.

None of the sizes changes a number that a run computes.
"""

from pathlib import Path

SHIPPED_MODEL = "sokoban-tiny"
SHIPPED_MODEL_FOLDER = Path(__file__).parents[1] / "tiny" / "sokoban_tiny"
"""The policy that comes with the package: its name as `model.path`, and its folder."""

QWEN2_ARCHITECTURE = "Qwen2ForCausalLM"
"""The architecture that our own torch model runs, as config.json names it."""

TOKENS_PER_PASS = {"cpu": 2_048, "cuda": 16_384}
"""Tokens per forward and backward pass, by device: few enough for a CPU's caches; enough to keep a GPU busy, while
bounding its activation memory. A longer sequence gets a pass to itself."""

CHUNK_ELEMENTS = 2**27
"""Logits in memory at once: half a GiB in float32, of which a backward pass holds about eight copies. With a vocabulary
of 151,936 that is 883 rows, which a GPU multiplies as efficiently as more."""

ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
"""Elements that ZeRO reduces at once; elements that stage 3 keeps gathered at once, also its reuse distance."""
