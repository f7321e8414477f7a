"""Tests of the classification bandit: perceptrons against torch's layers, images, batches and evaluation."""

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.tasks import classification
from sandboxes.update_rules.tasks.classification import ClassificationTask, Images, MLPEnsemble, read_images
from tests.sandboxes.update_rules.tasks import oracles


def make_few_images(count: int = 50) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2, count, 784), generator=generator, dtype=torch.uint8)
    classes = torch.randint(10, (2, count), generator=generator)
    return Images(pixels[0], classes[0], pixels[1], classes[1], source="synthetic")


def make_task_and_models(
    seeds: tuple[int, ...] = (3, 4), **settings: object
) -> tuple[ClassificationTask, MLPEnsemble, MemberRngs]:
    config = UpdateRuleConfig(**{"task": "mnist", "batch_size": 40, "hidden": 12, **settings})
    task, rngs = ClassificationTask(config, make_few_images()), MemberRngs(seeds)
    return task, task.make_models(rngs), rngs


def make_plain_model(models: MLPEnsemble, member: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [784, 12, 12, 10]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for number, layer in enumerate(layers):
        tensors = {name: models.weights[f"layers.{number}.{name}"][member].detach() for name in ("weight", "bias")}
        layer.load_state_dict(tensors)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def test_a_member_is_torchs_perceptron_with_its_weights() -> None:
    task, models, rngs = make_task_and_models()
    rollouts = task.sample(models, rngs, 1)
    log_probs = task.compute_logits(models, rollouts).log_softmax(-1)
    assert log_probs.shape == (2, 40, 1, 10)
    log_probs[..., 0].sum().backward()
    for member in range(2):
        model = make_plain_model(models, member)
        expected = model(rollouts.observations[member]).log_softmax(-1)
        torch.testing.assert_close(log_probs[member, :, 0], expected, atol=1e-5, rtol=1e-5)
        expected[..., 0].sum().backward()
        for number in range(3):
            for name in ("weight", "bias"):
                gradient = models.weights[f"layers.{number}.{name}"].grad
                expected_gradient = getattr(model[2 * number], name).grad
                torch.testing.assert_close(gradient[member], expected_gradient, atol=1e-4, rtol=1e-4)


def test_first_weights_are_uniform_within_the_bound_of_torchs_linear_layers() -> None:
    models = classification.init_mlp_ensemble((784, 50, 50, 10), MemberRngs((1, 2)))
    for name, weight in models.weights.items():
        bound = (784 if name.startswith("layers.0") else 50) ** -0.5
        assert float(weight.detach().abs().max()) <= bound
        if weight[0].numel() > 400:
            assert float(weight.detach().std()) == pytest.approx(bound / 3**0.5, abs=0.05 * bound)
    assert not torch.equal(models.weights["layers.1.weight"][0], models.weights["layers.1.weight"][1])


def test_the_fields_of_a_batch_are_consistent() -> None:
    task, models, rngs = make_task_and_models()
    rollouts = task.sample(models, rngs, 1)
    log_probs = task.compute_logits(models, rollouts).log_softmax(-1).detach()
    indices = rngs.integers("sandbox_prompts", 1, high=50, shape=(40,))
    assert torch.equal(rollouts.labels[..., 0], task.images.train_labels[indices])
    assert torch.equal(rollouts.observations, task.images.train_images[indices] / 255)
    assert torch.equal(rollouts.rewards, (rollouts.actions == rollouts.labels).float()[..., 0])
    label_log_probs = log_probs.gather(-1, rollouts.labels[..., None])[..., 0]
    torch.testing.assert_close(rollouts.expected_reward[..., None], label_log_probs.exp(), atol=1e-6, rtol=1e-5)
    action_log_probs = log_probs.gather(-1, rollouts.actions[..., None])[..., 0]
    torch.testing.assert_close(rollouts.behavior_log_probs, action_log_probs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rollouts.behavior_baseline, log_probs.exp().square().sum(-1), atol=1e-6, rtol=1e-5)
    assert rollouts.keep_mask.all()


def test_groups_guess_at_one_image_and_noise_corrupts_rewards() -> None:
    task, models, rngs = make_task_and_models(method="GRPO", group_size=4)
    rollouts = task.sample(models, rngs, 1)
    images = rollouts.observations.unflatten(1, (10, 4))
    assert (images == images[:, :, :1]).all()
    assert rollouts.expected_reward is None
    for member in range(2):
        is_mixed = oracles.find_mixed_groups(rollouts.rewards[member].tolist(), 4)
        is_kept = is_mixed if any(is_mixed) else [True] * 10
        assert rollouts.keep_mask[member].tolist() == [keep for keep in is_kept for _ in range(4)]
    task, models, rngs = make_task_and_models(reward_noise=0.5, reward_noise_mode="false_positive_action0")
    rollouts = task.sample(models, rngs, 1)
    is_corrupted = rngs.uniform("sandbox_noise", 1, shape=(40, 2))[..., 0] < 0.5
    expected = (rollouts.actions == rollouts.labels)[..., 0] | (is_corrupted & (rollouts.actions[..., 0] == 0))
    assert torch.equal(rollouts.rewards, expected.float())
    assert rollouts.expected_reward is None


def test_evaluation_is_of_the_likeliest_class_of_all_test_images() -> None:
    task, models, rngs = make_task_and_models()
    metrics = task.evaluate(models, rngs, 0)
    for member in range(2):
        probabilities = make_plain_model(models, member)(task.images.test_images / 255).softmax(-1).detach()
        error = (probabilities.argmax(-1) != task.images.test_labels).float().mean()
        entropy = -(probabilities * probabilities.log()).sum(-1).mean()
        assert float(metrics["test_error"][member]) == pytest.approx(float(error), abs=1e-6)
        assert float(metrics["entropy"][member]) == pytest.approx(float(entropy), abs=1e-5)
    assert metrics["synthetic_data"].tolist() == [1, 1]


@pytest.mark.long
def test_synthetic_images_have_mnists_shape_and_are_always_the_same() -> None:
    images, second_images = (classification.make_synthetic_images() for _ in range(2))
    assert images.train_images.shape == (60_000, 784)
    assert images.test_images.shape == (10_000, 784)
    assert images.train_images.dtype == torch.uint8
    assert set(images.train_labels.tolist()) == set(range(10))
    for one, other in zip(images[:4], second_images[:4], strict=True):
        assert torch.equal(one, other)


def write_idx(folder: Path, zipped: bool) -> None:
    rng = np.random.default_rng(0)
    for name, shape in {
        "train-images-idx3-ubyte": (60_000, 28, 28),
        "train-labels-idx1-ubyte": (60_000,),
        "t10k-images-idx3-ubyte": (10_000, 28, 28),
        "t10k-labels-idx1-ubyte": (10_000,),
    }.items():
        values = np.zeros(shape, dtype=np.uint8) if "images" in name else rng.integers(10, size=shape, dtype=np.uint8)
        values.flat[:3] = 5, 6, 7
        content = bytes([0, 0, 8, len(shape)]) + np.array(shape, dtype=">i4").tobytes() + values.tobytes()
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("zipped", [False, True])
def test_mnists_files_are_read(tmp_path: Path, zipped: bool) -> None:
    write_idx(tmp_path, zipped)
    images = read_images(str(tmp_path))
    assert images.source == "mnist"
    assert images.train_images[0, :4].tolist() == [5, 6, 7, 0]
    assert images.test_labels[:3].tolist() == [5, 6, 7]
    assert images.train_images.shape == (60_000, 784)


def test_files_that_are_not_mnists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no usable file train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"):
        read_images(str(tmp_path))
    write_idx(tmp_path, zipped=False)
    label_path = tmp_path / "t10k-labels-idx1-ubyte"
    label_bytes = label_path.read_bytes()
    for content, problem in ((label_bytes[:-1], "cannot reshape"), (label_bytes[1:], "it begins with 00 08 01")):
        label_path.write_bytes(content)
        with pytest.raises(ValueError, match=f"no usable file t10k-labels-idx1-ubyte .*{problem}"):
            read_images(str(tmp_path))
    label_path.unlink()
    (tmp_path / f"{label_path.name}.gz").write_bytes(gzip.compress(label_bytes)[:-20])
    with pytest.raises(ValueError, match=r"Compressed file ended .* set mnist_folder=null for synthetic images"):
        read_images(str(tmp_path))
