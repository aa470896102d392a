"""Rank pages of a base model on a device: tensors and sizes. Knows no adapters.

A page holds `PAGE_RANK` rank rows of A and of B-transposed for every projection of every layer, so one page table
serves all layers. Layout: `kernels.reference.LoraGroup`.
"""

import torch
from torch import Tensor

from adapters.manifest import BaseShape
from kernels.platform import platform_of
from kernels.reference import LARGEST, LoraGroup

PAGE_RANK = 8
# Maximum number of adapters that own pages at once.
MAX_SLOTS = 4096


class RankPages:
    """Rank pages: as many as fit into `memory` bytes, and the table of each slot's pages.

    max_rank: the largest rank of an adapter; a slot's row in the table has room for it. dtype: the model's, or one of 8
    bits, with a scale for each rank row. Raises ValueError if not even one adapter of `max_rank` fits.
    """

    def __init__(
        self, base: BaseShape, *, memory: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._base, self._dtype, self._device = base, dtype, device
        self.per_adapter = -(-max_rank // PAGE_RANK)
        self.page_bytes = self._row_bytes() * PAGE_RANK * base.num_layers
        self.num_pages = memory // self.page_bytes
        if self.num_pages < self.per_adapter:
            raise ValueError(
                f"adapter_memory: {memory} bytes hold {self.num_pages} rank pages, an adapter of rank {max_rank} needs "
                f"{self.per_adapter} ({self.per_adapter * self.page_bytes} bytes)"
            )
        self.num_slots = min(MAX_SLOTS, self.num_pages)
        self.groups = [{name: self._group(name) for name in base.groups} for _ in range(base.num_layers)]
        self.page_table = torch.full((self.num_slots, self.per_adapter), -1, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(self.num_slots, dtype=torch.int32, device=device)

    def _row_bytes(self) -> int:
        """Return the bytes of one rank row in one layer."""
        base = self._base
        elements = sum(_in_features(base, g) * len(base.groups[g]) + _column_bounds(base, g)[-1] for g in base.groups)
        scales = 4 * len(base.projections) if self._dtype in LARGEST else 0
        return elements * self._dtype.itemsize + scales

    def _group(self, name: str) -> LoraGroup:
        slices, bounds = len(self._base.groups[name]), _column_bounds(self._base, name)
        has_scales = self._dtype in LARGEST
        return LoraGroup(
            self._zeros(self.num_pages, slices, PAGE_RANK, _in_features(self._base, name)),
            self._zeros(self.num_pages, PAGE_RANK, bounds[-1]),
            torch.zeros(self.num_slots, slices, dtype=torch.float32, device=self._device),
            bounds,
            torch.zeros(self.num_pages, slices, PAGE_RANK, device=self._device) if has_scales else None,
        )

    def _zeros(self, *shape: int) -> Tensor:
        # Allocate bytes, because every backend can fill these with zeros.
        size = (*shape[:-1], shape[-1] * self._dtype.itemsize)
        return platform_of(self._device).zeros(size, torch.uint8).view(self._dtype)


def _in_features(base: BaseShape, group: str) -> int:
    return base.projections[base.groups[group][0]][1]


def _column_bounds(base: BaseShape, group: str) -> tuple[int, ...]:
    bounds = [0]
    for projection in base.groups[group]:
        bounds.append(bounds[-1] + base.projections[projection][0])
    return tuple(bounds)
