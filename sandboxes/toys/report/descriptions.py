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
