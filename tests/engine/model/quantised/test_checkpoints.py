"""Quantised safetensors: every weight in memory is exactly that of the checkpoint, and foreign ones are refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.config import read_config
from engine.model.decoder import load_embedding_and_head
from engine.model.families import parse_model_config
from engine.model.quantised.methods import METHODS
from engine.model.tensor_files import NOT_FINITE, tensor_error
from engine.model.weights import ModelWeights, base_tensor, open_weights
from kernels import reference
from kernels.cpu.plain import TorchOps
from kernels.gpu import schemes
from kernels.weights import GROUPS
from testing import quantised_files as files
from wire.errors import ConfigError

CPU = torch.device("cpu")
GPTQ4, GPTQ8 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq", "bits": 8}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FP8, BY_OUTPUT = {"quant_method": "fp8"}, "fp8 with a scale for each output"
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], files.Written], str]] = {
    "gptq 4 symmetric": (GPTQ4, partial(files.gptq, bits=4, symmetric=True), "int4 in groups of 32"),
    "gptq 4": (GPTQ4, partial(files.gptq, bits=4, symmetric=False), "int4 in groups of 32 with zero points"),
    "gptq 4 v2": (
        GPTQ4 | {"checkpoint_format": "gptq_v2"}, partial(files.gptq, bits=4, symmetric=False, v2=True),
        "int4 in groups of 32 with zero points",
    ),
    "gptq 4 shuffled": (GPTQ4, partial(files.gptq, bits=4, symmetric=False, shuffled=True), "dense"),
    "gptq 8 symmetric": (GPTQ8, partial(files.gptq, bits=8, symmetric=True), "int8 in groups of 32"),
    "gptq 8": (GPTQ8, partial(files.gptq, bits=8, symmetric=False), "int8 in groups of 32 with minimums"),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, files.awq, "int4 in groups of 32 with zero points"),
    "packed 4 symmetric": (PACKED, partial(files.packed, bits=4, symmetric=True), "int4 in groups of 32"),
    "packed 4": (PACKED, partial(files.packed, bits=4, symmetric=False), "int4 in groups of 32 with zero points"),
    "packed 8 symmetric": (PACKED, partial(files.packed, bits=8, symmetric=True), "int8 in groups of 32"),
    "int8 symmetric": (
        PACKED | {"format": "int-quantized"}, partial(files.int8, symmetric=True), "int8 with a scale for each output"
    ),
    "int8": (
        PACKED | {"format": "int-quantized"}, partial(files.int8, symmetric=False),
        "int8 in groups of 32 with minimums",
    ),
    "fp8 tensor": (PACKED | {"format": "float-quantized"}, partial(files.fp8, kind="tensor"), BY_OUTPUT),
    "fp8 channel": (PACKED | {"format": "float-quantized"}, partial(files.fp8, kind="channel"), BY_OUTPUT),
    "fbgemm channel": ({"quant_method": "fbgemm_fp8"}, partial(files.fp8, kind="channel"), BY_OUTPUT),
    "fp8 block": (FP8 | {"weight_block_size": [48, 32]}, partial(files.fp8, kind="block"), "fp8 in groups of 32"),
    "fp8 one block": (
        FP8 | {"weight_block_size": [128, 128]}, partial(files.fp8, kind="block", block=(128, 128)), BY_OUTPUT
    ),
}  # fmt: skip


def qkv(source: ModelWeights) -> Any:
    parts = [(f"model.layers.1.self_attn.{name}_proj", rows) for name, rows in (("q", 64), ("k", 32), ("v", 32))]
    return source.linear(parts, 64)


@pytest.mark.parametrize("case", sorted(CASES))
def test_weights_are_exactly_the_checkpoint_s(case: str, model: Path, tmp_path: Path) -> None:
    config, quantise, scheme = CASES[case]
    expected = files.write(model, tmp_path / "out", config, quantise)
    wanted = torch.cat([expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto") as source:
        found = qkv(source)
        assert str(found.scheme) == scheme
        assert torch.equal(reference.dequantize(found), wanted)
        down = source.linear([("model.layers.0.mlp.down_proj", 64)], 128)
        assert torch.equal(reference.dequantize(down), expected["model.layers.0.mlp.down_proj.weight"])
        head = source.embedding("lm_head", *expected["lm_head.weight"].shape)
        assert torch.equal(head.tensors["weight"], expected["lm_head.weight"])
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization="none") as source:
        assert torch.equal(qkv(source).tensors["weight"], wanted)
    with (
        open_weights(tmp_path / "out", torch.float32, CPU, quantization="int8") as source,
        pytest.raises(
            ConfigError, match=r"^quantization: \S*: tensor \S*q_proj\.\w+: quantised already; expected auto or none"
        ),
    ):
        qkv(source)


@pytest.mark.parametrize("case", [case for case in sorted(CASES) if CASES[case][2].startswith("fp8")])
def test_the_device_decides_which_fp8_weights_stay_in_fp8(case: str, model: Path, tmp_path: Path) -> None:
    """The CPU keeps none, the GPU those with a scale for each output and those in groups of whole tiles."""
    config, quantise, scheme = CASES[case]
    expected = files.write(model, tmp_path / "out", config, quantise)
    wanted = torch.cat([expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    for serves, kept in ((TorchOps().serves, "dense"), (schemes.serves, scheme if scheme == BY_OUTPUT else "dense")):
        with open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto", serves=serves) as source:
            found = qkv(source)
            assert str(found.scheme) == kept
            assert torch.equal(reference.dequantize(found), wanted)


def test_int8_weights_with_a_scale_for_each_output_are_divided_where_they_are_not_served(
    model: Path, tmp_path: Path
) -> None:
    config, quantise, scheme = CASES["int8 symmetric"]
    expected = files.write(model, tmp_path / "out", config, quantise)
    wanted = torch.cat([expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    for serves, kept in ((schemes.serves, scheme), (lambda scheme: scheme.group in GROUPS, "int8 in groups of 32")):
        with open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto", serves=serves) as source:
            found = qkv(source)
            assert str(found.scheme) == kept
            assert torch.equal(reference.dequantize(found), wanted)


@pytest.mark.parametrize("other", ["dense", "int8"])
def test_a_layer_of_fp8_and_other_parts_is_dequantised(other: str, model: Path, tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> files.Written:
        if weight.shape[0] == 64:  # q_proj, not k_proj and v_proj
            return files.fp8(weight, "channel")
        return files.int8(weight, symmetric=True) if other == "int8" else ({"weight": weight}, weight)

    config = PACKED | {"format": "mixed-precision", "ignore": ["re:.*([kv]|gate|up)_proj$"]}
    expected = files.write(model, tmp_path / "out", config, quantise)
    wanted = torch.cat([expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto") as source:
        found = qkv(source)
        assert source.linear([(Q, 64)], 64).scheme.kind == "fp8"
    assert torch.equal(found.tensors["weight"], wanted)


def test_a_quantised_head_is_not_taken_for_a_tied_embedding(model: Path, tmp_path: Path) -> None:
    """Its checkpoint has no tensor `lm_head.weight`."""
    config, quantise, _ = CASES["packed 4 symmetric"]
    expected = files.write(model, tmp_path / "out", config, quantise, ("lm_head.",))["lm_head.weight"]
    parsed = parse_model_config(read_config(tmp_path / "out"))
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization="none") as source:
        _, head = load_embedding_and_head(source, parsed, TorchOps())
    assert torch.equal(reference.dequantize(head), expected)
    assert torch.equal(base_tensor(tmp_path / "out", parsed, torch.float32, "lm_head"), expected)


class Tensors(dict[str, Tensor]):
    """A checkpoint in memory."""

    def raw(self, name: str) -> Tensor:
        return self[name]

    def stored_dtype(self, name: str) -> str:
        return {torch.float8_e4m3fn: "F8_E4M3"}.get(self[name].dtype, "other")

    def error(self, name: str, problem: str) -> ConfigError:
        return tensor_error(Path("memory"), name, problem)


Q = "model.layers.1.self_attn.q_proj"
BREAKS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "missing zeros": ("gptq 4", lambda t: t.pop(f"{Q}.qzeros"), r"q_proj.qzeros: missing \(gptq int4\)$"),
    "other dtype": (
        "awq", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}),
        r"q_proj.qweight: int64 \[64, 8\]; expected int32 \[64, 8\] \(awq int4\)$",
    ),
    "other shape": (
        "gptq 4", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:-1].clone()}),
        r"q_proj.qweight: int32 \[7, 64\]; expected int32 \[8, 64\] \(gptq int4\)$",
    ),
    "not a number": (
        "packed 4", lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan), f"q_proj.weight_scale: {NOT_FINITE}$"
    ),
    "five bits": (
        "packed 4", lambda t: t.update({f"{Q}.weight_packed": torch.zeros(64, 10, dtype=torch.int32)}),
        r"q_proj.weight_packed: \[64, 10\]; expected int32 64 rows of 4 or 8 bits \(compressed-tensors\)$",
    ),
    "groups of 8": (
        "packed 4 symmetric", lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 8)}),
        r"q_proj.weight: 8 groups of 64 inputs: expected groups of 16.* \(compressed-tensors\)$",
    ),
    "other blocks": (
        "fp8 block", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 3)}),
        r"q_proj.weight_scale_inv: \[3, 3\]; expected one, \[64, 1\], or one for each block \(fp8\)$",
    ),
    "no scale": (
        "fbgemm channel", lambda t: t.pop(f"{Q}.weight_scale"), r"q_proj.weight_scale: missing \(fbgemm_fp8\)$"
    ),
    "no scale, int8": (
        "int8 symmetric", lambda t: t.pop(f"{Q}.weight_scale"),
        r"q_proj.weight_scale: missing \(compressed-tensors\)$",
    ),
    "no scales of blocks": (
        "fp8 block", lambda t: t.pop(f"{Q}.weight_scale_inv"), r"q_proj.weight_scale_inv: missing \(fp8\)$"
    ),
    "no scale, compressed-tensors": (
        "fp8 channel", lambda t: t.pop(f"{Q}.weight_scale"),
        r"q_proj.weight_scale: missing \(compressed-tensors\)$",
    ),
    "e5m2": (
        "fbgemm channel", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float().to(torch.float8_e5m2)}),
        r"q_proj.weight: F8_E5M2; expected F8_E4M3 \(fbgemm_fp8\)$",
    ),
    "e5m2, compressed-tensors": (
        "fp8 tensor", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float().to(torch.float8_e5m2)}),
        r"q_proj.weight: F8_E5M2; expected F8_E4M3 \(compressed-tensors\)$",
    ),
    "infinite scale": (
        "fp8 tensor", lambda t: t[f"{Q}.weight_scale"].fill_(torch.inf), f"q_proj.weight_scale: {NOT_FINITE}$"
    ),
    "not a number, fp8": (
        "fp8 block", lambda t: t[f"{Q}.weight_scale_inv"][1].fill_(torch.nan), f"q_proj.weight_scale_inv: {NOT_FINITE}$"
    ),
    "not a number among FP8 weights": (
        "fbgemm channel", lambda t: t[f"{Q}.weight"].view(torch.uint8)[63].fill_(0x7F), f"q_proj.weight: {NOT_FINITE}$"
    ),
    "not a number, gptq": (
        "gptq 4", lambda t: t[f"{Q}.scales"][1, 2].fill_(torch.nan), f"q_proj.scales: {NOT_FINITE}$"
    ),
    "infinite scale, awq": (
        "awq", lambda t: t[f"{Q}.scales"][0, 63].fill_(-torch.inf), f"q_proj.scales: {NOT_FINITE}$"
    ),
    "integer scales": (
        "fbgemm channel", lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 1, dtype=torch.int32)}),
        r"q_proj.weight_scale: int32 \[64, 1\]; expected float32 or float16 or bfloat16 \[64, 1\] \(fbgemm_fp8\)$",
    ),
    "scales of other rows": (
        "fbgemm channel", lambda t: t.update({f"{Q}.weight_scale": torch.ones(63, 1)}),
        r"q_proj.weight_scale: \[63, 1\]; expected one, \[64, 1\], or one for each block \(fbgemm_fp8\)$",
    ),
    "rows of weights": (
        "fbgemm channel", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][1:].clone()}),
        r"q_proj.weight: float8_e4m3fn \[63, 64\]; expected float8_e4m3fn \[64, 64\] \(fbgemm_fp8\)$",
    ),
    "scalar of scales, gptq": (
        "gptq 4", lambda t: t.update({f"{Q}.scales": torch.tensor(1.0)}),
        r"q_proj.scales: float32 \[\]; expected two dimensions \(gptq int4\)$",
    ),
    "scalar of scales, awq": (
        "awq", lambda t: t.update({f"{Q}.scales": torch.tensor(1.0)}),
        r"q_proj.scales: float32 \[\]; expected two dimensions \(awq int4\)$",
    ),
    "no groups": (
        "packed 4 symmetric", lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 0)}),
        r"q_proj.weight: 0 groups of 64 inputs.* \(compressed-tensors\)$",
    ),
    "more groups than inputs": (
        "gptq 4 shuffled",
        lambda t: t.update(
            {f"{Q}.scales": torch.ones(128, 64), f"{Q}.qzeros": torch.zeros(128, 8, dtype=torch.int32)}
        ),
        r"q_proj.weight: 128 groups of 64 inputs.* \(gptq int4\)$",
    ),
    "group beyond the last": (
        "gptq 4 shuffled", lambda t: t[f"{Q}.g_idx"].__setitem__(5, 2),
        r"q_proj.g_idx: names a group outside 0 to 1 \(gptq int4\)$",
    ),
    "group before the first": (
        "gptq 4 shuffled", lambda t: t[f"{Q}.g_idx"].__setitem__(5, -1),
        r"q_proj.g_idx: names a group outside 0 to 1 \(gptq int4\)$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_tensor_is_refused_by_file_and_name(name: str, model: Path, tmp_path: Path) -> None:
    case, damage, refusal = BREAKS[name]
    config, quantise, _ = CASES[case]
    files.write(model, tmp_path / "out", config, quantise)
    tensors = load_file(tmp_path / "out/model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "out/model.safetensors")
    with (
        open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto") as source,
        pytest.raises(ConfigError, match=rf"^model: \S*/out/model\.safetensors: tensor \S*{refusal}"),
    ):
        qkv(source)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (
            {"quant_method": "bitsandbytes"},
            f'quant_method: expected a string, one of {", ".join(METHODS)}; got "bitsandbytes"',
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits: expected a number, one of 4, 8; got 3"),
        ({"quant_method": "gptq", "bits": "4"}, 'bits: expected a number, one of 4, 8; got "4"'),
        ({"quant_method": "gptq"}, "bits: expected a number, one of 4, 8; got none"),
        ({"quant_method": "gptq", "bits": None}, "bits: expected a number, one of 4, 8; got null"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'checkpoint_format: .*; got "marlin"'),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version: expected a string, .* gemm; got "gemv"'),
        ({"quant_method": "awq", "bits": 4, "version": True}, "version: expected a string, one of gemm; got true"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, 'format: expected .* dense; got "nvfp4-pack-quantized"'),
        (PACKED | {"transform_config": {"config_groups": {}}}, "transform_config is not served"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: expected two sizes, got \[128\]"),
        (PACKED | {"sparsity_config": "dense"}, "sparsity_config is not served"),
        (PACKED | {"ignore": "lm_head"}, 'ignore: expected a list of names, got "lm_head"'),
        (PACKED | {"config_groups": ["g"]}, r'config_groups: expected an object of objects, got \["g"\]'),
        (GPTQ4 | {"dynamic": [None]}, r"dynamic: expected an object, got \[null\]"),
        ({"quant_method": ["gptq"]}, r'quant_method: expected a string, one of .*; got \["gptq"\]'),
        ({"bits": 4}, "quant_method: expected a string, one of .*; got none"),
        ("awq", 'expected an object, got "awq"'),
    ],
)
def test_a_foreign_quantisation_is_refused_before_any_weight(config: Any, refusal: str, model: Path) -> None:
    raw = json.loads((model / "config.json").read_text()) | {"quantization_config": config}
    with pytest.raises(ConfigError, match=f"^quantization_config: {refusal}"):
        parse_model_config(raw)


@pytest.mark.parametrize(("module", "rows", "columns"), [("gptq", 36, 64), ("gptq", 64, 36), ("awq", 36, 64)])
def test_sizes_that_no_word_holds_are_refused(module: str, rows: int, columns: int) -> None:
    """Otherwise the packed zero points or values would be shorter than the sizes by which native code reads them."""
    words = partial(torch.zeros, dtype=torch.int32)
    shapes = {"gptq": (columns // 8, rows), "awq": (columns, rows // 8)}
    groups = 1
    tensors = {
        "q.qweight": words(shapes[module]), "q.qzeros": words(groups, rows // 8), "q.scales": torch.ones(groups, rows)
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"tensor q\.\w+: .*{rows} by {columns}.* \({module} int4\)$"):
        METHODS[module]({"quant_method": module, "bits": 4}).read(Tensors(tensors), "q", rows, columns)


def test_a_single_scale_and_zero_point_apply_to_the_whole_tensor() -> None:
    values = torch.arange(-32, 32, dtype=torch.int8).repeat(16, 1)
    tensors = {"q.weight": values, "q.weight_scale": torch.tensor(0.5), "q.weight_zero_point": torch.tensor(-3).char()}
    found = METHODS["compressed-tensors"](PACKED).read(Tensors(tensors), "q", 16, 64)
    assert found is not None
    assert torch.equal(reference.dequantize(found), 0.5 * (values.float() + 3))


def test_blocks_larger_than_the_tensor_take_no_memory() -> None:
    weight = torch.ones(16, 64).to(torch.float8_e4m3fn)
    method = METHODS["fp8"]({"quant_method": "fp8", "weight_block_size": [1 << 70, 1 << 45]})
    found = method.read(Tensors({"q.weight": weight, "q.weight_scale_inv": torch.full((1, 1), 2.0)}), "q", 16, 64)
    assert found is not None
    assert torch.equal(reference.dequantize(found), torch.full((16, 64), 2.0))
    assert found.num_bytes == 16 * 64 + 16 * 4


def test_whole_bits_may_be_written_as_a_fraction() -> None:
    words, scales = torch.zeros(8, 16, dtype=torch.int32), torch.ones(2, 16)
    tensors = {"q.qweight": words, "q.qzeros": torch.zeros(2, 2, dtype=torch.int32), "q.scales": scales}
    found = METHODS["gptq"](GPTQ4 | {"bits": 4.0}).read(Tensors(tensors), "q", 16, 64)
    assert str(found.scheme if found else None) == "int4 in groups of 32 with zero points"
