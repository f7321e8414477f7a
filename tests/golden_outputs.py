"""What commands print and reports hold, as recorded in tests/golden: a change of any word or number is seen.

python -m tests.golden_outputs        # records everything again, after a change that was meant
"""

import hashlib
import io
import math
import re
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pandas as pd
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from search_spaces.catalog import STUDIES
from tests.fakes import grid_folders, sandbox_folders
from tune_study.commands.cli import app
from tune_study.commands.demo import show_demo
from tune_study.demo.archive import read_recorded_study
from tune_study.host import console, machine_checks
from tune_study.host.machine_checks import Gpu
from tune_study.placement.memory import GIB
from tune_study.placement.memory_plan import GpuCapacity, plan_memory
from tune_study.placement.resources import preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import make_plan
from tune_study.tune.session import write_results

GOLDEN = Path(__file__).parent / "golden"
MAX_RUN_LINES = 3
"""Lines of the table of runs that are recorded of each dry run."""
MAX_TABLE_LINES = 30
"""Lines of a table that is recorded as text."""

MODELS = ("0.5B", "1.5B", "3B", "7B")
CARDS = {"24 GiB": 24, "40 GiB": 40, "80 GiB": 80, "141 GiB": 141}
NO_MACHINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_CACHE": "/nowhere",
    "XDG_CACHE_HOME": "/nowhere",
    "COLUMNS": "80",
    "TERM": "dumb",
}


def invoke(*words: str) -> Result:
    """Run a command in this process, on a machine without GPUs and without downloaded models."""
    return CliRunner().invoke(app, words, env=NO_MACHINE, prog_name="python -m tune_study")


def list_help() -> Iterator[str]:
    """The help of the program and of each of its commands."""
    yield invoke("--help").stdout
    names = re.findall(r"^  ([a-z][a-z-]+)  ", invoke("--help").stdout, re.MULTILINE)
    for name in names:
        yield f"== {name} --help\n{invoke(name, '--help').stdout}"


def list_dry_runs(folder: Path) -> Iterator[str]:
    """What each study would do on the laptop, and the study of the KL coefficient under each preset."""
    commands = [(name, "laptop") for name in STUDIES] + [("kl", preset) for preset in ("paper", "stress", "huge")]
    for name, preset in commands:
        result = invoke("run", name, "--preset", preset, "--output", str(folder), "--dry-run", "--seeds", "2")
        lines = [line.rstrip() for line in (result.stdout + result.stderr).replace(str(folder), "OUT").splitlines()]
        table = next((index for index, line in enumerate(lines) if line.startswith("run ")), len(lines))
        yield "\n".join([f"== run {name} --preset {preset}", *lines[: table + 1 + MAX_RUN_LINES]])


def list_memory_choices() -> Iterator[str]:
    """How runs of the paper's preset are placed on cards of several sizes, or what does not fit."""
    for model in MODELS:
        for card, gib in CARDS.items():
            for gpus in (1, 4):
                yield f"{model} on {gpus} x {card}: {choose_placement(model, gib, gpus)}"


def choose_placement(model: str, gib: int, num_gpus: int) -> str:
    overrides = {"model.path": f"Qwen/Qwen2.5-{model}", "trainer.n_gpus_per_node": num_gpus}
    plan = make_plan(STUDIES["kl"], "paper", "a test", overrides, None, 1, Path("/out"))
    cards = tuple(Gpu(str(index), f"GPU-{index}", "a card") for index in range(4))
    resources = preflight(plan, None, cards, 2, None, is_real=False)
    try:
        memory_plan = plan_memory(plan, resources, GpuCapacity(gib * GIB, "a test", True), NO_MACHINE)
    except PlanError as error:
        return str(error)
    assert memory_plan is not None
    verdict = "fits" if memory_plan.fits else "does not fit"
    settings = ", ".join(f"{name}={value}" for name, value in memory_plan.placement_settings.items())
    return f"{verdict}, {memory_plan.peak / GIB:.2f} GiB; {settings}"


