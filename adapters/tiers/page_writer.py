"""Writer of adapters into their pages while steps run, without delaying the steps.

A write waits for the steps that may still read the pages' previous content. On a GPU, copies have their own stream,
which waits for all work launched before the pages were allocated. An adapter counts as loaded only after its last byte
is written. Copies leave pinned memory through a few buffers in rotation, so little is in flight at any time: a step's
own upload, which shares the bus, waits only for that.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from kernels.platform import Fence, Lane, platform_of
from kernels.reference import LARGEST, LoraGroup, quantize_rows

NUM_BUFFERS = 4


class PageWriter:
    """Writer of adapters into the pages of each layer's `groups`.

    page_table, ranks: as in `kernels.reference.LoraRouting`. projections: those of each group, in the order of its
    slices. Not thread-safe.
    """

    def __init__(
        self,
        groups: list[dict[str, LoraGroup]],
        projections: Mapping[str, tuple[str, ...]],
        page_table: Tensor,
        ranks: Tensor,
        lane: Lane,
    ) -> None:
        self._groups, self._projections, self._lane = groups, projections, lane
        self._page_table, self._ranks = page_table, ranks
        parts = [part for group in groups[0].values() for part in (group.a_pages[0], group.b_pages[0])]
        largest = max(part.nbytes for part in (*parts, page_table[0]))
        platform = platform_of(page_table.device)
        self._buffers = [platform.staging([largest], torch.uint8) for _ in range(NUM_BUFFERS)]
        self._fences: list[Fence | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def write(self, adapter: HostAdapter, slot: int, pages: Sequence[int], behind: Fence) -> None:
        """Write an adapter; return when it can be read.

        behind: the last work that may read the pages' and slot's old content.
        """
        self._lane.wait(behind)
        for layer, groups in enumerate(self._groups):
            for name, group in groups.items():
                modules = [adapter.modules.get((layer, projection)) for projection in self._projections[name]]
                self._send(group.scales[slot], torch.tensor([module.scale if module else 0.0 for module in modules]))
                if any(modules):
                    self._write_group(group, modules, pages)
        table = torch.full((self._page_table.shape[1],), -1, dtype=torch.int32)
        table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._send(self._page_table[slot], table)
        self._send(self._ranks[slot : slot + 1], torch.tensor([adapter.rank_in_layers], dtype=torch.int32))
        for fence in self._fences:
            if fence is not None:
                fence.synchronize()

    def _write_group(self, group: LoraGroup, modules: Sequence[LoraModule | None], pages: Sequence[int]) -> None:
        page_rank = group.a_pages.shape[2]
        slices = [(s, rows_of(module, group.a_pages.dtype)) for s, module in enumerate(modules) if module is not None]
        for j, page in enumerate(pages):
            rows = slice(j * page_rank, (j + 1) * page_rank)
            a = self._zeros(group.a_pages[page])
            for s, module_rows in slices:
                part = module_rows.a[rows]
                a[s, : len(part)] = part
            self._start(group.a_pages[page], a)
            b = self._zeros(group.b_pages[page])
            for s, module_rows in slices:
                part = module_rows.b[rows]
                b[: len(part), group.offsets[s] : group.offsets[s + 1]] = part
            self._start(group.b_pages[page], b)
            if group.row_scales is not None:
                scales = self._zeros(group.row_scales[page])
                for s, module_rows in slices:
                    part = module_rows.scales[rows]
                    scales[s, : len(part)] = part
                self._start(group.row_scales[page], scales)

    def _send(self, target: Tensor, values: Tensor) -> None:
        self._start(target, self._zeros(target).copy_(values))

    def _zeros(self, target: Tensor) -> Tensor:
        """Return the next buffer, zeroed, in the target's shape and dtype, once its previous copy has ended.

        Return the target itself if copies are in place.
        """
        if self._lane.in_place:
            return target.zero_()
        fence = self._fences[self._turn]
        if fence is not None:
            fence.synchronize()
        buffer = self._buffers[self._turn][: target.nbytes].zero_()
        return buffer.view(target.dtype).view(target.shape)

    def _start(self, target: Tensor, staged: Tensor) -> None:
        self._fences[self._turn] = self._lane.copy(target, staged)
        self._turn = (self._turn + 1) % NUM_BUFFERS


class Rows(NamedTuple):
    """A module by rows of its rank: a `[r, in]`, b `[r, out]`; scales `[r]` fp32, the scales of rows of 8 bits."""

    a: Tensor
    b: Tensor
    scales: Tensor


def rows_of(module: LoraModule, dtype: torch.dtype) -> Rows:
    """Return the module's rows in the dtype of the pages: its own, or 8 bits.

    A row's scale is the product of A's and B's, because both apply to its sum.
    """
    if dtype not in LARGEST:
        return Rows(module.a, module.b.T, torch.ones(len(module.a)))
    a, a_scales = quantize_rows(module.a, dtype)
    b, b_scales = quantize_rows(module.b.T, dtype)
    return Rows(a, b, a_scales * b_scales)
