"""The recipes for other trainers: their plans, and their words against the real configurations of these trainers."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import get_output, type_words
from trainable.config.command_lines import split_words

FOLDER = Path(__file__).parents[3] / "examples" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
MAX_LINES = 40


def read_plan(recipe: str) -> dict[str, Any]:
    """The plan of a recipe."""
    (plan,) = json.loads(get_output(type_words("run", FOLDER / f"{recipe}.py", "--dry-run", "--json")))["plans"]
    return dict(plan)


def get_words(plan: Mapping[str, Any]) -> list[str]:
    """The command of the first arm, without the program."""
    words = split_words(next(iter(plan["commands"].values())))
    return words[words.index("-m") + 2 :] if "-m" in words else words[1:]


def find_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_a_plan(recipe: str) -> None:
    text = (FOLDER / f"{recipe}.py").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    plan = read_plan(recipe)
    lines = "\n".join(plan["lines"])
    assert lines.count(" differs in: ") == 2
    assert "{seed}" not in lines
    assert "\nLogs: {" in lines
    assert "\nCheckpoints: {output}/" in lines
    assert get_words(plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_reads_the_words_of_its_recipe() -> None:
    from trl.scripts.grpo import make_parser

    words = get_words(read_plan("trl_grpo"))
    script, training, model, *_ = make_parser().parse_args_and_config(args=[*words, "--bf16", "False", "--use_cpu"])
    assert script.reward_funcs == ["my_rewards.score"]
    assert (training.beta, training.learning_rate, training.max_steps, training.seed) == (0.0, 1e-6, 200, 0)
    assert (training.output_dir, model.model_name_or_path) == ("{output}", "Qwen/Qwen2.5-0.5B-Instruct")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hydra") is None, reason="make test-trl")
def test_verl_reads_the_words_of_its_recipe() -> None:
    from hydra import compose, initialize_config_dir

    # Braces are fields of ours, which Hydra would read as its own.
    words = [
        word.replace("{", "").replace("}", "") for word in get_words(read_plan("verl_ppo")) if "hydra.run" not in word
    ]
    with initialize_config_dir(config_dir=str(find_folder("verl") / "trainer" / "config"), version_base=None):
        config = compose(config_name="ppo_trainer", overrides=words)
    actor = config.actor_rollout_ref.actor
    assert (actor.kl_loss_coef, actor.use_kl_loss, actor.optim.lr) == (0.001, True, 1e-6)
    assert (config.trainer.total_training_steps, list(config.trainer.logger)) == (200, ["console"])
    assert config.trainer.default_local_dir == "output/checkpoints"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="make test-trl")
def test_tinker_has_the_settings_of_its_recipe() -> None:
    """By the source: to import it, the packages of its service are needed."""
    tree = ast.parse((find_folder("tinker_cookbook") / "recipes" / "math_rl" / "train.py").read_text())
    (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CLIConfig"]
    annotated = [node.target for node in config.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    assert {word.partition("=")[0] for word in get_words(read_plan("tinker_math"))} <= fields
