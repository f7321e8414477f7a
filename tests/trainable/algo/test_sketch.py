"""The sketch of a vector: inner products in expectation, with the variance that its docstring gives."""

import pytest
import torch

from trainable.algo import sketch
from trainable.algo.sketch import count_sketch

X = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1.5])
Y = torch.tensor([2.0, 1.0, -1.0, 0.5, 4.0, 1.0])
DRAWS, SIZE = 4000, 4


def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The products of both sketches over many seeds."""
    found = [float(count_sketch([x], SIZE, seed) @ count_sketch([y], SIZE, seed)) for seed in range(DRAWS)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("x", "y"), [(X, Y), (X, X), (X, -Y)])
def test_products_are_unbiased_and_vary_as_said(x: torch.Tensor, y: torch.Tensor) -> None:
    found, exact = products(x, y), float(x @ y)
    variance = float(x @ x) * float(y @ y) + exact**2 - 2 * float((x * y).square().sum())
    variance /= SIZE
    assert abs(float(found.mean()) - exact) < 4 * (variance / DRAWS) ** 0.5
    squares = (found - exact).square()
    assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / DRAWS**0.5


def test_it_is_linear_and_a_function_of_its_seed() -> None:
    both = count_sketch([2 * X - 3 * Y], SIZE, 5)
    assert torch.allclose(both, 2 * count_sketch([X], SIZE, 5) - 3 * count_sketch([Y], SIZE, 5))
    assert torch.equal(both, count_sketch([2 * X - 3 * Y], SIZE, 5))
    assert not torch.equal(both, count_sketch([2 * X - 3 * Y], SIZE, 6))
    assert (both.shape, both.dtype) == ((SIZE,), torch.float64)


@pytest.mark.parametrize("chunk", [2, sketch.CHUNK_ENTRIES])
def test_every_entry_is_in_one_place_with_one_sign(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "CHUNK_ENTRIES", chunk)
    places = set()
    for entry in range(5):
        unit = torch.zeros(5).index_fill(0, torch.tensor(entry), 1.0)
        found = count_sketch([unit[:3], unit[3:].view(1, 2)], 64, 1)
        assert sorted(found.abs().tolist()) == [0.0] * 63 + [1.0]
        places.add(int(found.abs().argmax()))
    assert len(places) == 5  # of 64: parts and chunks do not repeat the draws of the first


def test_half_precision_is_summed_in_double() -> None:
    halves = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert torch.equal(count_sketch([halves], 1, 2), count_sketch([halves.double()], 1, 2))


def test_nothing_has_no_sketch() -> None:
    with pytest.raises(ValueError, match="nothing to sketch"):
        count_sketch([], 8, 0)
