"""The settings that a search may change, and the values that it may give them: data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dimension:
    """One setting that a search changes: over an interval, or over a few values.

    Attributes:
        setting: the dotted setting.
        low, high: ends of the interval; both 0 if the setting has `values`.
        is_log: whether the interval is searched on a logarithmic scale.
        is_relative: whether `low` and `high` are multiples of the value that the preset gives the setting. Learning
            rates that suit a tiny model and a large one have no interval in common.
        is_integer: whether only whole numbers are tried.
        values: the values to choose from, as they are typed; empty for an interval.
        condition: (setting, value): the setting is changed only at points at which an earlier dimension has this
            value, as the mass of a filter has no meaning for another filter; empty if it is always changed.

    Example:
        >>> Dimension("actor.lr", 0.1, 10, is_log=True, is_relative=True).name
        'actor.lr'
        >>> Dimension("actor.kl_loss_coef", 1e-3, 1, is_log=True, condition=("actor.use_kl_loss", "True")).name
        'actor.kl_loss_coef if actor.use_kl_loss=True'
    """

    setting: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_relative: bool = False
    is_integer: bool = False
    values: tuple[str, ...] = ()
    condition: tuple[str, str] | tuple[()] = ()

    @property
    def name(self) -> str:
        """The name of the dimension: its setting, and its condition, since a setting may have one per condition."""
        return f"{self.setting} if {'='.join(self.condition)}" if self.condition else self.setting
