"""Compile the kernels of the tiny policies, so that the first study need not wait for them."""

import time

import numpy as np
import torch

from trainable.config.constants import SHIPPED_MODEL
from trainable.kernels.cache import leave_marker
from trainable.models.load import load_policy
from trainable.models.qwen2 import PassSettings
from trainable.rollout.compiled_sampler import CompiledSampler
from trainable.rollout.sampler import SamplingParams


def compile_kernels() -> float:
    """Run each kernel once with the arguments of a study, which compiles it, and leave the marker; returns seconds."""
    start_time = time.monotonic()
    torch.set_num_threads(1)
    policy = load_policy(SHIPPED_MODEL, torch.device("cpu"), PassSettings(compiled=True))
    conversation = CompiledSampler(policy.model).start_conversation(
        [[1, 2, 3]], 2, SamplingParams(1.0, 2, policy.stop_token), np.random.default_rng(0)
    )
    conversation.sample_replies([0, 1], [[], []])
    policy.model.model.compute_hidden_states(torch.tensor([[1, 2, 3]]), torch.arange(3)).sum().backward()
    leave_marker()
    return time.monotonic() - start_time
