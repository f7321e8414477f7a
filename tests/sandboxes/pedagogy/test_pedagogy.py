"""Tests of pedagogy: limits of its formulas, prompts and grading, rows and states, and what a teacher learns."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.pedagogy import algorithm as losses
from sandboxes.pedagogy.algorithm import Arithmetic, LessonBatch, PedagogyAlgorithm, make_trainer
from sandboxes.pedagogy.settings import PedagogyConfig
from tests.fakes.ensembles import run_ensemble

SMALL = {"d_model": 16, "num_layers": 1, "batch_size": 16}
METHODS = ("PedagogicalRL", "TeacherRL", "StudentGRPO")


def make_config(steps: int = 4, test_freq: int = 2, **settings: Any) -> PedagogyConfig:
    return PedagogyConfig(**{**SMALL, "trainer": {"total_training_steps": steps, "test_freq": test_freq}, **settings})


@given(st.lists(st.floats(0, 20), min_size=1, max_size=6))
def test_the_penalty_goes_from_the_mean_to_the_maximum(gaps: list[float]) -> None:
    tensor = torch.tensor(gaps, dtype=torch.float64)
    penalties = [float(losses.compute_spike_penalty(tensor, beta)) for beta in (1e-6, 0.1, 1.0, 5.0, 1e6)]
    assert penalties[0] == pytest.approx(sum(gaps) / len(gaps), abs=1e-3)
    assert penalties[-1] == pytest.approx(max(gaps), abs=1e-3)
    assert all(low <= high + 1e-6 for low, high in itertools.pairwise(penalties))


def test_learnability_falls_with_the_penalty_and_the_gate_is_half_open_at_gamma() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()[None, None]
    best, other = torch.tensor([[[0, 1]]]), torch.tensor([[[0, 2]]])
    assert float(losses.compute_surprise_gaps(log_probs, best).sum()) == 0
    gaps = losses.compute_surprise_gaps(log_probs, other)
    assert gaps.flatten().tolist() == pytest.approx([0, math.log(2)])
    penalty = losses.compute_spike_penalty(gaps, 5.0)
    assert float(penalty) == pytest.approx(math.log((1 + 2**5) / 2) / 5)
    assert float(losses.compute_learnability(penalty, 0.5)) == pytest.approx(((1 + 2**5) / 2) ** -0.1)
    assert float(losses.compute_learnability(torch.zeros(()), 0.5)) == 1
    log_probs = torch.tensor([-2.5, -0.1, -8.0], requires_grad=True)
    gate = losses.compute_gate(log_probs, 4.0, -2.5)
    assert not gate.requires_grad
    assert gate.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-9.6)), 1 / (1 + math.exp(22))])


@given(st.floats(0.01, 100))
def test_a_gate_is_normalized_per_completion(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    gate = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64) + 0.1
    loss = losses.gated_imitation_loss(log_probs, gate)
    # The scale of a gate changes nothing, and equal gates give the plain cross-entropy.
    torch.testing.assert_close(losses.gated_imitation_loss(log_probs, gate * scale), loss)
    torch.testing.assert_close(losses.gated_imitation_loss(log_probs, torch.ones_like(gate)), -log_probs.mean((1, 2)))
    expected = [
        sum(
            sum(float(w) * -float(p) for w, p in zip(ws, ps, strict=True)) / float(ws.sum())
            for ws, ps in zip(gate[member], log_probs[member], strict=True)
        )
        / 4
        for member in range(2)
    ]
    assert loss.tolist() == pytest.approx(expected)


def test_prompts_and_grades_are_those_of_the_task() -> None:
    task = Arithmetic(make_config())
    inputs = torch.tensor([[3, 4], [0, 2]])
    assert task.make_answers(inputs).tolist() == [[2], [2]]
    assert task.make_student_prompts(inputs).tolist() == [[3, 4, 5], [0, 2, 5]]
    assert task.make_teacher_prompts(inputs).tolist() == [[3, 4, 6, 2, 5], [0, 2, 6, 2, 5]]
    assert task.grade(inputs, torch.tensor([[6, 5, 2], [2, 2, 1]])).tolist() == [1, 0]
    config = make_config(content_vocab_size=11, answer_len=2)
    task, inputs = Arithmetic(config), torch.tensor([[9, 5]])
    assert task.make_answers(inputs).tolist() == [[3, 8]]
    assert config.max_positions == 9
    for actions, grade in (([1, 3, 8], 1), ([1, 3, 7], 0), ([3, 8, 8], 0)):
        assert task.grade(inputs, torch.tensor([actions])).tolist() == [grade]


def test_teacher_and_student_start_equal_and_only_those_that_learn_change() -> None:
    algorithm = PedagogyAlgorithm(make_config(), (0,))
    assert torch.equal(algorithm.student_optimizer.weights, algorithm.teacher_optimizer.weights)
    trainer = make_trainer(make_config(method="StudentGRPO"), (0,))
    run_ensemble(trainer)
    state = trainer.final_states[0].tensors
    assert torch.equal(state["teacher/weights"], algorithm.teacher_optimizer.weights[0])
    assert not torch.equal(state["student/weights"], state["teacher/weights"])


def compute_student_log_probs(algorithm: PedagogyAlgorithm, batch: LessonBatch, member: int) -> list[torch.Tensor]:
    """[T, A] for each completion: one forward pass per prompt, which is the student's own and has no hint."""
    rows = []
    for inputs, actions in zip(batch.inputs[member], batch.actions[member], strict=True):
        prompt = torch.tensor([*inputs.tolist(), algorithm.config.content_vocab_size])
        tokens = torch.cat((prompt, actions[:-1])).expand(len(batch.inputs), 1, -1)
        rows.append(algorithm.student.compute_logits(tokens, len(actions))[member, 0].detach().log_softmax(-1))
    return rows


