"""Reports of the service that tenants receive, in the cost units of `wire/costs.py`."""

import math
from typing import Annotated

from msgspec import Meta, Struct

from wire.errors import BadRequest

# Maximum number of tenants in one report.
MAX_TENANTS = 1000
MAX_SERVICE = 1e12


class ServiceElsewhere(Struct):
    """Service that tenants received at other engines since the last report of the same gateway process.

    tenants: cost units by tenant id.
    reporter: name of the gateway process; empty: the report counts whenever it arrives.
    number: greater than those of the reporter's earlier reports; a report that is sent again keeps its number.
    """

    tenants: dict[str, float]
    reporter: Annotated[str, Meta(max_length=64)] = ""
    number: int = 0

    def check(self) -> None:
        if len(self.tenants) > MAX_TENANTS:
            message = f"tenants: expected at most {MAX_TENANTS} tenants, got {len(self.tenants)}."
            raise BadRequest("tenants", message)
        for cost in self.tenants.values():
            if not (math.isfinite(cost) and 0 <= cost <= MAX_SERVICE):
                raise BadRequest("tenants", f"tenants: expected service from 0 to {MAX_SERVICE:g}, got {cost:g}.")


class ServiceCharged(Struct):
    """Number of the reported tenants that have requests on the engine."""

    num_charged: int
