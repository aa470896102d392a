"""Triton's products with weights of 8 and 4 bits against `kernels.reference`."""

import pytest
import torch

from kernels import reference
from kernels.gpu import quantised
from kernels.gpu.ops import TritonOps
from kernels.weights import Scheme
from tests.kernels.cpu.test_low_bits import SCHEMES, make
from tests.kernels.cpu.test_native import normal


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 64, 96), (5, 208, 70), (70, 34, 33)])
def test_products_equal_those_of_dequantised_weights(
    device: torch.device, scheme: Scheme, rows: int, in_features: int, out_features: int
) -> None:
    weights = make(scheme, out_features, in_features).to(device)
    bias = normal(out_features).to(device) if rows > 1 else None
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 0.1)):
        x = normal(rows, in_features).to(device, dtype)
        given = weights.with_bias(None if bias is None else bias.to(dtype))
        expected = reference.linear(x, given)
        found = quantised.linear(x, TritonOps().pack(given))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=2**-8 if dtype == torch.float16 else 1e-5)


def test_other_shapes_are_refused(device: torch.device) -> None:
    weights = make(SCHEMES[0], 33, 64).to(device)
    with pytest.raises(ValueError, match=r"x: expected \[T, 64\]"):
        quantised.linear(normal(3, 32).to(device), weights)
    assert quantised.linear(normal(0, 64).to(device), weights).shape == (0, 33)
    assert not TritonOps().serves(Scheme("int8", 64, torch.float16))
