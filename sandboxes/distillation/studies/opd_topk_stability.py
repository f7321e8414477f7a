"""Can the exact reverse KL be cut to the student's k most likely tokens when the student is untrained?

The published sum over the k tokens is not normalized, and so is no divergence: it falls when mass leaves the k tokens.
The arms `topk_normalized_k...` normalize both policies over them.
"""

from sandboxes.distillation.family import EXACT, NORMALIZED, make_distillation_study, make_top_k_settings
from search_spaces.declaration.study import Contrasts

TOP_KS = (1, 2, 4)
CONTRASTS: Contrasts = {
    "normalized against not": tuple((f"topk_normalized_k{k}", f"topk_rkl_k{k}") for k in TOP_KS if k > 1),
    "exact against sampled": (("full_vocab_rkl", "sampled_pg"),),
}

STUDY = make_distillation_study(
    name="opd-topk-stability",
    question=__doc__,
    arms={
        "full_vocab_rkl": EXACT,
        "sampled_pg": {"method": "OPDPG"},
        **{f"topk_rkl_k{k}": make_top_k_settings(k) for k in TOP_KS},
        # With one token, both normalized policies are 1, and nothing is learned.
        **{f"topk_normalized_k{k}": make_top_k_settings(k, others=NORMALIZED) for k in TOP_KS if k > 1},
    },
    baseline="full_vocab_rkl",
    setting="loss",
    contrasts=CONTRASTS,
)
