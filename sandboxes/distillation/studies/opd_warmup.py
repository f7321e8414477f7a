"""How long a warm-up does the top-k loss need, and does it keep what the warm-up taught?

As published, all arms have 300 steps, so an arm with a longer warm-up has fewer steps with the top-k loss. The arms
`k..._warm..._equal` have 300 steps after the switch.
"""

from sandboxes.distillation.family import (
    EXACT,
    REVERSAL_SETTINGS,
    STEPS,
    make_distillation_study,
    make_top_k_settings,
    scale_steps,
)
from search_spaces.declaration.study import Contrasts

TOP_KS = (4, 8)
WARMUPS = (0, 50, 100, 150, 200, 250)
CONTRASTS: Contrasts = {
    f"k {k}, warm-up {WARMUPS[-1]} against none, {label}": ((f"k{k}_warm{WARMUPS[-1]}{suffix}", f"k{k}_warm0"),)
    for k in TOP_KS
    for label, suffix in (("equal steps in total", ""), ("equal steps after the switch", "_equal"))
}

STUDY = make_distillation_study(
    name="opd-warmup",
    question=__doc__,
    arms={
        "full_vocab_rkl": EXACT,
        **{f"k{k}_warm{warmup}": make_top_k_settings(k, warmup) for k in TOP_KS for warmup in WARMUPS},
        **{
            f"k{k}_warm{warmup}_equal": make_top_k_settings(k, warmup, steps_after=STEPS)
            for k in TOP_KS
            for warmup in WARMUPS
            if warmup
        },
    },
    baseline="full_vocab_rkl",
    setting="k and warm-up",
    fixed_settings={**REVERSAL_SETTINGS, "trainer.test_freq": 10},
    contrasts=CONTRASTS,
    adapt=scale_steps,
)
