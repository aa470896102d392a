"""A decode step of the whole model in a CUDA graph: against the memory floor, and with adapters beside the base."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.kernels.measure import asked
from engine.execution.no_adapters import NoAdapters
from engine.model.config import ModelConfig
from engine.model.families import make_decoder, parse_model_config
from engine.model.weights import ModelWeights
from kernels.batch import Batch
from kernels.gpu.ops import TritonOps
from kernels.ops import EmbeddingLora, HeadLora, KvCache
from kernels.reference import LARGEST, LoraGroup
from kernels.weights import LinearWeights, dense

BLOCK_SIZE, PAGE_RANK = 16, 8
MIXED_RANKS = (8, 16, 32, 64, 128)


class RandomWeights(ModelWeights):
    """Double of a checkpoint: matrices scaled so that activations neither grow nor fade, norms and biases of 1."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([], dtype, device)

    def has_module(self, module: str) -> bool:
        return True

    def get(self, name: str, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(shape[-1] ** -0.5)

    def linear(self, modules: list[tuple[str, int]], in_features: int, *, has_bias: bool = False) -> LinearWeights:
        num_outputs = sum(rows for _, rows in modules)
        weights = dense(self.get(modules[0][0], num_outputs, in_features))
        return weights.with_bias(self.get(modules[0][0], num_outputs) if has_bias else None)

    def embedding(self, module: str, vocab_size: int, hidden_size: int) -> LinearWeights:
        return dense(self.get(module, vocab_size, hidden_size))


@dataclass(slots=True)
class Tables:
    """`kernels.ops.LoraTables` with random pages."""

    groups: list[dict[str, LoraGroup]]
    page_table: Tensor
    ranks: Tensor
    embeddings: dict[int, EmbeddingLora]
    heads: dict[int, HeadLora]
    page_rank: int = PAGE_RANK


def groups_of(c: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the input width and column bounds of each group of projections."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "qkv": (c.hidden_size, (0, q, q + kv, q + 2 * kv)),
        "o": (q, (0, c.hidden_size)),
        "gate_up": (c.hidden_size, (0, c.intermediate_size, 2 * c.intermediate_size)),
        "down": (c.intermediate_size, (0, c.hidden_size)),
    }


def elements_per_rank(c: ModelConfig) -> int:
    """Return the elements of A and B of all projections of all layers, per row of rank."""
    widths = groups_of(c).values()
    return c.num_layers * sum(width * (len(bounds) - 1) + bounds[-1] for width, bounds in widths)


def matrix_elements(c: ModelConfig) -> int:
    """Return the elements of all matrices that a step reads: the layers' and the head's."""
    layer = sum(width * bounds[-1] for width, bounds in groups_of(c).values())
    return c.num_layers * layer + c.hidden_size * c.vocab_size


def floor_ms(
    machine: Machine,
    c: ModelConfig,
    contexts: Sequence[int],
    cache_bytes: float,
    ranks: Sequence[int],
    lora_bytes: int = 2,
) -> float:
    """Return the time to read weights, keys and values, and the used adapters once, at this run's copy bandwidth.

    contexts: tokens before the step, by request. cache_bytes: bytes of one cached element, including its share of the
    scales. ranks: the adapters' ranks. lora_bytes: bytes of one element of A or B.
    """
    cache = c.kv_elements_per_token * (sum(contexts) + len(contexts)) * cache_bytes
    adapters = elements_per_rank(c) * sum(ranks) * lora_bytes
    return 1000 * (matrix_elements(c) * machine.dtype.itemsize + adapters + cache) / machine.bandwidth()


def make_tables(c: ModelConfig, ranks: list[int], machine: Machine, dtype: torch.dtype | None = None) -> Tables:
    """Return tables of adapters with these ranks, their pages in an 8-bit dtype or the machine's own."""
    dtype = dtype or machine.dtype
    pages_of = [-(-rank // PAGE_RANK) for rank in ranks]
    free = torch.randperm(sum(pages_of), generator=torch.Generator().manual_seed(0)).tolist()
    page_table = torch.full((len(ranks), max(pages_of)), -1, dtype=torch.int32)
    for slot, count in enumerate(pages_of):
        for j in range(count):
            page_table[slot, j] = free.pop()

    def pages(*shape: int) -> Tensor:
        drawn = torch.randn(shape, dtype=machine.dtype, device=machine.device)
        return drawn.mul_(0.01) if dtype == machine.dtype else drawn.mul_(25).clamp_(-127, 127).to(dtype)

    def group(width: int, bounds: tuple[int, ...]) -> LoraGroup:
        slices = len(bounds) - 1
        scales = torch.ones(len(ranks), slices, device=machine.device)
        a_pages = pages(sum(pages_of), slices, PAGE_RANK, width)
        row_scales = None
        if dtype in LARGEST:
            row_scales = torch.full((sum(pages_of), slices, PAGE_RANK), (0.01 / 25) ** 2, device=machine.device)
        return LoraGroup(a_pages, pages(sum(pages_of), PAGE_RANK, bounds[-1]), scales, bounds, row_scales)

    layers = [{name: group(*shape) for name, shape in groups_of(c).items()} for _ in range(c.num_layers)]
    rank_table = torch.tensor(ranks, dtype=torch.int32, device=machine.device)
    return Tables(layers, page_table.to(machine.device), rank_table, {}, {})


class DecodeStep:
    """The decoder with caches for requests of these contexts; `batch(n)` is a step of the first n."""

    def __init__(self, machine: Machine, contexts: Sequence[int]) -> None:
        self.machine, self.contexts = machine, list(contexts)
        self.config = parse_model_config(machine.model)
        weights = RandomWeights(machine.dtype, machine.device)
        self.decoder = make_decoder(self.config, TritonOps(), weights, max(contexts) + 1)
        self._blocks = [-(-(context + 1) // BLOCK_SIZE) for context in contexts]
        c = self.config
        self._shape = (sum(self._blocks), c.num_kv_heads, BLOCK_SIZE, c.head_dim)
        self.use_caches(machine.dtype)

    def use_caches(self, dtype: torch.dtype) -> None:
        def cache() -> KvCache:
            if dtype == self.machine.dtype:
                return KvCache(self._random(), self._random())
            k, v = (self._random().mul_(25).clamp_(-127, 127).to(dtype) for _ in "kv")
            scales = torch.full(self._shape[:3], 1 / 25, device=self.machine.device)
            return KvCache(k, v, scales, scales.clone())

        self._kv = [cache() for _ in range(self.config.num_layers)]
        self.use_adapters(None)

    def use_adapters(self, tables: Tables | None) -> None:
        self.decoder.attach(self._kv, NoAdapters(self.config.num_layers) if tables is None else tables)

    def batch(self, size: int, num_adapters: int = 0) -> Batch:
        device, row = self.machine.device, torch.arange(size)
        free = torch.randperm(self._shape[0], generator=torch.Generator().manual_seed(1)).int()
        tables = torch.zeros(size, max(self._blocks[:size]), dtype=torch.int32)
        for table, own in zip(tables, free.split(self._blocks), strict=False):
            table[: len(own)] = own
        positions = torch.tensor(self.contexts[:size])
        slots = tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        adapters = row % num_adapters if num_adapters else row * 0 - 1
        return Batch(
            token_ids=(row % self.config.vocab_size).to(device),
            positions=positions.to(device),
            slot_mapping=slots.to(device),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=(positions + 1).int().to(device),
            block_tables=tables.to(device),
            adapter_index=adapters.int().to(device),
            logits_rows=row.to(device),
            max_query_len=1,
            adapter_slots=tuple(range(min(num_adapters, size))),
        )

    @torch.inference_mode()
    def milliseconds(self, batch: Batch) -> float:
        return self.machine.milliseconds(lambda: self.decoder.forward(batch))

    def floor_ms(self, batch_size: int, cache_bytes: float, ranks: list[int], lora_bytes: int = 2) -> float:
        """Return `floor_ms` of the first requests."""
        return floor_ms(self.machine, self.config, self.contexts[:batch_size], cache_bytes, ranks, lora_bytes)

    def _random(self) -> Tensor:
        return torch.randn(self._shape, dtype=self.machine.dtype, device=self.machine.device)


def base(machine: Machine) -> Iterator[str]:
    """Measure decode by batch size, and with 8-bit caches at the largest batch."""
    yield f"copy bandwidth in this run: {machine.bandwidth() / 1e12:.2f} TB/s"
    yield ""
    yield "| batch | KV | step, ms | floor, ms | of the floor | tokens/s |"
    yield "|---|---|---|---|---|---|"
    step = DecodeStep(machine, [machine.context] * max(machine.batches))
    itemsize = machine.dtype.itemsize
    found = []
    for name, dtype, cache_bytes, batches in (
        (str(machine.dtype).removeprefix("torch."), machine.dtype, float(itemsize), machine.batches),
        ("fp8_e4m3", torch.float8_e4m3fn, 1 + 4 / step.config.head_dim, machine.batches[-1:]),
        ("int8", torch.int8, 1 + 4 / step.config.head_dim, machine.batches[-1:]),
    ):
        step.use_caches(dtype)
        for size in batches:
            taken = step.milliseconds(step.batch(size))
            floor = step.floor_ms(size, cache_bytes, [])
            yield f"| {size} | {name} | {taken:.3f} | {floor:.3f} | {floor / taken:.0%} | {1000 * size / taken:.0f} |"
            if dtype == machine.dtype:
                found.append(asked(f"decode, batch {size}, of the memory's floor", floor / taken, least=0.85))
    yield from ["", *found]


def contexts(machine: Machine) -> Iterator[str]:
    """Measure decode of a batch whose contexts differ, and of a long context among short ones."""
    yield "| contexts | step, ms | floor, ms | of the floor |"
    yield "|---|---|---|---|"
    found = []
    short, long = machine.mixed_contexts[0], machine.mixed_contexts[-1]
    for name, lengths in (
        ("+".join(map(str, machine.mixed_contexts)), machine.mixed_contexts * machine.mixed_copies),
        (f"{long} among {machine.lora_batch} of {short}", (long, *[short] * machine.lora_batch)),
    ):
        step = DecodeStep(machine, lengths)
        taken = step.milliseconds(step.batch(len(lengths)))
        floor = step.floor_ms(len(lengths), float(machine.dtype.itemsize), [])
        yield f"| {name} | {taken:.3f} | {floor:.3f} | {floor / taken:.0%} |"
        found.append(asked(f"decode, contexts {name}, of the memory's floor", floor / taken, least=0.8))
        del step
    yield from ["", *found]


def lora(machine: Machine) -> Iterator[str]:
    """Measure decode of one batch with adapters on all seven projections, beside the base step of the same run."""
    size, most = machine.lora_batch, machine.adapters[-1]
    step = DecodeStep(machine, [machine.context] * size)
    itemsize = float(machine.dtype.itemsize)
    alone = step.milliseconds(step.batch(size))
    floor_alone = step.floor_ms(size, itemsize, [])
    yield f"batch {size}, context {machine.context}; base step {alone:.3f} ms, its floor {floor_alone:.3f} ms"
    yield ""
    yield "| adapters | rank | pages | step, ms | of the base's speed | the most that memory allows | of the floor |"
    yield "|---|---|---|---|---|---|---|"
    found, milliseconds = [], {}
    cases: list[tuple[int, tuple[int, ...], torch.dtype]] = [
        *((count, (rank,), machine.dtype) for rank in (16, 64) for count in machine.adapters),
        (most, MIXED_RANKS, machine.dtype),
        *((count, (16,), torch.float8_e4m3fn) for count in machine.adapters[-2:]),
    ]
    for count, ranks, dtype in cases:
        chosen = [ranks[i % len(ranks)] for i in range(count)]
        label, pages = "-".join(map(str, ranks)), str(dtype).removeprefix("torch.")
        step.use_adapters(make_tables(step.config, chosen, machine, dtype))
        taken = milliseconds[count, ranks, dtype] = step.milliseconds(step.batch(size, count))
        floor = step.floor_ms(size, itemsize, chosen, dtype.itemsize)
        yield (
            f"| {count} | {label} | {pages} | {taken:.3f} | {alone / taken:.0%} | {floor_alone / floor:.0%} "
            f"| {floor / taken:.0%} |"
        )
        step.use_adapters(None)
        if ranks != MIXED_RANKS:
            what = f"{count} adapters of rank {label} in {pages}, of the base step's speed"
            found.append(asked(what, alone / taken, least=0.95 if ranks == (16,) else 0.9))
    step.decoder.ops = TritonOps(shrink_beside=False)
    step.use_adapters(make_tables(step.config, [16] * most, machine))
    taken = step.milliseconds(step.batch(size, most))
    yield f"| {most} | 16, shrink behind the base product, launched early | | {taken:.3f} | {alone / taken:.0%} | | |"
    mixed = sum(MIXED_RANKS[i % len(MIXED_RANKS)] for i in range(most))
    each_rank = (milliseconds[most, (64,), machine.dtype] - alone) / (64 * most)
    costs = (milliseconds[most, MIXED_RANKS, machine.dtype] - alone) / (mixed * each_rank)
    yield from ["", *found, asked("mixed ranks 8-128, of what their sum costs", costs, most=1.2)]
