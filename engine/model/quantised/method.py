"""Interface of the quantised checkpoints in safetensors, and what their readers share.

A method reads a module's tensors into a scheme of `kernels.weights` without a change of any weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.weights import LinearWeights, dense, pack_halves, quantised
from wire.errors import ConfigError

FIELD = "quantization_config"


class RawTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    def __contains__(self, name: str) -> bool: ...

    def raw(self, name: str) -> Tensor: ...


class Method(Protocol):
    """A way to store quantised weights, as config.json describes it."""

    name: str

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        """Return a module's weights `[rows, columns]`, None if they are not quantised. Raises ConfigError, naming the
        tensor and the scheme.
        """
        ...


class Groups(NamedTuple):
    """Unsigned values of 4 or 8 bits, `[out, in]` uint8, in groups of equal sizes.

    scales, zeros: `[out, groups]`; no zeros: the middle of the values. order: the group of each input, `[in]`, if a
    checkpoint lists them.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a checkpoint while it is read. scheme: for errors."""

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
                part, f"is {str(found.dtype).removeprefix('torch.')} {list(found.shape)}; expected {expected}"
            )
        return found

    def raw(self, part: str) -> Tensor:
        if not self.has(part):
            raise self.error(part, "is missing")
        return self.tensors.raw(f"{self.name}.{part}")

    def scales(self, part: str, *shape: int) -> Tensor:
        """Return finite scales. Raises ConfigError."""
        found = self.take(part, (torch.float16, torch.bfloat16, torch.float32), *shape)
        if not torch.isfinite(found.float()).all():
            raise self.error(part, "holds NaN or infinite values; is it damaged?")
        return found

    def groups(self, part: str) -> int:
        """Return the number of groups of scales `[groups, out]`. Raises ConfigError for another form."""
        found = self.raw(part)
        if found.dim() != 2:
            shown = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            raise self.error(part, f"is {shown}; expected two dimensions")
        return len(found)

    def error(self, part: str, problem: str) -> ConfigError:
        return ConfigError("model", f"tensor {self.name}.{part} ({self.scheme}) {problem}")

    def _check_sizes(self, found: Groups, rows: int, columns: int) -> None:
        """Check all sizes and indices, because native code reads the tensors without checks. Raises ConfigError."""
        groups = found.scales.shape[1]
        if not 1 <= groups <= columns:
            raise self.error("weight", f"{groups} groups of {columns} inputs: expected groups of 16 or more")
        grouped = [found.scales] if found.zeros is None else [found.scales, found.zeros]
        if found.values.shape != (rows, columns) or any(part.shape != (rows, groups) for part in grouped):
            raise self.error("weight", f"is {rows} by {columns}, which does not fill whole words of packed values")
        if found.order is not None and not 0 <= int(found.order.min()) <= int(found.order.max()) < groups:
            raise self.error("g_idx", f"names a group outside 0 to {groups - 1}")

    def in_groups(self, bits: int, found: Groups, rows: int, columns: int) -> LinearWeights:
        """Return weights `[rows, columns]` of 4 or 8 bits in a scheme of ours. Raises ConfigError for groups that
        cannot be cut, and for sizes that do not fill whole words.

        Inputs in another order than their groups are dequantised, because no packed scheme holds them.
        """
        self._check_sizes(found, rows, columns)
        middle, in_features = 1 << (bits - 1), columns
        scales, zeros, size = found.scales, found.zeros, in_features // found.scales.shape[1]
        if zeros is not None and bool((zeros == middle).all()):
            zeros = None
        if found.order is not None and not torch.equal(found.order.long(), torch.arange(in_features) // size):
            groups = found.order.long()
            offsets = torch.full_like(scales, middle, dtype=torch.float32) if zeros is None else zeros.float()
            return dense(scales.float()[:, groups] * (found.values.float() - offsets[:, groups]))
        try:
            if bits == 4:
                halves = pack_halves(found.values)
                if zeros is None:
                    return quantised("int4", halves, scales, in_features)
                return quantised("int4", halves, scales, in_features, "zeros", zeros.to(torch.uint8))
            signed = (found.values.to(torch.int16) - middle).to(torch.int8)
            if zeros is None:
                return quantised("int8", signed, scales, in_features)
            mins = -scales.float() * (zeros.float() - middle)
            return quantised("int8", signed, scales.float(), in_features, "mins", mins)
        except ValueError as error:
            raise self.error("weight", str(error)) from None


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the values of int32 words, lowest bits first, uint8 `[..., n, 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)


def choose(config: Mapping[str, Any], field: str, expected: Sequence[Any], default: Any = None) -> Any:
    """Return a field of the quantisation's config. Raises ConfigError unless it has one of the expected values."""
    value = config.get(field, default)
    if value not in expected:
        shown = ", ".join(str(each) for each in expected)
        raise ConfigError(FIELD, f"{field} {str(value)[:40]!r} is not served; expected one of {shown}")
    return expected[expected.index(value)]  # not `value`, which may be 4.0
