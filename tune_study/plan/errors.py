"""The errors of a study that cannot be run as requested."""


class PlanError(ValueError):
    """A study cannot be run as requested. The message says what is wrong, what is allowed and what to type."""


class MisfitError(PlanError):
    """A study needs more memory or disk space than there is. Commands then exit with code 3."""
