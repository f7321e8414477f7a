"""The family of the update-rule sandbox, and what its studies share: the conditions of its documents."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from search_spaces.declaration.family import Family, Settings, Shown
from search_spaces.declaration.study import Axis, Contrasts, Names, Study, unchanged
from trainable.sandbox.config.settings import UpdateRuleConfig

GROUPED: Settings = MappingProxyType({"group_size": 8, "inner_epochs": 4})
"""What the documents call grouped: 12 prompts of 8 rollouts, four optimizer steps a batch."""

REVERSAL: Settings = MappingProxyType(
    {
        "task": "token_reversal",
        "batch_size": 96,
        "trainer.total_training_steps": 300,
        "trainer.test_freq": 20,
        "trainer.resume_every": 100,
    }
)
"""The shared conditions of the published sweeps."""

SMOKE: Settings = MappingProxyType(
    {"batch_size": 16, "trainer.total_training_steps": 4, "trainer.test_freq": 4, "trainer.resume_every": 4}
)

_BYTES_OF_A_PARAMETER = 12
"""A weight and Adam's two moments, float32."""
_STATE_BESIDE = 200_000
"""Headers, counters, settings."""
_BYTES_OF_A_ROW = 12_000
"""metrics.jsonl 1.5 kB, Tune's result.json, progress.csv and TensorBoard, the log, tables and report."""


def words(config: UpdateRuleConfig) -> dict[str, str]:
    """What every template of a study may use: {task} and {method}."""
    return {"task": config.task, "method": config.method}


def loads(config: UpdateRuleConfig) -> str | None:
    """The language model that a condition loads, if its task does."""
    return config.model_name if config.task == "lm_bandit" else None


def sizes(config: UpdateRuleConfig, parameters: int) -> tuple[int, int]:
    """Bytes of a state of one run at most, and of a row with all that is made of it. parameters: of what it loads."""
    length = 2 * config.seq_len + 1
    transformer = config.num_layers * 13 * config.d_model**2 + (2 * config.vocab_size + 8 + length) * config.d_model
    mlp = (784 + config.hidden + 12) * config.hidden
    batches = max(config.replay_capacity, config.delay + 1)
    a_batch = config.batch_size * (max(784 * 4, length * 8, config.context_len * 8) + config.seq_len * 40)
    weights = _BYTES_OF_A_PARAMETER * max(transformer, mlp, parameters)
    return weights + batches * a_batch + _STATE_BESIDE, _BYTES_OF_A_ROW


UPDATE_RULES = Family(
    name="update_rules",
    trainer="trainable.families:UPDATE_RULES",
    config=UpdateRuleConfig,
    presets={"paper": MappingProxyType({}), "laptop": MappingProxyType({})},
    seeds={"paper": 3, "laptop": 3},
    words=words,
    loads=loads,
    seeds_together=True,
    sizes=sizes,
    models=("model_name",),
    files=("mnist_folder", "text_file"),
    shown=(Shown("test_error", "test error", ".3f"), Shown("entropy", "entropy", ".3f"), Shown("loss", "loss", ".4f")),
    line=(
        Shown("test_error", "test_error", ".4f"),
        Shown("test_error_unscored", "test_error_unscored", ".4f"),
        Shown("chain_reward", "chain_reward", ".4f"),
        Shown("entropy", "entropy", ".4f"),
        Shown("reward", "reward", ".4f"),
        Shown("loss", "loss", ".5f"),
        Shown("seconds", "seconds", ".2f"),
    ),
)


def sandbox_study(
    name: str,
    question: str,
    arms: Mapping[str, Settings],
    baseline: str,
    fixed: Settings = REVERSAL,
    setting: str = "update rule",
    run: str | None = None,
    smoke: Settings = SMOKE,
    contrasts: Contrasts = MappingProxyType({}),
    adapt: Callable[[Settings, Any], Settings] = unchanged,
) -> Study:
    """A study whose arms are conditions by name; the first paragraph of `question` is asked.

    arms: name -> what it sets beside `fixed`. setting: what the arms differ in, in words. run: the folder's template,
    the study's name if it is left out.
    """
    run = run or name.replace("-", "_")
    return Study(
        name=name,
        question=question.split("\n\n")[0],
        axis=Axis(
            setting=setting,
            option="--arms",
            grids={"paper": tuple(arms), "laptop": tuple(arms)},
            named=arms,
            adapt=adapt,
        ),
        fixed=fixed,
        baseline=baseline,
        published=Names(
            run=run,
            experiment=f"{run}-{{arm}}",
            title=name.replace("-", " ").capitalize(),
            summary="{arm} | task={task} | method={method}",
            wandb_project="update_rule_sandbox",
            log="{run}/{experiment}.log",
            checkpoints="{run}/{experiment}",
            summary_times=("total",),
            probe_log="",
        ),
        family=UPDATE_RULES,
        stop_rules=("uniform_groups",),
        smoke=smoke,
        contrasts=contrasts,
    )
