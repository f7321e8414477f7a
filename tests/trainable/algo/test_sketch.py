"""The sketch of a vector: inner products are unbiased, with the variance that the docstring of `count_sketch` gives."""

import pytest
import torch

from trainable.algo import gradient_signal
from trainable.algo.gradient_signal import count_sketch

X = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1.5])
Y = torch.tensor([2.0, 1.0, -1.0, 0.5, 4.0, 1.0])
DRAWS, SIZE = 4000, 4


@pytest.mark.long
@pytest.mark.parametrize(("x", "y"), [(X, Y), (X, X)])
def test_products_are_unbiased_and_vary_as_said(x: torch.Tensor, y: torch.Tensor) -> None:
    products = [float(count_sketch([x], SIZE, seed) @ count_sketch([y], SIZE, seed)) for seed in range(DRAWS)]
    sketch_products, exact_product = torch.tensor(products, dtype=torch.float64), float(x @ y)
    variance = float(x @ x) * float(y @ y) + exact_product**2 - 2 * float((x * y).square().sum())
    variance /= SIZE
    assert abs(float(sketch_products.mean()) - exact_product) < 4 * (variance / DRAWS) ** 0.5
    squared_errors = (sketch_products - exact_product).square()
    assert abs(float(squared_errors.mean()) - variance) < 4 * float(squared_errors.std()) / DRAWS**0.5


def test_it_is_linear_and_a_function_of_its_seed() -> None:
    combined_sketch = count_sketch([2 * X - 3 * Y], SIZE, 5)
    assert torch.allclose(combined_sketch, 2 * count_sketch([X], SIZE, 5) - 3 * count_sketch([Y], SIZE, 5))
    assert torch.equal(combined_sketch, count_sketch([2 * X - 3 * Y], SIZE, 5))
    assert not torch.equal(combined_sketch, count_sketch([2 * X - 3 * Y], SIZE, 6))
    assert (combined_sketch.shape, combined_sketch.dtype) == ((SIZE,), torch.float64)
    halves = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert torch.equal(count_sketch([halves], 1, 2), count_sketch([halves.double()], 1, 2))


@pytest.mark.parametrize("chunk", [2, gradient_signal.CHUNK_ENTRIES])
def test_every_entry_is_in_one_place_with_one_sign(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_signal, "CHUNK_ENTRIES", chunk)
    places = set()
    for entry in range(5):
        unit = torch.zeros(5).index_fill(0, torch.tensor(entry), 1.0)
        unit_sketch = count_sketch([unit[:3], unit[3:].view(1, 2)], 64, 1)
        assert sorted(unit_sketch.abs().tolist()) == [0.0] * 63 + [1.0]
        places.add(int(unit_sketch.abs().argmax()))
    assert len(places) == 5  # of 64 places: later tensors and chunks do not repeat the draws of the first
