"""Digest of a base model, by which adapters are bound to the weights that they were trained on.

It covers the config, the name and size of each weight file, its first bytes (names, shapes and dtypes of tensors) and
samples of the rest. Two models of one shape differ in nearly every weight, so samples tell them apart, and the start
of an engine does not read a file as a whole. It is no proof against someone who forges a model file.
"""

import hashlib
import json
from pathlib import Path

SAMPLES, SAMPLE_BYTES, HEAD_BYTES = 64, 4096, 64 << 10
# Fields of config.json that do not change the weights or the computation.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def base_digest(model: Path) -> str:
    """Return 64 hexadecimal digits for a model folder or a GGUF file. Raises OSError, ValueError."""
    digest = hashlib.sha256()
    if model.is_file():
        _add_file(digest, model)
        return digest.hexdigest()
    config = json.loads((model / "config.json").read_bytes())
    lasting = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    digest.update(json.dumps(lasting, sort_keys=True).encode())
    files = sorted(model.glob("*.safetensors")) or sorted(model.glob("*.gguf"))
    for path in files:
        digest.update(path.name.encode() + b"\0")
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "big"))
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * (i + 1) // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
