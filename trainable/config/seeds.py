"""Random number generators by purpose. A draw depends only on seed, purpose and indices, not on a global generator.

So a run that continues from a checkpoint draws the same numbers, and diagnostics do not affect training.
"""

import numpy as np

# The numbers are part of every random stream. Never change or reuse one; add new ones at the end.
PURPOSES = {
    "sampling": 1,
    "validation": 2,
    "test": 3,
    "critic": 4,
    "duplicates": 5,
    "demonstrations": 6,
    "weights": 7,
    "collapse": 8,
    "gradient_sampling": 9,
    "gradient_duplicates": 10,
    "gradient_folds": 11,
    "adapters": 12,
    "sandbox_weights": 13,
    "sandbox_prompts": 14,
    "sandbox_samples": 15,
    "sandbox_noise": 16,
    "sandbox_evaluation": 17,
    "sandbox_replay": 18,
    "sandbox_screen": 19,
    "sandbox_data": 20,
    "environment": 21,
    "sandbox_direction": 22,
    "sandbox_scalarizations": 23,
    "engine_noise": 24,
    "branches": 25,
}


def make_rng(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Create the generator of a run's seed for a key of PURPOSES and numbers such as the step."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, PURPOSES[purpose], *indices])))
