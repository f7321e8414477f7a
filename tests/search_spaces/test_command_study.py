"""Declarations of studies whose trials are a command: arms, types of settings, refusals, the space for Ray Tune."""

from typing import Any

import pytest

from search_spaces.command_study import REMARKS, make_command_study
from search_spaces.declaration.study import Study
from trainable.command.trial import Command
from tune_study.plan.study_plan import make_arm_config, make_base_config
from tune_study.tune.tuner import get_trainable, param_space

SETTINGS = {"lr": 1e-5, "n": 2, "loss.beta": 0, "name": "m"}


def make_study(**fields: Any) -> Study:
    return make_command_study("my-study", "Is it?", "train {lr} {n} {loss.beta} {name}", SETTINGS, **fields)


def list_arms(study: Study) -> dict[str, dict[str, object]]:
    base = make_base_config(study, "laptop")
    configs = {arm: make_arm_config(study, base, arm) for arm in study.get_grid("laptop")}
    return {arm: config.settings for arm, config in configs.items()}  # type: ignore[attr-defined]


def test_one_setting_is_the_axis() -> None:
    study = make_study(vary={"loss.beta": (0, 0.1)})
    assert (study.axis.setting, study.baseline) == ("args.loss.beta", "0")
    assert list_arms(study) == {"0": {**SETTINGS, "loss.beta": 0.0}, "0.1": {**SETTINGS, "loss.beta": 0.1}}
    # A whole number of which no value is a fraction stays one.
    assert type(list_arms(make_study(vary={"n": (2, 4)}))["4"]["n"]) is int


def test_several_settings_are_a_grid_and_arms_may_be_named() -> None:
    grid = list_arms(make_study(vary={"lr": (1e-5, 1e-4), "n": (1, 2)}))
    assert list(grid) == ["lr1e-05-n1", "lr1e-05-n2", "lr0.0001-n1", "lr0.0001-n2"]
    assert grid["lr0.0001-n1"] == {**SETTINGS, "lr": 1e-4, "n": 1}
    arms = list_arms(make_study(arms={"small": {}, "large": {"n": 8, "loss.beta": 0.5}}))
    assert arms == {"small": SETTINGS, "large": {**SETTINGS, "n": 8, "loss.beta": 0.5}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "A study has arms"),
        ({"vary": {"n": (1, 2)}, "arms": {"a": {}}}, "A study has arms"),
        ({"vary": {"m": (1, 2)}}, "settings lacks m, in which the arms differ"),
        ({"arms": {"a": {"m": 1}}}, "settings lacks m, in which the arms differ"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_study(**fields)


def test_ray_tune_gets_its_space() -> None:
    study = make_study(vary={"loss.beta": (0, 0.1)}, steps=7, gpus=0.5, cpus=3)
    space = param_space(study, seeds=2)
    assert get_trainable(study) is Command
    assert space["args.loss.beta"] == {"grid_search": [0.0, 0.1]}
    assert (space["args.name"], space["trainer.total_training_steps"]) == ("m", 7)
    config = {key: value for key, value in space.items() if key != "run"} | {"args.loss.beta": 0.1, "seed": 1}
    assert Command.make_config(config).settings == {**SETTINGS, "loss.beta": 0.1}  # type: ignore[attr-defined]
    assert Command.default_resource_request(config).bundles == [{"CPU": 3.0, "GPU": 0.5}]
    # The GPUs of a command are in one bundle, since it starts its processes itself.
    bundles = Command.default_resource_request({**config, "trainer.n_gpus_per_node": 4}).bundles
    assert bundles == [{"CPU": 3.0, "GPU": 4.0}]


def test_a_command_without_a_seed_is_remarked() -> None:
    (remark,) = REMARKS
    for command, applies in (("train {n} {flags}", True), ("train {n} {flags} --seed {seed}", False)):
        study = make_command_study("my-study", "Is it?", command, SETTINGS, vary={"n": (1, 2)})
        assert remark.applies(make_base_config(study, "laptop")) == applies
    assert "{seed}" in remark.sentence.format(c=None)
