"""Device memory that an adapter needs, and the refusal of adapters beyond the device tier's limits."""

from adapters.manifest import OUTSIDE, AdapterError
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.pages import PAGE_RANK
from adapters.tiers.reservations import Amount


def device_size(adapter: HostAdapter) -> Amount:
    outside = sum(m.a.nbytes + m.b.nbytes for (layer, _), m in adapter.modules.items() if layer == OUTSIDE)
    return Amount(1, -(-adapter.rank_in_layers // PAGE_RANK), outside)


def refusal(rank: int, outside_bytes: int, *, max_rank: int, max_outside_bytes: int) -> AdapterError | None:
    """Return the error of an adapter beyond the limits of the device tier; None if it can be placed.

    outside_bytes: size of its LoRA on embed_tokens and lm_head.
    """
    if rank > max_rank:
        return AdapterError("adapter", f"its rank is {rank}, the limit is {max_rank} (--max-lora-rank)")
    if outside_bytes > max_outside_bytes:
        return AdapterError(
            "adapter",
            f"its LoRA on embed_tokens and lm_head takes {outside_bytes} bytes, the limit is "
            f"{max_outside_bytes}, a quarter of --adapter-memory",
        )
    return None
