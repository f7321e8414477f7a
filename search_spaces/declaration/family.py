"""A family of studies: the configuration type, presets and name templates that its studies share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from search_spaces.declaration.presets import GameSettings, Preset
from trainable.config.base_config import BaseRunConfig
from trainable.config.own_parts import shorten_part_name
from trainable.config.run_config import list_outside_settings
from trainable.runs.study_record import Dimension


@dataclass(frozen=True)
class DisplayColumn:
    """A column that is shown while a run trains.

    Attributes:
        column: name of the column in the rows of metrics.jsonl.
        name: heading of the column in the table, and name of the field in a log line.
        format_spec: format of the numbers, as in Python's `format`.
        fallback_column: the column to show until this one has a value; empty if there is none.
    """

    column: str
    name: str
    format_spec: str
    fallback_column: str = ""


@dataclass(frozen=True)
class Family:
    """Studies that share a trainer and a type of configuration.

    Attributes:
        name: name of the family in study.json and in the tables.
        config_class: configuration of a run.
        trainable: "module:CLASS" of the tune.Trainable for these configurations; imported only where Ray is.
        presets: the presets by name.
        outcomes: columns of `analysis.load(...).trials` by which arms are compared. The first is the primary outcome,
            which gives the verdicts; the others support it and are adjusted together.
        margins: for some of the outcomes, the difference within which two arms count as equal.
        make_template_values: function of a configuration that returns the values that name templates may use.
        get_model_path: function of a configuration that returns the path or hub id of the model that a run loads and
            trains, or None if the run builds its own model.
        progress_columns: columns of the progress table. The first is the primary metric, which `status` shows too.
        log_columns: columns of the line that each step writes to the log of its run. Standard output gets some of these
            lines when it is not a terminal.
        has_batched_seeds: whether one trial trains all seeds of an arm together, each as a separate run.
        estimate_bytes: function of the configuration and of the parameter count of the loaded model that returns two
            sizes in bytes: that of a checkpoint, and that of a row together with everything derived from the row. None
            if the shape of the model determines both.
        estimate_step_seconds: function of the configuration that returns the seconds of a training step of one run on a
            core, evaluations included, as measured; None for a task that was not. None if the model determines it.
        name_suffix: template that is appended to the names of a study and of its runs if the study has no published
            names.
        games: the games that --env selects, by name; empty if the runs play none.
        is_fine_tuning: whether the family's runs fine-tune the language model of `get_model_path`, on GPUs if there
            are any.
        search_space: what `search` changes unless it is told otherwise; empty if that always has to be typed.
    """

    name: str
    config_class: type[BaseRunConfig]
    trainable: str
    presets: Mapping[str, Preset]
    outcomes: tuple[str, ...]
    margins: Mapping[str, float]
    make_template_values: Callable[[Any], dict[str, str]]
    get_model_path: Callable[[Any], str | None]
    progress_columns: tuple[DisplayColumn, ...]
    log_columns: tuple[DisplayColumn, ...]
    has_batched_seeds: bool = False
    estimate_bytes: Callable[[Any, int], tuple[int, int]] | None = None
    estimate_step_seconds: Callable[[Any], float | None] | None = None
    name_suffix: str = ""
    games: Mapping[str, GameSettings] = field(default_factory=dict)
    is_fine_tuning: bool = False
    search_space: tuple[Dimension, ...] = ()

    def __post_init__(self) -> None:
        if self.estimate_bytes is None and not self.is_fine_tuning:
            # The sizes of a language model follow from its config.json; those of any other model only the family knows.
            raise ValueError(
                f"The family {self.name} sets no `estimate_bytes`. Only a family with is_fine_tuning=True may leave it "
                "out: set estimate_bytes=FUNCTION."
            )

    def make_game_settings(self, game: str, preset: str) -> dict[str, object]:
        """The settings that come with a game under a preset. Raise KeyError for a game that does not exist."""
        game_settings, preset_settings = self.games[game], self.games[game].presets
        name = preset if preset in preset_settings else self.presets[preset].variant_of
        return {**game_settings.settings, **preset_settings.get(name, {})}

    @property
    def model_settings(self) -> tuple[str, ...]:
        """The settings that name a model, which may be a local folder."""
        return list_outside_settings(self.config_class, "model")

    @property
    def path_settings(self) -> tuple[str, ...]:
        """The settings that name a local file or folder, if they are set."""
        return list_outside_settings(self.config_class, "file")

    @property
    def primary_metric(self) -> str:
        """The column that says how good a run is."""
        return self.progress_columns[0].column


def make_value_label(value: str) -> str:
    """The published label of an axis value: no dots, lower case ("0.001" -> "0001", "1.0" -> "10").

    A part of the user has its name, without the file.
    """
    return shorten_part_name(value).replace(".", "").lower()
