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
    "trainable.config": (
        ("trainable.aliases", "trainable.sections", "trainable.setting_types", "trainable.study_config"),
        ("pydantic",),
    ),
    "trainable.section": (("trainable.setting_types",), ("pydantic",)),
    "trainable.sections": (("trainable.section", "trainable.setting_types", "trainable.study_config"), ("pydantic",)),
    "trainable.study_config": (("trainable.section",), ()),
    "trainable.setting_types": ((), ("pydantic",)),
    "trainable.aliases": ((), ()),
    "trainable.records": ((), ()),
    "trainable.seeds": ((), ("numpy",)),
    "trainable.stop_rules": (("trainable.sections",), ()),
    "trainable.links": ((), ()),
    "trainable.run_files": (("trainable.links",), ()),
    "trainable.failures": ((), ()),
    "trainable.full_disk": (("trainable.failures",), ()),
    "trainable.uris": (("trainable.failures",), ()),
    "trainable.remote": (("trainable.uris", "trainable.failures"), ("pyarrow",)),
    "trainable.mirror": (("trainable.remote", "trainable.failures", "trainable.full_disk", "trainable.run_files"), ()),
    "trainable.algo": (("trainable.algo",), ("torch",)),
    "trainable.sokoban": (("trainable.sokoban", "trainable.seeds"), ("numpy",)),
    "trainable.chat": ((), ()),
    "trainable.chat_template": (("trainable.chat",), ("jinja2", "tokenizers")),
    "trainable.protocol": (("trainable.sokoban", "trainable.seeds", "trainable.chat"), ("numpy",)),
    "trainable.qwen2_shape": ((), ("torch",)),
    "trainable.kv_cache": ((), ("torch",)),
    "trainable.packing": ((), ("torch",)),
    "trainable.qwen2": (("trainable.kv_cache", "trainable.packing", "trainable.qwen2_shape"), ("torch",)),
    "trainable.language_model": (("trainable.kv_cache", "trainable.qwen2"), ("torch",)),
    "trainable.hub_config": ((), ("torch", "transformers")),
    "trainable.hub_model": (
        ("trainable.hub_config", "trainable.kv_cache", "trainable.qwen2", "trainable.failures"),
        ("torch", "transformers"),
    ),
    "trainable.rollout": (
        ("trainable.rollout", "trainable.sokoban", "trainable.protocol", "trainable.seeds", "trainable.config",
         "trainable.language_model", "trainable.failures"),
        ("torch", "numpy", "transformers"),
    ),
    "trainable.rollout.vllm_sampler": (
        ("trainable.rollout", "trainable.failures", "trainable.qwen2"),
        ("torch", "numpy", "safetensors", "vllm"),
    ),
    "trainable.checkpoint": (("trainable.run_files", "trainable.links"), ("torch", "safetensors")),
    "trainable.ppo_trainable": (("trainable",), ("torch", "ray")),
    "trainable.backend.ranks": (("trainable",), ("torch", "ray")),
    "trainable.backend.zero": (("trainable",), ("torch", "deepspeed")),
    "trainable.backend.zero_weights": (("trainable",), ("torch", "deepspeed")),
    "trainable.backend.make": (("trainable",), ("torch",)),
    "trainable.backend": (
        ("trainable.backend", "trainable.meter", "trainable.nonfinite", "trainable.state", "trainable.sections"),
        ("torch", "numpy"),
    ),
    "trainable.lora": (("trainable",), ("torch", "numpy", "safetensors", "peft")),
    "trainable.sandbox.methods": ((), ()),
    "trainable.sandbox.rejections": (("trainable.sandbox",), ()),
    "trainable.sandbox.records": (("trainable.records",), ()),
    "trainable.sandbox.config": (
        ("trainable.sandbox.methods", "trainable.sandbox.rejections", "trainable.study_config",
         "trainable.setting_types"),
        ("pydantic",),
    ),
    "trainable.sandbox.rules": (("trainable.sandbox", "trainable.algo"), ("torch",)),
    "trainable.sandbox.update_rules": (("trainable.sandbox",), ("torch",)),
    "trainable.sandbox.trainable": (("trainable",), ("torch", "ray")),
    "trainable": (("trainable",), ("torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface_hub")),
    "search_spaces": (
        ("search_spaces", "trainable.config", "trainable.study_config", "trainable.sandbox.config",
         "trainable.sandbox.methods"),
        (),
    ),
    "analysis": (
        ("analysis", "trainable.records", "trainable.sandbox.records", "trainable.links"),
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
    own, outside = allowed("analysis.load")
    assert not below("trainable.trainer", own)
    assert "torch" not in outside


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import analysis", ("torch", "ray", "transformers")),
        ("import search_spaces", ("torch", "ray", "transformers")),
        ("import tune_study.cli", ("torch", "ray", "transformers", "matplotlib", "pandas")),
        ("import trainable.trainer", ("ray", "transformers", "vllm", "deepspeed", "peft")),
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
