"""The store's canonical form of an adapter, a function of its digest alone.

Two uploads of the same digest give the same bytes, so no tenant can read another tenant's `__metadata__`, file order or
config. `adapter_config.json` names each module in full, with its rank and alpha, so no pattern remains to be evaluated;
PEFT and vLLM load the folder like any other.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, LoraModuleInfo, TensorSpan, read_headers
from adapters.manifest import EMBEDDING, LM_HEAD, NO_LAYER, AdapterError
from adapters.safetensors_header import DTYPE_BYTES

Modules = Mapping[tuple[int, str], LoraModuleInfo]

_CHUNK = 1 << 20
_PREFIX = "base_model.model."
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_canonical(source: Path, target: Path) -> None:
    """Write the adapter of the folder `source` into the folder `target` and sync it. Raises AdapterError, OSError."""
    manifest, modules, copies = read_headers(source)
    tensors = _tensors(modules, copies)
    with (source / WEIGHTS_NAME).open("rb") as reader, (target / WEIGHTS_NAME).open("xb") as writer:
        writer.write(_header(tensors))
        for span in tensors.values():
            _copy(reader, writer, span)
        writer.flush()
        os.fsync(writer.fileno())
    with (target / CONFIG_NAME).open("xb") as config:
        config.write(json.dumps(_config(modules, manifest.invocation), indent=2).encode() + b"\n")
        config.flush()
        os.fsync(config.fileno())


def _name(layer: int, projection: str) -> str:
    """Return a module's full name."""
    if layer == NO_LAYER:
        return LM_HEAD if projection == LM_HEAD else f"model.{EMBEDDING}"
    block = "self_attn" if projection in _ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{projection}"


def _tensors(modules: Modules, copies: Mapping[str, TensorSpan]) -> dict[str, TensorSpan]:
    """Return the tensors by canonical name, sorted by dtype width, then by name.

    The widest dtypes come first, so that every tensor is aligned.
    """
    named = {}
    for (layer, projection), module in modules.items():
        name = _PREFIX + _name(layer, projection)
        for side, span in (("A", module.a), ("B", module.b)):
            inside = f"{name}.lora_{side}.weight"
            named[f"{name}.lora_embedding_{side}" if projection == EMBEDDING else inside] = span
    for projection, span in copies.items():
        wrapped = ".base_layer" if (NO_LAYER, projection) in modules else ""
        named[f"{_PREFIX}{_name(NO_LAYER, projection)}{wrapped}.weight"] = span
    return dict(sorted(named.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0])))


def _header(tensors: Mapping[str, TensorSpan]) -> bytes:
    entries, position = {}, 0
    for name, span in tensors.items():
        end = position + span.end - span.start
        entries[name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _copy(reader: BinaryIO, writer: BinaryIO, span: TensorSpan) -> None:
    reader.seek(span.start)
    left = span.end - span.start
    while left:
        chunk = reader.read(min(_CHUNK, left))
        if not chunk:
            raise AdapterError(span.name, "the file was cut off while it was read")
        writer.write(chunk)
        left -= len(chunk)


def _config(modules: Modules, invocation: Sequence[int]) -> dict[str, Any]:
    """Return adapter_config.json: the most frequent rank and alpha as r and lora_alpha, the others by full name.

    Raises AdapterError for a scale that no alpha produces.
    """
    plain = {key: _alpha(module.rank, module.scale, float(module.rank)) for key, module in modules.items()}
    rooted = {key: _alpha(module.rank, module.scale, math.sqrt(module.rank)) for key, module in modules.items()}
    use_rslora = None in plain.values()
    alphas = rooted if use_rslora else plain
    for key, alpha in alphas.items():
        if alpha is None:
            raise AdapterError("lora_alpha", f"no alpha gives the scale of {_name(*key)}; use rsLoRA for all or none")
    rank = _most_frequent(module.rank for module in modules.values())
    alpha = _most_frequent(alphas[key] for key in modules if modules[key].rank == rank)
    # A plain LoRA's config lacks the field, as in earlier releases, so that its stored form is the same.
    activated = {"alora_invocation_tokens": list(invocation)} if invocation else {}
    return {
        **activated,
        "alpha_pattern": {_name(*key): value for key, value in alphas.items() if value != alpha},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {_name(*key): module.rank for key, module in modules.items() if module.rank != rank},
        "target_modules": [_name(*key) for key in modules],
        "task_type": "CAUSAL_LM",
        "use_rslora": use_rslora,
    }


def _most_frequent(values: Iterator[Any]) -> Any:
    """Return the most frequent value; on a tie the largest, independent of the order."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _alpha(rank: int, scale: float, divisor: float) -> float | int | None:
    """Return the alpha for which alpha / divisor equals `scale` exactly, whole if possible; None if there is none."""
    middle = scale * divisor
    if not math.isfinite(middle):
        return None
    down, up = math.nextafter(middle, -math.inf), math.nextafter(middle, math.inf)
    for alpha in (float(round(middle)), middle, down, up):
        # Compare as hex, because -0.0 equals 0.0 but has another digest.
        if (alpha / divisor).hex() == scale.hex() and abs(alpha) < 1e30:
            return int(alpha) if alpha and alpha.is_integer() and abs(alpha) < 1 << 53 else alpha
    return None
