"""What the report says and shows of each family of toy studies."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """One panel of the learning curves: a step column, and the label of its axis."""

    column: str
    label: str


@dataclass(frozen=True)
class Description:
    """What differs between the reports of the families of toy studies.

    Attributes:
        label: name of the sandbox, above the title.
        outcome: the primary outcome, in words.
        number: its short name, in the index of a suite.
        panels: the panels of the learning curves.
        study_panels: panels of single studies, by name.
        run_columns: trial columns in the table of all runs, each with its heading.
    """

    label: str
    outcome: str
    number: str
    panels: tuple[Panel, ...]
    run_columns: Mapping[str, str]
    study_panels: Mapping[str, tuple[Panel, ...]] = field(default_factory=dict)


ERROR_PANEL = Panel("test_error", "test error (fraction)")
ENTROPY_PANEL = Panel("entropy", "entropy (nats)")

DESCRIPTIONS: Mapping[str, Description] = {
    "update_rules": Description(
        label="update-rule sandbox",
        outcome="test error at the end",
        number="test error",
        panels=(ERROR_PANEL, ENTROPY_PANEL),
        run_columns={"final_test_error": "test error", "final_entropy": "entropy"},
        study_panels={
            "replay": (ERROR_PANEL, Panel("replay_age", "age of the batch (updates)")),
            "partial-credit": (
                Panel("test_error", "test error, scored (fraction)"),
                Panel("test_error_unscored", "test error, not scored (fraction)"),
            ),
            "dense-correction": (ERROR_PANEL, Panel("chain_reward", "chain reward (reward)")),
        },
    ),
    "distillation": Description(
        label="on-policy distillation",
        outcome="test error at the end",
        number="test error",
        panels=(ERROR_PANEL, Panel("reverse_kl", "KL(student || teacher) (nats)")),
        run_columns={"final_test_error": "test error", "final_entropy": "entropy", "last_reverse_kl": "reverse KL"},
    ),
    "vector_rewards": Description(
        label="vector rewards",
        outcome="the score of a set over all weights",
        number="simplex score",
        panels=(Panel("simplex_score", "score over all weights (reward)"), Panel("best_at_9", "best of 9 (reward)")),
        run_columns={"late_simplex_score": "simplex score", "late_best_at_9": "best@9", "final_entropy": "entropy"},
    ),
    "pedagogy": Description(
        label="pedagogical reinforcement learning",
        outcome="test error of the student at the end",
        number="test error",
        panels=(ERROR_PANEL, Panel("teacher_test_error", "test error of the teacher (fraction)")),
        run_columns={
            "late_test_error": "test error",
            "late_teacher_test_error": "of the teacher",
            "final_entropy": "entropy",
        },
    ),
    "gradient_variance": Description(
        label="on-policy distillation",
        outcome="the logarithm of the gradient's variance",
        number="log10 of the variance",
        panels=(Panel("gradient_projection", "projection of the gradient"), Panel("gradient_norm", "gradient norm")),
        run_columns={
            "log10_gradient_variance": "log10 of the variance",
            "mean_gradient_norm": "mean gradient norm",
        },
    ),
}
"""By the name of the family."""
