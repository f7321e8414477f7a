"""Studies of single losses: any combination, exact against sampled, and the variance of the gradient."""

from itertools import pairwise

from sandboxes.distillation.family import EXACT, GRADIENT_VARIANCE, make_distillation_study
from sandboxes.toys.study import set_length
from trainable.families import Settings

# Any combination: `--set task=soft_reversal --set method=OPDPG`.
SINGLE = make_distillation_study(
    name="opd",
    question="How does one student learn with one loss?",
    arms={"single": {}},
    baseline="single",
    setting="combination",
    fixed_settings={},
    run_template="opd_{task}_{method}",
)

# Other tasks: `--set task=format_answer --set vocab_size=5 --set seq_len=3`, or `--set task=soft_reversal`.
EXACT_SAMPLED = make_distillation_study(
    name="opd-exact-sampled",
    question="How much does a student lose by learning from sampled tokens instead of the exact reverse KL?",
    arms={"exact": EXACT, "sampled": {"method": "OPDPG"}},
    baseline="exact",
    setting="loss",
    fixed_settings={"batch_size": 64, **set_length(500, 20, 100)},
)

_HORIZONS = (4, 8, 16, 32, 64)
_ESTIMATORS: dict[str, Settings] = {
    "full_vocab_rkl": {"method": "OPDReverseKL"},
    "token_pg": {"method": "OPDPG"},
    # The sum over the tokens of a sequence, as published; the other estimators average, as `sequence_pg_mean` does.
    "sequence_pg": {"method": "OPDSequencePG"},
    "sequence_pg_mean": {"method": "OPDSequencePG", "sequence_mean": True},
}
VARIANCE = make_distillation_study(
    name="opd-variance",
    question="How does the variance of the gradient grow with the length of the sequences, for exact and for sampled "
    "reverse KL?",
    arms={
        f"{estimator}-h{horizon}": {**settings, "seq_len": horizon}
        for estimator, settings in _ESTIMATORS.items()
        for horizon in _HORIZONS
    },
    baseline=f"full_vocab_rkl-h{_HORIZONS[0]}",
    setting="estimator and length",
    family=GRADIENT_VARIANCE,
    fixed_settings={
        "task": "reversal",
        "measures_variance": True,
        "vocab_size": 2,
        "batch_size": 16,
        "d_model": 32,
        "num_layers": 1,
        "max_seq_len": _HORIZONS[-1],
        **set_length(60, 1, 60),
    },
    smoke_settings={"trainer.total_training_steps": 3, "trainer.resume_every": 3},
    contrasts={
        **{
            f"{estimator}, {_HORIZONS[-1]} tokens against {_HORIZONS[0]}": (
                (f"{estimator}-h{_HORIZONS[-1]}", f"{estimator}-h{_HORIZONS[0]}"),
            )
            for estimator in _ESTIMATORS
        },
        **{
            f"{second} against {first}": tuple((f"{second}-h{horizon}", f"{first}-h{horizon}") for horizon in _HORIZONS)
            for first, second in (*pairwise(_ESTIMATORS), ("token_pg", "sequence_pg_mean"))
        },
    },
)
"""No student is trained. Every arm of a seed sees the same untrained student and, at one length, the same batches."""
