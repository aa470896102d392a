"""Probes of engines by /health and /state, then by the stream of their state changes.

An engine without such a stream (vLLM, or one behind a proxy that buffers streams) is polled instead.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import ClientError, ClientPayloadError, ClientResponseError, ClientSession, ClientTimeout

from gateway.fleet.health import Health, network_reason
from gateway.fleet.registry import EngineRecord
from gateway.fleet.vllm.version import UnsafeVersion, check_version

log = logging.getLogger(__name__)

TIMEOUT = ClientTimeout(total=3.0)
PUSHED = "application/x-ndjson"
# Longest line of a state stream, at 70 bytes for each adapter.
MAX_LINE_BYTES = 8 * 2**20
REFUSED = {
    "loraplex": "engine refuses the internal token; it must be LORAPLEX_INTERNAL_TOKEN's there",
    "vllm": "vLLM refuses this gateway's key; name its --api-key by ?key_env= or ?key_file= in LORAPLEX_ENGINES",
}
# vLLM's metrics of running and waiting requests.
VLLM_REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class Probe:
    """Watch of an engine's state.

    base_model: the name under which every engine must serve the base model. silence_seconds: an engine that pushes its
    state sends a line every second and is down after this silence.
    """

    def __init__(
        self, session: ClientSession, internal_token: str, base_model: str, silence_seconds: float = 5.0
    ) -> None:
        self._session = session
        self._push_timeout = ClientTimeout(total=None, sock_connect=TIMEOUT.total, sock_read=silence_seconds)
        self._base_model = base_model
        self._token = {"x-loraplex-internal-token": internal_token}

    async def __call__(self, engine: EngineRecord) -> None:
        """Probe the engine and update its record. Raises no network errors."""
        try:
            url = f"{engine.url}/health"
            async with self._session.get(url, timeout=TIMEOUT, allow_redirects=False) as response:
                if response.status != 200:
                    status = _status(await response.read())
                    reason = f"GET /health answered {response.status}" + (f" ({status})" if status else "")
                    engine.mark_down(reason, Health.DRAINING if status == "draining" else Health.DOWN)
                    return
        except TimeoutError:
            engine.missed(f"GET /health had no answer within {TIMEOUT.total:g} s")
            return
        except (ClientError, OSError) as error:
            engine.mark_down(f"GET /health failed: {network_reason(error)}")
            return
        in_flight = engine.in_flight
        try:
            state = await (self._vllm_state(engine) if engine.address.kind == "vllm" else self._state(engine))
        except (ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            if isinstance(error, ClientResponseError) and error.status in (401, 403):
                engine.mark_misconfigured(REFUSED[engine.address.kind])
                return
            # /state waits for a step to end; until it answers again, the last known state stays in use.
            log.debug("engine %s: %s at /state", engine.url, type(error).__name__)
        except UnsafeVersion as error:
            engine.mark_misconfigured(str(error))
            return
        else:
            engine.observe_state(state, in_flight)
        self._judge(engine)

    async def follow(self, engine: EngineRecord, heard: Callable[[], None]) -> bool:
        """Update the record from the engine's state stream until it ends or falls silent. Raises no network errors.

        heard: called after each line. Returns whether there was any line.
        """
        if engine.address.kind == "vllm":
            return False
        pushed = False
        try:
            async with self._session.get(
                f"{engine.url}/state",
                params={"watch": "true"},
                headers=self._token,
                timeout=self._push_timeout,
                allow_redirects=False,
                read_bufsize=MAX_LINE_BYTES,
            ) as response:
                if response.status != 200 or response.content_type != PUSHED:
                    return False
                async for line in response.content:
                    engine.observe_state(msgspec.json.decode(line, type=dict[str, Any]), engine.in_flight)
                    if engine.state.get("draining"):
                        engine.mark_down("it finishes its requests and stops", Health.DRAINING)
                    else:
                        self._judge(engine)
                    heard()
                    pushed = True
        except TimeoutError:
            # An engine that has sent no line yet may have to finish a long step first.
            if pushed:
                engine.mark_down("its state stream fell silent", Health.SILENT)
            else:
                engine.missed("GET /state?watch=true had no answer in time")
        except (ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
            # The next probe of /health finds the reason.
            log.debug("engine %s: %s while it was listened to", engine.url, type(error).__name__)
        return pushed

    def _judge(self, engine: EngineRecord) -> None:
        """Mark an answering engine as up if it serves the base model, else as misconfigured."""
        serves, wanted = engine.state.get("model", self._base_model), self._base_model
        if serves == wanted:
            engine.mark_up()
        else:
            engine.mark_misconfigured(
                f"engine serves {serves}, not {wanted}; start it with --served-model-name {wanted}"
            )

    async def _state(self, engine: EngineRecord) -> dict[str, Any]:
        return msgspec.json.decode(await self._get(engine, "/state"), type=dict[str, Any])

    async def _vllm_state(self, engine: EngineRecord) -> dict[str, Any]:
        """Return a vLLM server's state in our engine's form, from its model list and metrics. Raises UnsafeVersion."""
        if not engine.address.any_version:
            check_version(await self._get(engine, "/version"))
        metrics = await self._get(engine, "/metrics")
        # The list is read last, so that it includes an adapter that was just loaded.
        models = msgspec.json.decode(await self._get(engine, "/v1/models"), type=_Models).data
        bases = [model.id for model in models if model.parent is None]
        state: dict[str, Any] = {
            "model": self._base_model if self._base_model in bases else ", ".join(bases),
            "adapters_resident": [model.id for model in models if model.parent is not None],
            "max_num_seqs": engine.address.requests,
            "running": 0,
            "waiting": 0,
        }
        for name, count in VLLM_REQUESTS.findall(metrics):
            state[name.decode()] += int(float(count))
        return state

    async def _get(self, engine: EngineRecord, path: str) -> bytes:
        headers = engine.address.bearer if engine.address.kind == "vllm" else self._token
        url = engine.url + path
        async with self._session.get(url, headers=headers, timeout=TIMEOUT, allow_redirects=False) as response:
            response.raise_for_status()
            if response.status != 200:
                # Redirects are refused too: a server's secret is never sent to another server.
                raise ClientPayloadError(f"{path} answered {response.status}, expected 200")
            return await response.read()


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _status(body: bytes) -> str:
    """Return the status in the body of /health, "" if there is none."""
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any]).get("status", ""))[:40]
    except msgspec.MsgspecError:
        return ""
