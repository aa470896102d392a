"""Products with FP8 weights against `kernels.reference`: widened in registers, and by torch's scaled product."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu import quantised, scaled
from kernels.gpu.ops import TritonOps
from kernels.gpu.platform import CudaPlatform
from kernels.ops import Ops
from kernels.reference import LoraRouting
from kernels.weights import FP8, LinearWeights, Scheme, concatenated, fp8
from tests.kernels.cpu.test_native import make_batch, make_lora, normal
from tests.kernels.gpu.test_triton_ops import to


def make(out_features: int, in_features: int, group: int = 0) -> LinearWeights:
    """Return weights of any finite FP8 numbers, also subnormal ones. group: inputs that share a scale."""
    generator = torch.Generator().manual_seed(in_features)
    magnitudes = torch.randint(0, 0x7F, (out_features, in_features), generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, (out_features, in_features), generator=generator, dtype=torch.uint8) << 7
    groups = -(-in_features // group) if group else 1
    return fp8((magnitudes | signs).view(FP8), normal(out_features, groups) * 1e-3, group)


@pytest.fixture
def scaled_device(device: torch.device) -> torch.device:
    """Return a device that has torch's scaled product. The CPU has it too."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < scaled.CAPABILITY:
        pytest.skip("this GPU multiplies no FP8")
    return device


@pytest.mark.parametrize("group", [0, 64, 128])
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 64, 96), (5, 208, 70), (70, 150, 33)])
def test_widened_products_equal_those_of_dequantised_weights(
    device: torch.device, group: int, rows: int, in_features: int, out_features: int
) -> None:
    weights = make(out_features, in_features, group).to(device)
    bias = normal(out_features).to(device) if rows > 1 else None
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2**-10)):
        x = normal(rows, in_features).to(device, dtype)
        given = weights.with_bias(None if bias is None else bias.to(dtype))
        found = quantised.linear(x, TritonOps().pack(given))
        assert found.dtype == dtype
        torch.testing.assert_close(found, reference.linear(x, given), atol=tolerance, rtol=tolerance)


def test_every_byte_is_widened_to_its_number(device: torch.device) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8)[:, None].to(device)
    weights = fp8(values, torch.ones(256, 1, device=device))
    found = quantised.linear(torch.ones(1, 1, device=device), weights)
    assert found.isnan().sum() == 2
    torch.testing.assert_close(found[0], values.float()[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 64, 96), (5, 208, 80), (70, 4096, 16)])
def test_the_scaled_product_equals_its_twin_with_rounded_inputs(
    scaled_device: torch.device, rows: int, in_features: int, out_features: int
) -> None:
    weights = make(out_features, in_features).with_bias(normal(out_features, dtype=torch.bfloat16)).to(scaled_device)
    x = normal(rows, in_features, dtype=torch.bfloat16).to(scaled_device)
    found = scaled.linear(x, weights)
    expected = reference.linear(x, weights, rounds_inputs=True)
    exact = reference.linear(x, weights)
    assert found.dtype == torch.bfloat16
    values, scales = scaled.round_rows(x, FP8)
    of_rounded = reference.linear(values.float() * scales[:, None], weights).bfloat16()
    torch.testing.assert_close(found, of_rounded, atol=1e-4, rtol=2**-7)
    # Ties may be rounded differently.
    assert (found - expected).norm() < 0.2 * (found - exact).norm(), "inputs are not rounded to FP8"
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert scaled.linear(x[:0], weights).shape == (0, out_features)


def test_rows_are_rounded_as_in_the_reference(scaled_device: torch.device) -> None:
    x = normal(6, 2 * 100, dtype=torch.bfloat16).to(scaled_device)[:, :100]
    x[1] *= 1e-3
    x[2] = 0
    x[3, 7] = 3e38
    values, scales = scaled.round_rows(x, FP8)
    expected, expected_scales = reference.quantize_rows(x, FP8)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-6)
    # A tie between two numbers may be rounded to either.
    error, least = ((each.float() * scales[:, None] - x.float()).abs() for each in (values, expected))
    torch.testing.assert_close(error, least, atol=0, rtol=1e-4)
    assert (values.float() != expected.float()).float().mean() < 0.05
    with pytest.raises(ValueError, match=r"x: expected \[T, in\] with contiguous rows"):
        scaled.round_rows(x.t(), FP8)


