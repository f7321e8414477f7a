"""Tests of what all companions of the update rules must do: members that do not affect each other, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.toys.settings import ToyRunConfig
from tests.fakes.ensembles import run_ensemble
from tests.sandboxes.distillation import test_distillation as distillation
from tests.sandboxes.pedagogy import test_pedagogy as pedagogy
from tests.sandboxes.vector_rewards import test_vector_rewards as vector_rewards

CASES: list[tuple[Any, dict[str, Any]]] = [
    *((distillation, {"method": name}) for name in ("OPDReverseKL", "OPDTopKReverseKL", "OPDPG", "OPDSequencePG")),
    *((pedagogy, {"method": name}) for name in pedagogy.METHODS),
    (vector_rewards, {"method": "ScalarGRPO", "num_candidates": 1}),
    *((vector_rewards, {"method": name}) for name in ("MultiRLVR", "VPOGRPO")),
]


@pytest.mark.parametrize(("companion", "settings"), CASES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_member_is_the_one_that_it_is_alone_and_goes_on_from_its_state(
    companion: Any, settings: dict[str, Any]
) -> None:
    config, make_trainer = companion.make_config(steps=4, **settings), companion.make_trainer
    together, alone = make_trainer(config, (3, 4)), make_trainer(config, (4,))
    for _ in range(2):
        together.step()
        alone.step()
    for prefix in alone.algorithm.optimizers:
        weights = [trainer.get_state(4).tensors[f"{prefix}/weights"] for trainer in (together, alone)]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    resumed: EnsembleTrainer = make_trainer(config, (9,))
    resumed.load_states([alone.get_state(4)])
    rows = run_ensemble(alone)
    assert rows == run_ensemble(resumed)
    assert [row["step"] for row in rows[4]] == [2, 4]
    if companion is pedagogy:
        assert ("teacher_test_error" in rows[4][0]) == (settings["method"] != "StudentGRPO")


@pytest.mark.parametrize(
    ("make_config", "settings", "reason"),
    [
        (distillation.make_config, {"measures_variance": True}, "set eval_every=1"),
        (distillation.make_config, {"nhead": 3}, "nhead=3 does not divide d_model=16"),
        (distillation.make_config, {"task": "format_answer", "seq_len": 1}, "set seq_len=2 or more"),
        (distillation.make_config, {"warmup_steps": 2}, "only method=OPDTopKReverseKL has"),
        (distillation.make_config, {"method": "OPDTopKReverseKL", "warmup_steps": 6}, "leaves no step for the top-k"),
        (distillation.make_config, {"normalize_top_k": True}, "set normalize_top_k=false"),
        (distillation.make_config, {"sequence_mean": True}, "set sequence_mean=false"),
        (distillation.make_config, {"vocab_size": 10_001}, "vocab_size"),
        (pedagogy.make_config, {"nhead": 3}, "nhead=3 does not divide d_model=16"),
        (pedagogy.make_config, {"batch_size": 30}, "set batch_size=24"),
        (pedagogy.make_config, {"answer_len": 4}, "answer_len=4 does not fit into completion_len=3"),
        (pedagogy.make_config, {"teacher_steps": 0}, "leaves the teacher of method=PedagogicalRL untrained"),
        (vector_rewards.make_config, {"method": "ScalarGRPO"}, "set num_candidates=1"),
        (vector_rewards.make_config, {"num_candidates": 1}, "set num_candidates=2 or more"),
        (vector_rewards.make_config, {"batch_size": 30}, "is not a multiple of group_size=8: set batch_size=24"),
    ],
)
def test_settings_that_would_not_mean_what_they_say_are_refused(
    make_config: Callable[..., ToyRunConfig], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_config(**settings)
