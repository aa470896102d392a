"""Interface and shared parts of the readers of quantised safetensors checkpoints.

A reader converts a module's tensors to a scheme of `kernels.weights` without changing any weight.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.weights import SCALE_DTYPES, LinearWeights, dense, pack_halves, quantised
from wire.errors import ConfigError
from wire.json_values import as_json

FIELD = "quantization_config"
# Lists of modules that stay dense: of compressed-tensors, of vLLM's FP8, and of transformers.
_DENSE_LISTS = ("ignore", "ignored_layers", "modules_to_not_convert")


class RawTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def __contains__(self, name: str) -> bool: ...

    def raw(self, name: str) -> Tensor: ...

    def stored_dtype(self, name: str) -> str:
        """Return the name that the file gives to a tensor's dtype."""
        ...

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error about a tensor, present or missing."""
        ...


class Coverage:
    """Layers that a `quantization_config` says are quantised.

    only: names of these layers; None: all. without: names of dense layers, beside those that the config lists. A name
    may be a part of a layer's name or a regular expression, with or without `re:`, because programs write both.
    """

    def __init__(
        self, config: Mapping[str, Any], only: Sequence[str] | None = None, without: Sequence[str] = ()
    ) -> None:
        """Raises ConfigError naming the field."""
        self._only = only
        self._without = [*without, *(name for field in _DENSE_LISTS for name in names_of(config, field))]

    def __contains__(self, module: str) -> bool:
        return (self._only is None or _is_named(module, self._only)) and not _is_named(module, self._without)


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(name in module or _expression(name).match(module) for name in names)


def _expression(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix("re:"))
    except re.error:
        return re.compile(re.escape(name))


def names_of(config: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of names, empty if it is missing or null. Raises ConfigError."""
    names = config.get(field)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(FIELD, f"{field}: expected a list of names, got {as_json(names)}")
    return names or []


class Method(Protocol):
    """Reader of one `quant_method` of config.json. layers: those that it says are quantised."""

    name: str
    layers: Coverage

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        """Return a module's weights `[rows, columns]`, or None if they are dense. Raises ConfigError, naming the tensor
        and the scheme.
        """
        ...


class Groups(NamedTuple):
    """Unsigned values of 4 or 8 bits in groups of equal size.

    values: uint8 `[out, in]`. scales, zeros: `[out, groups]`; without zeros, the zero point is the middle of the range.
    order: group of each input, `[in]`, if the checkpoint has one.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """Module of a checkpoint that is being read. scheme: its name in errors."""

    tensors: RawTensors
    name: str
    scheme: str

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.tensors

    def take(self, part: str, dtypes: Sequence[torch.dtype], *shape: int) -> Tensor:
        """Return a tensor of the module. Raises ConfigError for another dtype or shape."""
        found = self.raw(part)
        if found.dtype not in dtypes or found.shape != shape:
            expected = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} {list(shape)}"
            raise self.error(
                part, f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}; expected {expected}"
            )
        return found

    def stored_dtype(self, part: str) -> str:
        """Return the name that the file gives to a tensor's dtype, empty for a missing tensor."""
        return self.tensors.stored_dtype(f"{self.name}.{part}") if self.has(part) else ""

    def raw(self, part: str) -> Tensor:
        if not self.has(part):
            raise self.error(part, "missing")
        return self.tensors.raw(f"{self.name}.{part}")

    def scales(self, part: str, *shape: int) -> Tensor:
        """Return scales of a shape. Raises ConfigError."""
        return self.take(part, SCALE_DTYPES, *shape)

    def groups(self, part: str) -> int:
        """Return the number of groups of scales `[groups, out]`. Raises ConfigError for another form."""
        found = self.raw(part)
        if found.dim() != 2:
            shown = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            raise self.error(part, f"{shown}; expected two dimensions")
        return len(found)

    def error(self, part: str, problem: str) -> ConfigError:
        return self.tensors.error(f"{self.name}.{part}", f"{problem} ({self.scheme})")

    def _check_sizes(self, weight: Groups, rows: int, columns: int) -> None:
        """Check all sizes and indices, because native code reads the tensors without checks. Raises ConfigError."""
        groups = weight.scales.shape[1]
        if not 1 <= groups <= columns:
            raise self.error("weight", f"{groups} groups of {columns} inputs: expected groups of 16 or more")
        grouped = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
        if weight.values.shape != (rows, columns) or any(part.shape != (rows, groups) for part in grouped):
            raise self.error("weight", f"{rows} by {columns}, which does not fill whole words of packed values")
        if weight.order is not None and not 0 <= int(weight.order.min()) <= int(weight.order.max()) < groups:
            raise self.error("g_idx", f"names a group outside 0 to {groups - 1}")

    def in_groups(self, bits: int, weight: Groups, rows: int, columns: int) -> LinearWeights:
        """Return weights `[rows, columns]` of 4 or 8 bits in a scheme of `kernels.weights`. Raises ConfigError for a
        group size that is not served, and for sizes that do not fill whole words.

        Weights whose groups are not consecutive inputs are dequantised, because no packed scheme can hold them.
        """
        self._check_sizes(weight, rows, columns)
        middle, in_features = 1 << (bits - 1), columns
        scales, zeros, size = weight.scales, weight.zeros, in_features // weight.scales.shape[1]
        if zeros is not None and bool((zeros == middle).all()):
            zeros = None
        if weight.order is not None and not torch.equal(weight.order.long(), torch.arange(in_features) // size):
            groups = weight.order.long()
            offsets = torch.full_like(scales, middle, dtype=torch.float32) if zeros is None else zeros.float()
            return dense(scales.float()[:, groups] * (weight.values.float() - offsets[:, groups]))
        try:
            if bits == 4:
                halves = pack_halves(weight.values)
                if zeros is None:
                    return quantised("int4", halves, scales, in_features)
                return quantised("int4", halves, scales, in_features, "zeros", zeros.to(torch.uint8))
            signed = (weight.values.to(torch.int16) - middle).to(torch.int8)
            if zeros is None:
                return quantised("int8", signed, scales, in_features)
            mins = -scales.float() * (zeros.float() - middle)
            return quantised("int8", signed, scales.float(), in_features, "mins", mins)
        except ValueError as error:
            raise self.error("weight", str(error)) from None


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack the values of int32 words, lowest bits first: uint8 `[..., n, 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)


def choose(config: Mapping[str, Any], field: str, expected: Sequence[Any], default: Any = None) -> Any:
    """Return a field of `quantization_config`. Raises ConfigError unless it has one of the expected values."""
    value = config.get(field, default)
    if value not in expected:
        kind = "a string" if isinstance(expected[0], str) else "a number"
        found = as_json(value) if field in config else "none"
        shown = ", ".join(str(each) for each in expected)
        raise ConfigError(FIELD, f"{field}: expected {kind}, one of {shown}; got {found}")
    return expected[expected.index(value)]  # not `value`, which may be 4.0
