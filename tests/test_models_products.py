"""Every way to multiply gives the same product; only large weights on a CPU are measured."""

import pytest
import torch

from pagedlab.models import products
from pagedlab.models.layers import MergedLinear

CPU = torch.device("cpu")


@pytest.mark.parametrize("formulation", [products.linear, products.transposed, products.packed])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_formulation_gives_the_same_product(formulation, rows, with_bias):
    if formulation is products.packed and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    weight, wide = torch.randn(96, 80), torch.randn(rows, 160)
    bias = torch.randn(96) if with_bias else None
    for x in (wide[:, :80].contiguous(), wide[:, ::2]):
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        found = formulation(weight)(x, bias)
        assert found.shape == (rows, 96) and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_small_weights_are_multiplied_plainly():
    assert products.fastest_formulation(torch.empty(1023, 1024)) is products.linear


@pytest.mark.parametrize("winner", [products.linear, products.transposed, products.packed])
def test_a_large_weight_keeps_its_product_whoever_wins(winner, monkeypatch):
    if winner is products.packed and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_measured", lambda *shape: winner)
    layer = MergedLinear(1024, {"q_proj": 1024, "k_proj": 64}, torch.float32, CPU)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(3, 1024)
    before = layer(x)
    layer.choose_product()
    torch.testing.assert_close(layer(x), before, atol=1e-4, rtol=1e-4)
    assert (len(layer.weight) == 0) == (winner is products.packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_this_torch_lacks_is_no_candidate(dtype, monkeypatch):
    assert products.linear in products.formulations(64, dtype)

    def missing(weight):
        raise AttributeError("no such operator in this build")

    monkeypatch.setattr(products, "packed", missing)
    assert products.formulations(64, dtype) == [products.linear, products.transposed]


def test_the_measurement_happens_once_per_shape():
    products._measured.cache_clear()
    for _ in range(3):
        assert products.fastest_formulation(torch.empty(1024, 1024)) in (
            products.linear, products.transposed, products.packed)
    assert products._measured.cache_info().misses == 1
