"""Every command in the documents is run in an empty folder, in the order in which the documents show it."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import analysis
from tests.fakes.forked_python import run_python
from tests.test_architecture import PACKAGES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
FINDINGS = ROOT / "FINDINGS.md"
LAB_BOOK = sorted((ROOT / "docs" / "log").glob("*.md"))
SLOW_PREFIXES = (
    "python -m trainable.tiny",
    "python benchmarks/",
    # One study that is analyzed, probed and plotted.
    "python -m tune_study run gradient-analysis --preset laptop --algo PPO --seeds 1 --steps 3",
    "python -m tune_study probe small/",
    "python -m tune_study plot-gradients small/",
    # tests/tune_study/commands/test_doctor.py runs it.
    "python -m tune_study doctor",
    # tests/golden_outputs.py runs it.
    "python -m tune_study demo",
    # These are whole studies; test_sandbox_run.py, test_companion_run.py and test_own_parts.py run similar ones.
    "python -m tune_study run opd-topk-stability --smoke",
    "python -m tune_study run vpo --smoke",
    "python -m tune_study run pedagogy --smoke",
    "python -m tune_study run distill --smoke",
    "python -m tune_study run influence --smoke",
    "python -m tune_study run bold.py",
    "python -m tune_study run kl --env bandit.py:Bandit",
    "python -m tune_study resume bandit/",
    # test_command_study.py runs it.
    "python examples/trl_frozenlake.py",
    # test_own_study.py runs such a study.
    "python -m tune_study run my_lr.py --preset laptop --seeds 1 --steps 1",
    "python -m tune_study resume results/my_lr_sokoban-tiny",
    "python -m tune_study run kl --preset laptop --kl-values 0 --seeds 1 --steps 3 --output parts",
    # test_confirmation.py plans one, test_search_run.py runs one, and reading/test_compare.py compares studies.
    "python -m tune_study confirm out/",
    # commands/test_fork.py plans one, and studies/test_fork_run.py runs one.
    "python -m tune_study fork out/",
    "python -m tune_study compare out/",
    # tests/sandboxes/trees/test_runs.py trains on trees, and reading/test_transcripts.py reads such episodes.
    "python -m tune_study run tree-grpo --preset laptop --smoke",
    "python -m tune_study transcripts trees/",
)
FIRST_STUDY = "python -m tune_study run kl --preset laptop --seeds 1 --steps 3 --kl-values 0,0.1 --output out"
"""The command of the README that makes the study in out/."""


OWN_STUDY = "my_lr.py"
NEW_STUDY = "python -m tune_study new my-lr --vary actor.lr=1e-4,3e-4,1e-3"
"""The command of a page that writes the file."""


SAVED_FILE = r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```"

ACTIVATE = "source .venv/bin/activate"


def iter_commands() -> Iterator[tuple[str, bool]]:
    """Yield every command of every page once, and whether the environment is active when a reader reaches it.

    A reader starts with the README; before its activation line, `python` is the interpreter of the system.
    """
    seen_commands, is_active = set(), False
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                command = line.split("  #")[0].strip()
                if command == ACTIVATE:
                    is_active = True
                elif command and not command.startswith("#") and command not in seen_commands:
                    seen_commands.add(command)
                    yield command, is_active


FAST_COMMANDS = [
    (command, is_active) for command, is_active in iter_commands() if not command.startswith(SLOW_PREFIXES)
]
SLOW_COMMANDS = [(command, is_active) for command, is_active in iter_commands() if command.startswith(SLOW_PREFIXES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader, with the files that the documents ask to save."""
    path: Path = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for name, text in re.findall(SAVED_FILE, page.read_text(encoding="utf-8"), re.DOTALL):
            (path / name).write_text(text)
    return path


def make_environment(is_active: bool) -> dict[str, str]:
    """Make the environment variables of a new terminal, in which the virtual environment is active or not."""
    environment_bin = Path(sys.prefix) / "bin"
    other_entries = [
        entry for entry in os.environ["PATH"].split(os.pathsep) if Path(entry).resolve() != environment_bin.resolve()
    ]
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return {**variables, "PATH": os.pathsep.join([*([str(environment_bin)] if is_active else []), *other_entries])}


def run_command(command: str, is_active: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    variables = {**make_environment(is_active), "TUNE_STUDY_CACHE": str(folder / "teachers")}
    if words[0] == "make":
        return subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, env=variables)
    assert words[0] == "python", f"the documents show a command that no test knows how to run: {command}"
    if words[1].startswith(("benchmarks/", "examples/")):
        words[1] = str(ROOT / words[1])
    starts_ray = words[3:4] in (["run"], ["resume"], ["confirm"], ["fork"], ["doctor"]) and "--dry-run" not in words
    starts_ray &= " resume out/" not in command  # whose runs have ended
    is_of_tune_study = words[:3] == ["python", "-m", "tune_study"] or words[1].endswith("/read_a_study.py")
    if is_active and is_of_tune_study and not starts_ray:
        return run_python(words[1:], folder, variables)
    return subprocess.run(["bash", "-c", shlex.join(words)], cwd=folder, capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(("command", "is_active"), FAST_COMMANDS)
def test_command(command: str, is_active: bool, folder: Path) -> None:
    process = run_command(command, is_active, folder)
    # A plan for GPUs may need more disk or memory than this machine has: it says so first, and exits with 3.
    may_not_fit = "--preset paper" in command and "--dry-run" in command
    assert process.returncode in ((0, 3) if may_not_fit else (0,)), process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("command", "is_active"), SLOW_COMMANDS)
