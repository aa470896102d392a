"""Weights by name, copied once from mapped files to the decoder's tensors, in the decoder's dtype and on its device."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelConfig, read_config
from engine.model.quantised.method import Method
from engine.model.quantised.methods import read_method
from engine.model.tensor_files import SafetensorsFile, WeightsFile, tensor_error
from engine.progress import LOADING, StartProgress
from kernels import reference
from kernels.dtypes import FILE_DTYPES
from kernels.weights import DENSE, LinearWeights, Scheme, concatenated, dense, divided, round_to_int4, round_to_int8
from wire.errors import ConfigError

ROUND = {"int8": round_to_int8, "int4": round_to_int4}


class ModelWeights:
    """Tensors by name over one or several files. Raises ConfigError naming a tensor that is missing or has the wrong
    shape.

    quantization: `none` returns all linear layers dense, `auto` in the scheme of the files; `int8` and `int4` round
    dense weights. method: reader of quantised safetensors modules. serves: returns whether the device keeps a scheme;
    other layers are dequantised when they are read (`Ops.serves`).
    """

    def __init__(
        self,
        files: list[WeightsFile],
        dtype: torch.dtype,
        device: torch.device,
        progress: StartProgress | None = None,
        quantization: str = "none",
        method: Method | None = None,
        serves: Callable[[Scheme], bool] = lambda _: True,
    ) -> None:
        self._opened = files
        self.files = {name: file for file in files for name in file.entries}
        self.dtype, self.device = dtype, device
        self._quantization, self._method, self._serves = quantization, method, serves
        self._progress = progress or (lambda *_: None)
        self._num_bytes = sum(file.entries[name].num_bytes for name, file in self.files.items())
        self._bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def has_module(self, module: str) -> bool:
        """Return whether a module has weights. A quantised module has no tensor named `weight`."""
        return any(name.startswith(f"{module}.") for name in self.files)

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

    def linear(self, modules: list[tuple[str, int]], in_features: int, *, has_bias: bool = False) -> LinearWeights:
        """Return several modules as one layer with all their outputs. modules: name and number of outputs of each."""
        weights = self._weights(modules, in_features)
        return weights.with_bias(self.fused([(f"{name}.bias", rows) for name, rows in modules]) if has_bias else None)

    def embedding(self, module: str, vocab_size: int, hidden_size: int) -> LinearWeights:
        """Return the embedding or the head. Rounded ones always have 8 bits, because every token depends on them."""
        return self._weights([(module, vocab_size)], hidden_size, is_table=True)

    def raw(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the host. Raises ConfigError for a dtype that is not served."""
        found = self.files[name].raw(name)
        self._count(name)
        return found

    def stored_dtype(self, name: str) -> str:
        """Return the name that the file gives to a tensor's dtype."""
        return self.files[name].entries[name].dtype

    def error(self, name: str, problem: str, field: str = "model") -> ConfigError:
        """Return the error about a tensor. A missing tensor of several files is said to be of their folder."""
        files = [self.files[name]] if name in self.files else self._opened
        path = Path(os.path.commonpath([file.path for file in files]))
        return tensor_error(path, files[0].own_name(name), problem, field)

    def _weights(self, modules: list[tuple[str, int]], in_features: int, *, is_table: bool = False) -> LinearWeights:
        stored = [self._stored(module, rows, in_features) for module, rows in modules]
        for (module, _), weights in zip(modules, stored, strict=True):
            if weights is not None and self._quantization in ROUND:
                name = next(name for name in self.files if name.startswith(f"{module}."))
                raise self.error(name, "quantised already; expected auto or none", "quantization")
            if weights is None and not is_table:
                self._check_dense(module)
        kept = [weights for weights in stored if weights is not None and self._keeps(weights.scheme)]
        # No scheme represents FP8 weights and others exactly.
        if len(kept) == len(stored) and len({weights.scheme.kind == "fp8" for weights in kept}) == 1:
            return concatenated(kept).to(self.device)
        weight = torch.empty(sum(rows for _, rows in modules), in_features, dtype=self.dtype, device=self.device)
        first = 0
        for (module, rows), weights in zip(modules, stored, strict=True):
            part = weight[first : first + rows]
            if weights is None:
                self._read(f"{module}.weight", part)
            else:
                part.copy_(reference.dequantize(weights))
            first += rows
        if self._quantization not in ROUND:
            return dense(weight)
        try:
            return ROUND["int8" if is_table else self._quantization](weight)
        except ValueError as error:
            raise ConfigError("quantization", f"tensor {modules[0][0]}: {error}") from None

    def _keeps(self, scheme: Scheme) -> bool:
        return self._quantization == "auto" and scheme != DENSE and self._serves(scheme)

    def _stored(self, module: str, rows: int, in_features: int) -> LinearWeights | None:
        """Return a module's weights as a reader of quantised data returns them, or None if `_read` has to read them."""
        if self._method is not None and (found := self._method.read(self, module, rows, in_features)) is not None:
            return found if self._serves(found.scheme) else divided(found)
        name = f"{module}.weight"
        self._check(name, (rows, in_features))
        if self._quantization == "none":
            return None
        stored = self.files[name].stored(name)
        if stored is not None:
            self._count(name)
        return stored

    def finish(self) -> None:
        """Report complete progress, because tensors that the decoder does not use are never read."""
        self._progress(LOADING, self._num_bytes, self._num_bytes)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor's shape before memory is allocated, because a wrong size may exceed the machine's memory.
        Raises ConfigError.
        """
        if name not in self.files:
            raise self.error(name, "missing")
        found = self.files[name].entries[name].shape
        if found != shape:
            raise self.error(name, f"shape {found}, the config says {shape}")

    def _check_dense(self, module: str) -> None:
        """Raise ConfigError for a dense layer that is quantised according to config.json."""
        name = f"{module}.weight"
        if self._method is None or module not in self._method.layers or self.stored_dtype(name) not in FILE_DTYPES:
            return
        problem = f"dense, but quantization_config says {self._method.name} and does not exclude this layer"
        raise self.error(name, f"{problem}; if no layer is quantised, remove quantization_config from config.json")

    def _read(self, name: str, out: Tensor) -> None:
        self.files[name].read(name, out)
        self._count(name)

    def _count(self, name: str) -> None:
        self._bytes_read = min(self._bytes_read + self.files[name].entries[name].num_bytes, self._num_bytes)
        self._progress(LOADING, self._bytes_read, self._num_bytes)


@contextmanager
def open_weights(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: StartProgress | None = None,
    quantization: str = "none",
    serves: Callable[[Scheme], bool] = lambda _: True,
) -> Iterator[ModelWeights]:
    """Open a folder's safetensors, listed by its index file if there is one, or its only GGUF file; or open a GGUF
    file. quantization, serves: see `ModelWeights`.
    """
    with ExitStack() as stack:
        files: list[WeightsFile] = []
        for name in [path] if path.is_file() else _files_of(path):
            file = _open_file(name)
            stack.callback(file.close)
            files.append(file)
        method = read_method(read_config(path)) if (path / "config.json").is_file() else None
        yield ModelWeights(files, dtype, device, progress, quantization, method, serves)


def base_tensor(path: Path, config: ModelConfig, dtype: torch.dtype, name: str) -> Tensor:
    """Return embed_tokens or lm_head, `[vocab, hidden]` on the CPU. Tied models return the embedding for both."""
    with open_weights(path, dtype, torch.device("cpu")) as source:
        is_head = name == "lm_head" and not config.tie_word_embeddings and source.has_module("lm_head")
        module = "lm_head" if is_head else "model.embed_tokens"
        return source.embedding(module, config.vocab_size, config.hidden_size).tensors["weight"]


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
