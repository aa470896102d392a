"""Products with int8 weights that have a scale for each output, as in W8A8 checkpoints, against the reference."""

import pytest
import torch

from kernels import reference
from kernels.cpu.plain import TorchOps
from kernels.gpu import quantised, scaled
from kernels.gpu.ops import TritonOps
from kernels.weights import LinearWeights, Scheme, concatenated, divided, int8_by_output, round_to_int8
from tests.kernels.cpu.test_native import normal
from tests.kernels.gpu.test_fp8 import check_that_rows_stay_apart, products


def make(out_features: int, in_features: int) -> LinearWeights:
    """Return weights of all int8 numbers, with scales of different sizes."""
    generator = torch.Generator().manual_seed(in_features)
    values = torch.randint(-128, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    return int8_by_output(values, normal(out_features, 1).exp() * 1e-3)


# The interpreter cuts numbers off where they become bfloat16; a GPU rounds them.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 64, 96), (31, 208, 80), (70, 4096, 16)])
def test_the_product_equals_its_twin_with_rounded_inputs(
    device: torch.device, dtype: torch.dtype, tolerance: float, rows: int, in_features: int, out_features: int
) -> None:
    weights = make(out_features, in_features).to(device)
    x = normal(rows, in_features, dtype=torch.bfloat16).to(device, dtype)
    values, scales = scaled.round_rows(x, torch.int8)  # not the reference's, because ties may be rounded differently
    for bias in (None, normal(out_features, dtype=dtype).to(device)):
        given = weights.with_bias(bias)
        found, exact = scaled.linear(x, given), reference.linear(x, given)
        assert found.dtype == dtype
        of_rounded = reference.linear(values.float() * scales[:, None], weights)
        expected = of_rounded if bias is None else of_rounded + bias.float()
        torch.testing.assert_close(found.float(), expected, atol=50 * tolerance, rtol=tolerance)
        assert (found - exact).norm() > 0.003 * exact.norm(), "inputs are not rounded to int8"
        assert (found - exact).norm() < 0.02 * exact.norm()
    assert scaled.linear(x[:0], weights).shape == (0, out_features)


def test_rows_are_rounded_as_in_the_reference(device: torch.device) -> None:
    x = normal(6, 2 * 100, dtype=torch.bfloat16).to(device)[:, :100]
    x[1] *= 1e-3
    x[2] = 0
    x[3, 7] = 3e38
    x[4] = torch.arange(-50, 50) * 0.5  # with 63.5 as the largest number these are ties
    x[4, 0] = 63.5
    values, scales = scaled.round_rows(x, torch.int8, least_rows=9)
    expected, expected_scales = reference.quantize_rows(x, torch.int8)
    assert values.shape == (9, 100)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-6)
    # The quotient of a tie may be rounded to either side before it is rounded to an integer.
    assert (values[:6].int() - expected.int()).abs().max() <= 1
    assert (values[:6] != expected).float().mean() < 0.05
    assert torch.equal(values[4].cpu(), expected[4].cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_not_finite_rows_and_large_ones_leave_other_requests_as_they_are(
    device: torch.device, dtype: torch.dtype
) -> None:
    """In bfloat16 by int8 products, in float16 widened."""
    check_that_rows_stay_apart(TritonOps(), make(96, 64).to(device), dtype)


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    weights, x = make(96, 64).to(device), normal(40, 64, dtype=torch.bfloat16).to(device)
    together = scaled.linear(x, weights)
    assert torch.equal(torch.cat([scaled.linear(row[None], weights) for row in x]), together)


def test_each_product_has_its_kernel(device: torch.device) -> None:
    ops, weights, x = TritonOps(), make(96, 64).to(device), normal(3, 64, dtype=torch.bfloat16).to(device)
    assert torch.equal(products(ops, x, weights), scaled.linear(x, weights))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2**-9)):
        found = products(ops, x.to(dtype), weights)
        assert torch.equal(found, quantised.linear(x.to(dtype), weights))
        torch.testing.assert_close(found, reference.linear(x.to(dtype), weights), atol=tolerance, rtol=tolerance)
    assert not scaled.can_multiply(x, make(97, 64), True)
    assert not scaled.can_multiply(x, make(96, 72), True)
    assert not scaled.can_multiply(x, round_to_int8(normal(96, 64)), True)


def test_backends_that_keep_a_scale_for_each_output() -> None:
    scheme = Scheme("int8", 0, torch.float32)
    assert str(scheme) == "int8 with a scale for each output"
    assert TritonOps().serves(scheme)
    assert TorchOps().serves(scheme)


def test_groups_have_the_weights_of_their_outputs() -> None:
    weights = make(48, 96)
    found = divided(weights)
    assert found.scheme == Scheme("int8", 32, torch.float32)
    assert torch.equal(reference.dequantize(found), reference.dequantize(weights))
    assert divided(found) is found


def test_layers_of_different_schemes_become_one_exactly() -> None:
    parts = [make(32, 96), round_to_int8(normal(16, 96)), make(16, 96)]
    found = concatenated(parts)
    assert found.scheme == Scheme("int8", 32, torch.float32, "mins")
    assert torch.equal(reference.dequantize(found), torch.cat([reference.dequantize(part) for part in parts]))
    assert concatenated([parts[0], parts[2]]).scheme == parts[0].scheme


def test_rows_of_an_embedding(device: torch.device) -> None:
    weights, ids = make(70, 128).to(device), torch.tensor([3, 0, 69, 3]).to(device)
    found = TritonOps().embed(weights, ids, torch.float16)
    assert torch.equal(found, reference.dequantize(weights)[ids].half())
