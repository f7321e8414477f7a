"""The base class of a section of settings."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from trainable.config.setting_types import MAX_INTEGER, format_value


class Section(BaseModel):
    """A group of settings that cannot be changed and refuses unknown keys."""

    # `validate_default`: a default is checked and converted like a value that a user types.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="after")
    def _check_integer_range(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ValueError(f"{name}={format_value(value)}: must be between -{MAX_INTEGER} and {MAX_INTEGER}")
        return self
