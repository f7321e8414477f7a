"""What studies of one kind share: the type of their configurations, its presets, and the words of their names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainable.config.study_config import BaseRunConfig

Settings = Mapping[str, object]
"""Dotted fields of a family's configuration and their values."""


@dataclass(frozen=True)
class DisplayColumn:
    """A column that is shown while a run trains: the row's name for it, what it is called, how a number is formatted.

    before: the column that stands for it until it is measured; empty: none.
    """

    column: str
    name: str
    format_spec: str
    fallback_column: str = ""


@dataclass(frozen=True)
class Family:
    """A kind of studies.

    name: as study.json and the tables say it. config: of a run. trainer: "module:NAME" of the TrainerFamily that makes
    trainers of such configurations, which is imported where a run is trained. presets: name -> what it sets. seeds:
    preset -> seeds of an arm where nobody asks for a number. words: a configuration -> what the templates of a study
    may use. loads: a configuration -> the model that its runs load and train, None for those that make their own.
    seeds_together: whether one trial trains all seeds of an arm side by side, each a run of its own. sizes: a
    configuration and the parameters of what it loads -> bytes of a state, and of a row with all that is made of it;
    None where the model's shape decides. shown: columns of the progress table, the first being how good a run is, which
    `status` shows too. line: columns of a step's line, in a log and where there is no terminal. models: settings that
    name a model, which may be a folder here. files: settings that name a file or folder here, if they are set. suffix:
    a template of `words` that ends the names of a study that has no names of its own. fine_tunes: whether what `loads`
    names is a language model that its runs fine-tune, on GPUs where there are some.
    """

    name: str
    config_class: type[BaseRunConfig]
    trainer: str
    presets: Mapping[str, Settings]
    n_seeds: Mapping[str, int]
    make_template_values: Callable[[Any], dict[str, str]]
    get_model_path: Callable[[Any], str | None]
    progress_columns: tuple[DisplayColumn, ...]
    log_columns: tuple[DisplayColumn, ...]
    has_batched_seeds: bool = False
    estimate_bytes: Callable[[Any, int], tuple[int, int]] | None = None
    model_settings: tuple[str, ...] = ()
    path_settings: tuple[str, ...] = ()
    name_suffix: str = ""
    is_fine_tuning: bool = False

    def __post_init__(self) -> None:
        if self.estimate_bytes is None and not self.is_fine_tuning:
            raise ValueError(f"the family {self.name} fine-tunes no language model, so nobody else knows its `sizes`.")

    @property
    def primary_metric(self) -> str:
        """The column that says how good a run is."""
        return self.progress_columns[0].column


def make_value_label(value: str) -> str:
    """The published label of an axis value: no dots, lower case ("0.001" -> "0001", "1.0" -> "10")."""
    return value.replace(".", "").lower()
