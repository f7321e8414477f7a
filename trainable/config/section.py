"""The base class of a section of settings."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from trainable.config.setting_types import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT, format_value


class Section(BaseModel):
    """A group of settings that cannot be changed and refuses unknown keys."""

    # `validate_default`: a default is checked and converted like a value that a user types.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="after")
    def _check_number_range(self) -> Self:
        """Refuse numbers that tensors cannot represent: integers beyond 32 bits, and floats that float32 cannot hold.

        This covers every setting, so that no field can be forgotten. Thresholds and durations do not enter float32
        arithmetic, but they do not need other numbers either.
        """
        for name, field in type(self).model_fields.items():
            setting = getattr(self, name)
            for value in setting if isinstance(setting, tuple) else (setting,):
                if isinstance(value, int) and abs(value) > MAX_INTEGER:
                    raise ValueError(f"{name}={format_value(value)}: must be between -{MAX_INTEGER} and {MAX_INTEGER}")
                # Written so that NaN is refused as well.
                if isinstance(value, float) and value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
                    raise ValueError(
                        f"{name}={format_value(setting)}: must be a number of float32, in size from {MIN_FLOAT:.2g} to "
                        f"{MAX_FLOAT:.2g} (the default is {format_value(field.default)})"
                    )
        return self
