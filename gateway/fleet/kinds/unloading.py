"""Choice of the idle adapters that a full foreign server unloads: least recently used, except that a tenant with many
more adapters than others unloads its own first, as `adapters/tiers/eviction.py` does for our engine.

A tenant that cycles through many adapters would otherwise unload a neighbour's only adapter between two of its uses.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# An adapter unused for this time, in seconds, is unloaded first, regardless of its tenant.
STALE_S = 60.0
# A tenant's adapters stay while another tenant with idle adapters has this many times as many adapters on the server.
HEAVY_RATIO = 2.0

# Times of the last use of each adapter, by digest and tenant.
Uses = Mapping[str, Mapping[str, float]]


def victims(idle: Sequence[str], resident: Iterable[str], uses: Uses, number: int) -> list[str]:
    """Return at most `number` idle adapters in the order in which to unload them. resident: all adapters there."""
    owners = {each: max(by, key=by.__getitem__) if (by := uses.get(each)) else "" for each in {*idle, *resident}}
    used_at = {each: max(by.values(), default=0.0) if (by := uses.get(each)) else 0.0 for each in owners}
    held = Counter(owners.values())
    left = sorted(idle, key=used_at.__getitem__)
    fresh_from = max(used_at.values(), default=0.0) - STALE_S
    chosen: list[str] = []
    while left and len(chosen) < number:
        victim = left[0]
        if owners[victim] and used_at[victim] >= fresh_from:
            heaviest = max((owners[each] for each in left), key=held.__getitem__)
            if held[heaviest] > HEAVY_RATIO * held[owners[victim]]:
                victim = next(each for each in left if owners[each] == heaviest)
        left.remove(victim)
        held[owners[victim]] -= 1
        chosen.append(victim)
    return chosen