def test_command_of_minutes(command: str, is_active: bool, folder: Path) -> None:
    if " out/results/" in command and not (folder / "out").exists():
        assert run_command(FIRST_STUDY, True, folder).returncode == 0
    # What writes the file takes no minutes, so it is tested with the other commands, maybe elsewhere.
    if f" {OWN_STUDY} " in f"{command} " and not (folder / OWN_STUDY).exists():
        assert run_command(NEW_STUDY, True, folder).returncode == 0
    process = run_command(command, is_active, folder)
    assert process.returncode == 0, process.stderr[-2000:]


def test_the_activation_line_of_the_readme_activates_the_environment(folder: Path) -> None:
    assert sys.prefix != sys.base_prefix, "the tests run in a virtual environment, as `make setup` makes it"
    line = ACTIVATE.replace(".venv", sys.prefix)
    process = subprocess.run(
        ["bash", "-c", f"{line} && python -c 'import sys; print(sys.prefix)'"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=make_environment(is_active=False),
    )
    assert process.stdout.strip() == sys.prefix, process.stderr


def test_before_the_activation_line_there_is_no_environment(folder: Path) -> None:
    process = run_command("python -m tune_study list", False, folder)
    assert process.returncode != 0


def test_the_python_example_of_the_readme(folder: Path) -> None:
    if not (folder / "out").exists():
        pytest.skip("needs the study that test_command runs; run the whole file")
    frames = analysis.load(folder / "out" / "results" / "kl_sweep_sokoban-tiny")
    assert len(frames.trials) == 2
    assert set(frames.trials["status"]) == {"completed"}
    assert len(frames.steps) == 6
    assert set(frames.levels["split"]) == {"val", "test"}
    trainer = frames.run("0.1").restore()
    assert 0 < trainer.evaluate("val", "greedy").success < 1


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        # The first one reads the study that test_command runs.
        ("read_a_study.py", ["StudyFrames of kl (2 runs); rows: trials 2, steps 6,", "success of 32 episodes: 0."]),
        ("own_question.py", ["1e-4     0  completed", "over 1 seed"]),
    ],
)
def test_an_example_runs(name: str, lines: list[str], folder: Path) -> None:
    if not (folder / "out").exists():
        pytest.skip("needs the study that test_command runs; run the whole file")
    process = run_command(f"python {ROOT / 'examples' / name}", True, folder)
    assert process.returncode == 0, process.stderr[-2000:]
    for line in lines:
        assert line in process.stdout


PYTHON_BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_examples_use_names_that_exist(block: str) -> None:
    """The imports are run, and every attribute of an imported module is looked up in it."""
    tree = ast.parse(block)
    names: dict[str, object] = {}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "example", "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id)
            if isinstance(module, ModuleType):
                assert hasattr(module, node.attr), f"{node.value.id} has no {node.attr}"


def test_files_that_the_documents_name_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?:tests|trainable|tune_study|analysis|search_spaces)/[\w/]+\.py\b", text):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_tests_that_the_documents_name_exist() -> None:
    references = [
        match
        for path in sorted((ROOT / "docs").glob("*.md"))
        for match in re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(references) >= 8
    for path, name in references:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def test_architecture_page_has_the_docstring_of_every_folder() -> None:
    """The tree of docs/architecture.md is the first line of every package's docstring."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("__init__.py")):
            folder = path.parent.relative_to(ROOT)
            first_line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            assert first_line.endswith("."), f"{path} has no docstring that says what the folder holds"
            tree_entry = "  " * (len(folder.parts) - 1) + f"{folder.name}/"
            assert f"\n{tree_entry:<24}{first_line.removesuffix('.')}\n" in text, f"docs/architecture.md: {folder}"


def test_links_between_the_documents_resolve() -> None:
    pages = [*PAGES, *LAB_BOOK, FINDINGS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def list_anchors(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_finding_has_a_basis_a_command_and_an_entry() -> None:
    """The last link or links of a line are headings of the lab book."""
    rows = [
        line.strip("| ").split(" | ") for line in FINDINGS.read_text(encoding="utf-8").splitlines() if "<br>" in line
    ]
    assert len(rows) >= 62
    for claim, evidence in rows:
        *basis_and_command, entries = evidence.split("<br>")
        assert basis_and_command[0], claim
        assert len(basis_and_command) == 1 or re.search("`|same|above|not recorded", basis_and_command[1]), claim
        assert re.fullmatch(r"(\[[^]]+\]\(docs/log/[\d-]+\.md#[\w-]+\)(, )?)+", entries), claim


def test_links_into_the_lab_book_name_entries() -> None:
    pages = [*PAGES, *LAB_BOOK, FINDINGS, ROOT / "CHANGELOG.md"]
    anchors = {page: list_anchors(page) for page in LAB_BOOK}
    links = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(((?:[\w./-]*log/)?\d{4}-\d\d-\d\d\.md|)#([^)\s]+)\)", text):
            path = (page.parent / target).resolve() if target else page
            if path in anchors:
                links += 1
                assert anchor in anchors[path], f"{page.name} links to {target}#{anchor}"
    assert links >= 62


def test_index_names_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in text, f"docs/index.md does not name {page.name}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