def products(ops: Ops, x: Tensor, weights: LinearWeights) -> Tensor:
    return ops.linear(x, ops.pack(weights), None, ops.step_tables(make_batch([1] * len(x), [1] * len(x), 16), None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_not_finite_rows_and_large_ones_leave_other_requests_as_they_are(
    scaled_device: torch.device, dtype: torch.dtype
) -> None:
    """In bfloat16 by the scaled product, in float16 widened."""
    check_that_rows_stay_apart(TritonOps(fp8_products=True), make(96, 64).to(scaled_device), dtype)


def check_that_rows_stay_apart(ops: Ops, weights: LinearWeights, dtype: torch.dtype) -> None:
    """Check that rows with a NaN, an infinity or large numbers change no other row. weights: `[96, 64]`."""
    x = normal(6, 64, dtype=dtype).to(weights.tensors["values"].device)
    alone = products(ops, x, weights)
    x[1, 5], x[3, 0], x[4] = torch.nan, torch.inf, 6e4
    found = products(ops, x, weights)
    others = [0, 2, 5]
    assert torch.equal(found[others], alone[others])
    assert alone.isfinite().all()
    assert not found[[1, 3]].isfinite().any()


def test_each_product_has_its_kernel(scaled_device: torch.device) -> None:
    by_output, by_block = make(96, 64).to(scaled_device), make(96, 128, 64).to(scaled_device)
    ops, x = TritonOps(fp8_products=True), normal(3, 64, dtype=torch.bfloat16).to(scaled_device)
    assert torch.equal(products(ops, x, by_output), scaled.linear(x, by_output))
    assert torch.equal(products(ops, x.half(), by_output), quantised.linear(x.half(), by_output))
    assert torch.equal(products(TritonOps(), x.half(), by_output), quantised.linear(x.half(), by_output))
    assert not scaled.can_multiply(normal(3, 128, dtype=torch.bfloat16), by_block, True)
    assert not scaled.can_multiply(x, make(97, 64), True)
    assert not scaled.can_multiply(x, make(96, 72), True)
    assert not scaled.can_multiply(x, by_output, False)


def test_an_adapters_delta_is_that_of_unrounded_inputs(
    scaled_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, because the interpreter multiplies no bfloat16."""
    monkeypatch.setattr(scaled, "can_multiply", lambda x, weights, has_fp8: True)
    group, tables = make_lora((0, 64, 96, 128), torch.float16)
    weights, ops = make(128, 96).to(scaled_device), TritonOps(fp8_products=True)
    batch = make_batch([1, 4, 1], [1, 4, 1], 16, [2, -1, 0])
    x = normal(batch.num_tokens, 96, dtype=torch.float16).to(scaled_device)
    values, scales = reference.quantize_rows(x.cpu(), FP8)
    exact, rounded = torch.zeros(len(x), 128), torch.zeros(len(x), 128)
    routing = LoraRouting(batch.adapter_index, tables.page_table, tables.ranks)
    for delta, inputs in ((exact, x.cpu().float()), (rounded, values.float() * scales[:, None])):
        reference.segmented_lora(delta, inputs, group, routing)
    tables.page_table, tables.ranks = (part.to(scaled_device) for part in (tables.page_table, tables.ranks))
    step = ops.step_tables(to(batch, scaled_device), tables)
    with_lora, without = (ops.linear(x, weights, each, step) for each in (to(group, scaled_device), None))
    found = (with_lora.float() - without.float()).cpu()
    assert exact.norm() > 1
    assert (found - exact).norm() < 0.2 * (found - rounded).norm()


def test_schemes_that_the_gpu_keeps() -> None:
    served = [Scheme("fp8", group, torch.float32) for group in (0, 64, 128)]
    assert all(TritonOps().serves(scheme) for scheme in served)
    assert not TritonOps().serves(Scheme("fp8", 32, torch.float32))
    assert [str(scheme) for scheme in served[::2]] == ["fp8 with a scale for each output", "fp8 in groups of 128"]


def test_layers_of_different_groups_become_one_exactly() -> None:
    parts = [make(32, 200, group) for group in (0, 64, 128)]
    found = concatenated(parts)
    assert found.scheme == Scheme("fp8", 64, torch.float32)
    assert torch.equal(reference.dequantize(found), torch.cat([reference.dequantize(part) for part in parts]))
    assert concatenated(parts[:1] * 2).scheme == parts[0].scheme


def test_rows_of_an_embedding(device: torch.device) -> None:
    weights, ids = make(70, 128, 64).to(device), torch.tensor([3, 0, 69, 3]).to(device)
    found = TritonOps().embed(weights, ids, torch.float16)
    assert torch.equal(found, reference.dequantize(weights)[ids].half())


@pytest.mark.parametrize(("capability", "scales"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_cards_capability_decides(capability: tuple[int, int], scales: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on an A100 widens weights; one on an RTX 4090, an L4 or an H100 multiplies FP8."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked: list[LinearWeights] = []
    monkeypatch.setattr(scaled, "linear", lambda x, weights: asked.append(weights) or x)
    monkeypatch.setattr(quantised, "linear", lambda x, weights: x)
    ops = CudaPlatform(torch.device("cuda")).ops(torch.bfloat16, 64, 16, None, None)
    products(ops, normal(3, 64, dtype=torch.bfloat16), make(96, 64))
    assert bool(asked) == scales
