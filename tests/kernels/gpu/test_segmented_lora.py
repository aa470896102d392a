"""Segmented LoRA in Triton against `kernels.reference`, over ranks, popularity, base rows, shapes and tile sizes."""

from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from kernels import reference
from kernels.gpu.segmented_lora import expand, segmented_lora, shrink
from kernels.gpu.segments import DECODE, PREFILL, TileSizes, build_segments
from kernels.reference import LoraGroup, LoraRouting
from testing.interpreter import repeated

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RANKS = (1, 8, 256, 5, 64, 16, 32, 2)
# in_features, offsets
SHAPES = {
    "SmolLM2 qkv": (576, (0, 576, 768, 960)),
    "SmolLM2 gate_up": (576, (0, 1536, 3072)),
    "Llama-3.1-8B k": (4096, (0, 1024)),
    "odd": (100, (0, 40, 77)),
}
WHOLE_SHAPES = {
    "SmolLM2 down": (1536, (0, 576)),
    "Llama-3.1-8B qkv": (4096, (0, 4096, 5120, 6144)),
    "Llama-3.1-8B gate_up": (4096, (0, 14336, 28672)),
    "Llama-3.1-8B down": (14336, (0, 4096)),
    "Qwen3-0.6B qkv": (1024, (0, 2048, 3072, 4096)),
}


# The tile sizes in use are tested below. Wide tiles, too large for a GPU, take a third of the interpreter's time.
WIDE = replace(DECODE, block_r=64, block_n=512, k_per_split=512)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill planes with NaN and tables with equally invalid indices, so that an unwritten element shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)


