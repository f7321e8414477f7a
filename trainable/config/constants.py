"""Numbers and names that the trainer uses and that plans reckon with; free of torch, so that both import the same ones.

None of the sizes changes a number that a run computes.
"""

from pathlib import Path

SHIPPED_MODEL = "sokoban-tiny"
SHIPPED_MODEL_FOLDER = Path(__file__).parents[1] / "tiny" / "sokoban_tiny"
"""The policy that comes with the package: its name as a model's path, and where it is."""

QWEN2_ARCHITECTURE = "Qwen2ForCausalLM"
"""The architecture, as config.json names it, that our own torch model runs."""

TOKENS_PER_PASS = {"cpu": 2_048, "cuda": 16_384}
"""Tokens of one forward and backward pass, by device: what fits a processor's caches; what keeps a GPU busy, and bounds
what it has to remember. A longer row makes a pass of its own."""

CHUNK_ELEMENTS = 2**27
"""Logits held at once: half a GiB in float32, of which a backward pass holds about eight copies. Of 151,936 vocabulary
entries that is 883 rows, which a GPU multiplies as fast as more."""

ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
"""Elements that ZeRO reduces at once, and that stage 3 keeps whole at once and looks ahead."""
