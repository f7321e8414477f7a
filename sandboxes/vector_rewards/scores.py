"""Scores of sets of candidates. E members, G groups of K sets each (B = G K), M candidates, D objectives, W weights."""

from torch import Tensor


def score_scalar(vector_rewards: Tensor, gold_weights: Tensor) -> Tensor:
    """[E, B], the best gold score of a set: max over M of gold . r.

    ScalarGRPO uses it with one candidate, whose gold score it is; MultiRLVR with several.

    Args:
        vector_rewards: [E, B, M, D] r.
        gold_weights: [D].
    """
    return (vector_rewards @ gold_weights).amax(-1)


def score_over_weights(vector_rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """[E, B], the mean over sampled weights of the best score of a set: mean over W of max over M of w . r.

    The maximum is inside the mean: a set is good if for each weight some candidate is, whichever it is.

    Args:
        vector_rewards: [E, B, M, D] r.
        weights: [E, G, W, D], shared by the sets of a group, which are therefore compared at the same weights.
        group_size: K.
    """
    groups = vector_rewards.unflatten(1, (-1, group_size))
    scores = groups @ weights[:, :, None].transpose(-1, -2)
    return scores.amax(-2).mean(-1).flatten(1)
