"""A study of distillation with real Ray and the real trainer, from the plan to the tables and the report."""

from pathlib import Path
from pkgutil import resolve_name

import pytest

import analysis
from analysis.report.pages import write_report
from tests.fakes.plans import plan_study
from tests.tune_study.studies.test_sandbox_run import run_study
from trainable.families import get_family

pytestmark = pytest.mark.usefixtures("ray_session")
SMALL = {"d_model": 8, "batch_size": 8, "trainer.total_training_steps": 6, "trainer.test_freq": 2}


@pytest.mark.slow
def test_a_study_of_distillation_becomes_tables_and_a_report(tmp_path: Path) -> None:
    arms = ("full_vocab_rkl", "warm_topk_k4")
    plan = plan_study(tmp_path, arms, 2, study="opd-cold-start", **SMALL)
    code, _, statuses = run_study(plan)
    assert code == 0
    assert {status.status for status in statuses.values()} == {"completed"}
    frames = analysis.load(plan.folder)
    trials = frames.trials.set_index(["arm", "seed"])
    assert list(frames.steps["step"].unique()) == [0, 2, 4, 6]
    warm = trials.loc[("warm_topk_k4", 0)]
    # Of 6 steps a third is the warm-up, so that the row of step 2 is the switch.
    errors = frames.steps[frames.steps["run_id"] == warm["run_id"]].set_index("step")["test_error"]
    assert warm["config/warmup_steps"] == 2
    assert warm["switch_test_error"] == errors[2]
    assert warm["error_since_switch"] == pytest.approx(errors[6] - errors[2])
    assert warm["late_test_error"] == pytest.approx(errors[[2, 4, 6]].mean())
    exact = trials.loc[("full_vocab_rkl", 0)]
    assert exact["switch_test_error"] != exact["switch_test_error"]  # NaN: no warm-up, no switch
    assert exact["last_reverse_kl"] > 0
    page = write_report(plan.folder).read_text(encoding="utf-8")
    for text in ("on-policy distillation", "KL(student || teacher)", "error_since_switch", "warm_topk_k4"):
        assert text in page
    assert "update-rule" not in page


def test_the_variance_of_a_run_is_that_of_its_batches() -> None:
    from statistics import variance

    projections = [0.5, -0.25, 0.125, 1.0]
    rows = [
        {"step": step, "gradient_projection": value, "gradient_norm": 2.0 + step}
        for step, value in enumerate(projections)
    ]
    family = get_family("gradient_variance")
    summary = resolve_name(family.summarize)([*rows, {"step": 4}], None, family.trial_columns)
    assert 10 ** summary["log10_gradient_variance"] == pytest.approx(variance(projections))
    assert summary["mean_gradient_norm"] == pytest.approx(3.5)
    assert summary["steps_done"] == 4
    assert "log10_gradient_variance" not in resolve_name(family.summarize)(rows[:1], None, family.trial_columns)
