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
from wire.errors import ConfigError


class Checkpoint:
    """Tensors by name over one or several files. Raises ConfigError naming a tensor that is missing or has the wrong
    shape.
    """

    def __init__(
        self, files: list[WeightsFile], dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.files = {name: file for file in files for name in file.entries}
        self._dtype, self._device = dtype, device
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
        out = torch.empty(sum(rows for _, rows in parts), *columns, dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            self._read(name, out[first : first + rows])
            first += rows
        return out

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
    path: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
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
        yield Checkpoint(files, dtype, device, progress)


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
