"""What was sampled: the batch that goes from tasks through replay to the update rules."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Next-token candidates at every prefix of the behaviour sequences; E members, B prompts, T positions, K each.

    actions, log_probs (of the sampling policy), rewards: [E, B, T, K]. Candidate 0 is the token that the behaviour
    sequence goes on with. Duplicates are entries of their own.
    """

    actions: Tensor
    log_probs: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Rollouts:
    """One batch of each of E members (seeds of one condition), B rollouts of T positions; a bandit has T 1.

    observations: [E, B, L] tokens: prompt, separator, sampled tokens; bandits: pixels [E, B, 784] as floats, or
    contexts [E, B, context_len]. actions, labels (the right action): [E, B, T], whole numbers. rewards: [E, B].
    actor_log_probs: [E, B, T] of the taken actions under the policy that sampled. actor_baseline: [E, B, T], that
    policy's sum of squared probabilities. keep: [E, B], False for rollouts that are not trained on (groups without a
    spread of rewards, or what Kondo leaves out); at least one True a member. group_size: rollouts i*K to (i+1)*K-1
    share a prompt; None: ungrouped. score_mask: [E, B, T], True where a position counts for the reward; None: all do.
    expected_reward: [E, B], exact mean reward of the sampling policy, where it is known. age: [E], updates since the
    batch was sampled. candidates: of rules that compare tokens. scalars: numbers of the sampler, [E] each:
    informative_group_rate, retained_group_rate, used_group_fallback for grouped batches.
    """

    observations: Tensor
    actions: Tensor
    labels: Tensor
    rewards: Tensor
    behavior_log_probs: Tensor
    behavior_baseline: Tensor
    keep_mask: Tensor
    age: Tensor
    group_size: int | None = None
    score_mask: Tensor | None = None
    expected_reward: Tensor | None = None
    candidates: Candidates | None = None
    scalars: dict[str, Tensor] = field(default_factory=dict)
