"""Tests of the published numbers: that they stay as they were compared, and that our studies have their settings."""

import hashlib
from pathlib import Path
from types import ModuleType

import pytest

from sandboxes.distillation.family import TRIAL_COLUMNS as DISTILLATION_COLUMNS
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.published import cells, distillation_sandbox, update_rule_sandbox
from sandboxes.toys.published.cells import POOLED
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.records import STEP_COLUMNS, TRIAL_COLUMNS
from search_spaces.catalog import STUDIES
from trainable.config.run_config import apply_overrides

DIGESTS = {
    "distillation_sandbox": "68017a0ac62737f8c4e804e7c231fef4e94c26545b283942b5a0addb5be3ad84",
    "update_rule_sandbox": "0201499523e7390ca128e9267b13ae265379a48f1261c64a718d6b8c4c08b358",
}
"""SHA-256 of the recorded numbers when they were last compared with a second typing of the printed tables."""
UNCOMPARED_SETTINGS = {
    "trainer", "seed", "diagnostics", "entropy_diagnostics", "oracle_fit", "hidden", "mnist_folder", "model_name",
    "text_file", "context_len", "kl_weight",
}  # fmt: skip
"""Settings that differ between runs of an arm, measure it, or belong to other tasks."""


def test_recorded_numbers_stay_as_they_were_compared_with_the_printed_ones_and_are_of_columns() -> None:
    for source, digest in DIGESTS.items():
        content = (Path(cells.__file__).parent / f"{source}.csv").read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, source
    steps, trials = ({column.name for column in columns} for columns in (STEP_COLUMNS, TRIAL_COLUMNS))
    for cell in update_rule_sandbox.CELLS:
        assert cell.column in (steps if cell.kind == POOLED else trials)
    assert {cell.column for cell in distillation_sandbox.CELLS} <= {column.name for column in DISTILLATION_COLUMNS}


@pytest.mark.parametrize(
    ("source", "name"),
    [(source, name) for source in (update_rule_sandbox, distillation_sandbox) for name in source.STUDY_SETTINGS],
)
def test_our_arms_have_the_settings_of_the_published_ones(source: ModuleType, name: str) -> None:
    """Every setting that makes a run what it is has a published value, which is ours."""
    is_of_rules = source is update_rule_sandbox
    default = UpdateRuleConfig() if is_of_rules else DistillationConfig()
    compared = set(type(default).model_fields) - UNCOMPARED_SETTINGS
    trainer_fields = set(type(default.trainer).model_fields) - set(default.unhashed_settings["trainer"])
    assert trainer_fields == {"total_training_steps", "test_freq", "n_gpus_per_node"}
    study = STUDIES[name]
    arms = {cell.arm for cell in source.CELLS if name in cell.studies}
    assert arms <= set(study.axis.named_settings)
    assert arms == set(study.axis.named_settings) or not is_of_rules  # studies of distillation have further arms
    for arm in arms:
        published = source.make_conditions(name, arm)
        assert published.keys() == compared | {"trainer.total_training_steps", "trainer.test_freq"}
        overrides = {**study.fixed_settings, **study.axis.named_settings[arm]}
        config = apply_overrides(default, overrides).model_dump()
        ours = config | {f"trainer.{key}": value for key, value in config["trainer"].items()}
        assert {key: ours[key] for key in published} == published, arm
