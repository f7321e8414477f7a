"""The architecture, checked on the syntax trees: layers, at most 14 modules per folder, no cycles, light imports."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from sandboxes.update_rules.config.rules import RULES
from search_spaces.catalog import STUDIES
from trainable.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from trainable.config.command_lines import PROGRAM

ROOT = Path(__file__).parent.parent
CORE = ("tune_study", "trainable", "search_spaces", "analysis")
PACKAGES = (*CORE, "sandboxes")
SANDBOXES = ("update_rules", "distillation", "vector_rewards", "pedagogy", "trees")
STANDARD_MODULES = set(sys.stdlib_module_names)
MAX_MODULES = 14
"""Modules that a folder may hold: as many as one sees at a glance."""
MAX_FORMAT_LINES = 120
"""Lines of a module that reads a format of logs: who knows the format checks it at one sitting."""

LAYERS: dict[str, tuple[str, ...]] = {
    # Train: from the folders that import nothing to those that import all others.
    "trainable.files": (),
    "trainable.config": ("trainable.files", "trainable.algo.names"),
    "trainable.algo": (),
    "trainable.runs": ("trainable.config", "trainable.files"),
    "trainable.sources": ("trainable.files", "trainable.runs.records"),
    "trainable.command": ("trainable.config", "trainable.files", "trainable.runs", "trainable.sources"),
    "trainable.command.trial": ("trainable",),
    "trainable.envs": ("trainable.config", "trainable.files"),
    "trainable.envs.sokoban": ("trainable.config", "trainable.envs"),
    "trainable.envs.games": ("trainable.config", "trainable.envs", "trainable.envs.sokoban"),
    "trainable.kernels": ("trainable.files",),
    "trainable.models": (
        "trainable.algo",
        "trainable.config",
        "trainable.envs",
        "trainable.files",
        "trainable.kernels",
        "trainable.runs",
    ),
    "trainable.rollout": (
        "trainable.files",
        "trainable.algo",
        "trainable.config",
        "trainable.envs",
        "trainable.kernels",
        "trainable.models",
        "trainable.runs",
    ),
    "trainable.backend": ("trainable.config", "trainable.models", "trainable.runs"),
    "trainable.ppo": (
        "trainable.algo",
        "trainable.backend",
        "trainable.config",
        "trainable.envs",
        "trainable.files",
        "trainable.models",
        "trainable.rollout",
        "trainable.runs",
    ),
    "trainable.diagnostics": (
        "trainable.algo",
        "trainable.backend",
        "trainable.config",
        "trainable.envs",
        "trainable.files",
        "trainable.models",
        "trainable.ppo",
        "trainable.rollout",
        "trainable.runs",
    ),
    "trainable.tiny": (
        "trainable.algo",
        "trainable.config",
        "trainable.envs",
        "trainable.kernels",
        "trainable.models",
        "trainable.ppo",
        "trainable.rollout",
    ),
    "trainable.export": (
        "trainable.backend",
        "trainable.config",
        "trainable.envs",
        "trainable.models",
        "trainable.runs",
    ),
    # The kinds of runs by name, and what Ray Tune runs, which may import all of them.
    "trainable.families": ("trainable.config", "trainable.runs.records", "trainable.runs.study_record"),
    "trainable.language_model": ("trainable",),
    "trainable.trial": ("trainable",),
    # Tries the parts of a user, of which each is used in another folder.
    "trainable.part_checks": ("trainable",),
    "trainable": (),
    # Declare.
    "search_spaces.declaration": ("trainable.config", "trainable.families"),
    "search_spaces.language_model": (
        "search_spaces.declaration",
        "trainable.config",
        "trainable.families",
        "trainable.runs.records",
        "trainable.runs.study_record",
    ),
    "search_spaces": ("search_spaces", "trainable.command.config", "trainable.families"),
    "search_spaces.ragen": ("search_spaces", "trainable.command.config", "trainable.config", "trainable.families"),
    # Read: of `trainable` only the names and types of rows, how files are written, and the thresholds of stop rules.
    "analysis": (
        "analysis",
        "trainable.config.aliases",
        "trainable.config.setting_types",
        "trainable.config.choices",
        "trainable.config.command_lines",
        "trainable.config.sections",
        "trainable.families",
        "trainable.runs.records",
        "trainable.files",
        "trainable.runs.episode_lines",
        "trainable.runs.history",
        "trainable.runs.study_record",
        "trainable.runs.run_files",
        "trainable.runs.stop_rules",
        "trainable.sources",
    ),
    # Writes runs.
    "analysis.sources.attach": (
        "trainable.config.setting_types",
        "analysis.sources.importing",
        "trainable.files",
        "trainable.runs.failures",
        "trainable.runs.history",
        "trainable.runs.run_files",
        "trainable.runs.study_record",
        "trainable.sources",
    ),
    # Restores runs.
    "analysis.notebook.frames": ("analysis", "trainable", "tune_study.commands.probe"),
    # Run.
    "tune_study.host": ("trainable",),
    "tune_study.plan": ("search_spaces", "trainable"),
    "tune_study.folder": ("tune_study.host", "tune_study.plan", "analysis", "search_spaces", "trainable"),
    "tune_study.placement": (
        "tune_study.folder",
        "tune_study.host",
        "tune_study.plan",
        "search_spaces",
        "trainable",
    ),
    "tune_study.tune": (
        "tune_study.folder",
        "tune_study.host",
        "tune_study.placement",
        "tune_study.plan",
        "analysis",
        "search_spaces",
        "trainable",
    ),
    "tune_study.tune.search": ("tune_study.folder", "tune_study.plan", "analysis", "search_spaces", "trainable"),
    "tune_study": ("tune_study", "analysis", "search_spaces", "trainable"),
    # The sandboxes may import all of these, and none of them may import a sandbox; nor may a sandbox another one.
    "sandboxes": (),
    "sandboxes.toys": CORE,
    **{f"sandboxes.{name}": (*CORE, "sandboxes.toys") for name in SANDBOXES},
}
"""Folder -> own modules and folders that it may import beside itself. The longest matching prefix counts."""

THIRD_PARTY_IMPORTS: dict[str, tuple[str, ...]] = {
    "trainable": (),
    "trainable.part_checks": ("torch", "numpy", "tokenizers"),
    "trainable.config": ("pydantic", "numpy"),
    "trainable.algo": ("torch",),
    "trainable.algo.names": (),
    "trainable.runs": ("torch", "numpy", "safetensors"),
    "trainable.runs.episode_lines": (),
    "trainable.runs.records": (),
    "trainable.runs.stop_rules": (),
    "trainable.runs.history": (),
    "trainable.runs.study_record": ("pydantic",),
    "trainable.runs.run_files": (),
    "trainable.runs.failures": (),
    "trainable.runs.orphans": ("psutil",),
    "trainable.envs": ("numpy",),
    "trainable.envs.data_rows": ("pyarrow",),
    "sandboxes.trees.repl": ("numpy",),
    "sandboxes.trees.repl.confined_process": (),
    "sandboxes.trees.repl.judge": ("requests", "pydantic"),
    "sandboxes.trees.repl.process": ("pydantic",),
    "sandboxes.trees.repl.questions": ("pydantic",),
    "trainable.kernels": ("torch", "numpy"),
    "trainable.kernels.compiled": ("numpy", "numba", "llvmlite"),
    "trainable.models": ("torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface_hub"),
    "trainable.models.packing": ("torch",),
    "trainable.models.codec": ("numpy",),
    "trainable.models.qwen2": ("torch", "numpy"),
    "trainable.models.qwen2_shape": (),
    "trainable.models.interface": ("torch",),
    "trainable.models.chat_template": ("jinja2", "tokenizers"),
    "trainable.models.lora": ("torch", "numpy", "safetensors", "peft", "bitsandbytes"),
    "trainable.rollout": ("torch", "numpy", "transformers"),
    "trainable.rollout.vllm_sampler": ("torch", "numpy", "safetensors", "vllm"),
    "trainable.backend": ("torch", "numpy"),
    "trainable.backend.zero": ("torch", "deepspeed"),
    "trainable.ppo": ("torch", "numpy"),
    "trainable.ppo.distributed": ("torch", "ray"),
    "trainable.diagnostics": ("torch", "numpy"),
    "trainable.tiny": ("torch", "numpy", "safetensors", "transformers", "tokenizers"),
    "trainable.export": ("torch", "huggingface_hub"),
    "sandboxes": (
        "torch",
        "numpy",
        "transformers",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "pydantic",
        "pandas",
    ),
    "sandboxes.toys.report": ("numpy", "pandas", "altair"),
    "trainable.command.config": ("pydantic",),
    "trainable.trial": ("ray", "pyarrow"),
    "trainable.uploads": ("pyarrow",),
    "search_spaces": (),
    "tune_study.commands.reading.alarms": ("pandas", "pydantic", "rich"),
    "tune_study.commands.reading.explain": ("numpy", "pandas", "rich"),
    "tune_study.commands.reading.plot_gradients": ("pandas", "rich"),
    "tune_study.commands.reading.watch": ("rich", "waitress"),
    "analysis.search.trials": ("numpy", "pandas", "optuna"),
    "analysis": ("numpy", "scipy", "pandas", "pyarrow"),
    # Parts of the trainers that import it.
    "analysis.sources.attach": ("transformers", "verl"),
    "analysis.charts": ("altair", "vl_convert", "numpy", "pandas"),
    "analysis.gradients.files": ("altair", "pandas"),
    "analysis.notebook": ("altair", "pandas"),
    "trainable.sources.event_files": ("tensorboardX", "google"),
    "trainable.sources.wandb_files": ("wandb",),
    "analysis.gallery": ("altair", "jinja2", "numpy", "pandas"),
    "analysis.report": ("altair", "jinja2", "markupsafe", "numpy", "pandas"),
    # tensorboardX is Ray Tune's.
    "tune_study": (
        "ray",
        "tensorboardX",
        "typer",
        "click",
        "rich",
        "wandb",
        "optuna",
        "pyarrow",
        "pydantic",
        "psutil",
        "packaging",
    ),
    "tune_study.plan": ("pydantic",),
    "tune_study.host": ("rich", "psutil"),
}
"""Folder or module -> other packages that it may import. The longest matching prefix counts."""


def find_modules() -> dict[str, Path]:
    """Return the path of every module of this project by its dotted name; a package is its __init__.py."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = find_modules()
