"""Device memory that an adapter needs, and the refusal of adapters beyond the device tier's limits."""

from adapters.manifest import NO_LAYER, AdapterError
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.pages import PAGE_RANK
from adapters.tiers.reservations import Amount


def device_size(adapter: HostAdapter) -> Amount:
    embedding_head = sum(m.a.nbytes + m.b.nbytes for (layer, _), m in adapter.modules.items() if layer == NO_LAYER)
    return Amount(1, -(-adapter.rank_in_layers // PAGE_RANK), embedding_head)


def refusal(
    rank: int, embedding_head_bytes: int, *, max_rank: int, max_embedding_head_bytes: int
) -> AdapterError | None:
    """Return the error of an adapter beyond the limits of the device tier; None if it can be placed.

    embedding_head_bytes: size of its LoRA on embed_tokens and lm_head.
    """
    if rank > max_rank:
        return AdapterError("adapter", f"its rank is {rank}, the limit is {max_rank} (--max-lora-rank)")
    if embedding_head_bytes > max_embedding_head_bytes:
        return AdapterError(
            "adapter",
            f"its LoRA on embed_tokens and lm_head takes {embedding_head_bytes} bytes, the limit is "
            f"{max_embedding_head_bytes}, a quarter of --adapter-memory",
        )
    return None
