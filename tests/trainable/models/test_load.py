import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.models.codec import Codec
from trainable.models.load import Policy, find_model, load_policy, make_critic, read_end_tokens
from trainable.models.qwen2 import Qwen2
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.tokenizer import write_tokenizer

CPU = torch.device("cpu")


def write_model_files(
    model: Qwen2, folder: Path, file_count: int = 1, dtype: torch.dtype = torch.float32, tied_head: bool = False
) -> Path:
    """Write the files of a hub folder: one or several weight files, in any precision, with or without the tied head."""
    config = {"architectures": ["Qwen2ForCausalLM"], **asdict(model.shape)}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: weight.to(dtype).clone()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight" or tied_head or not model.shape.tie_word_embeddings
    }
    names = sorted(weights)
    for index in range(file_count):
        file_weights = {name: weights[name] for name in names[index::file_count]}
        save_file(file_weights, folder / f"model-{index + 1:05}-of-{file_count:05}.safetensors")
    write_tokenizer(folder, SOKOBAN_TINY.pieces)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file_count", [1, 3])
def test_weights_are_those_of_the_files(tmp_path: Path, file_count: int, tied: bool) -> None:
    model = make_random_model(make_qwen2_shape(tie_word_embeddings=tied))
    policy = load_policy(str(write_model_files(model, tmp_path, file_count)), CPU)
    assert policy.folder == tmp_path
    for name, weight in model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], weight), name
    assert (policy.model.lm_head.weight is policy.model.model.embed_tokens.weight) == tied


def test_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    model = make_random_model(make_qwen2_shape())
    policy = load_policy(str(write_model_files(model, tmp_path, dtype=torch.bfloat16, tied_head=True)), CPU)
    for name, weight in policy.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.state_dict()[name].bfloat16().float())


def test_a_folder_that_lacks_files_is_refused(tmp_path: Path) -> None:
    write_model_files(make_random_model(make_qwen2_shape()), tmp_path, file_count=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RuntimeError, match="Missing key"):
        load_policy(str(tmp_path), CPU)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        load_policy(str(tmp_path), CPU)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"is not a model: it has no config\.json\. .*sokoban-tiny"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"config.json": 7}, {7}),
        ({"config.json": 7, "generation_config.json": [7, 9]}, {7, 9}),
        ({"config.json": [7, 8]}, {7, 8}),
        ({"config.json": None}, set()),
        ({}, set()),
    ],
    ids=str,
)
def test_a_reply_may_end_at_every_end_token_that_the_files_name(
    tmp_path: Path, files: dict[str, int | list[int] | None], tokens: set[int]
) -> None:
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value} if value is not None else {}))
    assert read_end_tokens(tmp_path) == tokens


def test_the_end_marker_of_the_chat_is_no_other_stop_token() -> None:
    policy = load_policy("sokoban-tiny", torch.device("cpu"))
    assert read_end_tokens(policy.folder) == {policy.stop_token}
    assert policy.other_stop_tokens == ()


@pytest.mark.parametrize("path", ["Nobody/no-such-model", "no such model!", "/no/such/folder"])
def test_a_model_that_is_nowhere_is_refused_with_the_command_that_fetches_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{path} is neither a folder nor in the local hub cache\. Fetch it with `hf"):
        find_model(path)


def test_the_critic_starts_as_a_copy_of_the_policy_with_its_own_small_head() -> None:
    model = make_random_model(make_qwen2_shape(hidden_size=64))
    policy = Policy(model, None, Path())  # type: ignore[arg-type]
    critic, same, other = (make_critic(policy, np.random.default_rng(seed), CPU) for seed in (0, 0, 1))
    assert torch.equal(critic.score.weight, same.score.weight)
    assert not torch.equal(critic.score.weight, other.score.weight)
    assert 0.01 < float(critic.score.weight.detach().std()) < 0.03
    assert critic.score.bias.tolist() == [0.0]
    for name, weight in critic.model.named_parameters():
        policy_weight = model.model.get_parameter(name)
        assert torch.equal(weight, policy_weight)
        assert weight is not policy_weight
        assert weight.requires_grad


def test_the_codec_adds_and_shows_no_special_tokens(tmp_path: Path) -> None:
    policy = load_policy(str(write_model_files(make_random_model(make_qwen2_shape()), tmp_path)), CPU)
    codec = Codec(policy.tokenizer)
    ids = codec.encode(["Up || Left</answer><|im_end|>", "Up", ""])
    assert [len(row) for row in ids] == [5, 1, 0]
    assert codec.decode([np.array(row) for row in ids]) == ["Up || Left</answer>", "Up", ""]
