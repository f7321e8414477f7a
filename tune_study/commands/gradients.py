"""What `plot-gradients` does: which analyses of a run folder are wanted, and where their pictures go."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from analysis.data.frames import StudyFrames, to_records
from analysis.data.line_files import ANALYSIS_SOURCES
from analysis.data.load import load
from analysis.gradients.files import write_analyses
from analysis.gradients.plots import FILTER_LABELS
from analysis.gradients.tables import make_analysis_table
from trainable.config.setting_types import format_value
from trainable.runs.links import make_folder
from tune_study.host.console import print_line, print_table
from tune_study.plan.study_plan import PlanError, parse_values

FIGURE_DIR = Path("figures") / "gradients"


class StepSelection(NamedTuple):
    """The analysed steps of one run and source that are wanted, rising."""

    run_id: str
    source: str
    steps: tuple[int, ...]


def read_analyses(folder: Path) -> StudyFrames:
    """Frames of results/<run>; PlanError where no gradients were analysed, or a file is damaged."""
    try:
        frames = load(folder)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if [family.name for family in frames.families] != ["ppo"]:
        raise PlanError(
            f"{format_value(folder, 1000)} fine-tuned no language model: the gradients of its runs were measured while they "
            "trained, and are in its report.html and steps.parquet."
        )
    if make_analysis_table(frames.gradients).empty:
        raise PlanError(
            f"{format_value(folder, 1000)} holds no gradient analysis: run a study with --set "
            "trainer.gradient_analysis_mode=True, or type `python -m tune_study probe` for a checkpoint."
        )
    return frames


def select_steps(
    frames: StudyFrames, trial: str | None, source: str | None, steps: Sequence[int]
) -> list[StepSelection]:
    """Each run and source with its wanted steps, none without one; PlanError where nothing is what was asked for."""
    if source is not None and source not in ANALYSIS_SOURCES:
        raise PlanError(f"There is no source `{format_value(source)}`: type --source train or --source probe.")
    analysis_rows = to_records(make_analysis_table(frames.gradients))
    run_ids = list(dict.fromkeys(row["run_id"] for row in analysis_rows))
    analysis_rows = [row for row in analysis_rows if trial in (None, row["run_id"])] or [
        row for row in analysis_rows if row["arm"] == trial
    ]
    if not analysis_rows:
        raise PlanError(
            f"No analysis is of a run `{format_value(trial)}`: type --trial and one of {', '.join(run_ids)}."
        )
    available_sources = sorted({row["source"] for row in analysis_rows})
    analysis_rows = [row for row in analysis_rows if source in (None, row["source"])]
    if not analysis_rows:
        raise PlanError(
            f"No analysis is of source {source}: leave --source out, or type --source {available_sources[0]}."
        )
    analysed_steps = sorted({row["step"] for row in analysis_rows})
    if unknown_steps := sorted(set(steps) - set(analysed_steps)):
        raise PlanError(
            f"Step {', '.join(map(str, unknown_steps))} was not analysed: type --step with one of "
            f"{', '.join(map(str, analysed_steps))}."
        )
    selected_steps = set(steps or analysed_steps)
    run_sources = dict.fromkeys(
        (row["run_id"], row["source"]) for row in analysis_rows if row["step"] in selected_steps
    )
    return [
        StepSelection(
            *pair,
            tuple(
                sorted(
                    {row["step"] for row in analysis_rows if (row["run_id"], row["source"]) == pair} & selected_steps
                )
            ),
        )
        for pair in run_sources
    ]


def parse_steps(texts: Sequence[str]) -> tuple[int, ...]:
    """The steps of every --step, each a whole number or a comma list of some."""
    entries = [entry for text in texts for entry in parse_values(text, "--step")]
    invalid_entries = [entry for entry in entries if not (entry.isascii() and entry.isdigit() and len(entry) < 19)]
    if invalid_entries:
        raise PlanError(
            f"--step '{format_value(invalid_entries[0])}' is no step: type whole numbers, like --step 1,51,101."
        )
    return tuple(int(entry) for entry in entries)


def print_steps(console: Console, frames: StudyFrames, selections: Sequence[StepSelection]) -> None:
    """Every analysis of what is chosen: run, source, step, before or after the filter, and what it holds."""
    selected_keys = {(one.run_id, one.source, step) for one in selections for step in one.steps}
    rows = [
        [
            row["run_id"], row["source"], str(row["step"]), FILTER_LABELS[row["prefilter"]], f"{row['groups']:g}",
            f"{row['sequences']:g}", str(row["buckets"]), row["components"],
        ]
        for row in to_records(make_analysis_table(frames.gradients)) if (row["run_id"], row["source"], row["step"]) in selected_keys
    ]  # fmt: skip
    headers = ("run", "source", "step", "analysed", "groups", "sequences", "buckets", "components")
    print_table(console, headers, rows)


def write_plots(
    console: Console, folder: Path, frames: StudyFrames, selections: Sequence[StepSelection], output_dir: Path | None
) -> None:
    """Write the pictures of what is chosen and print their paths.

    They go to <folder>/figures/gradients/<run_id>/, those of probes to probe/ in it, or all to `output_dir`, which one
    run and source can have. PlanError where that does not fit, or a folder cannot be written.
    """
    if output_dir is not None and len(selections) > 1:
        option_examples = ", ".join(f"--trial {one.run_id} --source {one.source}" for one in selections[:4])
        raise PlanError(
            f"--output-dir takes the pictures of one run and source, and {len(selections)} were analysed: add one of "
            f"{option_examples}{', ...' * (len(selections) > 4)}."
        )
    for selection in selections:
        folder_names = (*FIGURE_DIR.parts, selection.run_id, *(["probe"] if selection.source == "probe" else []))
        target = output_dir or folder.joinpath(*folder_names)
        tables = (frames.gradients, frames.gradient_groups)
        gradients, groups = (
            part[(part["run_id"] == selection.run_id) & (part["source"] == selection.source)] for part in tables
        )
        try:
            if output_dir is None:
                make_folder(folder, *folder_names)
            written_paths = write_analyses(gradients, groups, selection.steps, target)
        except OSError as error:
            raise PlanError(f"{target} cannot be written ({error}): type another --output-dir.") from None
        for path in written_paths:
            print_line(console, str(path))
