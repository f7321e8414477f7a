"""Run the benchmarks and print their figures beside the last ones, which are in RESULTS.md.

The table "Figures" of RESULTS.md names each figure by its script and by the keys that lead to it in the JSON object
that the script prints, with a last value and the fraction by which repeated measurements differ. A figure that differs
by more than this fraction is marked as moved. If a script fails or lacks a key of the table, the exit code is 1.
Run: python benchmarks/figures.py [SCRIPT ...] [--json FILE] [--save]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from machine import describe
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
HEADING = "## Figures"
KEY_SEPARATOR = " > "


class Figure(NamedTuple):
    """A row of the table.

    script: file name without .py. keys: path to the number in the JSON object, joined by " > "; lists by index.
    value: the last one, or None if it was never measured. better: "more" or "less". spread: fraction by which repeated
    measurements differ. meaning: what it is, with its unit.
    """

    script: str
    keys: str
    value: float | None
    better: str
    spread: float
    meaning: str

    def format(self) -> str:
        """The row in Markdown."""
        value = "" if self.value is None else f"{self.value:g}"
        return f"| {self.script} | {self.keys} | {value} | {self.better} | {self.spread:.0%} | {self.meaning} |"


class Comparison(NamedTuple):
    """A figure and its new value; None if its script failed or printed no such key."""

    figure: Figure
    value: float | None

    def judge(self) -> str:
        """One of: missing, new, same, better, worse."""
        if self.value is None:
            return "missing"
        if not self.figure.value:
            return "new"
        change = self.value / self.figure.value
        if 1 / (1 + self.figure.spread) <= change <= 1 + self.figure.spread:
            return "same"
        return "better" if (change > 1) == (self.figure.better == "more") else "worse"


def split_section(text: str) -> tuple[str, str, str]:
    """The text before the section "Figures", the section, and the text after it."""
    before, heading, rest = text.partition(HEADING)
    end = rest.find("\n## ")
    end = len(rest) if end == -1 else end
    return before, heading + rest[:end], rest[end:]


def read_figures(text: str) -> list[Figure]:
    """The rows of the table under the heading "Figures"."""
    figures = []
    for line in [line for line in split_section(text)[1].splitlines() if line.startswith("|")][2:]:
        script, keys, value, better, spread, meaning = (cell.strip() for cell in line.strip().strip("|").split("|"))
        last_value = float(value) if value else None
        figures.append(Figure(script, keys, last_value, better, float(spread.removesuffix("%")) / 100, meaning))
    return figures


def find_value(result: object, keys: str) -> float | None:
    """The number to which `keys` lead in a JSON value, or None."""
    for key in keys.split(KEY_SEPARATOR):
        if isinstance(result, Mapping):
            result = result.get(key)
        elif isinstance(result, list) and key.isdecimal() and int(key) < len(result):
            result = result[int(key)]
        else:
            return None
    return float(result) if isinstance(result, int | float) else None


def run_script(script: str) -> tuple[dict[str, object], str]:
    """The JSON object that a benchmark prints and an empty text, or an empty object and the end of its errors."""
    process = subprocess.run([sys.executable, FOLDER / f"{script}.py"], capture_output=True, text=True, check=False)
    if process.returncode:
        return {}, "\n".join(process.stderr.splitlines()[-5:])
    result: dict[str, object] = json.loads(process.stdout)
    return result, ""


def print_table(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print last and new values with their ratio; figures that moved are in bold."""
    table = Table("script", "figure", "last", "now", "ratio", "", title="Figures")
    for figure, value in comparisons:
        verdict = Comparison(figure, value).judge()
        ratio = f"{value / figure.value:.2f}" if value is not None and figure.value else ""
        texts = ["" if number is None else f"{number:g}" for number in (figure.value, value)]
        style = "bold" if verdict in ("better", "worse", "missing") else ""
        table.add_row(figure.script, figure.meaning, *texts, ratio, verdict, style=style)
    console.print(table)


def replace_values(text: str, comparisons: Sequence[Comparison]) -> str:
    """The text of RESULTS.md with the new values in its table; a figure without a new one keeps its last."""
    before, section, after = split_section(text)
    for figure, value in comparisons:
        if value is not None:
            section = section.replace(figure.format(), figure._replace(value=value).format())
    return before + section + after


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog="example: python benchmarks/figures.py rollout ppo_step"
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="names without .py; default: all of the table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with the table of the last figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the printed JSON objects of all scripts there")
    parser.add_argument("--save", action="store_true", help="put the new values into the table of the last figures")
    return parser.parse_args()


def run_scripts(names: Sequence[str], console: Console) -> dict[str, dict[str, object]]:
    """The JSON objects that the scripts print, by name, empty if one fails. `console` shows which one runs."""
    results = {}
    for index, name in enumerate(names, 1):
        console.print(f"{index}/{len(names)} {name}")
        results[name], message = run_script(name)
        if message:
            console.print(f"{name} failed:\n{message}", markup=False)
    return results


def main() -> None:
    """Run the scripts one after another, and compare."""
    options = parse_options()
    text = options.results.read_text(encoding="utf-8")
    figures = read_figures(text)
    all_names = list(dict.fromkeys(figure.script for figure in figures))
    unknown = next((name for name in options.scripts if name not in all_names), None)
    if unknown:
        print(f"{unknown!r} is no script of the table of figures. Allowed: {', '.join(all_names)}.", file=sys.stderr)
        sys.exit(2)
    results = run_scripts(options.scripts or all_names, Console(stderr=True))
    comparisons = [
        Comparison(figure, find_value(results[figure.script], figure.keys))
        for figure in figures
        if figure.script in results
    ]
    console = Console()
    print_table(comparisons, console)
    verdicts = [comparison.judge() for comparison in comparisons]
    moved = sum(verdict in ("better", "worse") for verdict in verdicts)
    machine = describe()
    console.print(f"{moved} of {len(verdicts)} figures moved. {machine['cpu_model']}, load {machine['load_average']}.")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.save:
        options.results.write_text(replace_values(text, comparisons), encoding="utf-8")
    sys.exit(1 if "missing" in verdicts else 0)


if __name__ == "__main__":
    main()
