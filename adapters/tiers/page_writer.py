"""Writer of adapters into their pages while steps run, without delaying the steps.

A write waits for the steps that may still read the pages' previous content. On a GPU, copies have their own stream,
which waits for all work launched before the pages were allocated. An adapter counts as loaded only after its last byte
is written. A page is packed in pinned memory in its own layout and copied in a few large pieces: a step's own upload,
which shares the bus, waits for one piece at most.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from adapters.tiers.pages import PAGE_RANK, PageParts, RankPages
from kernels.platform import CopyStream, DeviceEvent, platform_of
from kernels.reference import LARGEST, quantize_rows

NUM_BUFFERS = 2
# 80 us of a bus of 50 GB/s.
PIECE_BYTES = 4 << 20
Cells = npt.NDArray[Any]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NO_SCALES: Cells = np.zeros(0, np.int32)


class _Slices(NamedTuple):
    """Rows of a page, or of pages, for one group of projections in one layer, as integers. b: rows of each slice."""

    a: Cells
    b: tuple[Cells, ...]
    row_scales: Cells | None

    def of_page(self, page: int) -> "_Slices":
        scales = None if self.row_scales is None else self.row_scales[page]
        return _Slices(self.a[page], tuple(b[page] for b in self.b), scales)


class PageWriter:
    """Writer of adapters into `pages`.

    projections: those of each group, in the order of its slices. Not thread-safe. Values are copied by numpy: an
    adapter has hundreds of small tensors, and torch takes three times as long for each.
    """

    def __init__(self, pages: RankPages, projections: Mapping[str, tuple[str, ...]], copy_stream: CopyStream) -> None:
        self._pages, self._projections, self._copy_stream = pages, projections, copy_stream
        first = pages.groups[0]
        self._dtype = first[next(iter(first))].a_pages.dtype
        self._bounds = {name: group.offsets for name, group in first.items()}
        # The pages themselves if copies are in place, else buffers for a page each.
        self._in_place = self._slices(pages.memory) if copy_stream.in_place else []
        self._staging: list[tuple[Tensor, list[dict[str, _Slices]]]] = []
        self._events: list[DeviceEvent | None] = [None] * NUM_BUFFERS
        if not copy_stream.in_place:
            platform = platform_of(pages.memory.device)
            staged = [platform.staging([pages.page_bytes], torch.uint8) for _ in range(NUM_BUFFERS)]
            self._staging = [(memory, self._slices(memory)) for memory in staged]
            self._rows = [platform.staging(row.shape, row.dtype) for row in self._slot_rows(0)]

    def _slot_rows(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a slot's scales, page table and rank."""
        return self._pages.scales[slot], self._pages.page_table[slot], self._pages.ranks[slot : slot + 1]

    def _slices(self, memory: Tensor) -> list[dict[str, _Slices]]:
        def slices(name: str, parts: PageParts) -> _Slices:
            b, bounds = _cells(parts.b), self._bounds[name]
            columns = tuple(b[..., start:end] for start, end in pairwise(bounds))
            return _Slices(_cells(parts.a), columns, None if parts.row_scales is None else _cells(parts.row_scales))

        return [{name: slices(name, parts) for name, parts in layer.items()} for layer in self._pages.parts(memory)]

    def write(self, adapter: HostAdapter, slot: int, pages: Sequence[int], behind: DeviceEvent) -> None:
        """Write an adapter; return when it can be read.

        behind: the last work that may read the pages' and slot's old content.
        """
        self._copy_stream.wait(behind)
        scales: list[float] = []
        groups: list[tuple[int, str, list[Rows | None]]] = []
        for layer in range(len(self._pages.groups)):
            for name, projections in self._projections.items():
                modules = [adapter.modules.get((layer, projection)) for projection in projections]
                scales += [module.scale if module else 0.0 for module in modules]
                if any(modules):
                    groups.append(
                        (layer, name, [rows_of(module, self._dtype) if module else None for module in modules])
                    )
        for number, page in enumerate(pages):
            rows = slice(number * PAGE_RANK, (number + 1) * PAGE_RANK)
            if self._copy_stream.in_place:
                for layer, name, modules_rows in groups:
                    _fill_slices(self._in_place[layer][name].of_page(page), modules_rows, rows)
                continue
            turn = number % NUM_BUFFERS
            self._wait(turn)
            memory, staged = self._staging[turn]
            for layer, name, modules_rows in groups:
                _fill_slices(staged[layer][name], modules_rows, rows)
            for start in range(0, len(memory), PIECE_BYTES):
                piece = slice(start, start + PIECE_BYTES)
                self._events[turn] = self._copy_stream.copy(self._pages.memory[page, piece], memory[piece])
        self._write_slot(slot, scales, pages, adapter.rank_in_layers)

    def _write_slot(self, slot: int, scales: Sequence[float], pages: Sequence[int], rank: int) -> None:
        targets = self._slot_rows(slot)
        rows = targets if self._copy_stream.in_place else self._rows
        values = (scales, [*pages, *[-1] * (len(targets[1]) - len(pages))], [rank])
        for row, value in zip(rows, values, strict=True):
            row.numpy()[:] = value
        if not self._copy_stream.in_place:
            events = [self._copy_stream.copy(target, row) for target, row in zip(targets, rows, strict=True)]
            for turn in range(NUM_BUFFERS):
                self._wait(turn)
            for event in events:
                event.synchronize()

    def _wait(self, turn: int) -> None:
        event, self._events[turn] = self._events[turn], None
        if event is not None:
            event.synchronize()


def _cells(tensor: Tensor) -> Cells:
    """Return a host tensor's memory as integers of the same size, because numpy lacks some dtypes."""
    cells: Cells = tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()
    return cells


def _fill_slices(target: _Slices, modules: Sequence["Rows | None"], rows: slice) -> None:
    """Write those rank rows of a group's modules to a page."""
    for s, module in enumerate(modules):
        if module is not None and rows.stop <= len(module.a) and target.row_scales is None:
            target.a[s] = module.a[rows]
            target.b[s][:] = module.b[rows]
            continue
        _fill(target.a[s], module and module.a[rows])
        _fill(target.b[s], module and module.b[rows])
        if target.row_scales is not None:
            _fill(target.row_scales[s], module and module.scales[rows])


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
        return Rows(_cells(module.a), _cells(module.b).T, _NO_SCALES)
    a, a_scales = quantize_rows(module.a, dtype)
    b, b_scales = quantize_rows(module.b.T, dtype)
    return Rows(_cells(a), _cells(b), _cells(a_scales * b_scales))
