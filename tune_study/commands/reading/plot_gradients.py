"""The command `plot-gradients`: select gradient analyses of a study and write their figures."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from analysis.charts.gradients import FILTER_LABELS
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.gradients.files import write_analyses
from analysis.gradients.tables import make_analysis_table
from trainable.config.command_lines import format_command, quote_argument
from trainable.config.setting_types import format_value
from trainable.files.paths import make_folder
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.typed_settings import parse_values

FIGURE_DIR = Path("figures") / "gradients"


def read_analyses(folder: Path) -> StudyFrames:
    """Read the study in results/<run>. Raises PlanError if it has no gradient analysis, or if a file is damaged."""
    with as_plan_error(ValueError):
        frames = load(folder)
    # Toy studies measure gradients during training, as columns of their rows, so there are no analyses to plot.
    if not frames.has_symptoms:
        raise PlanError(
            f"{format_value(folder, 1000)} fine-tuned no language model: the gradients of its runs were measured "
            "during training, and are in its report.html and steps.parquet."
        )
    if make_analysis_table(frames.gradients).empty:
        # `probe` needs to know the run if there are several.
        arms = frames.trials["arm"]
        options = ("--trial", arms.iloc[0]) if len(arms) > 1 else ()
        command = format_command("probe", folder, *options)
        raise PlanError(
            f"{format_value(folder, 1000)} has no gradient analysis: run a study with --set "
            f"trainer.gradient_analysis_mode=True, or type `{command}` to analyze a checkpoint."
        )
    return frames


def select_steps(frames: StudyFrames, trial: str | None, source: str | None, steps: Sequence[int]) -> pd.DataFrame:
    """Select analyses by run (run_id or arm), source (train or probe) and steps; None and no steps select all.

    Returns rows of `make_analysis_table`. Raises PlanError if there is none.
    """
    # Options are applied one after another, so that each message can list the possible values.
    table = make_analysis_table(frames.gradients)
    if trial is not None:
        run_ids = ", ".join(table["run_id"].unique())
        # A run_id takes precedence over an arm of the same name.
        table = table[table["run_id" if trial in set(table["run_id"]) else "arm"] == trial]
        if table.empty:
            raise PlanError(
                f"There is no analysis of a run `{format_value(trial)}`: type --trial and one of {run_ids}."
            )
    if source is not None and source not in set(table["source"]):
        raise PlanError(
            f"There is no analysis from source {format_value(source)}: leave --source out, or type --source "
            f"{min(table['source'])}."
        )
    table = table[table["source"] == source] if source else table
    if unknown_steps := sorted(set(steps) - set(table["step"])):
        raise PlanError(
            f"Step {', '.join(map(str, unknown_steps))} was not analyzed: type --step with one of "
            f"{', '.join(map(str, sorted(set(table['step']))))}."
        )
    return table[table["step"].isin(steps)] if steps else table


def parse_steps(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse the steps of every --step, each a whole number or a comma-separated list."""
    entries = [entry for text in texts for entry in parse_values(text, "--step")]
    # Steps are compared with a table of 64-bit integers, which hold every number of 18 digits.
    invalid_entries = [entry for entry in entries if not (entry.isascii() and entry.isdigit() and len(entry) < 19)]
    if invalid_entries:
        raise PlanError(
            f"--step '{format_value(invalid_entries[0])}' is not a step: type whole numbers, like --step 1,51,101."
        )
    return tuple(int(entry) for entry in entries)


def print_steps(console: Console, table: pd.DataFrame) -> None:
    """Print the selected analyses: run, source, step, before or after the filter, and their sizes."""
    rows = [
        [
            row["run_id"],
            row["source"],
            str(row["step"]),
            FILTER_LABELS[row["prefilter"]],
            f"{row['groups']:g}",
            f"{row['sequences']:g}",
            str(row["buckets"]),
            row["components"],
        ]
        for row in to_records(table)
    ]
    headers = ("run", "source", "step", "analyzed", "groups", "sequences", "buckets", "components")
    print_table(console, headers, rows)


def write_plots(
    console: Console, folder: Path, frames: StudyFrames, table: pd.DataFrame, output_dir: Path | None
) -> None:
    """Write the figures of the selected analyses, rows of `table`, and print their paths.

    Figures are written to `output_dir`, else to <folder>/figures/gradients/<run_id>/, or its subfolder probe/ for
    probes. Raises PlanError if several runs or sources are selected for `output_dir`, or if a folder cannot be written.
    """
    selections = {key: sorted(set(rows["step"])) for key, rows in table.groupby(["run_id", "source"], sort=False)}
    # File names do not contain the run, so figures of two runs in one folder would overwrite each other.
    if output_dir is not None and len(selections) > 1:
        run_id, source = next(iter(selections))
        raise PlanError(
            f"--output-dir takes the figures of one run and source, and {len(selections)} were analyzed: add such as "
            f"--trial {quote_argument(run_id)} --source {source}."
        )
    for (run_id, source), steps in selections.items():
        folder_names = (*FIGURE_DIR.parts, run_id, *(["probe"] if source == "probe" else []))
        target = output_dir or folder.joinpath(*folder_names)
        gradients, groups = (
            rows[(rows["run_id"] == run_id) & (rows["source"] == source)]
            for rows in (frames.gradients, frames.gradient_groups)
        )
        try:
            if output_dir is None:  # below the study's folder, links are refused
                make_folder(folder, *folder_names)
            written_paths = write_analyses(gradients, groups, steps, target)
        except OSError as error:
            raise PlanError(f"{target} cannot be written ({error}): type another --output-dir.") from None
        for path in written_paths:
            print_line(console, str(path))
