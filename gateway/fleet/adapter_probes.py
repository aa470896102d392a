"""Probes of adapters in engines, off the path of requests. The quarantine counts their deaths; the breakers do not."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientPayloadError, ServerDisconnectedError

from gateway.fleet.engine import EngineRecord
from gateway.fleet.health import network_reason
from gateway.fleet.kinds.kind import read_detail
from gateway.fleet.kinds.table import Kinds
from gateway.fleet.quarantine import Quarantine, Quarantined
from gateway.fleet.registry import Registry
from gateway.fleet.routing import RoutedRequest, choose
from gateway.fleet.shared_deaths import Suspect
from gateway.records.adapters.rows import Reason
from gateway.records.bases.base import Binding, suspect_name
from gateway.records.tenants.tenants import Tenant
from wire.digests import digest_name
from wire.http_errors import HTTP_ERRORS
from wire.probes import AdapterProbe

log = logging.getLogger(__name__)

# Number of engines that died during probes of an adapter, at which it is refused.
DEATHS_UNTIL_REFUSED = 2
# Adapters whose deaths are remembered.
MAX_REMEMBERED = 10_000


class AdapterRefused(Exception):
    """The adapter cannot be served. probe: the result, None without one. is_final: no other engine can accept it."""

    def __init__(self, reasons: Sequence[Reason], probe: AdapterProbe | None = None, *, is_final: bool = True) -> None:
        super().__init__("; ".join(reason.message for reason in reasons))
        self.reasons = tuple(reasons)
        self.probe = probe
        self.is_final = is_final


class NotProbed(Exception):
    """No engine could probe the adapter now; it can be tried again."""


class AdapterProber:
    """Prober over the engines of the fleet."""

    def __init__(self, registry: Registry, kinds: Kinds, quarantine: Quarantine) -> None:
        self._registry = registry
        self._kinds = kinds
        self._quarantine = quarantine
        # Deaths that this process saw; those of all processes are in the quarantine, for its time.
        self._deaths: Counter[Suspect] = Counter()

    def can_probe(self, base: str) -> bool:
        """Return whether an engine of the base model (its id) that can probe is available."""
        return bool(self._engines(base))

    async def probe(self, tenant: Tenant, digest: str, binding: Binding, only: str | None = None) -> AdapterProbe:
        """Return the result of a usable adapter. Raises AdapterRefused, NotProbed.

        binding: the base model, and the weights whose engines are tried first. only: URL of the only engine to try.
        """
        body, suspect = {"probe": digest}, Suspect("probe", tenant.id, suspect_name(digest, binding.base))
        try:
            self._quarantine.check(tenant.id, [suspect.mark], body)
        except Quarantined as error:
            raise AdapterRefused([Reason(message=error.message, code=error.code)]) from error
        self._check_deaths(suspect)
        left, refused = [each for each in self._engines(binding.base) if only in (None, each.url)], None
        request = RoutedRequest(digest)
        while (choice := choose([each for each in left if each.serves(binding)] or left, request)) is not None:
            try:
                return await self._probe_in(choice.engine, tenant, digest, body, suspect)
            except AdapterRefused as error:
                if error.is_final:
                    raise
                # It cannot load the adapter, for example because of its rank; another engine may have other limits.
                refused = error
                left.remove(choice.engine)
        raise refused or NotProbed("no engine that can probe is available")

    async def _probe_in(
        self, engine: EngineRecord, tenant: Tenant, digest: str, body: dict[str, Any], suspect: Suspect
    ) -> AdapterProbe:
        try:
            suspects = partial(self._quarantine.suspects, tenant.id, [suspect.mark], body)
            with (
                engine.requests.count(digest, tenant.id, suspects=suspects) as in_flight,
                in_flight.ending_with(ClientError, ConnectionError),
            ):
                status, answer = await self._kinds[engine.address.traits.name].probe(engine, digest, tenant.id)
                in_flight.end()
        except ClientConnectorError as error:
            raise NotProbed("the engine cannot be reached") from error
        except (ServerDisconnectedError, ClientPayloadError, ConnectionError) as error:
            engine.mark_down(f"a probe failed: {network_reason(error)}")
            self._quarantine.died(engine, tenant.id, [suspect.mark], body, suspect)
            self._deaths[suspect] += 1
            while len(self._deaths) > MAX_REMEMBERED:
                del self._deaths[next(iter(self._deaths))]
            # Another gateway process may report the same death, or an earlier one.
            await self._quarantine.reported()
            self._check_deaths(suspect)
            raise NotProbed("the engine died during the probe") from error
        except HTTP_ERRORS as error:
            raise NotProbed(f"the engine did not answer: {type(error).__name__}") from error
        return _read(engine, status, answer)

    def _check_deaths(self, suspect: Suspect) -> None:
        """Raise AdapterRefused if too many engines died during probes of the adapter, at any gateway process."""
        if max(self._deaths[suspect], self._quarantine.number_of_deaths(suspect)) >= DEATHS_UNTIL_REFUSED:
            log.error("adapter %s is refused: engines died during its probes", digest_name(suspect.mark))
            text = f"{DEATHS_UNTIL_REFUSED} engines died while they probed this adapter"
            raise AdapterRefused([Reason(message=text, code="adapter_probe_crashed")])

    def _engines(self, base: str) -> list[EngineRecord]:
        able = (each for each in self._registry.up if each.state.probes and each.available)
        return [each for each in able if each.base == base]


def _read(engine: EngineRecord, status: int, answer: bytes) -> AdapterProbe:
    """Return the probe in an engine's answer. Raises AdapterRefused, NotProbed."""
    if status == 400 and (detail := read_detail(answer)).code == "adapter_refused":
        raise AdapterRefused([Reason(message=detail.message, code=detail.code)], is_final=False)
    try:
        if status != 200:
            raise NotProbed(f"engine {engine.url} answered {status}")
        probe = msgspec.json.decode(answer, type=AdapterProbe)
    except msgspec.MsgspecError as error:
        raise NotProbed(f"engine {engine.url} sent another answer than a probe's") from error
    if probe.reasons:
        reasons = [Reason(message=each.message, param="file", code=each.code) for each in probe.reasons]
        raise AdapterRefused(reasons, probe)
    return probe
