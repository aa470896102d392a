"""Checks of golden answers: one engine gets a version's prompts again, and the texts are compared."""

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.access.auth import TenantPrincipal
from gateway.api.golden.requests import GoldenRequests
from gateway.errors import BadRequest, EngineDied, NoEngine, Unavailable, UpstreamFailed
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.tokenizers import Tokenizers
from gateway.metrics import Metrics
from gateway.records.adapters.golden import Difference, Golden, GoldenCheck, GoldenSet
from gateway.records.adapters.probes import Probes
from gateway.records.bases.base import EngineSoftware
from gateway.records.bases.registry import Bases
from gateway.records.tenants.tenants import Tenant
from wire.errors import BadRequest as ProtocolError
from wire.text.tokenizer import ChatTemplateError, TextTooLong

log = logging.getLogger(__name__)

# Number of deaths and failures of engines during checks of one golden set under one software, at which the check is
# recorded with these errors.
DEATHS_UNTIL_RECORDED = 2
DIED = "Engines died or failed while they answered this prompt."
NOT_ASKED = "Engines died or failed while they answered an earlier prompt."
# Limit of the golden sets whose deaths are remembered.
MAX_REMEMBERED = 1000


class GoldenChecks:
    """Checker of golden answers."""

    def __init__(
        self,
        *,
        golden: Golden,
        probes: Probes,
        requests: GoldenRequests,
        registry: Registry,
        tokenizers: Tokenizers,
        bases: Bases,
        metrics: Metrics,
    ) -> None:
        self._golden = golden
        self._probes = probes
        self._requests = requests
        self._registry = registry
        self._tokenizers = tokenizers
        self._bases = bases
        self._metrics = metrics
        self._deaths: Counter[tuple[str, EngineSoftware]] = Counter()

    async def engines(self, tenant: Tenant, name: str, version: int) -> list[EngineRecord]:
        """Return the available engines that serve the version's base model, by address. Raises RecordNotFound."""
        binding = await self._probes.binding(tenant, name, version)
        engines = [each for each in self._registry.engines if each.available and each.takes_adapters]
        found = [each for each in engines if each.serves(binding)]
        return sorted(found, key=lambda each: each.url)

    async def check(
        self, tenant: Tenant, name: str, version: int, engine: EngineRecord, payer: TenantPrincipal | None = None
    ) -> tuple[GoldenSet, GoldenCheck]:
        """Ask a version's prompts on an engine, and record the result. Return the golden set and the result.

        payer: see `GoldenRequests.ask`. Raises RecordNotFound, and errors of requests that may succeed later.
        """
        found, software = await self._golden.get(tenant, name, version), engine.software
        differences = []
        for i, (prompt, answer) in enumerate(zip(found.prompts, found.answers, strict=True)):
            try:
                question = await self._requests.read(tenant, name, version, prompt)
                new = await self._requests.ask(question, payer, engine)
            except (BadRequest, ProtocolError, ChatTemplateError) as error:
                differences.append(Difference(prompt=i, error=str(error)))
            except (EngineDied, UpstreamFailed):
                # The prompt may be the cause. At the last death the check is recorded, so that it is not repeated.
                if not self._is_last_death(found.tag, software):
                    raise
                differences.append(Difference(prompt=i, error=DIED))
                differences += [Difference(prompt=j, error=NOT_ASKED) for j in range(i + 1, len(found.prompts))]
                break
            else:
                if new.text != answer.text:
                    differences.append(await self._compare(tenant, question.model.base, i, answer.text, new.text))
        if engine.software != software:
            raise Unavailable("The engine was replaced during the check; try again shortly.")
        check = GoldenCheck(software=software, differences=tuple(differences), checked_at=datetime.now(UTC))
        await self._golden.record(tenant, name, version, found.tag, check)
        self._deaths.pop((found.tag, software), None)
        self._metrics.golden_checked(tenant.name, len(found.prompts), len(differences))
        if differences:
            shown = f"{software.kind} {software.version or 'of an unknown release'}"
            log.warning("golden answers of tenant %s: %d differ under %s", tenant.id, len(differences), shown)
        return found, check

    async def _compare(self, tenant: Tenant, base_id: str, prompt: int, golden: str, text: str) -> Difference:
        """Return the difference of two texts, in tokens of the base model's tokenizer.

        It has no position if the tokens cannot be counted, because a check that failed here would be repeated.
        """
        base = self._bases.of_model(base_id)
        try:
            old, new = [await self._tokenizers.encode(base, each, tenant) for each in (golden, text)]
        except (BadRequest, NoEngine, TextTooLong):
            return Difference(prompt=prompt, text=text)
        position = num_equal(old, new)
        return Difference(prompt=prompt, position=position, agreement=position / max(len(old), len(new), 1), text=text)

    def _is_last_death(self, tag: str, software: EngineSoftware) -> bool:
        """Count a death or failure. Return whether it is the last before the check is recorded."""
        self._deaths[tag, software] += 1
        while len(self._deaths) > MAX_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]
        return self._deaths[tag, software] >= DEATHS_UNTIL_RECORDED


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
