"""Rank pages of a base model on a device: tensors and sizes. Independent of adapters.

A page holds `PAGE_RANK` rank rows of A and of B-transposed for every projection of every layer, so one page table
serves all layers. Its bytes are contiguous, so that one copy fills it. Layout: `kernels.reference.LoraGroup`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adapters.manifest import BaseShape
from kernels.platform import platform_of
from kernels.reference import LARGEST, LoraGroup

PAGE_RANK = 8
# Maximum number of adapters that own pages at once.
MAX_SLOTS = 4096
_ALIGNMENT = 16


class PageParts(NamedTuple):
    """Parts of pages of one group of projections in one layer, as in `kernels.reference.LoraGroup`, with any
    leading dimensions. row_scales: None unless the pages have 8 bits.
    """

    a: Tensor
    b: Tensor
    row_scales: Tensor | None


class RankPages:
    """Rank pages: as many as fit into `memory` bytes, and the table of each slot's pages.

    max_rank: the largest rank of an adapter; a slot's row in the table has room for it. dtype: the model's, or one of 8
    bits, with a scale for each rank row. Raises ValueError if not even one adapter of `max_rank` fits.
    """

    def __init__(
        self, base: BaseShape, *, memory: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._base, self._dtype = base, dtype
        self.per_adapter = -(-max_rank // PAGE_RANK)
        self.page_bytes = sum(_padded(size) for _, size in self._sizes()) * base.num_layers
        self.num_pages = memory // self.page_bytes
        if self.num_pages < self.per_adapter:
            raise ValueError(
                f"adapter_memory: {memory} bytes hold {self.num_pages} rank pages, an adapter of rank {max_rank} needs "
                f"{self.per_adapter} ({self.per_adapter * self.page_bytes} bytes)"
            )
        self.num_slots = min(MAX_SLOTS, self.num_pages)
        # Bytes, because every backend can fill these with zeros.
        self.memory = platform_of(device).zeros((self.num_pages, self.page_bytes), torch.uint8)
        slices = [len(projections) for projections in base.groups.values()]
        self.scales = torch.zeros(self.num_slots, sum(slices) * base.num_layers, dtype=torch.float32, device=device)
        scales = iter(self.scales.split(slices * base.num_layers, 1))
        self.groups = [
            {
                name: LoraGroup(parts.a, parts.b, next(scales), _column_bounds(base, name), parts.row_scales)
                for name, parts in layer.items()
            }
            for layer in self.parts(self.memory)
        ]
        self.page_table = torch.full((self.num_slots, self.per_adapter), -1, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(self.num_slots, dtype=torch.int32, device=device)

    def parts(self, memory: Tensor) -> list[dict[str, PageParts]]:
        """Return views of the pages in `memory`, uint8 `[..., page_bytes]`, by layer and group."""
        start = 0

        def take(size: int, dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal start
            part = memory[..., start : start + size].view(dtype)
            start += _padded(size)
            return part.unflatten(-1, shape)

        def group(name: str) -> PageParts:
            slices, columns = len(self._base.groups[name]), _column_bounds(self._base, name)[-1]
            sizes = dict(self._sizes())
            a = take(sizes[name, "a"], self._dtype, slices, PAGE_RANK, _in_features(self._base, name))
            b = take(sizes[name, "b"], self._dtype, PAGE_RANK, columns)
            has_scales = self._dtype in LARGEST
            scales = take(sizes[name, "row_scales"], torch.float32, slices, PAGE_RANK) if has_scales else None
            return PageParts(a, b, scales)

        return [{name: group(name) for name in self._base.groups} for _ in range(self._base.num_layers)]

    def _sizes(self) -> list[tuple[tuple[str, str], int]]:
        """Return the bytes of each part of a page in one layer."""
        found, base = [], self._base
        for name, projections in base.groups.items():
            rank_bytes = PAGE_RANK * self._dtype.itemsize
            found.append(((name, "a"), rank_bytes * len(projections) * _in_features(base, name)))
            found.append(((name, "b"), rank_bytes * _column_bounds(base, name)[-1]))
            if self._dtype in LARGEST:
                found.append(((name, "row_scales"), 4 * PAGE_RANK * len(projections)))
        return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _in_features(base: BaseShape, group: str) -> int:
    return base.projections[base.groups[group][0]][1]


def _column_bounds(base: BaseShape, group: str) -> tuple[int, ...]:
    bounds = [0]
    for projection in base.groups[group]:
        bounds.append(bounds[-1] + base.projections[projection][0])
    return tuple(bounds)
