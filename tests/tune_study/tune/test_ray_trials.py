"""The Trainable as Tune calls it: settings, seeds, results, checkpoints. Without Ray's driver where none is needed."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from sandboxes.update_rules.trial import UpdateRules
from search_spaces.catalog import STUDIES
from tests.fakes.trials import SMALL_TRIAL, TOY, drop_times, make_trial_config, save_trial, start_trial
from trainable.config.run_config import ConfigError
from trainable.files.json_values import write_object
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint
from trainable.runs.failures import CheckpointError, RunFailedError
from trainable.runs.records import carry_values, drop_carried, make_empty_row
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.training import StepResult
from trainable.trial import PPO
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import make_plan
from tune_study.tune.stoppers import RuleStopper, rules
from tune_study.tune.trials import make_trial_configs
from tune_study.tune.tuner import get_trainable, make_tuner, param_space


@pytest.fixture
def make_trial(make_in_folder: Any) -> Any:
    """Return a function that makes a trial of PPO."""
    return lambda name="trial", **config: make_in_folder(PPO, name, config)


@pytest.fixture
def make_toy(make_in_folder: Any) -> Any:
    """Return a function that makes a trial of update rules."""
    return lambda name, seed, **config: make_in_folder(UpdateRules, name, {**TOY, "seed": seed, **config})


@pytest.fixture
def checkpoint(make_trial: Any, tmp_path: Path) -> Path:
    """The checkpoint of a trial after its first step."""
    first = make_trial("first", **SMALL_TRIAL)
    first.step()
    save_trial(first, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


# Settings.


def test_a_setting_may_be_dotted_nested_or_published() -> None:
    for config in (
        {"actor.kl_loss_coef": 0.02},
        {"actor": {"kl_loss_coef": 0.02}},
        {"actor_rollout_ref.actor.kl_loss_coef": 0.02},
        {"actor_rollout_ref": {"actor": {"kl_loss_coef": "0.02"}}},
        {"kl_loss_coef": 0.02},
    ):
        assert PPO.make_config({**config, "seed": 3, "run": {"study": "kl"}}).actor.kl_loss_coef == 0.02


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actor.lr": 1e38}, "actor.lr"),
        ({"actor.no_such_setting": 1}, "There is no setting `actor.no_such_setting`"),
        ({"run": {"stop": ["a"]}}, "`run` has no key `stop`: choose from study"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO.default_resource_request({"trainer.device": "cpu", "trainer.n_gpus_per_node": 0, **config})


@pytest.mark.parametrize(
    ("gpus", "bundles"), [(0, [{"CPU": 1.0}]), (0.5, [{"CPU": 1.0, "GPU": 0.5}]), (2, [{"CPU": 1.0, "GPU": 1.0}] * 2)]
)
def test_a_trial_reserves_what_its_settings_name(gpus: float, bundles: list[dict[str, float]]) -> None:
    device = "cpu" if gpus == 0 else "auto"
    group = PPO.default_resource_request({"trainer.n_gpus_per_node": gpus, "trainer.device": device})
    assert (group.bundles, group.strategy) == (bundles, "STRICT_PACK")
    assert UpdateRules.default_resource_request({"seed": [0, 1]}).bundles == [{"CPU": 1.0}]


# Parameter spaces.


# Of each family, the last: a study with about four arms.
BY_ARMS = sorted(STUDIES, key=lambda name: -abs(len(STUDIES[name].get_grid("laptop")) - 4))


@pytest.mark.parametrize("study", {STUDIES[name].family.name: name for name in BY_ARMS}.values())
def test_a_space_has_the_configurations_of_the_command_line(study: str, tmp_path: Path) -> None:
    declared = STUDIES[study]
    plan = make_plan(declared, "laptop", "", {}, None, 2, tmp_path, n_baseline_seeds=2)
    interrupt: Any = type("NoInterrupt", (), {"path": "", "get_arm_path": staticmethod(str)})
    trainable: Any = get_trainable(declared)
    planned = [
        (config["seed"], trainable.make_config(config).compute_hash())
        for config in make_trial_configs(plan, {}, interrupt)
    ]
    space = param_space(study, seeds=2)
    drawn = [(config["seed"], trainable.make_config(config).compute_hash()) for config in draw_all(space)]
    assert sorted(map(str, drawn)) == sorted(map(str, planned))
    assert {config["run"]["study"] for config in draw_all(space)} == {study}


def draw_all(space: dict[str, Any]) -> list[dict[str, Any]]:
    """All points of a grid, as Tune draws them."""
    from ray.tune.search.variant_generator import generate_variants

    return [config for _, config in generate_variants(space)]


def test_a_domain_of_tune_takes_the_place_of_a_setting() -> None:
    domain = tune.loguniform(1e-4, 1e-3)
    space = param_space("kl", values=("0.1",), **{"actor.lr": domain})
    assert space["actor.lr"] is domain
    assert space["seed"] == 0
    assert space["actor.kl_loss_coef"] == 0.1
    grid = param_space("entropy", values=("0", "0.1"), **{"actor_rollout_ref.actor.optim.lr": tune.grid_search([1, 2])})
    assert grid["actor.lr"] == {"grid_search": [1, 2]}
    assert grid["actor.entropy_coeff"] == {"grid_search": [0.0, 0.1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"study": "nothing"}, "There is no study `nothing`"),
        ({"study": "kl", "seeds": 0}, "leaves nothing to run"),
    ],
)
def test_a_space_that_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((PlanError, ConfigError, ValueError), match=message):
        param_space(**arguments)


def test_the_tuner_of_a_study_has_its_trainable_and_what_is_given(tmp_path: Path) -> None:
    tuner = make_tuner("influence", seeds=2, values=("GRPO",), name="mine", storage_path=str(tmp_path))
    assert tuner._local_tuner.trainable is UpdateRules
    assert tuner._local_tuner.get_run_config().name == "mine"
    assert tuner._local_tuner.get_run_config().checkpoint_config.checkpoint_at_end


# Results.


def test_a_column_keeps_its_last_value() -> None:
    last_values: dict[str, Any] = {}
    first = carry_values({"step": 1, "base_val_success": 0.25, "val_success": None, "kl": None}, last_values)
    assert (first["val_success"], first["carried"]) == (0.25, "val_success kl")
    assert math.isnan(first["kl"])
    second = carry_values({"step": 2, "base_val_success": None, "val_success": 0.5, "kl": None}, last_values)
    assert (second["val_success"], second["base_val_success"]) == (0.5, 0.25)
    third = carry_values({"step": 3, "base_val_success": None, "val_success": None, "kl": 0.0}, last_values)
    assert (third["val_success"], third["kl"], third["carried"]) == (0.5, 0.0, "base_val_success val_success")
    assert drop_carried(third)["val_success"] is None
    assert drop_carried({"reward_std": 1.0}) == {"reward_std": 1.0}


def test_a_carried_validation_is_none_for_a_stop_rule() -> None:
    settings = PPO.make_config({"early_stop.success_patience": 2, "early_stop.success_threshold": 0.9}).early_stop
    stopper = RuleStopper("low_validation_success", settings)
    result = {"reward_std": 1.0, "groups_kept": 4, "val_success": 0.1}
    for step in range(1, 9):
        carried = "" if step % 4 == 0 else "val_success"
        row = {**result, "training_iteration": step, "carried": carried}
        assert stopper("trial", row) == (step == 8)  # the second validation below the threshold, not the second row
    assert (row["stop_rule"], row["stop_step"]) == ("low_validation_success", 8)


def test_the_rules_of_a_study_have_its_thresholds() -> None:
    combined = rules("kl")
    names = [stopper.rule for stopper in combined._stoppers]
    assert names == [*STUDIES["kl"].stop_rules, "alarm"]
    assert combined._stoppers[0].settings == PPO.make_config(param_space("kl", values=("0",))).early_stop
    assert rules("influence")._stoppers  # only the alarm: a trial of several runs ends when all have ended


@pytest.mark.parametrize("all_quantities", [False, True])
def test_a_failure_before_the_first_row_has_its_columns(make_trial: Any, all_quantities: bool) -> None:
    trial = make_trial(**SMALL_TRIAL, **{"collapse_detection.all_quantities": all_quantities})
    trial.begin = {}.__getitem__  # any error
    expected_columns = {*make_empty_row(all_quantities=all_quantities)} - {"stop_rule"}
    result = trial.step()
    assert result["failure_class"] == "error"
    assert expected_columns <= result.keys()
    assert ("collapse_first_turn_marginal_std" in result) == all_quantities


def test_settings_that_are_refused_leave_a_row_with_the_metric_of_a_scheduler(make_trial: Any) -> None:
    result = make_trial(**{**SMALL_TRIAL, "actor.lr": -1}).step()
    assert {*make_empty_row()} - {"stop_rule"} <= result.keys()
    assert "actor.lr" in result["failure"]


def test_a_failure_that_is_not_retried_is_a_result(make_trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial(**SMALL_TRIAL)
    trial.step()
    monkeypatch.setattr(trial.training, "step", lambda: {}["missing"])
    result = trial.step()
    assert (result["failure_class"], result["failure"], result["done"]) == ("error", "KeyError: 'missing'", True)
    assert "missing" in result["failure_trace"]
    assert {*make_empty_row()} - {"stop_rule"} <= result.keys()
    assert result["train_success"] == drop_carried(trial._last_values)["train_success"]

    def lose_the_device() -> None:
        raise RuntimeError("a device error")

    monkeypatch.setattr(trial.training, "step", lose_the_device)
    with pytest.raises(RunFailedError, match="a device error"):
        trial.step()


# Checkpoints.


def test_a_trial_continues_from_its_checkpoint_to_the_same_rows(make_trial: Any, tmp_path: Path) -> None:
    straight = make_trial("straight", **SMALL_TRIAL)
    expected = [straight.step() for _ in range(3)]
    first = make_trial("first", **SMALL_TRIAL)
    first.step()
    save_trial(first, tmp_path / "checkpoint")
    first.step()  # a step that is lost
    second = make_trial("second", **SMALL_TRIAL)
    second.load_checkpoint(str(tmp_path / "checkpoint"))
    (state,) = (tmp_path / "second").rglob("step_1")
    assert {path.stat().st_nlink for path in state.iterdir()} == {1}  # a state that is loaded is no link
    rows = [second.step() for _ in range(2)]
    names = drop_times(expected[0]).keys() - {"note"}
    for row, expected_row in zip(rows, expected[1:], strict=True):
        assert {name: drop_times(row)[name] for name in names} == {
            name: drop_times(expected_row)[name] for name in names
        }
        assert row["base_val_success"] == expected[0]["base_val_success"]  # carried over from before the checkpoint
    assert rows[-1]["finished"]
    assert [row["step"] for row in read_rows(tmp_path / "second" / "runs" / "default" / METRICS_FILE)] == [1, 2, 3]


def test_a_checkpoint_shares_the_files_of_a_state_and_not_those_of_lines(make_trial: Any, tmp_path: Path) -> None:
    trial = make_trial(**{**SMALL_TRIAL, "trainer.resume_every": 100})
    trial.step()
    save_trial(trial, tmp_path / "checkpoint")
    (state,) = (tmp_path / "checkpoint" / "0" / "state").iterdir()
    assert state.name == "step_1"  # written for the checkpoint, since none was due
    assert {path.stat().st_nlink for path in state.iterdir()} == {2}
    lines = (tmp_path / "checkpoint" / "0" / METRICS_FILE).read_bytes()
    trial.step()
    assert (tmp_path / "checkpoint" / "0" / METRICS_FILE).read_bytes() == lines


def test_a_checkpoint_of_other_settings_is_continued_with_ours(make_trial: Any, tmp_path: Path) -> None:
    donor = make_trial("donor", **{**SMALL_TRIAL, "actor.lr": 1e-3, "seed": 4})
    donor.step()
    save_trial(donor, tmp_path / "checkpoint")
    follower = make_trial("follower", **{**SMALL_TRIAL, "actor.lr": 3e-3, "seed": 4})
    follower.load_checkpoint(str(tmp_path / "checkpoint"))
    row, donor_row = follower.step(), donor.step()
    assert row["step"] == donor_row["step"] == 2
    assert row["train_success"] == donor_row["train_success"]  # the same weights have sampled
    later_row, later_donor_row = follower.step(), donor.step()
    assert drop_times(later_row) != drop_times(later_donor_row)  # after an update with another rate


def test_a_checkpoint_that_is_damaged_is_not_begun_again_in_silence(make_trial: Any, checkpoint: Path) -> None:
    for path in (checkpoint / "0" / "state" / "step_1").glob("*.safetensors"):
        content = path.read_bytes()
        path.unlink()  # the file is a hard link
        path.write_bytes(content[:-1] + b"x")
    second = make_trial("second", **SMALL_TRIAL)
    second.load_checkpoint(str(checkpoint))
    with pytest.raises(RunFailedError, match="The checkpoint cannot be continued"):
        second.step()


def test_a_checkpoint_of_a_study_names_the_folder_of_its_run(tmp_path: Path, make_trial: Any) -> None:
    (run,) = make_trial_config(tmp_path)["run"]["runs"]
    trial = start_trial(tmp_path)
    trial.step()
    folder = tmp_path / "kl" / "checkpoint_000000"
    save_trial(trial, folder)
    trial.cleanup()
    assert json.loads((folder / "runs.json").read_text())["0"] == run["run_id"]
    assert [path.name for path in folder.iterdir()] == ["runs.json"]
    # The state is where the run has it, below the folder of the study: <study>/runs/<run_id>.
    (tmp_path / "runs" / "r").rename(tmp_path / "runs" / run["run_id"])
    trainer = PPO.from_checkpoint(tune.Checkpoint.from_directory(folder), **{"actor.lr": 1e-5})
    assert (trainer.step_index, trainer.config.actor.lr) == (1, 1e-5)
    trainer.close()
    other = make_trial("other", **SMALL_TRIAL)
    other.load_checkpoint(str(folder))
    assert other.step()["step"] == 2


def test_a_checkpoint_without_a_state_says_why(make_trial: Any, tmp_path: Path) -> None:
    trial = make_trial(**{**SMALL_TRIAL, "trainer.total_training_steps": 1, "trainer.keep_last": False})
    assert trial.step()["finished"]
    save_trial(trial, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"no state of the same step for each run: .* trainer\.keep_last=false"):
        PPO.from_checkpoint(tune.Checkpoint.from_directory(tmp_path / "checkpoint"))


def test_the_seeds_of_a_toy_trial_are_in_one_checkpoint(make_toy: Any, tmp_path: Path) -> None:
    first = make_toy("first", [0, 1])
    results = [first.step() for _ in range(4)]
    errors = [row["test_error"] for row in results[-1]["rows"].values()]
    assert results[-1]["test_error"] == sum(errors) / 2
    assert results[-1]["finished"]
    second = make_toy("second", [0, 1])
    second.step()
    second.step()
    save_trial(second, tmp_path / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["0", "1"]
    second.cleanup()
    third = make_toy("third", [0, 1])
    third.load_checkpoint(str(tmp_path / "checkpoint"))
    result = third.step()
    assert [result[name] for name in ("step", "test_error")] == [results[2][name] for name in ("step", "test_error")]
    third.cleanup()
    trainer = UpdateRules.from_checkpoint(tune.Checkpoint.from_directory(tmp_path / "checkpoint"))
    assert list(trainer.seeds) == [0, 1]


def test_a_failure_before_the_first_step_keeps_what_was_there(make_trial: Any, tmp_path: Path) -> None:
    first = make_trial("trial", **SMALL_TRIAL)
    first.step()
    first.cleanup()
    second = make_trial("trial", **{**SMALL_TRIAL, "model.path": str(tmp_path / "gone")})
    result = second.step()
    assert result["done"]
    assert result["failure"]
    save_trial(second, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "0" / METRICS_FILE).read_bytes()
    assert [path.name for path in (tmp_path / "checkpoint" / "0" / "state").iterdir()] == ["step_1"]


def test_a_toy_run_of_one_seed_fails_with_its_reason_and_again_after_a_restart(make_toy: Any) -> None:
    trial = make_toy("one", 3)
    trial.step()
    trainer = trial.begin().trainer
    trainer.step = lambda before_update: StepResult(failures={3: "the loss is nan"})
    result = trial.step()
    assert (result["failure_class"], result["failure"], result["done"]) == ("non-finite", "the loss is nan", True)
    trial.cleanup()
    again = make_toy("one", 3).step()
    assert (again["failure_class"], again["failure"], again["finished"]) == ("non-finite", "the loss is nan", True)


def test_the_mean_of_several_seeds_has_every_column_when_one_of_them_fails(make_toy: Any) -> None:
    trial = make_toy("two", [0, 1])
    before = trial.step()
    trainer = trial.begin().trainer
    trainer.step = lambda before_update: StepResult(failures={1: "the loss is nan"})
    result = trial.step()
    assert before.keys() <= result.keys()
    (row,) = (row for run_id, row in trial._last_rows.items() if run_id.endswith("-s0"))
    assert result["test_error"] == row["test_error"]
    assert result["failed"] == {"default-s1": "the loss is nan"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seed": 1, "run": {"runs": [{"run_id": "a", "seed": 2}]}}, "seeds of `run` / `runs` are not those of `seed`"),
        ({"seed": [0, 1], "__trial_index__": 1}, "Repeater repeats a trial"),
    ],
)
def test_seeds_that_disagree_are_refused(make_trial: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trial(**SMALL_TRIAL, **config)


def test_the_repetitions_of_tune_are_seeds(make_trial: Any) -> None:
    trial = make_trial(**SMALL_TRIAL, seed=4, __trial_index__=2)
    assert [run["seed"] for run in trial._runs] == [6]


# Checkpoints of somebody else.


def test_no_pickle_of_a_checkpoint_is_read(make_trial: Any, checkpoint: Path) -> None:
    (checkpoint / "_dict_checkpoint.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/no'\ntR.")
    second = make_trial("second", **SMALL_TRIAL)
    for source in (str(checkpoint), tune.Checkpoint.from_directory(checkpoint)):
        with pytest.raises(CheckpointError, match=r"has a pickle, _dict_checkpoint\.pkl"):
            second.restore(source)


@pytest.mark.parametrize("kind", ["pointer", "folder", "file"])
def test_no_link_to_a_run_is_followed(make_trial: Any, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "study" / "trial" / "checkpoint_000000"
    link = {"pointer": folder.parents[1] / "runs" / "a", "folder": folder / "0", "file": folder / "0" / METRICS_FILE}[
        kind
    ]
    for parent in (folder, link.parent):
        parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(checkpoint / "0" / METRICS_FILE if kind == "file" else checkpoint / "0")
    if kind == "pointer":
        write_object(folder / "runs.json", {"0": "a"})
    with pytest.raises(OSError, match="symbolic link"):
        PPO.from_checkpoint(tune.Checkpoint.from_directory(folder))
    trial = make_trial("second", **SMALL_TRIAL)
    with pytest.raises(OSError, match="symbolic link"):
        trial.load_checkpoint(str(folder))
    assert not list((tmp_path / "second").rglob(METRICS_FILE))


def test_what_a_checkpoint_names_outside_of_it_is_not_used(checkpoint: Path) -> None:
    address = "http://127.0.0.1:9/judge"
    (state,) = (checkpoint / "0" / "state").iterdir()
    tensors, values = read_checkpoint(state)
    values["settings"]["env"]["papers"]["judge_url"] = address
    shutil.rmtree(state)
    write_checkpoint(state, tensors, values)
    source = tune.Checkpoint.from_directory(checkpoint)
    with pytest.raises(CheckpointError, match=f"env.papers.judge_url={address}"):
        PPO.from_checkpoint(source)
    PPO.from_checkpoint(source, **{"env.papers.judge_url": address}).close()
