"""The import table of the design, run over the syntax trees, and the boundaries that keep imports light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tune_study", "trainable", "search_spaces", "analysis")
STANDARD = set(sys.stdlib_module_names)

# Module prefix -> (own modules it may import, other packages it may import). The longest matching prefix counts.
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "trainable.config.run_config": (
        ("trainable.config.aliases", "trainable.config.sections", "trainable.config.setting_types", "trainable.config.study_config"),
        ("pydantic",),
    ),
    "trainable.config.section": (("trainable.config.setting_types",), ("pydantic",)),
    "trainable.config.sections": (("trainable.config.section", "trainable.config.setting_types", "trainable.config.study_config"), ("pydantic",)),
    "trainable.config.study_config": (("trainable.config.section",), ()),
    "trainable.config.setting_types": ((), ("pydantic",)),
    "trainable.config.aliases": ((), ()),
    "trainable.runs.records": ((), ()),
    "trainable.config.seeds": ((), ("numpy",)),
    "trainable.runs.stop_rules": (("trainable.config.sections",), ()),
    "trainable.runs.links": ((), ()),
    "trainable.runs.run_files": (("trainable.runs.links",), ()),
    "trainable.runs.failures": ((), ()),
    "trainable.runs.full_disk": (("trainable.runs.failures",), ()),
    "trainable.runs.uris": (("trainable.runs.failures",), ()),
    "trainable.runs.remote": (("trainable.runs.uris", "trainable.runs.failures"), ("pyarrow",)),
    "trainable.runs.mirror": (("trainable.runs.remote", "trainable.runs.failures", "trainable.runs.full_disk", "trainable.runs.run_files"), ()),
    "trainable.algo": (("trainable.algo",), ("torch",)),
    "trainable.envs.sokoban": (("trainable.envs.sokoban", "trainable.config.seeds"), ("numpy",)),
    "trainable.envs.chat": ((), ()),
    "trainable.models.chat_template": (("trainable.envs.chat",), ("jinja2", "tokenizers")),
    "trainable.envs.sokoban.prompt": (("trainable.envs.sokoban", "trainable.config.seeds", "trainable.envs.chat"), ("numpy",)),
    "trainable.models.qwen2_shape": ((), ("torch",)),
    "trainable.models.kv_cache": ((), ("torch",)),
    "trainable.models.packing": ((), ("torch",)),
    "trainable.models.qwen2": (("trainable.models.kv_cache", "trainable.models.packing", "trainable.models.qwen2_shape"), ("torch",)),
    "trainable.models.interface": (("trainable.models.kv_cache", "trainable.models.qwen2"), ("torch",)),
    "trainable.models.hub_config": ((), ("torch", "transformers")),
    "trainable.models.hub_model": (
        ("trainable.models.hub_config", "trainable.models.kv_cache", "trainable.models.qwen2", "trainable.runs.failures"),
        ("torch", "transformers"),
    ),
    "trainable.rollout": (
        ("trainable.rollout", "trainable.envs.sokoban", "trainable.envs.sokoban.prompt", "trainable.config.seeds", "trainable.config.run_config",
         "trainable.models.interface", "trainable.runs.failures"),
        ("torch", "numpy", "transformers"),
    ),
    "trainable.rollout.vllm_sampler": (
        ("trainable.rollout", "trainable.runs.failures", "trainable.models.qwen2"),
        ("torch", "numpy", "safetensors", "vllm"),
    ),
    "trainable.runs.checkpoint": (("trainable.runs.run_files", "trainable.runs.links"), ("torch", "safetensors")),
    "trainable.ppo_trainable": (("trainable",), ("torch", "ray")),
    "trainable.ppo.ranks": (("trainable",), ("torch", "ray")),
    "trainable.backend.zero": (("trainable",), ("torch", "deepspeed")),
    "trainable.backend.zero_weights": (("trainable",), ("torch", "deepspeed")),
    "trainable.backend.make": (("trainable",), ("torch",)),
    "trainable.backend": (
        ("trainable.backend", "trainable.backend.meter", "trainable.runs.nonfinite", "trainable.runs.state", "trainable.config.sections"),
        ("torch", "numpy"),
    ),
    "trainable.models.lora": (("trainable",), ("torch", "numpy", "safetensors", "peft")),
    "trainable.sandbox.config.methods": ((), ()),
    "trainable.sandbox.config.rejections": (("trainable.sandbox",), ()),
    "trainable.sandbox.measure.records": (("trainable.runs.records",), ()),
    "trainable.sandbox.config.settings": (
        ("trainable.sandbox.config.methods", "trainable.sandbox.config.rejections", "trainable.config.study_config",
         "trainable.config.setting_types"),
        ("pydantic",),
    ),
    "trainable.sandbox.rules": (("trainable.sandbox", "trainable.algo"), ("torch",)),
    "trainable.sandbox.rules.catalog": (("trainable.sandbox",), ("torch",)),
    "trainable.sandbox.training.trainable": (("trainable",), ("torch", "ray")),
    "trainable": (("trainable",), ("torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface_hub")),
    "search_spaces": (
        ("search_spaces", "trainable.config.run_config", "trainable.config.study_config", "trainable.sandbox.config.settings",
         "trainable.sandbox.config.methods"),
        (),
    ),
    "analysis": (
        ("analysis", "trainable.runs.records", "trainable.sandbox.measure.records", "trainable.runs.links"),
        ("numpy", "scipy", "pandas", "pyarrow", "matplotlib", "jinja2"),
    ),
    "tune_study": (
        ("tune_study", "search_spaces", "analysis", "trainable"),
        ("ray", "typer", "click", "rich", "wandb", "optuna", "pyarrow", "pydantic", "psutil", "packaging"),
    ),
}  # fmt: skip


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def allowed(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    prefixes = [prefix for prefix in TABLE if module == prefix or module.startswith(prefix + ".")]
    return TABLE[max(prefixes, key=len)]


def below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_one_way(module: str, path: Path) -> None:
    own, outside = allowed(module)
    wrong = [
        name
        for name in imports(path)
        if (not below(name, own) if name.split(".")[0] in PACKAGES else name.split(".")[0] not in {*STANDARD, *outside})
    ]
    assert not wrong, f"{module} imports {wrong}"


def test_the_table_catches_a_wrong_import() -> None:
    own, outside = allowed("analysis.data.load")
    assert not below("trainable.ppo.trainer", own)
    assert "torch" not in outside


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import analysis", ("torch", "ray", "transformers")),
        ("import search_spaces", ("torch", "ray", "transformers")),
        ("import tune_study.commands.cli", ("torch", "ray", "transformers", "matplotlib", "pandas")),
        ("import trainable.ppo.trainer", ("ray", "transformers", "vllm", "deepspeed", "peft")),
    ],
)
def test_light_imports_stay_light(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_no_tolerance_is_so_wide_that_a_test_is_empty() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("rtol", "rel") and isinstance(node.value, ast.Constant):
                assert node.value.value is None or node.value.value <= 1e-2, f"{path}:{node.value.lineno}"
