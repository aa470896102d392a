"""Weights by name, copied once from mapped files to the decoder's tensors, in the decoder's dtype and on its device."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.tensor_files import SafetensorsFile, WeightsFile
from engine.progress import LOADING, Progress
from kernels.weights import LinearWeights, concatenated, dense, round_to_int4, round_to_int8
from wire.errors import ConfigError

ROUND = {"int8": round_to_int8, "int4": round_to_int4}


class Checkpoint:
    """Tensors by name over one or several files. Raises ConfigError naming a tensor that is missing or has the wrong
    shape.

    quantization: `none` returns all linear layers dense, `auto` as the files store them; `int8` and `int4` round dense
    ones.
    """

    def __init__(
        self,
        files: list[WeightsFile],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        quantization: str = "none",
    ) -> None:
        self.files = {name: file for file in files for name in file.entries}
        self.dtype, self.device, self._quantization = dtype, device, quantization
        self._progress = progress or (lambda *_: None)
        self._num_bytes = sum(file.entries[name].num_bytes for name, file in self.files.items())
        self._bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def get(self, name: str, *shape: int) -> Tensor:
        return self.fused([(name, shape[0])], *shape[1:])

    def fused(self, parts: list[tuple[str, int]], *columns: int) -> Tensor:
        """Return the rows of several tensors, concatenated: `[sum of rows, *columns]`."""
        for name, rows in parts:
            self._check(name, (rows, *columns))
        out = torch.empty(sum(rows for _, rows in parts), *columns, dtype=self.dtype, device=self.device)
        first = 0
        for name, rows in parts:
            self._read(name, out[first : first + rows])
            first += rows
        return out

    def linear(self, parts: list[tuple[str, int]], in_features: int, *, has_bias: bool = False) -> LinearWeights:
        """Return the layer of several modules' outputs, concatenated. parts: module names and numbers of outputs."""
        weights = self._weights([(f"{name}.weight", rows) for name, rows in parts], in_features)
        return weights.with_bias(self.fused([(f"{name}.bias", rows) for name, rows in parts]) if has_bias else None)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> LinearWeights:
        """Return a table of the vocabulary: the embedding or the head. Rounded tables have 8 bits, because every token
        depends on them.
        """
        return self._weights([(f"{name}.weight", vocab_size)], hidden_size, is_table=True)

    def _weights(self, parts: list[tuple[str, int]], in_features: int, *, is_table: bool = False) -> LinearWeights:
        if self._quantization in ("auto", *ROUND):
            stored = [self._stored(name, rows, in_features) for name, rows in parts]
            kept = [weights for weights in stored if weights is not None]
            if kept and self._quantization != "auto":
                raise ConfigError("quantization", f"tensor {parts[0][0]} is quantised already; expected auto or none")
            if len(kept) == len(parts):
                return concatenated(kept)
        weight = self.fused(parts, in_features)
        if self._quantization not in ROUND:
            return dense(weight)
        try:
            return ROUND["int8" if is_table else self._quantization](weight)
        except ValueError as error:
            raise ConfigError("quantization", f"tensor {parts[0][0]}: {error}") from None

    def _stored(self, name: str, rows: int, in_features: int) -> LinearWeights | None:
        """Return a weight as its file stores it, None if that is dense or a form that is dequantised on reading."""
        self._check(name, (rows, in_features))
        file = self.files[name]
        found = file.stored(name, self.device)
        if found is not None:
            self._bytes_read += file.entries[name].num_bytes
            self._progress(LOADING, self._bytes_read, self._num_bytes)
        return found

    def finish(self) -> None:
        """Report complete progress, because tensors that the decoder does not use are never read."""
        self._progress(LOADING, self._num_bytes, self._num_bytes)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor's shape before memory is allocated, because a wrong size may exceed the machine's memory.
        Raises ConfigError.
        """
        if name not in self.files:
            raise ConfigError("model", f"tensor {name} is missing from the weights")
        found = self.files[name].entries[name].shape
        if found != shape:
            raise ConfigError("model", f"tensor {name} has shape {found}, the config says {shape}")

    def _read(self, name: str, out: Tensor) -> None:
        file = self.files[name]
        file.read(name, out)
        self._bytes_read += file.entries[name].num_bytes
        self._progress(LOADING, self._bytes_read, self._num_bytes)


@contextmanager
def open_weights(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    quantization: str = "none",
) -> Iterator[Checkpoint]:
    """Open a folder's safetensors, listed by its index file if there is one, or its only GGUF file; or open a GGUF
    file.
    """
    with ExitStack() as stack:
        files: list[WeightsFile] = []
        for name in [path] if path.is_file() else _files_of(path):
            file = _open_file(name)
            stack.callback(file.close)
            files.append(file)
        yield Checkpoint(files, dtype, device, progress, quantization)


def base_tensor(path: Path, config: ModelConfig, dtype: torch.dtype, name: str) -> Tensor:
    """Return embed_tokens or lm_head, `[vocab, hidden]` on the CPU. Tied models return the embedding for both."""
    with open_weights(path, dtype, torch.device("cpu")) as source:
        is_head = name == "lm_head" and not config.tie_word_embeddings and "lm_head.weight" in source
        return source.get(
            "lm_head.weight" if is_head else "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )


def _open_file(path: Path) -> WeightsFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    from engine.model.gguf.model import GgufWeights  # a heavy import that a folder of safetensors does not need

    return GgufWeights(path)


def _files_of(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("model", f"{index} is not an index of weights: {error}") from None
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        gguf = list(folder.glob("*.gguf"))
        if len(gguf) != 1:
            raise ConfigError(
                "model", f"{folder}: expected .safetensors weights or one .gguf file, got {len(gguf)} .gguf files"
            )
        return gguf
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError("model", f"{folder / name} is in the index but missing")
    return [folder / name for name in names]
