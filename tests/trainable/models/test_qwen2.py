import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.layouts import LAYOUTS, Rows, make_layout
from tests.fakes.scripted import make_hub_twin, make_qwen2_shape
from tests.strategies.examples import draw_examples
from trainable.models.qwen2 import Qwen2
from trainable.models.qwen2_shape import Qwen2Shape


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def model(request: pytest.FixtureRequest) -> Qwen2:
    return make_layout(*request.param)


@pytest.fixture(scope="module")
def grouped_model() -> Qwen2:
    return make_layout(*LAYOUTS[1])


def make_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


def test_logits_are_those_of_transformers(model: Qwen2) -> None:
    tokens = make_tokens(3, 17)
    with torch.no_grad():
        actual = model.lm_head(model.model.compute_hidden_states(tokens, torch.arange(tokens.numel())))
        expected = make_hub_twin(model)(input_ids=tokens).logits
    assert_close(actual, expected.flatten(0, 1))


def test_gradients_are_those_of_transformers(model: Qwen2) -> None:
    tokens, positions = make_tokens(3, 13), torch.tensor([2, 7, 12, 15, 25, 38])
    weights = torch.randn(6, 23, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (model.lm_head(model.model.compute_hidden_states(tokens, positions)) * weights).sum().backward()
    twin = make_hub_twin(model)
    (twin(input_ids=tokens).logits.flatten(0, 1)[positions] * weights).sum().backward()
    expected = {name: weight.grad for name, weight in twin.named_parameters()}
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert_close(weight.grad, expected.pop(name), 1e-4)
    assert not expected


@draw_examples(40)
@given(st.integers(0, 2**32 - 1))
def test_any_chunking_and_selection_equals_the_full_forward(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # In float64, a rounding error cannot look like a fault.
    model = make_layout(*LAYOUTS[int(rng.integers(len(LAYOUTS)))]).double()
    count = int(rng.integers(1, 5))

    def draw_chunk(minimum: int) -> list[int]:
        return rng.integers(0, 23, int(rng.integers(minimum, 5))).tolist()

    with torch.inference_mode():
        rows = Rows(model, count, int(rng.integers(1, 30)))
        rows.extend([draw_chunk(1) for _ in range(count)])
        for _ in range(5):
            active = int(rng.integers(1, len(rows.tokens) + 1))
            chunks = [draw_chunk(0) for _ in range(active)]
            if any(chunks):
                rows.extend(chunks)
            if rng.random() < 0.5:
                rows.select(rng.integers(0, len(rows.tokens), int(rng.integers(1, 6))).tolist())
            if rng.random() < 0.5:
                rows.cache.pack()


def test_packing_leaves_as_many_slots_as_the_longest_row_has_tokens(grouped_model: Qwen2) -> None:
    with torch.inference_mode():
        rows = Rows(grouped_model, 3, 10)
        rows.extend([[1, 2, 3, 4], [5], [9, 9]])
        rows.extend([[6], [7]])
        assert rows.cache.used_slots == 5
        rows.select([1, 2])
        rows.cache.pack()
        assert rows.cache.used_slots == 2
        assert (rows.cache.bias[:, :2] == 0).all()
        assert (rows.cache.bias[:, 2:] == -torch.inf).all()
        rows.extend([[8], [8]])


def test_all_tensors_are_on_the_device_of_the_tokens(grouped_model: Qwen2) -> None:
    """`meta` stands in for a GPU: a tensor that is created without a device lands there and cannot mix with others."""
    tokens = make_tokens(2, 5)
    valid = torch.ones(2, 5, dtype=torch.bool)
    positions = torch.arange(5).expand(2, 5)
    cache = grouped_model.model.make_cache(2, 3)
    last_positions = torch.tensor([4, 9])
    rows = torch.tensor([1, 0, 1])
    with torch.inference_mode(), torch.device("meta"):
        full = grouped_model.model.compute_hidden_states(tokens, last_positions)
        assert_close(grouped_model.model.extend(tokens, positions, valid, cache), full)
        cache.select_rows(rows)
        cache.pack()
    assert cache.keys[0].device.type == "cpu"


def write_config(folder: Path, **changes: object) -> Path:
    config = {"architectures": ["Qwen2ForCausalLM"], **asdict(make_qwen2_shape()), "extra": 1, **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_a_config_is_read(tmp_path: Path) -> None:
    assert Qwen2Shape.read(write_config(tmp_path)) == make_qwen2_shape()
    assert make_qwen2_shape().head_dim == 8


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"eos_token_id": [7, 8]}, "eos_token_id", 7),
        ({"rope_theta": 1e6}, "rope_theta", 1e6),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}, "rope_theta", 500.0),
        ({"rope_theta": None}, "rope_theta", 10_000.0),
        ({"tie_word_embeddings": None}, "tie_word_embeddings", False),
    ],
)
def test_forms_that_a_config_may_take(tmp_path: Path, changes: dict[str, object], field: str, value: object) -> None:
    assert getattr(Qwen2Shape.read(write_config(tmp_path, **changes)), field) == value
