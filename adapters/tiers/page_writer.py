"""Writer of adapters into their pages while steps run, without delaying the steps.

A write waits for the steps that may still read the pages' previous content. On a GPU, copies have their own stream,
which waits for all work launched before the pages were allocated. An adapter counts as loaded only after its last byte
is written. Copies leave pinned memory through a few buffers in rotation, so little is in flight at any time: a step's
own upload, which shares the bus, waits only for that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from kernels.platform import Fence, Lane, platform_of
from kernels.reference import LARGEST, LoraGroup, quantize_rows

NUM_BUFFERS = 4
Cells = npt.NDArray[Any]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NO_SCALES: Cells = np.zeros(0, np.int32)


class _Target(NamedTuple):
    """Device tensor whose rows are written. cells: the same memory as a numpy array, if it is host memory."""

    tensor: Tensor
    cells: Cells | None


class PageWriter:
    """Writer of adapters into the pages of each layer's `groups`.

    page_table, ranks: as in `kernels.reference.LoraRouting`. projections: those of each group, in the order of its
    slices. Not thread-safe. Values are copied by numpy: an adapter has hundreds of small tensors, and torch takes three
    times as long for each.
    """

    def __init__(
        self,
        groups: list[dict[str, LoraGroup]],
        projections: Mapping[str, tuple[str, ...]],
        page_table: Tensor,
        ranks: Tensor,
        lane: Lane,
    ) -> None:
        self._projections, self._lane = projections, lane
        self._page_table, self._ranks = self._target(page_table), self._target(ranks)
        self._groups = [{name: _Group(group, self._target) for name, group in layer.items()} for layer in groups]
        parts = [part for group in groups[0].values() for part in (group.a_pages[0], group.b_pages[0])]
        largest = max(part.nbytes for part in (*parts, page_table[0]))
        platform = platform_of(page_table.device)
        self._buffers = [platform.staging([largest], torch.uint8) for _ in range(NUM_BUFFERS)]
        self._fences: list[Fence | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def _target(self, tensor: Tensor) -> _Target:
        return _Target(tensor, _cells(tensor) if self._lane.in_place else None)

    def write(self, adapter: HostAdapter, slot: int, pages: Sequence[int], behind: Fence) -> None:
        """Write an adapter; return when it can be read.

        behind: the last work that may read the pages' and slot's old content.
        """
        self._lane.wait(behind)
        for layer, groups in enumerate(self._groups):
            for name, group in groups.items():
                modules = [adapter.modules.get((layer, projection)) for projection in self._projections[name]]
                with self._row(group.scales, slot) as scales:
                    scales.view(np.float32)[:] = [module.scale if module else 0.0 for module in modules]
                if any(modules):
                    self._write_group(group, modules, pages)
        with self._row(self._page_table, slot) as table:
            table[: len(pages)], table[len(pages) :] = pages, -1
        with self._row(self._ranks, slice(slot, slot + 1)) as rank:
            rank[0] = adapter.rank_in_layers
        for fence in self._fences:
            if fence is not None:
                fence.synchronize()

    def _write_group(self, group: "_Group", modules: Sequence[LoraModule | None], pages: Sequence[int]) -> None:
        page_rank, dtype = group.a_pages.tensor.shape[2], group.a_pages.tensor.dtype
        slices = [None if module is None else rows_of(module, dtype) for module in modules]
        for j, page in enumerate(pages):
            rows = slice(j * page_rank, (j + 1) * page_rank)
            with self._row(group.a_pages, page) as a:
                for s, module_rows in enumerate(slices):
                    _fill(a[s], module_rows and module_rows.a[rows])
            with self._row(group.b_pages, page) as b:
                for s, module_rows in enumerate(slices):
                    _fill(b[:, group.offsets[s] : group.offsets[s + 1]], module_rows and module_rows.b[rows])
            if group.row_scales is not None:
                with self._row(group.row_scales, page) as scales:
                    for s, module_rows in enumerate(slices):
                        _fill(scales[s], module_rows and module_rows.scales[rows])

    @contextmanager
    def _row(self, target: _Target, index: int | slice) -> Iterator[Cells]:
        """Yield memory for a row, and start its copy to the device at the end. The caller must write the whole row.

        The memory is the row itself if copies are in place, else the next buffer, once its previous copy has ended.
        """
        if target.cells is not None:
            yield target.cells[index]
            return
        row, fence = target.tensor[index], self._fences[self._turn]
        if fence is not None:
            fence.synchronize()
        staged = self._buffers[self._turn][: row.nbytes].view(row.dtype).view(row.shape)
        yield _cells(staged)
        self._fences[self._turn] = self._lane.copy(row, staged)
        self._turn = (self._turn + 1) % NUM_BUFFERS


class _Group:
    """A layer's `LoraGroup` as targets."""

    def __init__(self, group: LoraGroup, target: Callable[[Tensor], _Target]) -> None:
        self.a_pages, self.b_pages = target(group.a_pages), target(group.b_pages)
        self.scales, self.offsets = target(group.scales), group.offsets
        self.row_scales = None if group.row_scales is None else target(group.row_scales)


def _cells(tensor: Tensor) -> Cells:
    """Return a host tensor's memory as integers of the same size, because numpy lacks some dtypes."""
    cells: Cells = tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()
    return cells


def _fill(target: Cells, rows: Cells | None) -> None:
    """Copy the rows to the first rows of the target and set the others to zero."""
    count = 0 if rows is None else len(rows)
    if rows is not None:
        target[:count] = rows
    if count < len(target):
        target[count:] = 0


class Rows(NamedTuple):
    """A module by rows of its rank, as integers: a `[r, in]`, b `[r, out]`; scales `[r]` fp32, the scales of rows of 8
    bits.
    """

    a: Cells
    b: Cells
    scales: Cells


def rows_of(module: LoraModule, dtype: torch.dtype) -> Rows:
    """Return the module's rows in the dtype of the pages: its own, or 8 bits.

    A row's scale is the product of A's and B's, because both apply to its sum.
    """
    if dtype not in LARGEST:
        return Rows(_cells(module.a), _cells(module.b.T), _NO_SCALES)
    a, a_scales = quantize_rows(module.a, dtype)
    b, b_scales = quantize_rows(module.b.T, dtype)
    return Rows(_cells(a), _cells(b), _cells(a_scales * b_scales))
