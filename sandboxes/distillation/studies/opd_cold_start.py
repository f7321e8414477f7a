"""Does a warm-up with the exact reverse KL save the top-k loss from its cold start?

As published, an arm with a warm-up of 100 steps has 200 steps with the top-k loss, and a cold one has 300. The arms
`warm_equal_...` have 300 steps after the switch, so that they differ from the cold ones in the warm-up alone.
"""

from sandboxes.distillation.family import (
    EXACT,
    NORMALIZED,
    STEPS,
    make_distillation_study,
    make_top_k_settings,
    scale_steps,
)
from search_spaces.declaration.study import Contrasts

TOP_KS = (1, 2, 4)
WARMUP = 100
CONTRASTS: Contrasts = {
    "warm against cold, equal steps in total": tuple((f"warm_topk_k{k}", f"cold_topk_k{k}") for k in TOP_KS),
    "warm against cold, equal steps after the switch": tuple((f"warm_equal_k{k}", f"cold_topk_k{k}") for k in TOP_KS),
    "normalized against not, warm, k 4": (("warm_normalized_k4", "warm_topk_k4"),),
}

STUDY = make_distillation_study(
    name="opd-cold-start",
    question=__doc__,
    arms={
        "full_vocab_rkl": EXACT,
        **{f"cold_topk_k{k}": make_top_k_settings(k) for k in TOP_KS},
        **{f"warm_topk_k{k}": make_top_k_settings(k, WARMUP) for k in TOP_KS},
        **{f"warm_equal_k{k}": make_top_k_settings(k, WARMUP, steps_after=STEPS) for k in TOP_KS},
        "warm_normalized_k4": make_top_k_settings(4, WARMUP, others=NORMALIZED),
    },
    baseline="full_vocab_rkl",
    setting="loss and warm-up",
    contrasts=CONTRASTS,
    adapt=scale_steps,
)
