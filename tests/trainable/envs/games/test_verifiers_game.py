"""examples/verifiers_game.py: what it says without the package, and with it, the levels and rewards of tasksets."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.command_line import assert_refused, type_words
from trainable.config import own_parts
from trainable.config.own_parts import PartFile, pin_parts, register_file
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.part_checks import check_part

EXAMPLE = Path(__file__).parents[4] / "examples" / "verifiers_game.py"


def test_without_the_package_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_parts, "_loaded_files", {})
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ("run", "kl", "--preset", "small", "--model", "none", "--output", "out", "--env", f"{EXAMPLE}:GAME")
    assert_refused(type_words(*words), "ModuleNotFoundError", "# python -m pip install 'verifiers>=0.4'`). Correct the")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("verifiers.v1", reason="verifiers, a large package that nothing else needs, is not installed")
    return register_file(PartFile(str(EXAMPLE), EXAMPLE.read_text("utf-8")))


def test_the_example_passes_the_check_of_a_game(example: Any) -> None:
    settings = {"env.name": "verifiers_game.py:GAME", "model.path": "none", **example.GAME.settings}
    check_part(pin_parts(apply_overrides(RunConfig(), settings)), "env.name")


def test_sets_are_disjoint_and_do_not_depend_on_the_order_of_tasks(example: Any) -> None:
    game, vf = example.GAME, example.vf
    sets = [{level.prompt for level in levels} for levels in (game.training, game.validation, game.test)]
    assert len(set.union(*sets)) == sum(map(len, sets)) == 900
    assert min(map(len, sets)) > 60
    other = example.VerifiersGame(example.Sums(vf.TasksetConfig()).shuffle(seed=1))
    seeds = [123, 10_000, 10_001]
    assert [level.key for level in other.make_levels(seeds)] == [level.key for level in game.make_levels(seeds)]
    with pytest.raises(ValueError, match="Sums has too few prompts"):
        example.VerifiersGame(example.Sums(vf.TasksetConfig()).take(2))


def test_rewards_are_weighted_sums_of_the_rewards_of_a_task(example: Any) -> None:
    vf = example.vf

    class Graded(example.Sum):
        @vf.reward(weight=0.5)
        async def is_short(self, trace: Any) -> float:
            assert [message.role for message in trace.messages] == ["user", "assistant"]
            return float(len(trace.last_reply) < 5)

    level = example.GAME.make_levels([123])[0]
    level = level._replace(task=Graded(level.task.data))
    answer = str(sum(map(int, level.task.data.prompt.split("+"))))
    actions = [(answer,), (f"It is {answer}.",), ("no",), ()]
    outcome = example.GAME.step([level] * 4, actions, np.zeros((4, 1)))
    np.testing.assert_array_equal(outcome.rewards, [1.5, 1.0, 0.5, 0.5])
    np.testing.assert_array_equal(outcome.success, [True, True, False, False])
    np.testing.assert_array_equal(outcome.done, [True, True, True, False])


def test_tasks_that_need_more_than_a_reply_are_refused(example: Any) -> None:
    vf = example.vf

    class Measured(vf.Task):
        @vf.metric
        async def seconds(self, trace: Any, runtime: Any) -> float:
            return 0.0

    data = vf.TaskData(prompt="1 + 1")
    tasks = {
        "a runtime": Measured(data),
        "a judge": vf.Task(data, vf.TaskConfig(judges=[vf.ReferenceJudgeConfig(id="reference")])),
    }
    for need, task in tasks.items():
        taskset = type("Tasks", (vf.Taskset,), {"load": lambda self, task=task: [task]})(vf.TasksetConfig())
        with pytest.raises(ValueError, match=f"{type(task).__name__} needs {need}: this game has only replies"):
            example.VerifiersGame(taskset)
