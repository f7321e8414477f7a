"""The error of a study that cannot be run as requested."""


class PlanError(ValueError):
    """A study cannot be run as requested. The message says what is wrong, what is allowed and what to type."""