def indices(popularity: str, num_tokens: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    """Return the adapter of each token, by Punica's popularities, some with base rows between."""
    if popularity == "distinct":
        return torch.randperm(num_slots, generator=generator)[:num_tokens].int()
    weights = {
        "uniform": torch.ones(num_slots),
        "zipf": torch.arange(1, num_slots + 1).float() ** -1.5,
        "identical": torch.eye(num_slots)[1],
        "skewed": torch.tensor([0.9] + [0.1 / (num_slots - 1)] * (num_slots - 1)),
        "base between": torch.ones(num_slots),
        "all base": torch.ones(num_slots),
    }[popularity]
    index = torch.multinomial(weights, num_tokens, replacement=True, generator=generator).int()
    if popularity == "base between":
        index[torch.rand(num_tokens, generator=generator) < 0.4] = -1
    if popularity == "all base":
        index[:] = -1
    return index


def make(shape, index, dtype, device, ranks=RANKS, page_rank=8, max_rank=256, seed=0):
    """Return a pool with pages assigned in shuffled order, NaN outside the adapters' rank rows."""
    generator = torch.Generator().manual_seed(seed)
    in_features, offsets = (SHAPES | WHOLE_SHAPES)[shape]
    num_slices, max_pages = len(offsets) - 1, -(-max_rank // page_rank)
    pages_of = [-(-r // page_rank) for r in ranks]
    free = torch.randperm(sum(pages_of) + 3, generator=generator).tolist()
    a_pages = torch.full((len(free), num_slices, page_rank, in_features), float("nan"))
    b_pages = torch.full((len(free), page_rank, offsets[-1]), float("nan"))
    page_table = torch.full((len(ranks), max_pages), -1, dtype=torch.int32)
    for slot, rank in enumerate(ranks):
        for j in range(pages_of[slot]):
            page = page_table[slot, j] = free.pop()
            rows = min(page_rank, rank - j * page_rank)
            a_pages[page, :, :rows] = torch.randn(num_slices, rows, in_features, generator=generator)
            b_pages[page, :rows] = torch.randn(rows, offsets[-1], generator=generator)
            # The reference reads whole pages: rows beyond the rank must be zero there.
            if rows < page_rank:
                a_pages[page, :, rows:] = 0
                b_pages[page, rows:] = 0
    scales = torch.rand(len(ranks), num_slices, generator=generator) / in_features**0.5
    group = LoraGroup(a_pages.to(device, dtype), b_pages.to(device, dtype), scales.to(device), offsets)
    routing = LoraRouting(
        index.to(device), page_table.to(device), torch.tensor(ranks, dtype=torch.int32, device=device)
    )
    x = torch.randn(len(index), in_features, generator=generator).to(device, dtype)
    y = torch.randn(len(index), offsets[-1], generator=generator).to(device, dtype)
    return y, x, group, routing


def in_8_bits(group, dtype):
    """Return the group with its pages quantised, and NaN as the scale of rows that no adapter owns."""
    a, a_scales = reference.quantize_rows(group.a_pages.nan_to_num(), dtype)
    slices = [
        reference.quantize_rows(group.b_pages[..., start:end].nan_to_num(), dtype)
        for start, end in zip(group.offsets, group.offsets[1:], strict=False)
    ]
    row_scales = a_scales * torch.stack([scales for _, scales in slices], 1)
    row_scales[group.a_pages.isnan().any(-1)] = float("nan")
    b = torch.cat([values.view(torch.uint8) for values, _ in slices], -1).view(dtype)
    return replace(group, a_pages=a, b_pages=b, row_scales=row_scales)


def check(y, x, group, routing, tile_sizes: TileSizes | None = None, segments=None) -> torch.Tensor:
    expected, again, before = y.clone(), y.clone(), y.clone()
    reference.segmented_lora(expected, x, group, routing)
    segments = segments or build_segments(routing, group.a_pages.shape[2], tile_sizes=tile_sizes)
    segmented_lora(y, x, group, segments)
    error = (y.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[y.dtype]
    torch.testing.assert_close(y.float(), expected.float(), atol=40 * TOLERANCE[y.dtype], rtol=10 * TOLERANCE[y.dtype])
    base = routing.adapter_index < 0
    assert torch.equal(y[base], before[base])
    assert base.all() or not torch.equal(y, before)
    # The interpreter runs one program after the other, so a second run differs only if the segments changed, which the
    # small shape shows.
    if y.is_cuda or x.shape[1] == SHAPES["odd"][0]:
        segmented_lora(again, x, group, segments)
        assert torch.equal(y, again)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, repeated(torch.float16)])
@pytest.mark.parametrize(
    "popularity", ["distinct", "uniform", "zipf", "identical", "skewed", "base between", "all base"]
)
def test_popularity(popularity, dtype, device):
    index = indices(popularity, 8 if popularity == "distinct" else 37, len(RANKS), torch.Generator().manual_seed(1))
    check(*make("odd", index, dtype, device), WIDE if device.type == "cpu" else DECODE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tile_sizes", "dtype"), [(DECODE, torch.float16), (PREFILL, torch.float32)], ids=["decode fp16", "prefill fp32"]
)
def test_shapes_and_tile_sizes(shape, tile_sizes, dtype, device):
    index = indices("base between", 40, 4, torch.Generator().manual_seed(2))
    check(*make(shape, index, dtype, device, ranks=(3, 16, 40, 8), max_rank=64), tile_sizes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", WHOLE_SHAPES)
def test_whole_projections(shape, dtype, device):
    """Ranks 1 to 256 mix with base rows between, under the tile sizes chosen for few rows and for many."""
    for num_tokens, tile_sizes in ((12, DECODE), (70, PREFILL)):
        index = indices("base between", num_tokens, len(RANKS), torch.Generator().manual_seed(2))
        check(*make(shape, index, dtype, device), replace(tile_sizes, block_n=512))


@pytest.mark.parametrize("page_rank", [8, 16])
def test_page_ranks(page_rank, device):
    """All page ranks up to 256 are correct with the tile sizes of decodes."""
    index = indices("uniform", 20, len(RANKS), torch.Generator().manual_seed(3))
    check(*make("odd", index, torch.float16, device, page_rank=page_rank))


def test_chunks_longer_than_a_tile(device):
    """An adapter owns more rows than a chunk holds, with both tile sizes, with a ragged end."""
    index = torch.tensor([2] * 45 + [-1] + [0] * 17 + [2] * 22, dtype=torch.int32)
    for tile_sizes in (DECODE, PREFILL):
        check(*make("odd", index, torch.float32, device, ranks=(8, 4, 40), max_rank=64), tile_sizes)


@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("shape", "tile_sizes", "dtype"), [("SmolLM2 qkv", DECODE, torch.float16), ("odd", PREFILL, torch.float32)]
)
def test_pages_of_8_bits(shape, tile_sizes, dtype, page_dtype, device):
    index = indices("base between", 20, 4, torch.Generator().manual_seed(2))
    y, x, group, routing = make(shape, index, dtype, device, ranks=(3, 16, 40, 8), max_rank=64)
    full = y.clone()
    reference.segmented_lora(full, x, group, routing)
    before = y.clone()
    got = check(y, x, in_8_bits(group, page_dtype), routing, tile_sizes)
    # The loss of 8 bits: e4m3 keeps three bits behind the point, int8 seven of the row's largest.
    error = (got - full).float().norm() / (full - before).float().norm()
    assert 0 < error < (0.06 if page_dtype == torch.float8_e4m3fn else 0.02)


def test_small_weights_of_8_bits_keep_their_bits_in_fp16(device):
    """Small 8-bit weights keep their bits in fp16: the row scales are far below its smallest normal number."""
    index = indices("uniform", 9, 2, torch.Generator().manual_seed(2))
    y, x, group, routing = make("odd", index, torch.float16, device, ranks=(8, 16), max_rank=16)
    small = in_8_bits(replace(group, b_pages=group.b_pages * 2e-3), torch.float8_e4m3fn)
    y.zero_()
    expected = y.float()
    reference.segmented_lora(expected, x.float(), replace(small, scales=group.scales * 500), routing)
    segmented_lora(y, x, replace(small, scales=group.scales * 500), build_segments(routing, 8))
    assert (y.float() - expected).norm() / expected.norm() < 2e-3


def test_split_k_changes_only_rounding(device):
    index = torch.tensor([0, 1, 1, 2, -1, 0], dtype=torch.int32)
    whole, split = (
        check(
            *make("Llama-3.1-8B k", index, torch.float32, device, ranks=(8, 16, 40), max_rank=64),
            replace(DECODE, k_per_split=k_per_split),
        )
        for k_per_split in (4096, 512)
    )
    assert not torch.equal(whole, split)
    torch.testing.assert_close(whole, split, atol=1e-3, rtol=1e-4)


def test_untargeted_slices_are_not_read(device):
    """Scale 0 means that the adapter does not target the projection; its pages may hold any values."""
    index = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32)
    y, x, group, routing = make("odd", index, torch.float32, device, ranks=(4, 8))
    group.scales[1, 0] = 0
    expected = y.clone()
    reference.segmented_lora(expected, x, group, routing)
    group.a_pages[routing.page_table[1, 0], 0] = float("nan")
    segmented_lora(y, x, group, build_segments(routing, 8))
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)


def test_neighbours_poison_stays_theirs(device):
    """An adapter full of NaN affects only its own rows."""
    index = torch.tensor([0, 1, -1, 1, 0, -1], dtype=torch.int32)
    y, x, group, routing = make("SmolLM2 qkv", index, torch.float16, device, ranks=(16, 8))
    group.a_pages[routing.page_table[0, :2]] = float("nan")
    segmented_lora(y, x, group, build_segments(routing, 8))
    assert y[index == 0].isnan().all()
    assert not y[index != 0].isnan().any()


def test_no_load_before_b_depends_on_another_but_the_length_of_the_list(device, monkeypatch):
    """An expand program reads its number of items before it reads B. Each item then reads rows of the tables by chunk,
    and their places follow from the item's number alone. It reads no table by slot, and no row of these tables twice.
    """
    if device.type == "cuda":
        pytest.skip("records loads in the interpreter")
    from triton.runtime import interpreter

    index = torch.tensor([2] * 20 + [-1] + [0] * 3 + [3] * 5 + [1], dtype=torch.int32)
    y, x, group, routing = make("odd", index, torch.float32, device, ranks=(3, 16, 40, 8), max_rank=64)
    segments = build_segments(routing, 8, tile_sizes=replace(DECODE, block_n=32))
    planes, scales = shrink(x, group, segments), segments.chunk_scales(group.scales)
    tables = {name: getattr(segments, name) for name in ("counts", "chunks", "pages", "rows")}
    tables |= {"scales": scales, "y": y, "planes": planes, "B": group.b_pages}
    loads: dict[int, list[tuple[str, list[int]]]] = {}
    builder = type(interpreter.interpreter_builder)
    load = builder.create_masked_load

    def recording(self, pointers, mask, *rest):
        at = sorted(set(pointers.data[mask.data].tolist()))
        name = next((n for n, t in tables.items() if at and 0 <= at[0] - t.data_ptr() < t.nbytes), "another table")
        found = [(each - tables[name].data_ptr()) // 4 for each in at] if name in tables else at
        loads.setdefault(self.grid_idx[0], []).append((name, found))
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", recording)
    expand(y, planes, group, segments)
    num_chunks, stride, max_pages = int(segments.counts[0]), segments.chunks.shape[1], segments.pages.shape[1]
    num_items = num_chunks * 4  # tiles of 32 columns: two of each slice
    by_item = {}
    for program, (first, *others) in loads.items():
        assert first == ("counts", [0])
        items: list[list[tuple[str, list[int]]]] = [[]]
        for name, at in others:
            if name == "chunks" and "B" in dict(items[-1]):
                items.append([])
            items[-1].append((name, at))
        by_item |= zip(range(program, num_items, len(loads)), items, strict=True)
    assert len(by_item) == num_items
    for item, found in by_item.items():
        chunk, tile = divmod(item, 4)
        before = takewhile(lambda each: each[0] != "B", found)
        assert [each for each in before if each[0] not in ("rows", "y")] == [
            ("chunks", [stride + chunk]),
            ("chunks", [stride + chunk + 1]),
            ("chunks", [2 * stride + chunk]),
            ("scales", [chunk * scales.stride(0) + tile // 2]),
            ("pages", [chunk * max_pages, chunk * max_pages + 1]),
        ]


def test_tables_are_written_before_they_are_read(device, monkeypatch):
    """The memory of the tables may have any old values, as it has when a graph is replayed with another mix."""
    generator = torch.Generator().manual_seed(5)
    for popularity in ("uniform", "identical", "all base", "skewed"):
        mix = indices(popularity, 21, 5, generator)
        y, x, group, routing = make("odd", mix, torch.float32, device, ranks=(1, 8, 5, 40, 16), max_rank=64)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, 2**30, **options))
            segments = build_segments(routing, 8)
        check(y, x, group, routing, segments=segments)


@pytest.mark.parametrize("popularity", ["uniform", "identical", "all base", "base between", "skewed"])
@pytest.mark.parametrize("tile_sizes", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("num_tokens", [1, repeated(100), 150])
def test_one_launch_builds_the_tables_that_sorting_does(num_tokens, tile_sizes, popularity, device, monkeypatch):
    index = indices(popularity, num_tokens, len(RANKS), torch.Generator().manual_seed(8)).to(device)
    ranks = torch.tensor(RANKS, dtype=torch.int32, device=device)
    routing = LoraRouting(index, torch.zeros(len(RANKS), 32, dtype=torch.int32, device=device), ranks)
    routed = build_segments(routing, 8, tile_sizes=tile_sizes)
    monkeypatch.setattr("kernels.gpu.segments.MAX_ROUTED", 0)
    expected = build_segments(routing, 8, tile_sizes=tile_sizes)
    num_chunks, num_tiles = expected.counts.tolist()
    assert torch.equal(routed.counts, expected.counts)
    assert torch.equal(routed.rows, expected.rows)
    assert torch.equal(routed.chunks[0, :num_chunks], expected.chunks[0, :num_chunks])
    assert torch.equal(routed.chunks[1, : num_chunks + 1], expected.chunks[1, : num_chunks + 1])
    assert torch.equal(routed.tiles[:, :num_tiles], expected.tiles[:, :num_tiles])
    # The scales of a pool's groups, columns of one table, are gathered once, by chunk.
    table = torch.rand(len(RANKS), 7, generator=torch.Generator().manual_seed(9)).to(device)
    slots = expected.chunks[0, :num_chunks].long()
    for segments in (routed, expected):
        for start, end in ((0, 3), (3, 4), (4, 7)):
            found = segments.chunk_scales(table[:, start:end])
            assert torch.equal(found[:num_chunks, : end - start], table[slots, start:end])
        assert len(segments.scales) == 1
    with pytest.raises(ValueError, match="scales: expected columns of a float32 table"):
        routed.chunk_scales(table.T)


@pytest.mark.parametrize("tile_sizes", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_single_adapter_needs_no_sorting(tile_sizes, device):
    """A single adapter without a table of rows gives the same bits as sorted tables."""
    index = torch.full((75,), 3, dtype=torch.int32)
    y, x, group, routing = make("odd", index, torch.float32, device, ranks=(8, 4, 16, 40), max_rank=64)
    sorted_y = check(y.clone(), x, group, routing, tile_sizes)
    segments = build_segments(routing, 8, single_adapter=True, tile_sizes=tile_sizes)
    assert segments.rows is None
    assert torch.equal(check(y, x, group, routing, segments=segments), sorted_y)


def test_known_number_of_adapters_shrinks_the_tables(device):
    index = torch.tensor([4] * 50 + [-1] * 3 + [1] * 50, dtype=torch.int32)
    y, x, group, routing = make("odd", index, torch.float32, device)
    segments = build_segments(routing, 8, num_adapters=2)
    assert segments.tile_sizes is PREFILL
    assert build_segments(routing, 8).tile_sizes is DECODE
    assert segments.chunks.shape[1] < build_segments(routing, 8, tile_sizes=PREFILL).chunks.shape[1]
    check(y, x, group, routing, segments=segments)


def test_strided_rows(device):
    """x and y may be column slices of wider buffers, whose other columns do not change."""
    index = indices("uniform", 9, len(RANKS), torch.Generator().manual_seed(6))
    y, x, group, routing = make("odd", index, torch.float32, device)
    wide_x = torch.full((9, 160), float("nan"), device=device)
    wide_y = torch.full((9, 99), float("nan"), device=device)
    wide_x[:, 16:116], wide_y[:, 3:80] = x, y
    expected = check(y, x, group, routing)
    segmented_lora(wide_y[:, 3:80], wide_x[:, 16:116], group, build_segments(routing, 8))
    assert torch.equal(wide_y[:, 3:80], expected)
    assert wide_y[:, :3].isnan().all()
    assert wide_y[:, 80:].isnan().all()


@pytest.mark.parametrize("break_it", ["shape", "dtype", "page_rank", "slices", "row_scales"])
def test_bad_arguments_are_named(break_it, device):
    y, x, group, routing = make("odd", torch.zeros(3, dtype=torch.int32), torch.float32, device)
    segments = build_segments(routing, 8)
    if break_it == "shape":
        x = x[:, :50]
    if break_it == "dtype":
        x = x.half()
    if break_it == "page_rank":
        segments = build_segments(routing, 16)
    if break_it == "row_scales":
        group = replace(group, row_scales=torch.ones(1, device=device))
    if break_it == "slices":
        group = replace(group, offsets=(0, 40, 60, 77))
    with pytest.raises(ValueError, match=r"^(x|a_pages|offsets|row_scales): "):
        segmented_lora(y, x, group, segments)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [64, 700])
def test_bfloat16(shape, num_tokens, device):
    index = indices("base between", num_tokens, len(RANKS), torch.Generator().manual_seed(7))
    y, x, group, routing = make(shape, index, torch.bfloat16, device)
    check(y.clone(), x, group, routing)
    for page_dtype in (torch.float8_e4m3fn, torch.int8):
        check(y.clone(), x, in_8_bits(group, page_dtype), routing)
