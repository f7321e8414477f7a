"""The errors of a study that cannot be run as requested."""

from collections.abc import Iterator
from contextlib import contextmanager


class PlanError(ValueError):
    """A study cannot be run as requested. The message says what is wrong, what is allowed and what to type."""


class MisfitError(PlanError):
    """A study needs more memory or disk space than there is. Commands then exit with code 3."""


@contextmanager
def as_plan_error(error_class: type[Exception]) -> Iterator[None]:
    """Turn errors of this class in the body into a PlanError with the same message."""
    try:
        yield
    except error_class as error:
        raise PlanError(str(error)) from None
