"""Construction of the parts of golden answers."""

from gateway.api.golden.checking import GoldenChecks
from gateway.api.golden.handlers import GoldenRoutes
from gateway.api.golden.requests import GoldenRequests
from gateway.api.golden.upgrades import Upgrades
from gateway.api.inference.admission import Admission
from gateway.api.requests.memory import BodyMemory
from gateway.components import Billing, Records, Serving
from gateway.records.adapters.golden import Golden
from gateway.records.adapters.probes import Probes
from gateway.resources import Resources


def build_golden(
    resources: Resources,
    records: Records,
    billing: Billing,
    serving: Serving,
    admission: Admission,
    body_memory: BodyMemory,
) -> tuple[GoldenRoutes, Upgrades]:
    """Return the routes and the background checks."""
    golden, metrics = Golden(resources.database), resources.metrics
    requests = GoldenRequests(
        admission=admission,
        auth=records.auth,
        dispatcher=serving.dispatcher,
        accounting=billing.accounting,
        metrics=metrics,
        body_memory=body_memory,
        request_timeout=resources.settings.request_timeout,
    )
    checks = GoldenChecks(
        golden=golden,
        probes=Probes(resources.database),
        requests=requests,
        registry=serving.registry,
        tokenizers=serving.tokenizers,
        bases=records.bases,
        metrics=metrics,
    )
    routes = GoldenRoutes(
        tenants=records.tenants,
        auth=records.auth,
        catalog=records.catalog,
        golden=golden,
        requests=requests,
        checks=checks,
        quota=billing.quota,
    )
    upgrades = Upgrades(golden, checks, records.tenants, serving.registry, serving.queues, resources.redis)
    return routes, upgrades
