"""Make studies of toy tasks, whose arms are named conditions, and their families."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from search_spaces.declaration.study import Axis, Contrasts, NameTemplates, Study, keep_settings
from trainable.families import DisplayColumn, Family, Preset, Settings
from trainable.runs.records import COMMON_TRIAL_COLUMNS, STOP_COLUMNS, Column

_PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset(MappingProxyType({}), n_seeds=3) for name in ("paper", "laptop")}
)
"""The presets of a toy family, all equal, because the tasks are small everywhere."""


def set_length(steps: int, test_freq: int, resume_every: int) -> Settings:
    """Make the settings of a run's steps, of the steps between evaluations, and between checkpoints."""
    lengths = {"total_training_steps": steps, "test_freq": test_freq, "resume_every": resume_every}
    return MappingProxyType({f"trainer.{name}": value for name, value in lengths.items()})


SMOKE_SETTINGS: Settings = MappingProxyType({"batch_size": 16, **set_length(4, 4, 4)})
"""Settings of --smoke: small enough to run a study in seconds, so its numbers are meaningless."""
BYTES_PER_ROW = 12_000
"""For metrics.jsonl, Tune's result.json, progress.csv and TensorBoard, the log, tables and report."""
BYTES_PER_PARAMETER = 12
"""A weight and Adam's two moments, in float32."""
_STATE_OVERHEAD_BYTES = 100_000


def make_toy_family(
    name: str,
    trial_columns: tuple[Column, ...],
    log_columns: tuple[str, ...],
    progress_columns: Mapping[str, str],
    **fields: Any,
) -> Family:
    """Make a family of toy studies.

    trial_columns: in addition to the columns that all families have. log_columns: fields of a log line, before the
    seconds. progress_columns: the columns of the progress table, each with its heading. fields: other fields of
    `Family`, overriding those that toy families share.
    """
    shared_fields = {
        "presets": _PRESETS,
        "summarize": "analysis.data.summaries:summarize_by_prefix",
        "report": "sandboxes.toys.report.report:TOY_REPORT",
        "get_environment": lambda settings: str(settings.get("task", "")),
        # Values that every template of a study can use.
        "make_template_values": lambda config: {"task": config.task, "method": config.method},
        "has_batched_seeds": True,
    }
    return Family(
        name=name,
        trial_columns=(*COMMON_TRIAL_COLUMNS, *STOP_COLUMNS, *trial_columns),
        log_columns=make_log_columns(dict.fromkeys(log_columns, ".4f")),
        progress_columns=tuple(
            DisplayColumn(column, heading, ".4f" if column == "loss" else ".3f")
            for column, heading in progress_columns.items()
        ),
        **{**shared_fields, **fields},
    )


def make_log_columns(formats: Mapping[str, str]) -> tuple[DisplayColumn, ...]:
    """Make the fields of a log line, named after their columns, from the format of each; losses have five digits."""
    all_formats = {**formats, **{name: ".5f" for name in formats if name.endswith("loss")}, "seconds": ".2f"}
    return tuple(DisplayColumn(column, column, format_spec) for column, format_spec in all_formats.items())


_SUMMARIES = {
    "late": "mean of {} over the last 4 planned evaluations",
    "final": "{} of the last row",
    "last": "{} of the last row with a batch",
}


def make_summary_columns(step_columns: Iterable[Column], names: str) -> tuple[Column, ...]:
    """Make the trial columns `names`, separated by spaces: late_, final_ or last_, and the name of a step column."""
    units = {column.name: column.unit for column in step_columns}
    pairs = (name.split("_", 1) for name in names.split())
    return tuple(Column(f"{kind}_{name}", units[name], _SUMMARIES[kind].format(name)) for kind, name in pairs)


def estimate_toy_bytes(n_parameters: int, n_networks: int = 1) -> tuple[int, int]:
    """Estimate the maximum bytes of a checkpoint of networks with `n_parameters` parameters each, and of a row."""
    return n_networks * (BYTES_PER_PARAMETER * n_parameters + _STATE_OVERHEAD_BYTES), BYTES_PER_ROW


def count_transformer_parameters(config: Any) -> int:
    """Bound from above the parameters of the transformer of a configuration with num_layers, d_model and so on."""
    # A block's matrices have 12 d^2 weights; its biases and norms have fewer than d^2.
    return config.num_layers * 13 * config.d_model**2 + config.d_model * (
        2 * config.num_actions + config.max_positions + 2
    )


def make_toy_study(
    name: str,
    question: str,
    arms: Mapping[str, Settings],
    baseline: str,
    family: Family,
    fixed_settings: Settings,
    setting: str,
    smoke_settings: Settings = SMOKE_SETTINGS,
    run_template: str | None = None,
    contrasts: Contrasts = MappingProxyType({}),
    adapt: Callable[[Settings, Any], Settings] = keep_settings,
    stop_rules: tuple[str, ...] = (),
    wandb_project: str | None = None,
) -> Study:
    """Make a study whose arms are named conditions of a toy task; see `Study` and `Axis` for most arguments.

    question: a text whose first paragraph is the question, such as the docstring of the study's module. arms: by name
    of the arm, the settings in addition to `fixed_settings`. setting: how the arms differ, in words. run_template: name
    of the study's folder; by default the study's name with underscores. wandb_project: by default the family's name
    followed by `_sandbox`.
    """
    run_template = run_template or name.replace("-", "_")
    return Study(
        name=name,
        question=question.split("\n\n")[0],
        axis=Axis(
            setting=setting,
            option="--arms",
            grids={"paper": tuple(arms), "laptop": tuple(arms)},
            named_settings=arms,
            adapt=adapt,
        ),
        fixed_settings=fixed_settings,
        baseline=baseline,
        published_templates=NameTemplates(
            run=run_template,
            experiment=f"{run_template}-{{arm}}",
            title=name.replace("-", " ").capitalize(),
            summary="{arm} | task={task} | method={method}",
            wandb_project=wandb_project or f"{family.name}_sandbox",
            log="{run}/{experiment}.log",
            checkpoints="{run}/{experiment}",
            summary_times=("total",),
            probe_log="",
        ),
        family=family,
        stop_rules=stop_rules,
        smoke_settings=smoke_settings,
        contrasts=contrasts,
    )


@dataclass(frozen=True)
class Description:
    """What the report says and shows of a family of toy studies, beside the tables that all have."""

    label: str
    """Name of the sandbox, above the title."""
    outcome: str
    """The primary outcome, in words."""
    panels: Mapping[str, str]
    """Step columns whose learning curves a study shows if it measures them, each with the label of its axis."""
