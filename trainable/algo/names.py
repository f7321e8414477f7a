"""Names by which settings select formulas of this folder, for code that does not import torch.

>>> KL_KINDS["low_var_kl"]
'k3'
"""

KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Maps the names of KL estimators from sampled tokens to their formula in `losses.KL_FORMULAS`."""

TOKEN_MEANS = ("token-mean", "token-mean-global")
LOSS_AGG_MODES = (*TOKEN_MEANS, "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""The aggregations of a loss. For their formulas, see `reductions.compute_loss_weights`."""