def write_folders(root: Path) -> dict[str, Path]:
    """Write the studies whose reports are recorded; return their folders by name."""
    seeds = (0.1, 0.12, 0.11)
    runs = [
        run
        for arm, shift in (("DG", 0.0), ("GRPO", 0.2), ("TPO", -0.03))
        for run in sandbox_folders.make_seed_runs(arm, [error + shift for error in seeds])
    ]
    return {
        "recorded sweep": root / "demo" / "results" / read_recorded_study().run,  # which `demo` unpacks
        "made-up grid": grid_folders.write_grid(root / "grid", grid_folders.ONE_TYPE, seeds=2),
        "made-up sandbox": sandbox_folders.write_sandbox(root / "sandbox", runs),
    }


def list_reports(root: Path) -> Iterator[str]:
    """What the terminal prints of each study, the text of its page, and the tables of its figures."""
    for name, folder in write_folders(root).items():
        terminal = io.StringIO()
        if folder.exists():
            problem = write_results(folder, Console(file=terminal), with_pictures=False)
        else:
            problem = show_demo(Console(file=terminal), root / "demo")
        assert not problem
        page = (folder / "report.html").read_text(encoding="utf-8")
        yield f"== {name}: conclusion\n{terminal.getvalue().replace(str(root), 'OUT')}"
        yield f"== {name}: page\n{extract_text(page).replace(str(root), 'OUT')}"
        for path in sorted(folder.glob("figures/*.csv")):
            yield f"== {name}: {path.name}\n{format_table(pd.read_csv(path))}"


def extract_text(page: str) -> str:
    """Return the text of a page without its figures and listings, a line per row, paragraph or other block."""
    page = re.sub(r"<(script|style|svg|head|pre|caption)\b.*?</\1>", "", page, flags=re.DOTALL)
    page = re.sub(r"\s+", " ", page)
    page = re.sub(r"</t[dh]>", " | ", page)
    page = re.sub(r"</(tr|p|h\d|li|div|figure|section|summary)>", "\n", page)
    lines = (line.strip() for line in re.sub(r"<[^>]+>", "", page).splitlines())
    return "\n".join(line for line in lines if line)


def format_table(table: pd.DataFrame) -> str:
    """Return a table as text, of a long one the digest; the last digits of a number depend on the processor."""
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(table) <= MAX_TABLE_LINES else f"{','.join(table)}\n{len(table)} rows, {digest}\n"


RECORDS: Mapping[str, Callable[[Path], Iterable[str]]] = {
    "help.txt": lambda folder: list_help(),
    "dry_runs.txt": list_dry_runs,
    "memory_choices.txt": lambda folder: list_memory_choices(),
    "reports.txt": list_reports,
}
"""File in tests/golden -> what makes its paragraphs, in an empty folder."""


@contextmanager
def fix_machine() -> Iterator[None]:
    """Give this process a quick machine: two cores, 16 GiB of memory, a disk of 100 GB, no GPU, no models."""
    usage = namedtuple("usage", "total used free")(200 * 10**9, 100 * 10**9, 100 * 10**9)
    with (
        mock.patch.dict("os.environ", NO_MACHINE),
        mock.patch("shutil.disk_usage", return_value=usage),
        mock.patch("os.sched_getaffinity", return_value={0, 1}, create=True),
        mock.patch.object(machine_checks, "measure_available_memory", return_value=16 * 2**30),
        mock.patch.object(console, "SECONDS_PER_PHASE_LINE", math.inf),  # of a slow machine
    ):
        yield


def make_record(name: str, folder: Path) -> str:
    """Return the text of a file of `RECORDS` as this version makes it."""
    with fix_machine():
        return "".join(paragraph.rstrip("\n") + "\n" for paragraph in RECORDS[name](folder))


def main() -> None:
    """Record everything."""
    for name in RECORDS:
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / name).write_text(make_record(name, Path(folder)), encoding="utf-8")
        print(GOLDEN / name)


if __name__ == "__main__":
    main()
