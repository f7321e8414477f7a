"""With a graded teacher, whose most likely tokens should the top-k loss count: the student's, the teacher's, or both's?

The published comparison of two temperatures also changes the rank of the separator: at temperature 0.5 its weight of
0.02 is among the teacher's four largest, and at 1.0 it is not, so that the loss lets mass escape to it. The arms
`..._separator_in` and `..._separator_out` change its weight, so that temperature and rank vary on their own.
"""

from sandboxes.distillation.family import (
    EXACT,
    NORMALIZED,
    REVERSAL_SETTINGS,
    STEPS,
    make_distillation_study,
    make_top_k_settings,
    scale_steps,
)
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

SUPPORTS = ("student", "teacher", "intersection")
TEMPERATURES = (1.0, 0.5)
WARMUPS = (0, 100, 200, 250)
TOP_K = 4
# The fourth largest weight is exp(-2 / temperature): .135 and .018. A weight of .02 is below the first and above the
# second; the weights here are on the other side.
OTHER_WEIGHTS = {1.0: ("separator_in", 0.2), 0.5: ("separator_out", 0.01)}


def _make_arms(temperature: float) -> dict[str, Settings]:
    name, teacher = f"T{temperature}", {"teacher_temperature": temperature}
    label, weight = OTHER_WEIGHTS[temperature]

    def make(support: str, warmup: int = 0, steps_after: int | None = None, **others: object) -> Settings:
        support_settings = {**teacher, "top_k_support": support, **others}
        return make_top_k_settings(TOP_K, warmup, steps_after=steps_after, others=support_settings)

    return {
        f"{name}_full": {**EXACT, **teacher},
        **{f"{name}_{support}_warm{warmup}": make(support, warmup) for support in SUPPORTS for warmup in WARMUPS},
        f"{name}_teacher_{label}": make("teacher", special_token_weight=weight),
        f"{name}_intersection_{label}": make("intersection", special_token_weight=weight),
        f"{name}_teacher_normalized": make_top_k_settings(
            TOP_K, others={**teacher, **NORMALIZED, "top_k_support": "teacher"}
        ),
        f"{name}_student_warm100_equal": make("student", 100, STEPS),
        f"{name}_teacher_warm100_equal": make("teacher", 100, STEPS),
    }


def _pair(first: tuple[str, str], second: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Pair arms of two temperatures and ends of a name, for both supports of the teacher."""
    return tuple((f"_{support}_".join(first), f"_{support}_".join(second)) for support in ("teacher", "intersection"))


CONTRASTS: Contrasts = {
    # The question: one support against another, in arms that are otherwise equal.
    **{
        f"{support} support against the student's, temperature {temperature:g}": tuple(
            (f"T{temperature}_{support}_warm{warmup}", f"T{temperature}_student_warm{warmup}") for warmup in WARMUPS
        )
        for temperature in TEMPERATURES
        for support in SUPPORTS[1:]
    },
    **{
        f"{support} support against the exact loss, temperature {temperature:g}": tuple(
            (f"T{temperature}_{support}_warm{warmup}", f"T{temperature}_full") for warmup in WARMUPS
        )
        for temperature in TEMPERATURES
        for support in SUPPORTS
    },
    "warm-up of 100 steps against none, equal steps after the switch": tuple(
        (f"T{temperature}_{support}_warm100_equal", f"T{temperature}_{support}_warm0")
        for temperature in TEMPERATURES
        for support in ("student", "teacher")
    ),
    "temperature 0.5 against 1, separator outside the support": _pair(("T0.5", "separator_out"), ("T1.0", "warm0")),
    "temperature 0.5 against 1, separator in the support": _pair(("T0.5", "warm0"), ("T1.0", "separator_in")),
    "separator in the support against outside": (
        *_pair(("T1.0", "separator_in"), ("T1.0", "warm0")),
        *_pair(("T0.5", "warm0"), ("T0.5", "separator_out")),
    ),
    "normalized against not, teacher's support": tuple(
        (f"T{temperature}_teacher_normalized", f"T{temperature}_teacher_warm0") for temperature in TEMPERATURES
    ),
}

STUDY = make_distillation_study(
    name="opd-soft-teacher",
    question=__doc__,
    arms={name: settings for temperature in TEMPERATURES for name, settings in _make_arms(temperature).items()},
    baseline="T1.0_full",
    setting="temperature, support and warm-up",
    fixed_settings={**REVERSAL_SETTINGS, "task": "soft_reversal", "trainer.test_freq": 10},
    contrasts=CONTRASTS,
    adapt=scale_steps,
)
