"""One step's plan as the flat tensors of `kernels.batch.Batch`."""

import numpy as np
import torch
from torch import Tensor

from engine.scheduling.request import Request
from kernels.batch import Batch


def build_batch(plan: dict[Request, int], block_size: int, device: torch.device) -> Batch:
    """Lays the plan flat, requests of one adapter side by side. `plan`'s own order is kept otherwise.

    Rows of `logits_rows` are, in plan order: every prompt position for a request that wants prompt_logprobs, else the
    last token of each request that this step brings to its end.
    """
    num_requests = len(plan)
    counts = np.fromiter(plan.values(), np.int32, num_requests)
    starts = np.zeros(num_requests + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    token_ids = np.empty(total, np.int64)
    context_lens = np.empty(num_requests, np.int32)
    adapters = np.empty(num_requests, np.int32)
    blocks = np.zeros((num_requests, max(len(r.blocks) for r in plan)), np.int32)
    rows: list[int] = []
    for i, (request, n) in enumerate(plan.items()):
        first, at = request.num_computed, int(starts[i])
        token_ids[at : at + n] = request.token_ids[first : first + n]
        context_lens[i] = first + n
        adapters[i] = request.adapter_slot
        blocks[i, : len(request.blocks)] = request.blocks
        rows.extend(logits_rows(request, n, at))
    positions = np.arange(total) - np.repeat(starts[:-1] - (context_lens - counts), counts)
    owner = np.repeat(np.arange(num_requests), counts)
    slots = blocks[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        token_ids=tensor(token_ids),
        positions=tensor(positions.astype(np.int64)),
        slot_mapping=tensor(slots),
        query_start=tensor(starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(blocks),
        adapter_index=tensor(np.repeat(adapters, counts)),
        logits_rows=tensor(np.array(rows, np.int64)),
        max_query_len=int(counts.max()),
        max_context_len=int(context_lens.max()),
        adapter_slots=tuple(sorted(set(adapters.tolist()) - {-1})),
        has_base_rows=bool((adapters < 0).any()),
    )


def logits_rows(request: Request, num_tokens: int, at: int) -> range:
    """Which of the request's rows, starting at flat row `at`, need logits in this step."""
    ends = request.num_computed + num_tokens == request.num_tokens
    if request.wants_prompt_logprobs:
        return range(at, at + num_tokens)
    return range(at + num_tokens - 1, at + num_tokens) if ends else range(0)