@pytest.mark.parametrize("method", METHODS[:2])
def test_the_reward_of_a_teacher_is_that_of_its_method(method: str) -> None:
    algorithm = PedagogyAlgorithm(make_config(method=method), (0, 1))
    batch = algorithm.sample(1)
    expected_means = []
    for member in range(2):
        rewards = []
        log_prob_rows = compute_student_log_probs(algorithm, batch, member)
        for log_probs, actions, task_reward in zip(
            log_prob_rows, batch.actions[member], batch.task_rewards[member], strict=True
        ):
            chosen = [float(row[action]) for row, action in zip(log_probs, actions, strict=True)]
            gaps = [float(row.max()) - value for row, value in zip(log_probs, chosen, strict=True)]
            penalty = math.log(sum(math.exp(5 * gap) for gap in gaps) / len(gaps)) / 5
            if method == "PedagogicalRL":
                rewards.append(float(task_reward) * math.exp(-0.5 * penalty))
            else:
                rewards.append(float(task_reward) + 0.5 * sum(chosen) / len(chosen))
        expected_means.append(sum(rewards) / len(rewards))
    assert batch.task_rewards.mean() > 0
    _, columns = algorithm._update_teacher(batch)
    assert columns["teacher_reward"].tolist() == pytest.approx(expected_means, abs=1e-5)
    assert (columns["teacher_reward"] < columns["task_reward"]).all()


@pytest.mark.parametrize("method", METHODS[:2])
def test_imitation_makes_the_lessons_more_likely_to_the_student_and_leaves_the_teacher(method: str) -> None:
    algorithm = PedagogyAlgorithm(make_config(method=method, student_lr=3e-3), (0,))
    lessons, teacher_weights = algorithm.sample(1), algorithm.teacher_optimizer.weights.clone()
    rows = [algorithm._imitate(lessons)[1] for _ in range(20)]
    assert float(rows[-1]["student_loss"]) < float(rows[0]["student_loss"]) - 0.2
    assert float(rows[-1]["lesson_log_prob_mean"]) > float(rows[0]["lesson_log_prob_mean"])
    assert (float(rows[0]["gate_mean"]) == 1) == (method == "TeacherRL")
    assert torch.equal(algorithm.teacher_optimizer.weights, teacher_weights)


def test_a_student_alone_makes_right_answers_likelier_than_wrong_ones() -> None:
    algorithm = PedagogyAlgorithm(make_config(method="StudentGRPO", batch_size=96, student_lr=3e-3), (0,))
    batch = algorithm.sample(1)
    for _ in range(20):
        algorithm._reinforce_student(batch)
    log_probs = algorithm._compute_student_log_probs(batch).detach().gather(-1, batch.actions[..., None])[..., 0]
    changes, is_right = (log_probs - batch.behavior_log_probs).sum(-1), batch.task_rewards == 1
    assert float(changes[is_right].mean()) > max(0.1, float(changes[~is_right].mean()) + 0.1)


@pytest.mark.slow
def test_a_teacher_learns_to_use_the_hint() -> None:
    config = make_config(120, 120, batch_size=96, d_model=32, teacher_lr=3e-3)
    (first, last) = run_ensemble(make_trainer(config, (0,)))[0]
    assert last["teacher_test_error"] < first["teacher_test_error"] - 0.3
