"""Dense layers of a checkpoint whose config.json names a quantisation: served only if the config excludes them."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.quantised.methods import METHODS
from engine.model.weights import ModelWeights, open_weights
from kernels import reference
from kernels.weights import LinearWeights
from testing import quantised_files as files
from wire.errors import ConfigError

CPU = torch.device("cpu")
GPTQ, AWQ, FP8 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}
FBGEMM, PACKED = {"quant_method": "fbgemm_fp8"}, {"quant_method": "compressed-tensors", "format": "pack-quantized"}
TWO_BITS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 2}}}}
Q, K, V = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")


def qkv(source: ModelWeights) -> LinearWeights:
    return source.linear([(Q, 64), (K, 32), (V, 32)], 64)


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
@pytest.mark.parametrize(
    "config", [GPTQ, AWQ, FP8, FBGEMM, PACKED | TWO_BITS], ids=lambda config: config["quant_method"]
)
def test_dense_layers_are_refused_under_a_scheme(
    config: dict[str, Any], quantization: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "out")
    raw = json.loads((model / "config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    refusal = (
        rf"^model: \S*/out/model\.safetensors: tensor {Q}\.weight: dense, but quantization_config says "
        rf"{config['quant_method']} and .*remove quantization_config from config\.json$"
    )
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization=quantization) as source:
        source.embedding("model.embed_tokens", *source.files["lm_head.weight"].entries["lm_head.weight"].shape)
        with pytest.raises(ConfigError, match=refusal):
            qkv(source)


EXCLUDED: dict[str, tuple[dict[str, Any], bool]] = {
    "names": (PACKED | {"ignore": [K, V]}, True),
    "one name": (PACKED | {"ignore": [K]}, False),
    "expression": (PACKED | {"ignore": ["re:.*self_attn.[kv]_proj$"]}, True),
    "no expression": (PACKED | {"ignore": ["re:[kv]_proj", "*"]}, False),
    "block": (FBGEMM | {"modules_to_not_convert": ["lm_head", "model.layers.1"]}, True),
    "other block": (FBGEMM | {"modules_to_not_convert": ["model.layers.0", "mlp"]}, False),
    "none": (FBGEMM | {"modules_to_not_convert": None}, False),
    "ends": (FP8 | {"ignored_layers": ["k_proj", "v_proj"]}, True),
    "targets": (PACKED | {"config_groups": {"g": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 8}}}}, True),
    "all targets": (PACKED | TWO_BITS, False),
    "no weights": (PACKED | {"config_groups": {"g": {"targets": ["Linear"], "weights": None}}}, True),
    "no groups": (PACKED | {"config_groups": {}}, True),
}


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_only_layers_that_the_config_excludes_may_be_dense(name: str, model: Path, tmp_path: Path) -> None:
    """q_proj is in FP8, k_proj and v_proj are dense."""
    config, is_served = EXCLUDED[name]
    expected = files.write(model, tmp_path / "out", config, partial(files.fp8, kind="channel"), (Q,))
    with open_weights(tmp_path / "out", torch.float32, CPU, quantization="auto") as source:
        if is_served:
            wanted = torch.cat([expected[f"{module}.weight"] for module in (Q, K, V)])
            assert torch.equal(reference.dequantize(qkv(source)), wanted)
            return
        dense = V if name == "one name" else K
        with pytest.raises(ConfigError, match=rf"tensor {dense}\.weight: dense, but"):
            qkv(source)


@pytest.mark.parametrize(
    ("fields", "covers"),
    [
        ({}, True),
        ({"dynamic": {"-:.*q_proj": {}}}, False),
        ({"dynamic": {"+:.*q_proj": {"bits": 8}, "-:.*k_proj": {}}}, True),
        ({"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]}, True),
        ({"modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]]}, False),
        ({"modules_in_block_to_quantize": None, "dynamic": None}, True),
    ],
)
def test_gptqs_own_fields_exclude_layers(fields: dict[str, Any], covers: bool) -> None:
    assert (Q in METHODS["gptq"](GPTQ | fields).layers) == covers
