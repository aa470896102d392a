"""Pools of vLLM servers behind an llm-d router: one address, behind which the router chooses a server.

Written from the source of llm-d's router of May 2026 (`pkg/epp`); it has never run against a real one. The router sends
a request without a body to a random server, so the state is that of any server of the pool. Each server needs
Loraplex's plugin, because a load call would reach one server only.

A request names its adapter by digest, by which the router finds servers that have it loaded, and its tenant by the
fairness id, by which the router's flow control takes turns. The gateway limits the requests in flight (`?requests=`)
and sends them in the tenants' fair order, as to a single server.
"""

import logging
from typing import TYPE_CHECKING, Any

from aiohttp import ClientResponse

from gateway.errors import GatewayError
from gateway.fleet.calls.answers import Incoming
from gateway.fleet.calls.call import Call
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.traits import Traits
from gateway.fleet.kinds.foreign import read_models, reported_state
from gateway.fleet.kinds.kind import ErrorDetail, Misconfigured
from gateway.fleet.kinds.vllm import MIXES_BASE, Vllm

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

log = logging.getLogger(__name__)

FAIRNESS_ID = "x-gateway-inference-fairness-id"
# Header of an answer to a request that the router refused or ended.
DROPPED_REASON = "x-llm-d-request-dropped-reason"


class Llmd(Vllm):
    traits = Traits(
        name="llmd",
        prefix="llmd+",
        title="llm-d",
        own_fields=Vllm.traits.own_fields,
        request_errors=Vllm.traits.request_errors,
    )

    async def read_state(self, engine: EngineRecord) -> EngineState:
        server = await self.read_server(engine)
        if not server.finds_adapters:
            raise Misconfigured(
                "a server of this pool lacks Loraplex's plugin, which its adapters need: install loraplex[vllm] beside "
                "each vLLM and set LORAPLEX_ADAPTER_STORE"
            )
        models = read_models(await self.get(engine, "/v1/models"))
        # Counts and adapters of one server would say nothing about the pool.
        state = {
            "model": models.base_name(self._services.base_names()),
            "max_num_seqs": engine.address.requests,
            "version": server.version,
            "finds_adapters": True,
            "base_digest": server.base_digest,
            # Another server of the pool may have answered before.
            "no_base_reason": MIXES_BASE if server.mixes_base else engine.state.no_base_reason,
        }
        return reported_state(state)

    async def prepare_adapter(self, engine: EngineRecord, digest: str, call: Call) -> None:
        """Do nothing: the chosen server loads the adapter."""

    async def lacks_adapter(self, response: ClientResponse, call: Call) -> bool:
        return False

    async def deliver(
        self, engine: EngineRecord, call: Call, body: dict[str, Any], headers: dict[str, str]
    ) -> ClientResponse:
        return await self.post(engine, call, body, {**headers, FAIRNESS_ID: call.tenant.id})

    def error(self, answer: Incoming, detail: ErrorDetail, model: "Model") -> GatewayError:
        if (reason := answer.headers.get(DROPPED_REASON)) is not None:
            log.info("llm-d dropped a request of '%s': %s", model.name, reason[:40])
        return super().error(answer, detail, model)
