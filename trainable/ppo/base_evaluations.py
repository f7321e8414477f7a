"""Validations of untrained policies, which the runs of a process that start from the same policy share."""

import hashlib
import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainable.config.own_parts import pin_parts
from trainable.config.run_config import RunConfig
from trainable.ppo.evaluation import Evaluation

_MAX_ENTRIES = 32
"""Validations to remember. The runs of a seed follow each other, so few are needed at a time."""


def make_evaluation_key(config: RunConfig, weights: Mapping[str, Tensor], reference: str | None) -> str:
    """SHA-256 of everything on which the validation of an untrained policy depends.

    These are the weights of the policy, the seed, the game with its levels and the settings of the sampler. How the
    policy will be trained has no influence, except on the weights of turns that are recorded with an episode of a tree,
    so all arms of a study over losses have the same key.

    Args:
        config: the run's configuration.
        weights: the policy's tensors by name, on the CPU.
        reference: fingerprint of a reference with weights of its own; None without one. The KL to it may be measured.
    """
    settings = pin_parts(config).model_dump(mode="json", include={"seed", "env", "model", "rollout"})
    # Without a reference of its own the policy is the reference, and there is no KL to measure.
    kl_source = [config.measures_val_kl, reference] if reference else None
    # Recorded episodes of trees have the weights of their turns.
    tree_settings = (
        [config.algorithm.tree_weighting, config.algorithm.train_children] if config.env.kind.has_trees else None
    )
    choices = [settings, kl_source, config.trainer.log_val_generations, tree_settings]
    digest = hashlib.sha256(json.dumps(choices, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class BaseEvaluations:
    """The validations of untrained policies by their key; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._evaluations: dict[str, list[Evaluation]] = {}

    def get_or_make(self, key: str, evaluate: Callable[[], list[Evaluation]]) -> list[Evaluation]:
        """The evaluations of `key`, which `evaluate` makes unless they have been made before."""
        if key not in self._evaluations:
            self._evaluations[key] = evaluate()
            if len(self._evaluations) > _MAX_ENTRIES:
                del self._evaluations[next(iter(self._evaluations))]
        return self._evaluations[key]
