"""Arms are found by their value and by the name that a report gives them."""

import pytest

from tune_study.plan.errors import PlanError
from tune_study.plan.typed_settings import find_arm

KL = "actor.kl_loss_coef"


@pytest.mark.parametrize("text", ["0.1", "0.10", "KL 0.1", "kl 0.1", " KL  0.1 ", "kl=0.1", "KL0.1"])
def test_a_name_of_a_report_is_the_arm(text: str) -> None:
    assert find_arm(text, ("0", "0.1"), KL) == "0.1"


@pytest.mark.parametrize(("text", "setting"), [("0.2", KL), ("entropy 0.1", KL), ("KL 0.2", KL), ("KL 0.1", None)])
def test_others_are_refused_with_the_arms(text: str, setting: str | None) -> None:
    with pytest.raises(PlanError, match=r"There is no arm .*: type --baseline with one of 0, 0\.1\."):
        find_arm(text, ("0", "0.1"), setting, "--baseline")


def test_an_arm_comes_before_a_name() -> None:
    assert find_arm("KL 0.1", ("0.1", "KL 0.1"), KL) == "KL 0.1"
