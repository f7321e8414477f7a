"""Combinations of settings that would not measure what their names say, and why they are refused."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainable.sandbox.config import UpdateRuleConfig


def rejection(config: "UpdateRuleConfig") -> str | None:
    """Why `config` cannot be run, in a sentence that says what to set; None where it can."""
    if config.d_model % config.nhead:
        return f"nhead={config.nhead} does not divide d_model={config.d_model}: set nhead=1, or a divisor"
    return None
