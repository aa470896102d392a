"""Mixtures of adapters in host memory: the parts' ranks are concatenated, as in PEFT's `add_weighted_adapter` ("cat").

Weights and scales are multiplied into A, so a mixture's modules have the scale 1 and the device tier treats it like any
other adapter.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from adapters.manifest import AdapterError
from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from wire.digests import digest_name
from wire.mixtures import Mixture

# Share of the host memory that one tenant's mixtures may occupy. A tenant can name any number of mixtures without an
# upload, so beyond this share its own oldest mixtures are evicted, not other tenants' adapters.
TENANT_SHARE = 1 / 8


class Mixtures:
    """Mixtures in use by requests, and each tenant's mixtures in host memory, oldest first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.share = int(max_bytes * TENANT_SHARE)
        self._used: dict[str, Mixture] = {}
        self._held: dict[str, OrderedDict[str, int]] = {}
        self._owners: dict[str, str] = {}

    def add(self, mixture: Mixture) -> None:
        self._used[mixture.digest] = mixture

    def remove(self, digest: str) -> None:
        self._used.pop(digest, None)

    def get(self, digest: str) -> Mixture | None:
        return self._used.get(digest)

    def surplus(self, tenant_id: str, num_bytes: int, is_kept: Callable[[str], bool]) -> list[str]:
        """Return the tenant's mixtures to evict before one of `num_bytes` is added; those that are kept stay."""
        held, found = self._held.get(tenant_id, OrderedDict[str, int]()), list[str]()
        left = sum(held.values()) + num_bytes
        for digest, size in held.items():
            if left <= self.share:
                break
            if is_kept(digest):
                continue
            found.append(digest)
            left -= size
        return found

    def hold(self, tenant_id: str, digest: str, num_bytes: int) -> None:
        """Record a mixture that is in host memory."""
        self._owners[digest] = tenant_id
        self._held.setdefault(tenant_id, OrderedDict())[digest] = num_bytes

    def evicted(self, digest: str) -> None:
        """Record that an adapter was evicted from host memory. Ignores adapters that are no mixtures."""
        tenant_id = self._owners.pop(digest, None)
        if tenant_id is not None:
            del self._held[tenant_id][digest]
            if not self._held[tenant_id]:
                del self._held[tenant_id]


class PartHeader(NamedTuple):
    """Part of a mixture before it is loaded. ranks: ranks of its modules. invocation: see `AdapterManifest`."""

    ranks: Mapping[tuple[int, str], int]
    invocation: tuple[int, ...]


def check_parts(parts: Sequence[tuple[str, PartHeader]], max_rank: int) -> None:
    """Check a mixture's parts by digest. Raises AdapterError for an activated LoRA, which applies to some tokens only,
    and if the ranks of the parts' modules add up to more than `max_rank`.
    """
    ranks: Counter[tuple[int, str]] = Counter()
    for digest, part in parts:
        if part.invocation:
            raise AdapterError("mixture", f"{digest_name(digest)} is an activated LoRA, which cannot be a part")
        ranks.update(part.ranks)
    if (rank := max(ranks.values())) > max_rank:
        raise AdapterError("mixture", f"the ranks of its adapters add up to {rank}, the limit is {max_rank}")


def mix(digest: str, parts: Sequence[tuple[HostAdapter, float]]) -> HostAdapter:
    """Return the weighted sum of adapters as one adapter. Raises AdapterError for values too large for the dtype."""
    modules: dict[tuple[int, str], LoraModule] = {}
    for key in sorted({key for part, _ in parts for key in part.modules}):
        found = [(part.modules[key], weight) for part, weight in parts if key in part.modules]
        a = torch.cat([(module.a.float() * weight * module.scale).to(module.a.dtype) for module, weight in found])
        if not torch.isfinite(a).all():
            raise AdapterError("mixture", f"its weights give values too large for {a.dtype}")
        # Each rank's column of b stays contiguous, as the pages store it.
        modules[key] = LoraModule(a, torch.cat([module.b.T for module, _ in found]).T, 1.0)
    return HostAdapter(
        digest,
        max(len(module.a) for module in modules.values()),
        modules,
        sum(module.a.nbytes + module.b.nbytes for module in modules.values()),
    )
