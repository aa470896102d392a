"""Comparison of the load's weights, by which shares are computed, with those of the server's tenants."""

import math
from collections.abc import Mapping

from loraplex.bench.access import tenants_weights
from loraplex.bench.load import Load
from loraplex.bench.run import BenchError, Server

SHARES = "shares (of_entitled) are computed with the load's weights"


async def compare_weights(
    server: Server, load: Load, admin_key: str | None
) -> tuple[Mapping[str, float] | None, str | None]:
    """Return the weights of the server's tenants by the load's names, and a warning if shares may be wrong.

    admin_key: an operator's key of a Loraplex gateway. Weights are None if they are unknown.
    """
    weights = {tenant.name: tenant.weight for tenant in load.tenants}
    if len(weights) == 1:
        return None, None
    # An engine behind a gateway receives the load's weights with each request.
    if server.internal_token is not None:
        return weights, None
    keys = {target.tenant: target.api_key for source in load.sources for target in source.targets}
    why = "no admin key for the server was found"
    if admin_key is not None:
        try:
            known = await tenants_weights(server, keys, admin_key)
        except BenchError as error:
            why = str(error)
        else:
            return known, None if _in_proportion(weights, known) else _difference(weights, known)
    if len(set(weights.values())) == 1:
        return None, None
    return None, f"{SHARES}; those of the server's tenants are unknown: {why}"


def _in_proportion(weights: Mapping[str, float], known: Mapping[str, float]) -> bool:
    [first, *others] = [known[name] / weights[name] for name in known]
    return all(math.isclose(first, other, rel_tol=1e-6) for other in others)


def _difference(weights: Mapping[str, float], known: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {weights[name]:g} (server: {known[name]:g})" for name in known)
    return f"{SHARES}, which are not in proportion to those of the server's tenants: {named}"
