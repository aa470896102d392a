"""Scenario files: TOML with a pattern of requests for each tenant. Errors name the file's line and the key."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from loraplex.bench.arrivals import LONGEST, Arrival, Closed, Phases, Ramp, Seconds, Trace
from loraplex.bench.load import Api, Load, LoadError, Slo, Source, Target, Tenant
from loraplex.bench.sampling import Even, Fixed, Length, LogNormal, Popularity, UniformLength
from loraplex.bench.schema_text import describe
from loraplex.bench.toml_lines import Path as Keys
from loraplex.bench.toml_lines import TomlError, TomlLines
from loraplex.bench.trace import Row, TraceError, read_trace
from wire.escaping import escaped

MAX_BYTES = 1 << 20
MAX_ADAPTERS = 100_000
MAX_SEED = 2**63 - 1
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
Weight = Annotated[float, Meta(gt=0, le=1_000_000)]
Offset = Annotated[float, Meta(ge=0, le=LONGEST)]


class ScenarioError(Exception):
    """A wrong scenario; the message names the file, the line and the key."""


class SloTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Targets in seconds; a request outside of one does not count as goodput."""

    ttft: Seconds | None = None
    tpot: Seconds | None = None
    latency: Seconds | None = None


class TenantTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant: which requests it sends, and when.

    adapters: names of models, `{0..63}` in a name counts; default: the adapters that the server
    lists for the tenant's key, or its models if none is an adapter.
    key_env: environment variable with its API key. start, stop: seconds of its first and last possible arrival.
    """

    name: Name
    arrival: Arrival
    input: Length | None = None
    output: Length | None = None
    weight: Weight = 1.0
    adapters: Annotated[list[Name], Meta(min_length=1)] | None = None
    popularity: Popularity = Even()
    start: Offset = 0.0
    stop: Seconds | None = None
    requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    key_env: Name | None = None
    slo: SloTable | None = None


class BaselineTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A run before the measured ones, without some tenants; the report compares the others' TTFT."""

    without: Annotated[list[str], Meta(min_length=1)]


class ServiceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Service that a prompt's and an answer's token count; the defaults are the VTC paper's."""

    input: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    output: Annotated[float, Meta(ge=0, le=1_000_000)] = 2.0


