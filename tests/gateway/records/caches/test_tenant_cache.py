"""A tenant's entries displace its own first."""

from gateway.records.caches.tenant_cache import TenantCache


def test_a_tenant_displaces_its_own_entries_first():
    cache: TenantCache[int, str] = TenantCache(most=10, most_each=4)
    for number in range(2):
        cache.put("quiet", number, "q")
    for number in range(100):
        cache.put("loud", number, "l")
    assert [cache.get("quiet", number) for number in range(2)] == ["q", "q"]
    assert [number for number in range(100) if cache.get("loud", number)] == [96, 97, 98, 99]
    # Beyond the room of all tenants, the longest unchanged tenant's oldest entry goes.
    for tenant in ("a", "b"):
        for number in range(4):
            cache.put(tenant, number, tenant)
    kept = {tenant: [n for n in range(100) if cache.get(tenant, n)] for tenant in ("quiet", "loud", "a", "b")}
    assert kept == {"quiet": [], "loud": [98, 99], "a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    cache.put("a", 0, "new")
    assert (cache.get("a", 0), cache.get("a", 1), cache.get("loud", 98)) == ("new", "a", "l")
