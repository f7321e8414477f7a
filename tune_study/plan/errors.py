"""The errors that refuse a command: each says what is wrong with a study or a machine, and what to type."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

FAILED_CHECK_CODE = 4
"""The exit code of `report --fail-on` if it names a result of the study."""


class PlanError(ValueError):
    """A study cannot be run as requested. The message says what is wrong, what is allowed and what to type.

    remedy: what to type, unless `text` says it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(f"{text}: {remedy}." if remedy else text)


class MisfitError(PlanError):
    """A study needs more memory or disk space than there is."""

    exit_code = 3


@contextmanager
def as_plan_error(error_class: type[Exception], subject: str = "") -> Iterator[None]:
    """Turn errors of this class in the body into a PlanError with the same message. subject: what stands before it."""
    try:
        yield
    except error_class as error:
        raise PlanError(f"{subject}{error}") from None
