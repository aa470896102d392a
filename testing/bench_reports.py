"""Reports of `loraplex bench` from given times to first token, without a server."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.bench.arrivals import Poisson
from loraplex.bench.load import Load, PlannedRequest, Source, Target, Tenant
from loraplex.bench.report import make_report, run_report
from loraplex.bench.run import Run
from loraplex.bench.sampling import Even, Fixed
from loraplex.bench.sending import Failure, Sample

# Names with the markup of a terminal or a page, which must show them unchanged.
HOSTILE = ("[/x]", "[team]a", ":smile:", "all", '<b onclick="x">', "\x1b[2J")


def load_of(*names: str, **changes: Any) -> Load:
    """Return a load of these tenants, each with one request a second for two seconds."""
    sources = (Source(n, (Target(n, f"secret-{n}", "m"),), Poisson(1.0), Even(), Fixed(8), Fixed(3)) for n in names)
    settings: dict[str, Any] = {"tenants": tuple(Tenant(name) for name in names), "seconds": 2.0} | changes
    return Load(sources=tuple(sources), **settings)


def answered(tenant: str, ttft: float, due: float = 0.0) -> Sample:
    """Return a sample with three tokens, a tenth of a second apart."""
    times = array("d", [due + ttft, due + ttft + 0.1, due + ttft + 0.2])
    return Sample(planned(tenant), due, due, times[-1], times, 8, 3)


def failed(tenant: str, failure: Failure, due: float = 0.0) -> Sample:
    """Return a sample without a token."""
    return Sample(planned(tenant), due, due, due + 0.1, error=failure)


def planned(tenant: str) -> PlannedRequest:
    return PlannedRequest(tenant, 0, None, Target(tenant, f"secret-{tenant}", "m"), 8, 3)


def run_of(load: Load, samples: Sequence[Sample]) -> dict[str, Any]:
    return run_report(Run(load, list(samples), seconds=2.0))


def report_of(
    load: Load, runs: Sequence[Sequence[Sample]], baseline: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the report of runs with these samples. baseline: a run's report."""
    about = {"name": "x", "description": "<i>", "started": "now", "loraplex": "0", "overhead": None} | changes
    alone = None if baseline is None else dict(baseline)
    return make_report("http://x", load, [run_of(load, samples) for samples in runs], alone, **about)
