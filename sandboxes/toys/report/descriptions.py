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
    """What differs between the reports of the families of toy studies."""

    label: str
    """Name of the sandbox, above the title."""
    outcome: str
    """The primary outcome, in words."""
    number: str
    """Its short name, in the index of a suite."""
    panels: tuple[Panel, ...]
    """The panels of the learning curves."""
    run_columns: Mapping[str, str]
    """Trial columns in the table of all runs, each with its heading."""
    study_panels: Mapping[str, tuple[Panel, ...]] = field(default_factory=dict)
    """Panels of single studies, by name."""


ERROR_PANEL = Panel("test_error", "test error (fraction)")
ENTROPY_PANEL = Panel("entropy", "entropy (nats)")