FOLDERS = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def get_folder(module: str) -> str:
    return module if module in FOLDERS else module.rpartition(".")[0]


@cache
def list_nodes(source: str) -> list[ast.AST]:
    """Return all nodes of the tree of a source, which several tests look through."""
    return list(ast.walk(ast.parse(source)))


def read_imports(source: str) -> set[str]:
    """Return the modules that a source imports, also under TYPE_CHECKING and inside functions.

    An import from a module of this project counts as the module, and not as the name that is imported from it.
    """
    names: set[str] = set()
    for node in list_nodes(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            dotted_names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                dotted_name if dotted_name in MODULES else node.module or "" for dotted_name in dotted_names.values()
            }
    return names


@cache
def read_all_imports() -> dict[str, set[str]]:
    """Return the imports of every module, which not every process that collects tests has to read."""
    return {name: read_imports(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def find_longest_match(module: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    """Return the longest prefix of `module` in a table, with its entry."""
    prefix = max((name for name in table if is_below(module, (name,))), key=len)
    return prefix, table[prefix]


def find_wrong_imports(module: str, imports: set[str]) -> list[str]:
    """Return the imports of `module` that are not allowed."""
    layer, lower_layers = find_longest_match(module, LAYERS)
    third_party = {*STANDARD_MODULES, *find_longest_match(module, THIRD_PARTY_IMPORTS)[1]}

    def is_wrong(name: str) -> bool:
        package = name.split(".")[0]
        return not is_below(name, (layer, *lower_layers)) if package in PACKAGES else package not in third_party

    return sorted(filter(is_wrong, imports))


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a cycle of a directed graph as its nodes in order, or an empty list."""
    finished: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in finished:
            return []
        for target in sorted(graph.get(node, ())):
            if cycle := search(target, [*path, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := search(node, []))), [])


def test_imports_follow_the_layers() -> None:
    wrong_imports = {module: find_wrong_imports(module, imports) for module, imports in read_all_imports().items()}
    assert {module: names for module, names in wrong_imports.items() if names} == {}


def test_a_wrong_import_is_reported() -> None:
    source = "import torch, numpy\nfrom trainable.ppo import trainer\nfrom analysis.stats import estimates"
    assert find_wrong_imports("analysis.data.load", read_imports(source)) == ["torch", "trainable.ppo.trainer"]
    late_import = "def f():\n    from trainable.diagnostics.collapse import diagnose"
    assert find_wrong_imports("trainable.ppo.trainer", read_imports(late_import)) == ["trainable.diagnostics.collapse"]


def test_layers_name_only_existing_modules() -> None:
    names = {*LAYERS, *THIRD_PARTY_IMPORTS, *(name for lower_layers in LAYERS.values() for name in lower_layers)}
    assert names <= MODULES.keys()


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(get_folder(name) for name in MODULES if name not in FOLDERS)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_a_format_of_logs_has_a_short_module() -> None:
    shared = {f"trainable.sources.{name}" for name in ("reading", "log_files", "logs", "names")}
    formats = {name: path for name, path in MODULES.items() if get_folder(name) == "trainable.sources"}
    assert shared < formats.keys()
    lengths = {name: path.read_text().count("\n") for name, path in formats.items() if name not in shared}
    assert {name: length for name, length in lengths.items() if length > MAX_FORMAT_LINES} == {}


def test_module_imports_have_no_cycle() -> None:
    graph = {name: (imports & MODULES.keys()) - {name} for name, imports in read_all_imports().items()}
    assert find_cycle(graph) == []


def test_folder_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for name, imports in read_all_imports().items():
        graph[get_folder(name)] |= {get_folder(target) for target in imports & MODULES.keys()} - {get_folder(name)}
    assert find_cycle(graph) == []


def test_a_cycle_is_reported() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


ENGINES = frozenset({"vllm", "compiled"})
CHOICES = (
    ENGINES
    | frozenset(ADVANTAGE_ESTIMATORS)
    | frozenset(POLICY_LOSSES)
    | frozenset(RULES)
    | (STUDIES.keys() - {"kl", "entropy"})
)
"""Names of choices, rules and studies, but those that are words for other things too: whoever needs to know something
of one asks for a field of its record."""
DECLARATIONS = {"search_spaces.language_model.family": {"RunConfig"}, "trainable.config.sections": ENGINES}
"""The names that a module may compare with, since it says there what they mean for others."""


def find_compared_names(source: str) -> list[str]:
    """Return the choices that a source compares a value with, and the configuration classes in its isinstance()."""
    names: list[str] = []
    for node in list_nodes(source):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            names += [
                operand.value for operand in operands if isinstance(operand, ast.Constant) and operand.value in CHOICES
            ]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names += [name for name in ("RunConfig", "UpdateRuleConfig") if name in ast.unparse(node.args[1])]
    return names


def test_choices_are_not_compared_by_name() -> None:
    for module, path in MODULES.items():
        names = find_compared_names(path.read_text(encoding="utf-8"))
        assert set(names) <= DECLARATIONS.get(module, frozenset()), module


def test_a_comparison_is_reported() -> None:
    assert find_compared_names('x = 1 if name == "gae" else 2 if isinstance(c, RunConfig) else 3') == [
        "gae",
        "RunConfig",
    ]


def find_unquoted_commands(source: str) -> list[str]:
    """Return the commands of a source that are put together as text, or quoted by it, instead of by format_command."""
    commands: list[str] = []
    for node in list_nodes(source):
        is_format = isinstance(node, ast.Attribute) and node.attr == "format"
        if is_format or isinstance(node, ast.JoinedStr | ast.BinOp):
            texts = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
            commands += [text for text in texts if isinstance(text, str) and PROGRAM in text]
        if isinstance(node, ast.Import) and any(alias.name == "shlex" for alias in node.names):
            commands.append("shlex")
    return commands


def test_commands_that_are_printed_are_quoted_in_one_place() -> None:
    for module in MODULES.keys() - {"trainable.config.command_lines"}:
        assert find_unquoted_commands(MODULES[module].read_text(encoding="utf-8")) == [], module


@pytest.mark.parametrize(
    "source", ['f"{PREFIX} resume {folder}"', '"PREFIX resume " + folder', '"PREFIX {}".format(folder)', "import shlex"]
)
def test_a_command_that_is_put_together_is_reported(source: str) -> None:
    assert find_unquoted_commands(source.replace("{PREFIX}", PROGRAM).replace("PREFIX", PROGRAM))


def test_a_class_has_a_name_of_its_own() -> None:
    modules_by_class: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        (module_node, *_) = list_nodes(path.read_text(encoding="utf-8"))
        assert isinstance(module_node, ast.Module)
        for node in module_node.body:
            if isinstance(node, ast.ClassDef):
                modules_by_class.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in modules_by_class.items() if len(modules) > 1} == {}


LIGHT_IMPORTS = (
    # In one process, since what is absent after several imports is absent after each.
    (
        # A sandbox can be imported before the studies are listed.
        ("import sandboxes.toys.study", ("torch", "ray", "transformers", "pandas")),
        ("import tune_study.commands.cli", ("torch", "ray", "transformers", "altair", "pandas")),
        ("import analysis", ("torch", "ray", "transformers", "scipy.stats", "scipy.optimize")),
        ("import trainable.ppo.trainer", ("ray", "transformers", "vllm", "deepspeed", "peft")),
    ),
    (
        # What a study's driver imports.
        (
            "from tune_study.tune import run; run.import_tensorboard(); "
            "import tensorboardX, tune_study.tune.callbacks, trainable.trial, analysis.report.pages",
            ("torch", "transformers", "numba"),
        ),
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("steps", LIGHT_IMPORTS, ids=["parts", "driver"])
def test_light_imports_stay_light(steps: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    lines = ["import sys"]
    for statement, absent in steps:
        lines += [statement, f"print([name for name in {absent!r} if name in sys.modules])"]
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert process.stdout.split() == ["[]"] * len(steps), steps


def test_no_tolerance_is_so_wide_that_a_test_is_empty() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for tolerance in re.findall(r"\b(?:rtol|rel)=([\d.e+-]+)\s*[,)]", path.read_text(encoding="utf-8")):
            assert float(tolerance) <= 1e-2, path