class Spec(Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario file. docs/reference.md describes the keys."""

    name: Name
    tenants: Annotated[list[TenantTable], Meta(min_length=1, max_length=1000)]
    description: str = ""
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] = 0
    seconds: Seconds | None = None
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 2
    timeout: Seconds = 600.0
    drain: Offset | None = None
    api: Api = "completions"
    ignore_eos: bool = True
    window: Seconds | None = None
    service: ServiceTable = ServiceTable()
    slo: SloTable = SloTable()
    baseline: BaselineTable | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """A tenant's key, and the models and the adapters among them that the server lists for it."""

    api_key: str | None = field(repr=False)
    models: Sequence[str]
    adapters: Sequence[str]


class Scenario:
    """A scenario file that was read and checked as far as possible without the server. Raises ScenarioError.

    rate_scale: factor of the rates of all open loops.
    """

    def __init__(self, path: Path, rate_scale: float = 1.0) -> None:
        self.path = path
        self._toml = self._parse()
        self.spec = self._convert(self._toml.value)
        if rate_scale != 1:
            self.spec = self._scaled(rate_scale)
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._check()

    @property
    def tenants(self) -> list[str]:
        return [tenant.name for tenant in self.spec.tenants]

    def keys_from_environment(self) -> dict[str, str]:
        """Return the API keys of the tenants with `key_env`. Raises ScenarioError if a variable is unset."""
        keys = {}
        for number, tenant in enumerate(self.spec.tenants):
            if tenant.key_env is not None:
                key = os.environ.get(tenant.key_env)
                if not key:
                    self._fail(("tenants", number, "key_env"), f"the environment has no variable {tenant.key_env}")
                keys[tenant.name] = key
        return keys

    def fail_without_key(self, tenant: str, why: str) -> NoReturn:
        """Raise the ScenarioError of a tenant without a valid API key."""
        number = self.tenants.index(tenant)
        key = "name" if self.spec.tenants[number].key_env is None else "key_env"
        self._fail(("tenants", number, key), f"no key for {tenant!r}: {why}")

    def load(self, access: Mapping[str, Access], seed: int | None = None) -> Load:
        """Return the load for a server. access: by tenant. Raises ScenarioError for adapters that it does not list."""
        spec = self.spec
        tenants = [Tenant(t.name, t.weight, self._slo(t)) for t in spec.tenants]
        sources = [self._source(number, tenant, access[tenant.name]) for number, tenant in enumerate(spec.tenants)]
        load = Load(
            tuple(tenants),
            tuple(sources),
            spec.seed if seed is None else seed,
            spec.seconds,
            spec.warmup,
            spec.timeout,
            spec.api,
            spec.ignore_eos,
            spec.service.input,
            spec.service.output,
            spec.window,
            drain=spec.drain,
        )
        for number, source in enumerate(sources):
            try:
                load.check_size(source)
            except LoadError as error:
                self._fail(("tenants", number, "arrival"), str(error))
        return load

    def load_without_server(self, models: Sequence[str], seed: int | None = None) -> Load:
        """Return the load without asking a server for its models. models: those of tenants without `adapters`; without
        any, their requests name no model. Raises ScenarioError.
        """
        access = {}
        for number, tenant in enumerate(self.spec.tenants):
            names = [*(self._expanded(number, tenant) or models or [""])]
            in_trace = [row.adapter for row in self._rows.get(tenant.name, ()) if row.adapter]
            access[tenant.name] = Access(None, [*names, *in_trace], names)
        return self.load(access, seed)

    def _slo(self, tenant: TenantTable) -> Slo:
        own = tenant.slo or self.spec.slo
        return Slo(own.ttft, own.tpot, own.latency)

    def _source(self, number: int, tenant: TenantTable, access: Access) -> Source:
        rows = self._rows.get(tenant.name, ())
        models = self._models(number, tenant, access)
        # A trace has lengths of its own.
        unused = Fixed(1)
        return Source(
            tenant.name,
            tuple(Target(tenant.name, access.api_key, model) for model in models),
            tenant.arrival,
            tenant.popularity,
            tenant.input or unused,
            tenant.output or unused,
            tenant.start,
            tenant.stop,
            tenant.requests,
            rows,
        )

    def _models(self, number: int, tenant: TenantTable, access: Access) -> list[str]:
        """Return the tenant's models. Raises ScenarioError for those that the server does not list."""
        wanted = self._expanded(number, tenant)
        in_trace: dict[str, Row] = {}
        for row in sorted(self._rows.get(tenant.name, ()), key=lambda row: row.line):
            if row.adapter:
                in_trace.setdefault(row.adapter, row)
        models = list(wanted or in_trace or access.adapters or access.models)
        listed, in_list = set(access.models), set(models)
        for model in dict.fromkeys((*models, *in_trace)):
            at: Keys = ("tenants", number, "arrival")
            if wanted and model in wanted:
                at = ("tenants", number, "adapters", wanted[model])
            row_at = self._trace_line(tenant, in_trace.get(model))
            if model not in listed:
                known = ", ".join(list(access.models)[:20]) or "no model"
                self._fail(at, f"the server has no model {model!r} for this tenant; it lists {known}{row_at}")
            if model not in in_list:
                at = ("tenants", number, "adapters")
                self._fail(at, f"the trace names the adapter {model!r}, which is not in this list{row_at}")
        if not models:
            self._fail(("tenants", number), "the server lists no model for this tenant")
        return models

    def _trace_line(self, tenant: TenantTable, row: Row | None) -> str:
        """Return the place of a trace's request for an error; nothing for a model that no request names."""
        if row is None or not isinstance(tenant.arrival, Trace):
            return ""
        return f"; {self.path.parent / tenant.arrival.file}:{row.line}"

    def _parse(self) -> TomlLines:
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ScenarioError(f"{self.path}: {error.strerror}") from error
        if len(content) > MAX_BYTES:
            line = content.count(b"\n", 0, MAX_BYTES) + 1
            raise ScenarioError(f"{self.path}:{line}: expected at most {MAX_BYTES} bytes; they end on this line")
        try:
            return TomlLines(content.decode())
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ScenarioError(f"{self.path}:{line}: expected UTF-8") from error
        except TomlError as error:
            raise ScenarioError(f"{self.path}:{error.line}: not TOML: {escaped(str(error))}") from error

    def _convert(self, value: Any, cause: str = "") -> Spec:
        """Return the checked scenario. cause: end of its error."""
        try:
            return msgspec.convert(value, Spec)
        except msgspec.ValidationError as error:
            keys, text = describe(str(error), Spec, value)
            self._fail(keys, text + cause, error)

    def _scaled(self, factor: float) -> Spec:
        """Return the scenario with the rates of its open loops multiplied."""
        tenants = self.spec.tenants
        if all(isinstance(tenant.arrival, Closed) for tenant in tenants):
            raise ScenarioError(f"--rate-scale: {self.path} has closed loops only, whose requests have no rate")
        scaled = replace(self.spec, tenants=[replace(t, arrival=t.arrival.scaled(factor)) for t in tenants])
        return self._convert(msgspec.to_builtins(scaled), f", after --rate-scale {factor:g}")

    def _fail(self, keys: Keys, text: str, cause: Exception | None = None) -> NoReturn:
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
        where = f"{self.path}:{self._toml.line(keys)}: "
        raise ScenarioError(where + escaped(f"{name}: {text}" if name else text)) from cause

    def _check(self) -> None:
        spec = self.spec
        if spec.drain is not None and spec.seconds is None:
            self._fail(("drain",), "needs seconds, after which the requests in flight are drained")
        seen: set[str] = set()
        for number, tenant in enumerate(spec.tenants):
            at: Keys = ("tenants", number)
            if tenant.name in seen:
                self._fail((*at, "name"), f"{tenant.name!r} is the name of an earlier tenant")
            seen.add(tenant.name)
            self._check_times(at, tenant)
            self._check_lengths(at, tenant)
            self._expanded(number, tenant)
            self._check_ramps((*at, "arrival"), tenant.arrival)
            if isinstance(tenant.arrival, Trace):
                self._rows[tenant.name] = self._read_rows(at, tenant, tenant.arrival)
        if spec.window is not None and spec.seconds is not None and spec.window > spec.seconds:
            self._fail(("window",), f"expected at most the run's {spec.seconds:g} seconds, got {spec.window:g}")
        for number, name in enumerate(spec.baseline.without if spec.baseline else ()):
            if name not in seen:
                self._fail(("baseline", "without", number), f"no tenant is named {name!r}")
        if spec.baseline and not seen - set(spec.baseline.without):
            self._fail(("baseline", "without"), "expected at least one tenant to remain")

    def _check_ramps(self, at: Keys, arrival: Arrival) -> None:
        if isinstance(arrival, Phases):
            for number, phase in enumerate(arrival.phases):
                self._check_ramps((*at, "phases", number, "arrival"), phase.arrival)
        elif isinstance(arrival, Ramp) and not (arrival.start_rate or arrival.end_rate):
            self._fail((*at, "end_rate"), "expected start_rate or end_rate above 0")

    def _check_times(self, at: Keys, tenant: TenantTable) -> None:
        seconds = self.spec.seconds
        has_end = (seconds, tenant.stop, tenant.requests) != (None, None, None)
        if not has_end and not isinstance(tenant.arrival, Phases | Trace):
            self._fail((*at, "arrival"), "never ends; give seconds (of all tenants), stop or requests")
        if seconds is not None and tenant.start >= seconds:
            self._fail((*at, "start"), f"expected less than the run's {seconds:g} seconds, got {tenant.start:g}")
        if tenant.stop is not None and tenant.stop <= tenant.start:
            self._fail((*at, "stop"), f"expected more than start ({tenant.start:g}), got {tenant.stop:g}")

    def _check_lengths(self, at: Keys, tenant: TenantTable) -> None:
        for name, length in (("input", tenant.input), ("output", tenant.output)):
            if isinstance(tenant.arrival, Trace) and length is not None:
                self._fail((*at, name), "the trace has lengths of its own; leave this out")
            if not isinstance(tenant.arrival, Trace) and length is None:
                self._fail(at, f'{name} is missing; expected a table like {{kind = "fixed", tokens = 64}}')
            if isinstance(length, UniformLength | LogNormal) and length.min > length.max:
                self._fail((*at, name, "min"), f"expected at most max ({length.max}), got {length.min}")

    def _read_rows(self, at: Keys, tenant: TenantTable, arrival: Trace) -> tuple[Row, ...]:
        name = arrival.rows or tenant.name
        try:
            rows = read_trace(self.path.parent / arrival.file)
        except TraceError as error:
            self._fail((*at, "arrival", "file"), str(error), error)
        own = tuple(row for row in rows if row.tenant == name)
        if not own:
            known = ", ".join(list(dict.fromkeys(row.tenant for row in rows))[:10]) or "none"
            place: Keys = (*at, "arrival") if arrival.rows is None else (*at, "arrival", "rows")
            self._fail(place, f"the trace has no request of tenant {name!r}; it has those of {known}")
        return own

    def _expanded(self, number: int, tenant: TenantTable) -> dict[str, int] | None:
        """Return the names of `adapters` with `{first..last}` replaced by each number, and the place of each in the
        list; None without the key.
        """
        if tenant.adapters is None:
            return None
        names: dict[str, int] = {}
        for place, name in enumerate(tenant.adapters):
            at: Keys = ("tenants", number, "adapters", place)
            match = re.fullmatch(r"(.*)\{(\d{1,9})\.\.(\d{1,9})\}(.*)", name)
            first, last = (int(match[2]), int(match[3])) if match else (0, 0)
            if not 0 <= last - first < MAX_ADAPTERS:
                self._fail(at, f"expected {{first..last}} with 1 to {MAX_ADAPTERS} numbers, got {name!r}")
            if len(names) + last - first >= MAX_ADAPTERS:
                self._fail(at, f"expected at most {MAX_ADAPTERS} names in the list")
            made = [f"{match[1]}{i}{match[4]}" for i in range(first, last + 1)] if match else [name]
            if repeated := names.keys() & made:
                self._fail(at, f"{min(repeated)!r} is in the list twice")
            names |= dict.fromkeys(made, place)
        return names
