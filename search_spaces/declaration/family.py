"""A family of studies: the configuration type, presets and name templates that its studies share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainable.config.base_config import BaseRunConfig

Settings = Mapping[str, object]
"""Dotted setting of a family's configuration -> value."""


@dataclass(frozen=True)
class DisplayColumn:
    """A column that is shown while a run trains.

    Attributes:
        column: its name in the rows of metrics.jsonl.
        name: its heading.
        format_spec: how its numbers are formatted.
        fallback_column: the column to show until this one has a value; empty: none.
    """

    column: str
    name: str
    format_spec: str
    fallback_column: str = ""


@dataclass(frozen=True)
class Family:
    """Studies that share a trainer and a type of configuration.

    Attributes:
        name: its name in study.json and in the tables.
        config_class: configuration of a run.
        trainer: "module:NAME" of the TrainerFamily for these configurations; imported only where a run trains.
        presets: preset -> the settings that it changes.
        n_seeds: preset -> default number of seeds per arm.
        make_template_values: configuration -> the values that name templates may use.
        get_model_path: configuration -> the model that its runs load and train; None if they build their own.
        progress_columns: columns of the progress table. The first is the primary metric, which `status` shows too.
        log_columns: columns of the line per step in a log, and on the screen where there is no terminal.
        has_batched_seeds: whether one trial trains all seeds of an arm together, each as a separate run.
        estimate_bytes: configuration and parameter count of the loaded model -> bytes of a checkpoint, and of a row
            with everything derived from it; None where both follow from the model's shape.
        model_settings: settings that name a model, which may be a local folder.
        path_settings: settings that name a local file or folder, if they are set.
        name_suffix: template that ends the names of a study without published names.
        is_fine_tuning: whether its runs fine-tune the language model of `get_model_path`, on GPUs if there are any.
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
            # The sizes of a language model follow from its config.json; those of any other model only the family knows.
            raise ValueError(
                f"The family {self.name} sets no `estimate_bytes`. Only a family with is_fine_tuning=True may leave it "
                "out: set estimate_bytes=FUNCTION."
            )

    @property
    def primary_metric(self) -> str:
        """The column that says how good a run is."""
        return self.progress_columns[0].column


def make_value_label(value: str) -> str:
    """The published label of an axis value: no dots, lower case ("0.001" -> "0001", "1.0" -> "10")."""
    return value.replace(".", "").lower()
