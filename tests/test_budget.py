"""The size of the project as a ratchet: a bound is lowered freely, and raised only with a sentence that says why."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache

import pytest

from tests.test_architecture import MODULES, PACKAGES, ROOT, list_nodes
from tune_study.demo.archive import unpack

STATEMENTS: Mapping[str, int] = {
    "analysis": 5976,
    "sandboxes": 4123,
    "search_spaces": 489,
    "trainable": 11396,
    "tune_study": 6921,
}
"""Package -> most statements, docstrings left out.

`sandboxes` was raised from 3,360 when trees of rollouts came to it, which took 1,534 from the other packages.
`trainable` was raised from 9,849 when trials began to upload their checkpoints themselves and data sets became games,
and `search_spaces` by the preset `small`; then from 10,105 for what people train with today: three losses, STAPO,
refill, masks, penalties of long replies, schedules of fifteen settings and a moving reference (`search_spaces` and
`analysis` by one statement each, for the names and the order of arms with schedules), and from 10,477 by controllers,
resets of the reference by a rule, prefix trees, and the noise of validations of unknown size. `analysis` was
raised from 5,129 for the readers of eleven trainers' logs in six formats, and `tune_study` from 6,482 for `import`,
`noise-floor` and `--json`. These readers went to `trainable` when a command could become the trainer of a run, which
follows its logs with them: 460 statements, and 600 for commands (`search_spaces` by 84, their declaration and RAGEN's,
and `tune_study` by 138: `new --command`, `--trainer`, and their plans).

The gallery raised `search_spaces` by 118 (nine studies) and `analysis` by 650: recordings, pages and budgets (260, with
pages that score alarms, compare places and judge advice), the detectors of other tools (310), and what the report says
of a fork. Its index took 45 more for what to do if a run collapses, which arms are the same runs, and how each study
trained, with the name alone of a model in a folder. Forks took 61 statements of `trainable` and 200 of `tune_study`.
Rows and runs that forks and arms repeat, and that count once, took 6 of `analysis`, what `alarms` says of forks and the
preset that a study declares for CPUs 11 of `tune_study`, and this field one of `search_spaces`. What a newcomer missed
took 14 of `analysis`, 10 of `trainable` and 38 of `tune_study`: a search for settings, tables and pages that fit a
terminal, the column that `import` takes, the order of the findings, and why a difference is open."""

READERS: Mapping[str, int] = {"study.json": 1, "run.json": 1, "status.json": 1}
"""File of a study -> most modules that name it. One that reads and writes it is what there should be."""

TRACED_FILES: Mapping[str, int] = {"dry run": 40, "status": 15, "first step": 54}
"""What is done -> most files of the project of which a function is called.

Raised to 40 by the catalog, which also finds studies of other trainers; from 37 and 50, two each, by the module of
schedules and by what further settings read, from 52 because a codec, in a module of its own, is a class with
functions, and from 53 because what swaps nothing is a swap of no tensors, and no special case."""


@cache
def count_statements() -> Counter[str]:
    """The statements of each package, without docstrings."""
    counts: Counter[str] = Counter()
    for name, path in MODULES.items():
        nodes = list_nodes(path.read_text(encoding="utf-8"))
        counts[name.split(".")[0]] += sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)
    return counts


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_more_statements(package: str) -> None:
    assert count_statements()[package] <= STATEMENTS[package]


@pytest.mark.parametrize("name", READERS)
def test_a_file_format_has_few_readers(name: str) -> None:
    modules = [
        module
        for module, path in MODULES.items()
        if any(
            isinstance(node, ast.Constant) and node.value == name
            for node in list_nodes(path.read_text(encoding="utf-8"))
        )
    ]
    assert len(modules) <= READERS[name], modules


TRACE = """
import inspect, json, os, sys
import numpy, pandas, scipy.special, torch  # before the trace, which would slow them down
from tune_study.commands.cli import app
from trainable.language_model import TRAINER as LANGUAGE_MODEL

root, packages, commands = sys.argv[1], set(json.loads(sys.argv[2])), json.loads(sys.argv[3])

def trace(function):
    files = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, no module and no class
            name = frame.f_code.co_filename
            if name.startswith(root) and name[len(root) + 1:].split("/")[0] in packages:
                files.add(name[len(root) + 1:])

    sys.setprofile(note)
    try:
        function()
    except SystemExit as error:
        assert not error.code, error.code
    finally:
        sys.setprofile(None)
    return sorted(files)

for name, code in commands.items():
    if not (child := os.fork()):  # what a command has imported and cached is not there for the next one
        scope = {**globals()}
        exec(code, scope)
        print(json.dumps([name, scope["files"]]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, name
"""
COMMANDS: Mapping[str, str] = {
    "dry run": """
files = trace(lambda: app('run kl --preset laptop --kl-values 0 --seeds 1 --output out --dry-run'.split()))
""",
    "status": "files = trace(lambda: app(['status', 'results/study']))",
    "first step": """
from search_spaces.catalog import STUDIES
from tune_study.plan.study_plan import make_arm_config, make_base_config
config = make_arm_config(STUDIES["kl"], make_base_config(STUDIES["kl"], "laptop"), "0.01")
files = trace(lambda: LANGUAGE_MODEL.make_trainer(config, (0,)).step())
""",
}


@pytest.fixture(scope="module")
def traced_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return for each command the files of this project of which it calls a function."""
    folder = tmp_path_factory.mktemp("traced")
    unpack(folder / "results" / "study")
    words = [sys.executable, "-c", TRACE, str(ROOT), json.dumps(PACKAGES), json.dumps(COMMANDS)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return dict(json.loads(line) for line in process.stdout.splitlines() if line.startswith('["'))


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_enters_few_files(name: str, traced_files: dict[str, list[str]]) -> None:
    assert len(traced_files[name]) <= TRACED_FILES[name], "\n".join(traced_files[name])
