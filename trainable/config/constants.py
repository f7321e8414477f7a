"""Constants that both the trainer and the planner use. Plans import this module, so it does not import torch.

The sizes are limits on memory. None of them changes a number that a run computes.
"""

from pathlib import Path

SHIPPED_MODEL = "sokoban-tiny"
SHIPPED_MODEL_FOLDER = Path(__file__).parents[1] / "tiny" / "sokoban_tiny"
"""The policy that comes with the package: its name as `model.path`, and its folder."""

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

ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
"""Settings of DeepSpeed, in elements: its reduce bucket, and the parameters that stage 3 keeps gathered at once."""
