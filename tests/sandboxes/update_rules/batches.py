"""Batches of random numbers for tests of functions on batches."""

from dataclasses import replace

import torch

from sandboxes.update_rules.rollouts import Candidates, Rollouts


def make_random_batch(seed: int, members: int = 2, size: int = 5, length: int = 3, actions: int = 4) -> Rollouts:
    """Make [E members, B size, T length] with A actions. Each member keeps some of its rollouts, and at least one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (members, size, length)
    sampled_actions = torch.randint(actions, shape, generator=generator)
    keep_mask = torch.rand(members, size, generator=generator) < 0.7
    keep_mask[:, 0] = True
    return Rollouts(
        observations=torch.randint(actions, (members, size, 2 * length + 1), generator=generator),
        actions=sampled_actions,
        labels=torch.randint(actions, shape, generator=generator),
        rewards=torch.rand(members, size, generator=generator),
        behavior_log_probs=torch.rand(shape, generator=generator).log(),
        behavior_baseline=torch.rand(shape, generator=generator),
        keep_mask=keep_mask,
        age=torch.zeros(members, dtype=torch.int64),
        group_size=5,
        scalars={"used_group_fallback": torch.zeros(members)},
    )


def add_candidates(batch: Rollouts, count: int = 3) -> Rollouts:
    """Return the batch with `count` candidates per position. The first candidate is the sampled action."""
    generator = torch.Generator().manual_seed(9)
    others = torch.randint(4, (*batch.actions.shape, count - 1), generator=generator)
    log_probs = torch.rand((*batch.actions.shape, count), generator=generator).log()
    actions = torch.cat([batch.actions.unsqueeze(-1), others], dim=-1)
    return replace(batch, candidates=Candidates(actions, log_probs, torch.rand(actions.shape, generator=generator)))
