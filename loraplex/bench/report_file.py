"""Parsing of JSON reports for a comparison: only the fields that it reads. The file is untrusted.

Fields that older releases did not write are UNSET.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loraplex.bench.load import Slo
from loraplex.bench.report import SCHEMA


class CompareError(Exception):
    """A file that is no report of this version; the message names it and the field."""


class Range(Struct, frozen=True):
    """A figure over the runs of a report. None: infinite."""

    median: float | None
    min: float | None
    max: float | None


Ranges = Mapping[str, Range]


class Summary(Struct, frozen=True):
    all: dict[str, Range]
    tenants: dict[str, dict[str, Range]]
    fairness: dict[str, Range]


class Service(Struct, frozen=True):
    input: float
    output: float


class TenantLoad(Struct, frozen=True):
    weight: float
    slo: Slo


class PlannedRequests(Struct, frozen=True):
    sha256: str


class LoadOfReport(Struct, frozen=True):
    """A report's load without its sources, for which the plan's hash stands."""

    seed: int
    seconds: float | None
    warmup: int
    api: str
    timeout: float
    drain: float | None
    service: Service
    plan: PlannedRequests
    ignore_eos: bool | UnsetType = UNSET
    window: float | UnsetType | None = UNSET
    tenants: dict[str, TenantLoad] | UnsetType = UNSET

    def values(self) -> dict[tuple[str, ...], Any]:
        """Return each value by its path, such as `("service", "input")`."""
        return dict(_leaves((), msgspec.to_builtins(self)))


def _leaves(path: tuple[str, ...], value: Any) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, below in value.items() for leaf in _leaves((*path, key), below)]


class AnyRun(Struct, frozen=True):
    """A run, of which a comparison needs nothing."""


class Report(Struct, frozen=True):
    runs: list[AnyRun]
    load: LoadOfReport
    summary: Summary
    warnings: list[str]


class AnySchema(Struct, frozen=True):
    schema: str


def read_report(path: Path) -> Report:
    """Return the report in a file. Raises CompareError."""
    try:
        content = path.read_bytes()
        schema = msgspec.json.decode(content, type=AnySchema).schema
        if schema != SCHEMA:
            raise CompareError(f"{path}: expected the schema {SCHEMA!r}, got {schema!r}")
        report = msgspec.json.decode(content, type=Report)
    except OSError as error:
        raise CompareError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise CompareError(f"{path}: not a report of loraplex bench --json: too many levels") from error
    except msgspec.DecodeError as error:
        raise CompareError(f"{path}: not a report of loraplex bench --json: {error}") from error
    if not report.runs:
        raise CompareError(f"{path}: the report has no finished run")
    return report
