"""The results of a study for other programs: what `--json` prints, and which of them `report --fail-on` fails on."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from analysis.data.load import load
from analysis.report.pages import summarize_study
from trainable.config.setting_types import format_value
from trainable.runs.run_files import is_locked
from tune_study.plan.errors import PlanError

CONDITIONS = ("worse", "collapsed")


def read_results(folder: Path) -> dict[str, Any]:
    """Read verdicts and ends of runs of results/<run> (`summarize_study`), with the path of its report."""
    answer = summarize_study(load(folder, live=is_locked(folder)))
    return {**answer, "folder": str(folder), "page": str(folder / "report.html")}


def parse_conditions(text: str) -> tuple[str, ...]:
    """Parse --fail-on. Raises PlanError for a word that is none of `CONDITIONS`."""
    words = tuple(word.strip() for word in text.split(","))
    if not set(words) <= set(CONDITIONS):
        raise PlanError(
            f"--fail-on {format_value(text)} names no result to fail on: type worse (the verdict on an arm), collapsed "
            "(a run), or worse,collapsed."
        )
    return words


def describe_failures(results: Mapping[str, Any], conditions: Collection[str]) -> str:
    """Say which arms are worse and which runs collapsed, as far as --fail-on names it; empty without any."""
    worse = [arm["arm"] for arm in results["arms"] if arm["verdict"] == "worse"]
    collapsed = [run["run"] for run in results["runs"] if run["collapsed"]]
    sentences = {
        "worse": worse and f"Worse than the baseline {results['baseline']} (--fail-on worse): {', '.join(worse)}.",
        "collapsed": collapsed and f"Collapsed (--fail-on collapsed): {', '.join(collapsed)}.",
    }
    return " ".join(sentence for word, sentence in sentences.items() if word in conditions and sentence)
