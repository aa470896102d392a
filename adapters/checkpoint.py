"""A LoRA adapter folder as PEFT saves it, checked by header and content, and named by its digest.

Imports no torch, because the gateway checks uploads. Never unpickles.

The digest is the SHA-256 of everything that affects the result: the invocation tokens of an activated LoRA, for each
module in order its rank and scale, and the dtypes, shapes and bytes of its two tensors. It does not depend on the order
of tensors in the file, the order of keys in the config, or fields that only describe the training.
"""

import hashlib
import io
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from adapters.manifest import (
    EMBEDDING,
    LM_HEAD,
    NO_LAYER,
    REFUSED,
    AdapterError,
    AdapterManifest,
    AdapterNotFound,
    BaseShape,
    parse_manifest,
    quoted,
)
from adapters.safetensors_header import DTYPE_BYTES, HeaderError, JsonError, are_sizes, parse_json, read_header
from wire.bounded_dict import BoundedDict

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
# Dtypes of an adapter's tensors: those of `kernels.dtypes.FILE_DTYPES`, without torch.
DTYPES = ("F32", "F16", "BF16")

_MAX_CONFIG_BYTES = 1 << 20
# The header of 126 layers of 7 modules with long names is 300 KB; parsing 2 MiB of JSON takes about 50 MB of memory.
_MAX_HEADER_BYTES = 2 << 20
# Cache of parsed headers and configs: number of entries, and bytes of the largest header, which takes 2 MB when parsed.
# Adapters of one recipe have equal ones in a store, and those of 30 layers take 12 ms to parse.
_MAX_CACHED, _MAX_CACHED_BYTES = 32, 384 << 10
_CHUNK = 1 << 20
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>lm_head|model\.layers\.(?P<layer>0|[1-9]\d{0,4})\."
    r"(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_EMBEDDING = re.compile(
    r"base_model\.model\.(?P<module>model\.embed_tokens)\.lora_embedding_(?P<side>[AB])(?:\.default)?"
)
# PEFT saves the base model's embedding and head together with an adapter that targets them.
_BASE_COPY = re.compile(r"base_model\.model\.(?:model\.)?(?P<name>embed_tokens|lm_head)(?:\.base_layer)?\.weight")
# Tensors that exist only if a config field is on. They are refused with that field's message, even if the field is off.
_TURNED_ON = {
    "use_dora": re.compile(r".*\.lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    "lora_bias": re.compile(r".*\.lora_B(?:\.default)?\.bias"),
}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Position of a tensor in the file. shape: A `[rank, in]`, B `[out, rank]`; start, end: file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoraModuleInfo:
    """LoRA on a projection of a layer: y += scale * (x A^T) B^T."""

    rank: int
    scale: float
    a: TensorSpan
    b: TensorSpan


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """A checked adapter. rank: the largest of its modules. num_bytes: size of its tensors in the file.

    modules: by layer and projection; embed_tokens (A over the vocabulary) and lm_head have layer NO_LAYER. base_copies:
    copies of the base model's embed_tokens or lm_head that the adapter's trainer saved. The loader must check that they
    equal the base model's tensors, because PEFT would load them in their place.
    """

    folder: Path
    manifest: AdapterManifest
    modules: Mapping[tuple[int, str], LoraModuleInfo]
    rank: int
    num_bytes: int
    digest: str
    base_copies: Mapping[str, TensorSpan] = field(default_factory=dict)

    def check_base(self, base: BaseShape) -> None:
        """Raise AdapterError unless every module exists in the base model with these sizes."""
        for (layer, projection), module in self.modules.items():
            if layer >= base.num_layers:
                raise AdapterError(
                    module.a.name, f"the base model has {base.num_layers} layers; is this adapter for another model?"
                )
            expected = (base.embedding_head if layer == NO_LAYER else base.projections).get(projection)
            if expected is None:
                raise AdapterError(module.a.name, "the base model's config.json has no vocab_size to check it against")
            found = (module.b.shape[0], module.a.shape[1])
            if found != expected:
                raise AdapterError(
                    module.a.name,
                    f"{projection} maps {found[1]} features to {found[0]}, the base model's {expected[1]} to "
                    f"{expected[0]}; is this adapter for another model?",
                )
        vocabulary = base.embedding_head.get(LM_HEAD)
        if vocabulary is not None and any(token >= vocabulary[0] for token in self.manifest.invocation):
            raise AdapterError(
                "alora_invocation_tokens", f"expected token ids below {vocabulary[0]}, the base model's vocabulary"
            )
        for name, span in self.base_copies.items():
            if span.shape != vocabulary:
                raise AdapterError(
                    span.name,
                    f"its shape is {span.shape}, the base model's {name} {vocabulary}; another size is not served",
                )

    def check_size(self, max_bytes: int) -> None:
        """Check that the adapter fits an engine's host memory for adapters; 0 means unknown. Raises AdapterError."""
        # Engines convert adapters to their own dtype, which has at least two bytes per number.
        size = 2 * sum(math.prod(span.shape) for m in self.modules.values() for span in (m.a, m.b))
        if max_bytes and size > max_bytes:
            raise AdapterError("adapter", f"takes {size} bytes of host memory; the engines here have {max_bytes}")

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_NAME


def check_ranks(manifest: AdapterManifest, modules: Mapping[tuple[int, str], LoraModuleInfo], max_rank: int) -> None:
    """Raise AdapterError for a module beyond `max_rank`, naming the field of the config that sets its rank.

    manifest: that of the uploaded config, because the canonical form has other patterns.
    """
    for module in modules.values():
        if module.rank > max_rank:
            is_default = module.rank == manifest.rank
            raise AdapterError(
                "r" if is_default else "rank_pattern",
                f"the rank of {_module_name(module.a)} is {module.rank}; the engines here serve ranks up to {max_rank}",
            )


def _module_name(a: TensorSpan) -> str:
    match = _TENSOR.fullmatch(a.name) or _EMBEDDING.fullmatch(a.name)
    return a.name if match is None else match["module"]


Headers = tuple[AdapterManifest, Mapping[tuple[int, str], LoraModuleInfo], Mapping[str, TensorSpan]]
_parsed, _parsed_lock = BoundedDict[bytes, Headers](_MAX_CACHED), threading.Lock()


def open_checkpoint(folder: str | Path, verified: str | None = None) -> AdapterCheckpoint:
    """Read and check an adapter folder completely. Raises AdapterError, OSError.

    verified: the digest, if these files were read before and have not changed since; only the headers are read then.
    """
    folder = Path(folder)
    # The file is not memory-mapped: truncating a mapped file during the read would crash the process.
    manifest, modules, copies = read_headers(folder)
    if verified is None:
        with (folder / WEIGHTS_NAME).open("rb") as file:
            digest = _digest(file, modules, copies, manifest.invocation)
    else:
        digest = verified
    return AdapterCheckpoint(
        folder=folder,
        manifest=manifest,
        modules=modules,
        rank=max(module.rank for module in modules.values()),
        num_bytes=sum(span.end - span.start for m in modules.values() for span in (m.a, m.b)),
        digest=digest,
        base_copies=copies,
    )


def files_version(folder: Path) -> tuple[tuple[int, int, int, int], ...]:
    """Return a stamp of the two files that changes with their content, without reading them. Raises OSError."""
    found = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    return tuple((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) for stat in found)


def read_headers(folder: Path) -> Headers:
    """Return the manifest, the modules and the copies of base weights of an adapter folder without reading tensors.

    Caches the last results by the files' bytes. Raises AdapterError, OSError.
    """
    check_files(folder)
    config = (folder / CONFIG_NAME).read_bytes()
    with (folder / WEIGHTS_NAME).open("rb") as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(start, "little")
        if length > _MAX_CACHED_BYTES:
            file.seek(0)
            return parse_headers(config, file, size)
        header = start + file.read(length)
    key = hashlib.sha256(b"%d %d\n" % (len(config), size) + config + header).digest()
    with _parsed_lock:
        found = _parsed.get(key)
    if found is None:
        found = parse_headers(config, io.BytesIO(header), size)
        with _parsed_lock:
            _parsed.put(key, found)
    return found


def parse_headers(config: bytes, file: IO[bytes], size: int) -> Headers:
    """Parse a config and the header of a file of this size. Raises AdapterError, OSError."""
    manifest = parse_manifest(_parse_json(config, CONFIG_NAME))
    spans = _read_spans(file, size)
    copies = {match["name"]: span for span in spans if (match := _BASE_COPY.fullmatch(span.name))}
    modules = _pair([span for span in spans if span not in copies.values()], manifest)
    return manifest, modules, copies


def check_files(folder: Path) -> None:
    """Raise AdapterError unless the folder contains an adapter's two files; checks only names and sizes."""
    if not folder.is_dir():
        raise AdapterNotFound("adapter", f"no such folder: {folder}")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if (folder / name).is_file():
            continue
        if name == WEIGHTS_NAME and (folder / PICKLE_NAME).exists():
            raise AdapterError(PICKLE_NAME, f"pickled weights can run code and are refused; save as {WEIGHTS_NAME}")
        raise AdapterError(name, "the file is missing")
    if (folder / CONFIG_NAME).stat().st_size > _MAX_CONFIG_BYTES:
        raise AdapterError(CONFIG_NAME, f"is larger than {_MAX_CONFIG_BYTES} bytes")


def _parse_json(raw: bytes, name: str) -> Any:
    try:
        return parse_json(raw)
    except JsonError as error:
        raise AdapterError(name, str(error)) from None


def _read_spans(file: IO[bytes], size: int) -> list[TensorSpan]:
    """Return all tensors of an adapter's file of this size. Raises AdapterError."""
    try:
        entries = read_header(file, size, _MAX_HEADER_BYTES, _check_tensor)
    except HeaderError as error:
        raise AdapterError(error.tensor or WEIGHTS_NAME, error.problem) from None
    return [TensorSpan(e.name, e.dtype, (e.shape[0], e.shape[1]), e.start, e.end) for e in entries]


def _check_tensor(name: str, dtype: Any, shape: Any) -> None:
    for config_field, tensor in _TURNED_ON.items():
        if tensor.fullmatch(name):
            raise AdapterError(name, REFUSED[config_field])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise AdapterError(name, f"expected dtype {', '.join(DTYPES)}, got {quoted(dtype)}")
    if not are_sizes(shape) or len(shape) != 2 or 0 in shape:
        raise AdapterError(name, f"expected two dimensions of at least 1, got {quoted(shape)}")


def _pair(spans: list[TensorSpan], manifest: AdapterManifest) -> dict[tuple[int, str], LoraModuleInfo]:
    """Pair A and B of every module, in order of (layer, projection), with the rank and scale that PEFT would use."""
    names: dict[tuple[int, str], str] = {}
    sides: dict[tuple[int, str], dict[str, TensorSpan]] = {}
    for span in spans:
        match = _TENSOR.fullmatch(span.name) or _EMBEDDING.fullmatch(span.name)
        if match is None:
            raise AdapterError(
                span.name,
                "is not LoRA on q, k, v, o, gate, up or down of a decoder layer, embed_tokens or lm_head; not served",
            )
        module = match["module"]
        layer = int(match.groupdict().get("layer") or NO_LAYER)
        key = (layer, module.rpartition(".")[2])
        # A and B share the module's name, so only the first of the two tensors is checked.
        if names.get(key) != module and not manifest.targets(module, layer):
            raise AdapterError(span.name, "the config's target_modules do not select this module; PEFT would ignore it")
        names[key] = module
        if match["side"] in sides.setdefault(key, {}):
            raise AdapterError(span.name, "this tensor appears twice")
        sides[key][match["side"]] = span
    if not sides:
        raise AdapterError(WEIGHTS_NAME, "has no LoRA tensors")
    if manifest.ensure_weight_tying and any(layer == NO_LAYER for layer, _ in sides):
        raise AdapterError("ensure_weight_tying", "one LoRA for both embed_tokens and lm_head is not served")
    if manifest.invocation and (NO_LAYER, EMBEDDING) in sides:
        raise AdapterError("alora_invocation_tokens", "an activated LoRA on embed_tokens is not served, as in PEFT")
    return {key: _module(names[key], sides[key], manifest) for key in sorted(sides)}


def _module(module: str, sides: dict[str, TensorSpan], manifest: AdapterManifest) -> LoraModuleInfo:
    for side in "AB":
        if side not in sides:
            raise AdapterError(f"{module}.lora_{side}", "is missing; LoRA needs A and B of each module")
    a, b, rank = sides["A"], sides["B"], manifest.rank_of(module)
    for span, found in ((a, a.shape[0]), (b, b.shape[1])):
        if found != rank:
            raise AdapterError(span.name, f"its rank is {found}, the config's r (or rank_pattern) says {rank}")
    return LoraModuleInfo(rank, manifest.scale_of(module), a, b)


def _digest(
    file: BinaryIO,
    modules: Mapping[tuple[int, str], LoraModuleInfo],
    copies: Mapping[str, TensorSpan],
    invocation: Sequence[int],
) -> str:
    digest = hashlib.sha256(b"loraplex adapter 1\n")
    if invocation:
        digest.update(f"invocation {' '.join(map(str, invocation))}\n".encode())
    for (layer, projection), module in modules.items():
        digest.update(f"{layer} {projection} {module.rank} {module.scale.hex()}\n".encode())
        _add(digest, file, module.a)
        _add(digest, file, module.b)
    for name in sorted(copies):
        digest.update(f"base {name}\n".encode())
        _add(digest, file, copies[name])
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", file: BinaryIO, span: TensorSpan) -> None:
    digest.update(f"{span.dtype} {span.shape[0]} {span.shape[1]}\n".encode())
    file.seek(span.start)
    for start in range(span.start, span.end, _CHUNK):
        size = min(_CHUNK, span.end - start)
        chunk = file.read(size)
        if len(chunk) != size:
            raise AdapterError(span.name, "the file was cut off while it was read")
        _check_finite(span, chunk)
        digest.update(chunk)


# A number whose exponent bits are all ones is NaN or infinite. In F16 the high byte has the whole exponent. In F32 and
# BF16 it has seven of the eight bits, so values of 1.7e38 and more are refused too; no trained weight is that large.
_HIGH_BYTE_MASK = {"F32": 0x7F, "BF16": 0x7F, "F16": 0x7C}
_BAD_HIGH_BYTES = {
    dtype: [bytes([i]) for i in range(256) if i & mask == mask] for dtype, mask in _HIGH_BYTE_MASK.items()
}


def _check_finite(span: TensorSpan, chunk: bytes) -> None:
    """Raise AdapterError for NaN or infinite values.

    chunk: little-endian numbers of span.dtype, complete ones (a chunk's size is a multiple of every item size).
    """
    width = DTYPE_BYTES[span.dtype]
    high_bytes = chunk[width - 1 :: width]
    # Each search takes a tenth of the time of `bytes.translate`.
    if any(byte in high_bytes for byte in _BAD_HIGH_BYTES[span.dtype]):
        raise AdapterError(span.name, "holds NaN or infinite values")
