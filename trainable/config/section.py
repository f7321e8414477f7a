"""A part of the settings."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from trainable.config.setting_types import LARGEST_WHOLE_NUMBER, shown


class Section(BaseModel):
    """A part of the settings: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="after")
    def _whole_numbers_can_be_counted_to(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
                raise ValueError(f"{name} {shown(value)} is beyond {LARGEST_WHOLE_NUMBER}, the largest number")
        return self
