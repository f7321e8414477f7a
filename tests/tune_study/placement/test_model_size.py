import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.plans import read_shape
from tests.fakes.scripted import make_qwen2_shape as make_torch_shape
from tests.strategies.examples import draw_examples
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.interface import ValueModel
from trainable.models.qwen2 import Qwen2, Qwen2Trunk
from trainable.models.qwen2_shape import Qwen2Shape
from tune_study.placement.memory import count_trained_parameters
from tune_study.placement.model_files import read_model_shape

# Parameters of the Qwen2.5 models on the hub, from their cards.
PUBLISHED = {
    "0.5": 494_032_768,
    "1.5": 1_543_714_304,
    "3": 3_085_938_688,
    "7": 7_615_616_512,
    "14": 14_770_033_664,
    "32": 32_763_876_352,
    "72": 72_706_203_648,
}


NO_MODELS = {"HF_HUB_CACHE": "/nowhere"}


def write_config(folder: Path, **changes: object) -> Path:
    """Write a config.json in the hub's format to `folder`; a change to None leaves the field out."""
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", **asdict(make_torch_shape()), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@st.composite
def draw_shapes(draw: st.DrawFn) -> Qwen2Shape:
    kv_heads, groups, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5)) * 2
    return make_torch_shape(
        vocab_size=draw(st.integers(1, 60)),
        hidden_size=kv_heads * groups * head_dim,
        intermediate_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 4)),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=draw(st.booleans()),
    )


@draw_examples(60)
@given(draw_shapes())
def test_counts_are_those_of_the_modules(qwen2_shape: Qwen2Shape) -> None:
    with TemporaryDirectory() as folder:
        shape = read_shape(str(write_config(Path(folder), **asdict(qwen2_shape))))
    policy, critic = Qwen2(qwen2_shape), ValueModel(Qwen2Trunk(qwen2_shape))
    counts = {"policy": count_parameters(policy), "critic": count_parameters(critic)}
    assert (shape.head_dim, shape.tie_word_embeddings) == (qwen2_shape.head_dim, qwen2_shape.tie_word_embeddings)
    assert count_trained_parameters(shape, RunConfig()) == counts
    shared_trunk = apply_overrides(RunConfig(), {"critic.shared_trunk": True})
    assert count_trained_parameters(shape, shared_trunk) == {
        "policy": counts["policy"] + count_parameters(critic.score)
    }
    assert shape.parameters == counts["policy"]
    layers = [layer for layer in policy.model.modules() if isinstance(layer, torch.nn.Linear)]
    assert shape.linear_parameters == sum(map(count_parameters, layers))
    assert shape.all_matrices == [(layer.in_features, layer.out_features) for layer in layers]


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_model_that_is_not_here_has_its_published_parameters(size: str) -> None:
    shape = read_shape(f"Qwen/Qwen2.5-{size}B", NO_MODELS)
    assert shape.parameters == PUBLISHED[size]
    for path in (f"{size}B-Instruct", f"Math-{size}B", f"Coder-{size}B-Instruct"):
        assert read_model_shape(f"Qwen/Qwen2.5-{path}", NO_MODELS) == shape


@pytest.mark.parametrize("path", ["some/model", "Qwen/Qwen2.5-3B"])
def test_a_hub_id_is_found_in_the_hub_cache_before_the_published_sizes(tmp_path: Path, path: str) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert (read_model_shape(path, environ) is None) == (path == "some/model")
    snapshots = tmp_path / f"models--{path.replace('/', '--')}" / "snapshots"
    for snapshot, vocabulary in (("aaa", 5), ("bbb", 7)):
        write_config(snapshots / snapshot, vocab_size=vocabulary)
    (snapshots / "bbb" / "config.json").rename(tmp_path / "blob")  # as the hub's own client writes it
    (snapshots / "bbb" / "config.json").symlink_to(tmp_path / "blob")
    assert read_shape(path, environ).vocab_size == 7


UNRELEASED = ["Qwen/Qwen2.5-4B", "Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B "]
NOT_HERE = ["", "no/such/model", "some/m*", "~nobody-of-this-name/x", "a" * 400]


@pytest.mark.parametrize("path", UNRELEASED + NOT_HERE)
def test_what_is_not_here_has_no_shape(path: str, work_dir: Path) -> None:
    write_config(work_dir / "models--some--model" / "snapshots" / "aaa")
    assert read_model_shape(path, {"HF_HUB_CACHE": str(work_dir)}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"vocab_size": None},
        {"hidden_size": "16"},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": []},
        {"tie_word_embeddings": "yes"},
        *("", "[]", "\udcff"),
    ],
)
def test_another_config_has_no_shape(changes: dict[str, object] | str, tmp_path: Path) -> None:
    assert read_model_shape(str(write_config(tmp_path)), {}) is not None
    if isinstance(changes, str):
        (tmp_path / "config.json").write_bytes(changes.encode(errors="surrogateescape"))
    else:
        write_config(tmp_path, **changes)
    assert read_model_shape(str(tmp_path), {}) is None


def test_a_head_that_is_not_named_as_tied_is_one_of_its_own(tmp_path: Path) -> None:
    shape = read_shape(str(write_config(tmp_path, tie_word_embeddings=None)))
    assert shape.own_head == shape.vocab_size * shape.hidden_size
