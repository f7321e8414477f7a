"""Batches of drawn numbers, for tests of what is done with a batch."""

from dataclasses import replace

import torch

from trainable.sandbox.batch.rollouts import Candidates, Rollouts


def drawn_batch(seed: int, members: int = 2, size: int = 5, length: int = 3, actions: int = 4) -> Rollouts:
    """[E members, B size, T length] with A actions; some rollouts are not kept, but at least one a member."""
    generator = torch.Generator().manual_seed(seed)
    shape = (members, size, length)
    taken = torch.randint(actions, shape, generator=generator)
    keep = torch.rand(members, size, generator=generator) < 0.7
    keep[:, 0] = True
    return Rollouts(
        observations=torch.randint(actions, (members, size, 2 * length + 1), generator=generator),
        actions=taken,
        labels=torch.randint(actions, shape, generator=generator),
        rewards=torch.rand(members, size, generator=generator),
        behavior_log_probs=torch.rand(shape, generator=generator).log(),
        behavior_baseline=torch.rand(shape, generator=generator),
        keep_mask=keep,
        age=torch.zeros(members, dtype=torch.int64),
        group_size=5,
        scalars={"used_group_fallback": torch.zeros(members)},
    )


def with_candidates(batch: Rollouts, count: int = 3) -> Rollouts:
    """The same batch with `count` candidates a position, the first of which was taken."""
    generator = torch.Generator().manual_seed(9)
    others = torch.randint(4, (*batch.actions.shape, count - 1), generator=generator)
    log_probs = torch.rand((*batch.actions.shape, count), generator=generator).log()
    actions = torch.cat([batch.actions.unsqueeze(-1), others], dim=-1)
    return replace(batch, candidates=Candidates(actions, log_probs, torch.rand(actions.shape, generator=generator)))
