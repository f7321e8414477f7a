"""The frames of a study beside Ray Tune's own."""

from pathlib import Path

import numpy as np

import analysis
from trainable.runs.records import STEP_COLUMNS, TIME_COLUMNS


def check_trials(folder: Path) -> None:
    """Check that the frames of a study have what Ray Tune's own views of it have."""
    from ray.tune import ExperimentAnalysis, ResultGrid

    frames = analysis.load(folder)
    trials = frames.trials.set_index("run_id")
    grid = ResultGrid(ExperimentAnalysis(str(folder)))
    ray_trials = grid.get_dataframe().set_index("run_id").loc[trials.index]
    left_out = ("base_", "config/")
    shared_columns = [name for name in ray_trials.columns if name in trials.columns and not name.startswith(left_out)]
    assert ray_trials["config/actor.kl_loss_coef"].tolist() == trials["config/actor.kl_loss_coef"].tolist()
    assert ray_trials["config/seed"].tolist() == trials["seed"].tolist()
    assert {"total_optimizer_steps", "test_success", "stop_rule", "seed", "arm"} <= set(shared_columns)
    for name in shared_columns:
        if name == "trial_id":
            continue
        values, ray_values = trials[name].to_numpy(), ray_trials[name].to_numpy()
        if trials[name].dtype.kind == "f":
            np.testing.assert_allclose(ray_values.astype(float), values, rtol=1e-12, err_msg=name)
        else:
            assert [str(value) for value in ray_values if value == value and value is not None] == [
                str(value) for value in values if value == value and str(value) != "<NA>"
            ], name
    last_rows = frames.steps.groupby("run_id").tail(1).set_index("run_id").loc[trials.index]
    for column in STEP_COLUMNS:
        if column.name in ray_trials and column.name not in TIME_COLUMNS:
            ray_values, values = ray_trials[column.name].astype(float), last_rows[column.name].astype(float)
            # What the last step has not measured has its last value in Ray's frame.
            is_measured = values.notna()
            np.testing.assert_allclose(ray_values[is_measured], values[is_measured], rtol=1e-12, err_msg=column.name)
