"""How does the variance of the gradient grow with the length of the sequences, for exact and for sampled reverse KL?

No student is trained. Every arm of a seed sees the same untrained student and, at the same length, the same batches.
`sequence_pg` sums over the tokens of a sequence, as published, and the other estimators average; `sequence_pg_mean` is
the same estimator with their normalization.
"""

from itertools import pairwise

from sandboxes.distillation.family import GRADIENT_VARIANCE, make_distillation_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

HORIZONS = (4, 8, 16, 32, 64)
ESTIMATORS: dict[str, Settings] = {
    "full_vocab_rkl": {"method": "OPDReverseKL"},
    "token_pg": {"method": "OPDPG"},
    "sequence_pg": {"method": "OPDSequencePG"},
    "sequence_pg_mean": {"method": "OPDSequencePG", "sequence_mean": True},
}
ARMS: dict[str, Settings] = {
    f"{estimator}-h{horizon}": {**settings, "seq_len": horizon}
    for estimator, settings in ESTIMATORS.items()
    for horizon in HORIZONS
}
CONTRASTS: Contrasts = {
    **{
        f"{estimator}, {HORIZONS[-1]} tokens against {HORIZONS[0]}": (
            (f"{estimator}-h{HORIZONS[-1]}", f"{estimator}-h{HORIZONS[0]}"),
        )
        for estimator in ESTIMATORS
    },
    **{
        f"{second} against {first}": tuple((f"{second}-h{horizon}", f"{first}-h{horizon}") for horizon in HORIZONS)
        for first, second in (*pairwise(ESTIMATORS), ("token_pg", "sequence_pg_mean"))
    },
}

STUDY = make_distillation_study(
    name="opd-variance",
    question=__doc__,
    arms=ARMS,
    baseline=f"full_vocab_rkl-h{HORIZONS[0]}",
    setting="estimator and length",
    family=GRADIENT_VARIANCE,
    fixed_settings={
        "task": "reversal",
        "measures_variance": True,
        "vocab_size": 2,
        "batch_size": 16,
        "d_model": 32,
        "num_layers": 1,
        "max_seq_len": HORIZONS[-1],
        "trainer.total_training_steps": 60,
        "trainer.test_freq": 1,
        "trainer.resume_every": 60,
    },
    smoke_settings={"trainer.total_training_steps": 3, "trainer.resume_every": 3},
    contrasts=CONTRASTS,
)
