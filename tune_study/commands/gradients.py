"""What `plot-gradients` does: which analyses of a run folder are wanted, and where their pictures go."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from analysis.data.frames import StudyFrames, records
from analysis.data.line_files import SOURCES
from analysis.data.load import load
from analysis.gradients.files import write_analyses
from analysis.gradients.plots import WHEN
from analysis.gradients.tables import analyses
from trainable.config.setting_types import shown
from trainable.runs.links import make_folder
from tune_study.host.console import print_table, say
from tune_study.plan.study_plan import PlanError, parse_values

FIGURES = Path("figures") / "gradients"


class Chosen(NamedTuple):
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
            f"{shown(folder, 1000)} fine-tuned no language model: the gradients of its runs were measured while they "
            "trained, and are in its report.html and steps.parquet."
        )
    if analyses(frames.gradients).empty:
        raise PlanError(
            f"{shown(folder, 1000)} holds no gradient analysis: run a study with --set "
            "trainer.gradient_analysis_mode=True, or type `python -m tune_study probe` for a checkpoint."
        )
    return frames


def choose(frames: StudyFrames, trial: str | None, source: str | None, steps: Sequence[int]) -> list[Chosen]:
    """Each run and source with its wanted steps, none without one; PlanError where nothing is what was asked for."""
    if source is not None and source not in SOURCES:
        raise PlanError(f"There is no source `{shown(source)}`: type --source train or --source probe.")
    found = records(analyses(frames.gradients))
    names = list(dict.fromkeys(row["run_id"] for row in found))
    found = [row for row in found if trial in (None, row["run_id"])] or [row for row in found if row["arm"] == trial]
    if not found:
        raise PlanError(f"No analysis is of a run `{shown(trial)}`: type --trial and one of {', '.join(names)}.")
    there = sorted({row["source"] for row in found})
    found = [row for row in found if source in (None, row["source"])]
    if not found:
        raise PlanError(f"No analysis is of source {source}: leave --source out, or type --source {there[0]}.")
    analysed = sorted({row["step"] for row in found})
    if unknown := sorted(set(steps) - set(analysed)):
        raise PlanError(
            f"Step {', '.join(map(str, unknown))} was not analysed: type --step with one of "
            f"{', '.join(map(str, analysed))}."
        )
    wanted = set(steps or analysed)
    pairs = dict.fromkeys((row["run_id"], row["source"]) for row in found if row["step"] in wanted)
    return [
        Chosen(*pair, tuple(sorted({row["step"] for row in found if (row["run_id"], row["source"]) == pair} & wanted)))
        for pair in pairs
    ]


def parse_steps(texts: Sequence[str]) -> tuple[int, ...]:
    """The steps of every --step, each a whole number or a comma list of some."""
    entries = [entry for text in texts for entry in parse_values(text, "--step")]
    odd = [entry for entry in entries if not (entry.isascii() and entry.isdigit() and len(entry) < 19)]
    if odd:
        raise PlanError(f"--step '{shown(odd[0])}' is no step: type whole numbers, like --step 1,51,101.")
    return tuple(int(entry) for entry in entries)


def print_steps(console: Console, frames: StudyFrames, chosen: Sequence[Chosen]) -> None:
    """Every analysis of what is chosen: run, source, step, before or after the filter, and what it holds."""
    wanted = {(one.run_id, one.source, step) for one in chosen for step in one.steps}
    rows = [
        [
            row["run_id"], row["source"], str(row["step"]), WHEN[row["prefilter"]], f"{row['groups']:g}",
            f"{row['sequences']:g}", str(row["buckets"]), row["components"],
        ]
        for row in records(analyses(frames.gradients)) if (row["run_id"], row["source"], row["step"]) in wanted
    ]  # fmt: skip
    heads = ("run", "source", "step", "analysed", "groups", "sequences", "buckets", "components")
    print_table(console, heads, rows)


def write_pictures(
    console: Console, folder: Path, frames: StudyFrames, chosen: Sequence[Chosen], output_dir: Path | None
) -> None:
    """Write the pictures of what is chosen and print their paths.

    They go to <folder>/figures/gradients/<run_id>/, those of probes to probe/ in it, or all to `output_dir`, which one
    run and source can have. PlanError where that does not fit, or a folder cannot be written.
    """
    if output_dir is not None and len(chosen) > 1:
        listed = ", ".join(f"--trial {one.run_id} --source {one.source}" for one in chosen[:4])
        raise PlanError(
            f"--output-dir takes the pictures of one run and source, and {len(chosen)} were analysed: add one of "
            f"{listed}{', ...' * (len(chosen) > 4)}."
        )
    for one in chosen:
        names = (*FIGURES.parts, one.run_id, *(["probe"] if one.source == "probe" else []))
        target = output_dir or folder.joinpath(*names)
        parts = (frames.gradients, frames.gradient_groups)
        gradients, groups = (part[(part["run_id"] == one.run_id) & (part["source"] == one.source)] for part in parts)
        try:
            if output_dir is None:
                make_folder(folder, *names)
            written = write_analyses(gradients, groups, one.steps, target)
        except OSError as error:
            raise PlanError(f"{target} cannot be written ({error}): type another --output-dir.") from None
        for path in written:
            say(console, str(path))
