"""Named random streams: every draw of a run comes from (seed, purpose, indices), never from a global generator."""

import numpy as np

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
}


def make_rng(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """The generator of one purpose of one run.

    seed: the run's seed. purpose: a key of PURPOSES. indices: what tells this draw from others of its purpose,
    such as the step. Equal arguments give equal streams in any process.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, PURPOSES[purpose], *indices])))
