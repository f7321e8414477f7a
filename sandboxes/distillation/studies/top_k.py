"""Studies of the top-k loss with a teacher that knows the answer: its cold start, and warm-ups with the exact loss."""

from sandboxes.distillation.family import (
    EXACT,
    NORMALIZED,
    REVERSAL_SETTINGS,
    STEPS,
    make_distillation_study,
    make_top_k_settings,
    scale_steps,
)

_TOP_KS = (1, 2, 4)

STABILITY = make_distillation_study(
    name="opd-topk-stability",
    question="Can the exact reverse KL be cut to the student's k most likely tokens when the student is untrained?",
    arms={
        "full_vocab_rkl": EXACT,
        "sampled_pg": {"method": "OPDPG"},
        **{f"topk_rkl_k{k}": make_top_k_settings(k) for k in _TOP_KS},
        # With one token, both normalized policies are 1, and nothing is learned.
        **{f"topk_normalized_k{k}": make_top_k_settings(k, others=NORMALIZED) for k in _TOP_KS if k > 1},
    },
    baseline="full_vocab_rkl",
    setting="loss",
    contrasts={
        "normalized against not": tuple((f"topk_normalized_k{k}", f"topk_rkl_k{k}") for k in _TOP_KS if k > 1),
        "exact against sampled": (("full_vocab_rkl", "sampled_pg"),),
    },
)
"""The published sum over the k tokens is not normalized, so it is not a divergence: it falls when mass leaves the k
tokens. The arms `topk_normalized_k...` normalize both policies over them."""

_COLD_START_WARMUP = 100
COLD_START = make_distillation_study(
    name="opd-cold-start",
    question="Does a warm-up with the exact reverse KL save the top-k loss from its cold start?",
    arms={
        "full_vocab_rkl": EXACT,
        **{f"cold_topk_k{k}": make_top_k_settings(k) for k in _TOP_KS},
        **{f"warm_topk_k{k}": make_top_k_settings(k, _COLD_START_WARMUP) for k in _TOP_KS},
        **{f"warm_equal_k{k}": make_top_k_settings(k, _COLD_START_WARMUP, steps_after=STEPS) for k in _TOP_KS},
        "warm_normalized_k4": make_top_k_settings(4, _COLD_START_WARMUP, others=NORMALIZED),
    },
    baseline="full_vocab_rkl",
    setting="loss and warm-up",
    contrasts={
        "warm against cold, equal steps in total": tuple((f"warm_topk_k{k}", f"cold_topk_k{k}") for k in _TOP_KS),
        "warm against cold, equal steps after the switch": tuple(
            (f"warm_equal_k{k}", f"cold_topk_k{k}") for k in _TOP_KS
        ),
        "normalized against not, warm, k 4": (("warm_normalized_k4", "warm_topk_k4"),),
    },
    adapt=scale_steps,
)
"""As published, an arm with a warm-up of 100 steps has 200 steps with the top-k loss, and a cold one has 300. The arms
`warm_equal_...` have 300 steps after the switch, so they differ from the cold ones only in the warm-up."""

_LARGE_KS = (4, 8)
_WARMUPS = (0, 50, 100, 150, 200, 250)
WARMUP = make_distillation_study(
    name="opd-warmup",
    question="How long a warm-up does the top-k loss need, and does it keep what the warm-up taught?",
    arms={
        "full_vocab_rkl": EXACT,
        **{f"k{k}_warm{warmup}": make_top_k_settings(k, warmup) for k in _LARGE_KS for warmup in _WARMUPS},
        **{
            f"k{k}_warm{warmup}_equal": make_top_k_settings(k, warmup, steps_after=STEPS)
            for k in _LARGE_KS
            for warmup in _WARMUPS
            if warmup
        },
    },
    baseline="full_vocab_rkl",
    setting="k and warm-up",
    fixed_settings={**REVERSAL_SETTINGS, "trainer.test_freq": 10},
    contrasts={
        f"k {k}, warm-up {_WARMUPS[-1]} against none, {label}": ((f"k{k}_warm{_WARMUPS[-1]}{suffix}", f"k{k}_warm0"),)
        for k in _LARGE_KS
        for label, suffix in (("equal steps in total", ""), ("equal steps after the switch", "_equal"))
    },
    adapt=scale_steps,
)
"""As published, all arms have 300 steps, so an arm with a longer warm-up has fewer steps with the top-k loss. The arms
`k..._warm..._equal` have 300 steps after the switch."""
