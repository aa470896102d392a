"""Products with weights of 8 and 4 bits against `kernels.reference`, and rounding to such weights."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import native, native_build
from kernels.cpu.plain import TorchOps
from kernels.ops import Ops
from kernels.reference import LoraRouting
from kernels.weights import (
    LinearWeights,
    Scheme,
    concatenated,
    dense,
    pack_halves,
    quantised,
    round_to_int4,
    round_to_int8,
    unpack_halves,
)
from tests.kernels.cpu.test_native import make_batch, make_lora, normal

SCHEMES = [
    Scheme("int8", 32, torch.float16),
    Scheme("int8", 16, torch.float32),
    Scheme("int8", 32, torch.bfloat16, "mins"),
    Scheme("int4", 32, torch.float16),
    Scheme("int4", 32, torch.bfloat16, "mins"),
    Scheme("int4", 16, torch.float32, "mins"),
    Scheme("int4", 32, torch.float32),
    Scheme("int4", 32, torch.float16, "zeros"),
]


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    library = native_build.load()
    assert library is not None, "the tests need a C++ compiler"
    return native.NativeOps(library)


def make(scheme: Scheme, out_features: int, in_features: int) -> LinearWeights:
    """Return random weights with every value of the scheme."""
    generator = torch.Generator().manual_seed(in_features)
    groups = -(-in_features // scheme.group)
    scales = (normal(out_features, groups) * 0.02).to(scheme.scale_dtype)
    given = {
        "": {},
        "mins": {"mins": (normal(out_features, groups + 1)[:, 1:] * 0.1).to(scheme.scale_dtype)},
        "zeros": {"zeros": torch.randint(0, 17, (out_features, groups), generator=generator, dtype=torch.uint8)},
    }[scheme.offsets]
    least, most = (-128, 128) if scheme.kind == "int8" else (0, 16)
    values = torch.randint(least, most, (out_features, in_features), generator=generator)
    stored = values.to(torch.int8) if scheme.kind == "int8" else pack_halves(values)
    return LinearWeights(scheme, {"values": stored, "scales": scales, **given}, in_features, out_features)


def step_tables(ops: Ops, rows: int) -> object:
    return ops.step_tables(make_batch([rows], [rows], 16), None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (208, 70), (34, 33)])
def test_products_equal_those_of_dequantised_weights(
    ops: Ops, scheme: Scheme, in_features: int, out_features: int
) -> None:
    weights = make(scheme, out_features, in_features).with_bias(normal(out_features))
    assert ops.serves(scheme)
    packed = ops.pack(weights)
    for rows in (1, 4, 5, 17, 130):
        x = normal(rows, in_features)
        expected = torch.nn.functional.linear(x, reference.dequantize(weights), weights.bias)
        assert torch.equal(reference.linear(x, weights), expected)
        torch.testing.assert_close(ops.linear(x, packed, None, step_tables(ops, rows)), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 130])
def test_in_bf16_the_native_product_rounds_inputs_too(scheme: Scheme, rows: int) -> None:
    library = native_build.load()
    assert library is not None
    ops = native.NativeOps(library)
    weights = make(scheme, 70, 208).with_bias(normal(70, dtype=torch.bfloat16))
    x = normal(rows, 208, dtype=torch.bfloat16)
    x[0, :40] *= 50  # an outlier costs its own group's precision only
    x[-1, 32:64] = 0
    y = ops.linear(x, ops.pack(weights), None, step_tables(ops, rows))
    rounded = reference.linear(x.float(), weights, rounds_inputs=True)
    torch.testing.assert_close(y, rounded.bfloat16(), atol=1e-3, rtol=2**-7)
    exact = reference.linear(x.float(), weights)
    assert (y.float() - exact).norm() < 0.02 * exact.norm()
    assert (y.float() - rounded).norm() < (y.float() - exact).norm()


@pytest.mark.parametrize("rounded", [round_to_int8, round_to_int4])
def test_in_fp32_a_row_takes_about_as_long_as_with_dense_weights(rounded: Callable[[Tensor], LinearWeights]) -> None:
    """Widening the weights costs little beside reading them in fp32; weight by weight it took four times as long."""
    library = native_build.load()
    assert library is not None
    ops = native.NativeOps(library)
    ops.threads = 1  # the calling thread, whose time other processes do not change
    original, x, tables = normal(2048, 2048), normal(1, 2048), step_tables(ops, 1)
    seconds: dict[str, list[float]] = {"dense": [], "rounded": []}
    packed = {"dense": ops.pack(dense(original)), "rounded": ops.pack(rounded(original))}
    for _ in range(15):
        for name, weights in packed.items():
            began = time.thread_time()
            ops.linear(x, weights, None, tables)
            seconds[name].append(time.thread_time() - began)
    assert min(seconds["rounded"]) < 2.5 * min(seconds["dense"])


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others(scheme: Scheme, dtype: torch.dtype) -> None:
    """Also with LoRA, in the product or after it, whose delta is that of the dense product."""
    library = native_build.load()
    assert library is not None
    ops = native.NativeOps(library)
    group, tables = make_lora((0, 64, 96, 128), dtype)
    weights = make(scheme, 128, 96)
    packed = ops.pack(weights)
    counts, adapters = [1, 19, 1, 3, 8, 40, 1], [2, 5, 2, -1, 0, 6, 4]
    batch = make_batch(counts, counts, 16, adapters)
    x = normal(batch.num_tokens, 96, dtype=dtype)
    together = ops.linear(x, packed, group, ops.step_tables(batch, tables))
    expected = ops.linear(x, packed, None, ops.step_tables(batch, tables))
    for row, adapter in enumerate(batch.adapter_index.tolist()):
        alone = ops.linear(
            x[row : row + 1], packed, group, ops.step_tables(make_batch([1], [1], 16, [adapter]), tables)
        )
        assert torch.equal(alone[0], together[row]), row
    reference.segmented_lora(expected, x, group, LoraRouting(batch.adapter_index, tables.page_table, tables.ranks))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=2**-7)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding(ops: Ops, scheme: Scheme, dtype: torch.dtype) -> None:
    weights = make(scheme, 70, 208)
    tokens = torch.tensor([0, 69, 3, 31, 32, 3])
    found = ops.embed(ops.pack(weights), tokens, dtype)
    assert torch.equal(found, reference.dequantize(weights)[tokens].to(dtype))


def relative_error(weights: LinearWeights, original: Tensor) -> float:
    return float((reference.dequantize(weights) - original).norm() / original.norm())


def test_rounding_is_as_close_as_its_bits_allow() -> None:
    original = normal(64, 1000)
    eight, four = round_to_int8(original), round_to_int4(original)
    assert relative_error(eight, original) < 0.006
    assert relative_error(four, original) < 0.085
    assert eight.num_bytes < 0.54 * 2 * original.numel()
    assert four.num_bytes < 0.29 * 2 * original.numel()
    # Whole multiples of a step are exact, but for the rounding of the scale, and so is a group of zeros.
    simple = torch.tensor([[0.5, -0.25] * 16 + [0.0] * 32])
    for weights in (round_to_int8(simple), round_to_int4(simple)):
        torch.testing.assert_close(reference.dequantize(weights), simple, atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match="even number of inputs, got 33"):
        round_to_int4(normal(4, 33))


def test_int4_clips_where_that_lowers_the_error() -> None:
    original = normal(64, 1024)
    largest = original.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    plain = (original / (largest / 8)).round().clamp(-8, 7) * (largest / 8)
    assert relative_error(round_to_int4(original), original) < 0.95 * float((plain - original).norm() / original.norm())


def test_halves_round_trip() -> None:
    values = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    assert torch.equal(unpack_halves(pack_halves(values)), values)


def test_large_groups_are_cut_and_odd_ones_refused() -> None:
    values = torch.ones(4, 256, dtype=torch.int8)
    cut = quantised("int8", values, normal(4, 2), 256)
    assert cut.scheme.group == 32
    assert torch.equal(reference.dequantize(cut), normal(4, 2).repeat_interleave(128, 1))
    with pytest.raises(ValueError, match="expected groups of 16, or of a multiple of 32"):
        quantised("int8", values, normal(4, 32), 256)


def test_layers_of_different_schemes_become_one_exactly() -> None:
    parts = [make(scheme, 32, 64) for scheme in SCHEMES]
    together = concatenated(parts)
    assert torch.equal(reference.dequantize(together), torch.cat([reference.dequantize(part) for part in parts]))
    assert concatenated(parts[:1]) is parts[0]


def test_a_scheme_that_is_not_served() -> None:
    library = native_build.load()
    assert library is not None
    ops = native.NativeOps(library)
    assert not ops.serves(Scheme("int8", 64, torch.float16))
    assert ops.serves(dense(normal(2, 2)).scheme)


@pytest.mark.parametrize("in_features", [64, 70])
@pytest.mark.parametrize("rounded", [round_to_int8, round_to_int4])
def test_a_described_weight_has_the_form_of_a_rounded_one(
    rounded: Callable[[Tensor], LinearWeights], in_features: int
) -> None:
    def form(weight: Tensor) -> tuple[Scheme, dict[str, tuple[torch.Size, torch.dtype]]]:
        found = rounded(weight)
        return found.scheme, {name: (each.shape, each.dtype) for name, each in found.tensors.items()}

    weight = normal(6, in_features)
    assert form(weight.to("meta")) == form(weight)
