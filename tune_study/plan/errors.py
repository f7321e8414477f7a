"""What is wrong with a study or a machine: as a value that is printed, and as the error that refuses a command."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

Severity = Literal["remark", "refusal", "misfit", "failed check"]
"""A misfit is a lack of memory or disk space. A failed check is a result that `report --fail-on` names."""

EXIT_CODES: Mapping[Severity, int] = {"remark": 0, "refusal": 2, "misfit": 3, "failed check": 4}
"""The exit code of a command that finds such a problem."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a study or a machine, and what to type, unless `text` says it."""

    severity: Severity
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return the problem as one paragraph."""
        prefix = "Remark: " if self.severity == "remark" else ""
        return prefix + (f"{self.text}: {self.remedy}." if self.remedy else self.text)


class PlanError(ValueError):
    """A study cannot be run as requested. The message says what is wrong, what is allowed and what to type."""

    severity: ClassVar[Severity] = "refusal"

    def __init__(self, text: str, remedy: str = "") -> None:
        self.problem = Problem(self.severity, text, remedy)
        super().__init__(str(self.problem))


class MisfitError(PlanError):
    """A study needs more memory or disk space than there is."""

    severity = "misfit"


@contextmanager
def as_plan_error(error_class: type[Exception], subject: str = "") -> Iterator[None]:
    """Turn errors of this class in the body into a PlanError with the same message. subject: what stands before it."""
    try:
        yield
    except error_class as error:
        raise PlanError(f"{subject}{error}") from None
