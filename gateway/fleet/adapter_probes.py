"""Probes of adapters in engines, off the path of requests. The quarantine counts their deaths; the breakers do not.

An adapter is refused only if two engines died during its probes while no other tenant had requests there. Any other
tenant's request may be the cause, also a detached one that the engine has not shown to have survived. So for the time
of a quarantine, an adapter with a death is probed only on engines without other tenants' requests, and after two deaths
beside them not at all; its version stays `validating`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientOSError, ClientPayloadError, ServerDisconnectedError

from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import network_reason
from gateway.fleet.engines.own_requests import named
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import Death
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from gateway.fleet.kinds.kind import read_detail
from gateway.fleet.kinds.table import Kinds
from gateway.fleet.routing.choice import RoutedRequest, choose
from gateway.records.adapters.rows import Reason
from gateway.records.bases.base import Binding, suspect_name
from gateway.records.tenants.tenants import Tenant
from wire.digests import digest_name
from wire.error_codes import ADAPTER_REFUSED
from wire.http_errors import HTTP_ERRORS
from wire.probes import AdapterProbe

log = logging.getLogger(__name__)

# Number of engines that died during probes of an adapter without other tenants' requests, at which it is refused, and
# number of those that died beside such requests, at which its next probe waits.
DEATHS_UNTIL_REFUSED = 2
SHARED_DEATHS_UNTIL_WAIT = 2
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
    """No engine could probe the adapter now; it can be tried again. The message is for its tenant."""


class AdapterProber:
    """Prober over the engines of the fleet. allows: returns whether an engine may get probes now."""

    def __init__(
        self,
        registry: Registry,
        kinds: Kinds,
        quarantine: Quarantine,
        allows: Callable[[EngineRecord], bool] = lambda _: True,
    ) -> None:
        self._registry = registry
        self._kinds = kinds
        self._quarantine = quarantine
        self._allows = allows
        # Deaths that this process saw, for longer than the quarantine keeps them. The newest suspect is the last.
        self._deaths: dict[Suspect, list[Death]] = {}

    def can_probe(self, base: str) -> bool:
        """Return whether an engine of the base model (its id) that can probe is available."""
        return bool(self._engines(base))

    async def probe(self, tenant: Tenant, digest: str, binding: Binding, only: str | None = None) -> AdapterProbe:
        """Return the result of a usable adapter. Raises AdapterRefused, NotProbed.

        binding: the base model, and the weights whose engines are tried first. only: URL of the only engine to try.
        """
        suspects = [Suspect(kind, tenant.id, suspect_name(digest, binding.base)) for kind in ("probe", "adapter")]
        beside_others = self._check_deaths(suspects[0])
        try:
            self._quarantine.check_adapter(tenant.id, suspects[0].mark)
        except Quarantined as error:
            # It ends after a time, and a refusal does not.
            raise NotProbed(error.message) from error
        able = [each for each in self._engines(binding.base) if only in (None, each.url)]
        left, refused = [each for each in able if beside_others or each.serves_only(tenant.id)], None
        request = RoutedRequest(digest)
        while (choice := choose([each for each in left if each.serves(binding)] or left, request)) is not None:
            try:
                return await self._probe_in(choice.engine, tenant, digest, suspects)
            except AdapterRefused as error:
                if error.is_final:
                    raise
                # It cannot load the adapter, for example because of its rank; another engine may have other limits.
                refused = error
                left.remove(choice.engine)
        if refused is None and able:
            raise NotProbed("an engine died during a probe of it, and each engine now has other tenants' requests")
        raise refused or NotProbed("no engine that can probe is available")

    async def _probe_in(
        self, engine: EngineRecord, tenant: Tenant, digest: str, suspects: Sequence[Suspect]
    ) -> AdapterProbe:
        try:
            with (
                engine.requests.count(digest, tenant.id, is_sent=False, suspects=partial(named, suspects)) as in_flight,
                in_flight.ending_with(ClientError, ConnectionError),
            ):
                kind = self._kinds[engine.address.traits.name]
                status, answer = await kind.probe(engine, digest, tenant.id, partial(engine.note_sent, in_flight))
                in_flight.end()
        except ClientConnectorError as error:
            raise NotProbed("the engine cannot be reached") from error
        except (ClientOSError, ServerDisconnectedError, ClientPayloadError, ConnectionError) as error:
            engine.mark_gone(in_flight.instance, f"a probe failed: {network_reason(error)}")
            self._quarantine.died(engine, tenant.id, named(suspects), in_flight.instance)
            self._remember(suspects[0])
            # Another process may still report its tenants' requests for this death, so the next attempt counts it.
            raise NotProbed("the engine died during the probe") from error
        except HTTP_ERRORS as error:
            raise NotProbed(f"the engine did not answer: {type(error).__name__}") from error
        return _read(engine, status, answer)

    def _remember(self, suspect: Suspect) -> None:
        known = self._deaths.pop(suspect, [])
        self._deaths[suspect] = [*known, *(each for each in self._quarantine.deaths(suspect) if each not in known)]
        while len(self._deaths) > MAX_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def _check_deaths(self, suspect: Suspect) -> bool:
        """Return whether the adapter may be probed beside other tenants' requests. Raises AdapterRefused, NotProbed."""
        recent = self._quarantine.deaths(suspect)
        known = [each for each in {*self._deaths.get(suspect, ()), *recent} if each.tenants == {suspect.tenant_id}]
        alone = [each for each in known if not self._quarantine.is_forgotten(suspect.tenant_id, each)]
        if len(alone) >= DEATHS_UNTIL_REFUSED:
            log.error("adapter %s is refused: engines died during its probes", digest_name(suspect.mark))
            text = f"{DEATHS_UNTIL_REFUSED} engines died while they probed this adapter"
            raise AdapterRefused([Reason(message=text, code="adapter_probe_crashed")])
        if sum(each not in alone for each in recent) >= SHARED_DEATHS_UNTIL_WAIT:
            raise NotProbed("engines died during its probes and other tenants' requests; the next probe waits")
        return not recent

    def _engines(self, base: str) -> list[EngineRecord]:
        able = (each for each in self._registry.up if each.state.probes and each.available)
        return [each for each in able if each.base == base and self._allows(each)]


def _read(engine: EngineRecord, status: int, answer: bytes) -> AdapterProbe:
    """Return the probe in an engine's answer. Raises AdapterRefused, NotProbed."""
    if status == 400 and (detail := read_detail(answer)).code == ADAPTER_REFUSED:
        raise AdapterRefused([Reason(message=detail.message.rstrip("."), code=detail.code)], is_final=False)
    try:
        if status != 200:
            log.info("engine %s answered a probe with status %d", engine.url, status)
            raise NotProbed(f"the engine answered {status}")
        probe = msgspec.json.decode(answer, type=AdapterProbe)
    except msgspec.MsgspecError as error:
        log.info("engine %s sent another answer than a probe's", engine.url)
        raise NotProbed("the engine sent another answer than a probe's") from error
    if probe.reasons:
        reasons = [Reason(message=each.message, param="file", code=each.code) for each in probe.reasons]
        raise AdapterRefused(reasons, probe)
    return probe
