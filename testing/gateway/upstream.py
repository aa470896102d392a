"""A small real engine server for proxying tests: the engine's routes and SSE format over real sockets.

Its tokens are made up. The request's own `x_engine` field controls its behaviour, which also shows that unknown fields
pass through.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

from aiohttp import web

from testing.gateway.upstream_bodies import Finished, counts, logprob, usage
from testing.serving import serving
from wire.digests import bare_digest, digest_name
from wire.mixtures import Mixture, is_mixture, parse_terms
from wire.responses import ASK_TOKENS, REPORT_TYPE

TOKEN = "tests-token-8e2b6f4091cd57a3"


class Upstream:
    """Engine double. Fields of `x_engine`, per request:

    tokens (2): tokens to generate
    delay: seconds between tokens
    status, code: answer this status with this error code instead
    fail_after: send an error event after this many tokens
    drop_after: cut the connection after this many tokens
    per_event: tokens in one event
    pad: extra bytes in the answer and in each event
    mixed_after: the receipt is "mixed" in that event

    With `keeps_allowances` it keeps allowances and reports whole answers, for tests that leave time to raise an
    allowance.
    """

    url = ""
    model = "base"
    instance = "one"
    token = TOKEN
    # Its release, and the digest of its base model; None: it reports none.
    version: str | None = None
    base_digest: str | None = None
    healthy = True
    # Status in the answer of its health route while it is not healthy.
    health_status = ""
    draining = False
    # Requests of other gateways here, and the seats of its batch. With seats, it reports its own requests as running.
    running = 0
    seats = 0
    # Whether it pushes its state.
    pushes = True
    # Adapters in its host memory; None: the state omits them, as if unchanged or not supported.
    host: list[str] | None = None
    # Whether it keeps allowances, and whether it follows hints.
    keeps_allowances = False
    takes_hints = True
    # Status of its answer to a probe. 0: it closes the connection; None: it cannot probe.
    probe_status: int | None = None
    # Its first probes that wait for `probes_go_on`, as those of heavy tenants do.
    waiting_probes = 0
    # Refusal of every request: a status and an error code, or None to cut the connection.
    refuses: tuple[int, str] | Literal[False] | None = False
    # Whether it compiles further structured outputs or refuses them.
    compiles = True
    # False: an engine without our extensions, like vLLM.
    says_progress = True
    remembers = True
    # Sends no state and starts no answer, as if stopped.
    mute = False
    holds = False
    # The receipt: True for the requested model, another model's, or None, as from vLLM and older engines.
    receipt: str | Literal[True] | None = True
    # The characters of whole answers, repeated.
    alphabet = "a"
    # Streams of requests with `pause` wait after their first event.
    paused = True
    # Counts: requests that clients cancelled, events, followers of its state, and probes.
    cancelled = events = followers = probed = 0
    _active = _revision = 0

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        # Headers of the calls of `/tokenize`, with lower-case names.
        self.tokenized: list[dict[str, str]] = []
        self.finished: dict[str, Finished] = {}
        self.probes_go_on = asyncio.Event()
        self.resident: list[str] = []
        self.activated: list[str] = []
        self.preempted: list[dict[str, Any]] = []
        self.recent_steps: list[dict[str, Any]] = []
        # Request id -> the completion tokens that it may generate.
        self.allowances: dict[str, int] = {}
        self._last_push: tuple[object, ...] = ()
        # The structured outputs compiled so far.
        self.compiled: list[Any] = []
        # Hints by adapter and tenant.
        self.hints: list[tuple[str, str]] = []
        # Further fields of the state.
        self.reported: dict[str, Any] = {}
        self.pins: list[list[str]] = []
        # Reported service at other engines, by tenant.
        self.service: Counter[str] = Counter()
        # Texts of a stream's tokens, in turn. With `logprobs` they have probabilities.
        self.says = ["a"]
        # Connections of the streams that have not ended.
        self.streaming: set[asyncio.Transport] = set()

    @asynccontextmanager
    async def serving(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[Self]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/allowances", self._allow)
        app.router.add_post("/probe", self._probe)
        app.router.add_post("/prefetch", self._prefetch)
        app.router.add_post("/pins", self._pin)
        app.router.add_post("/service", self._add_service)
        app.router.add_get("/health", self._health)
        app.router.add_get("/state", self._state)
        app.router.add_get("/finished", self._finished)
        async with serving(app, port, host) as self.url:
            yield self

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append({k.lower(): v for k, v in request.headers.items()})
        return web.json_response({"count": 2, "max_model_len": 4096, "tokens": [1, 2]})

    async def _prefetch(self, request: web.Request) -> web.Response:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        body = await request.json()
        self.hints.append((body["adapter"], body["tenant"]))
        return web.json_response({"is_loaded": self.takes_hints})

    async def _pin(self, request: web.Request) -> web.Response:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        self.pins.append((await request.json())["adapters"])
        return web.json_response({"num_kept": len(self.pins[-1])})

    async def _add_service(self, request: web.Request) -> web.Response:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        self.service.update((await request.json())["tenants"])
        return web.json_response({"num_charged": 0})

    async def _wait_out(self, condition: Callable[[], bool]) -> None:
        while True:
            if not condition():
                return
            await asyncio.sleep(0.01)

    async def _health(self, _: web.Request) -> web.Response:
        await self._wait_out(lambda: self.mute)
        return web.Response() if self.healthy else web.json_response({"status": self.health_status}, status=503)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        if request.headers["x-loraplex-internal-token"] != self.token:
            return web.Response(status=401)
        if request.query.get("watch") != "true" or not self.pushes:
            return web.json_response(self._state_now())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        self.followers += 1
        try:
            revision, told_at = -1, 0.0
            while self.healthy and self.pushes:
                state, now = self._state_now(), time.monotonic()
                # Paced by the clock, however slow the machine: silence is the sign of a hung engine.
                if not self.mute and (state["revision"] != revision or now - told_at >= 0.5):
                    revision, told_at = state["revision"], now
                    await response.write(json.dumps(state).encode() + b"\n")
                await asyncio.sleep(0.01)
        finally:
            self.followers -= 1
        return response

    def _state_now(self) -> dict[str, Any]:
        running = self.running + (self._active if self.seats else 0)
        pushed = (
            *(self.instance, self.model, tuple(self.resident + self.activated), running, self.draining),
            *(self.keeps_allowances, self.version, len(self.preempted), tuple(self.host or ())),
            tuple(self.reported.items()),
        )
        if pushed != self._last_push:
            self._last_push = pushed
            self._revision += 1
        return {
            "instance": self.instance,
            "revision": self._revision,
            "model": self.model,
            "adapters_resident": self.resident,
            "adapters_activated": self.activated,
            "running": running,
            "max_num_seqs": self.seats,
            "waiting": 0,
            "draining": self.draining,
            "keeps_allowances": self.keeps_allowances,
            "probes": self.probe_status is not None,
            "base_digest": self.base_digest,
            "version": self.version,
            "preempted": self.preempted,
            "recent_steps": self.recent_steps,
            **({} if self.host is None else {"adapters_host": self.host}),
            **self.reported,
        }

    async def _finished(self, request: web.Request) -> web.Response:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        known = [self.finished[i] for i in request.query["ids"].split(",") if i in self.finished]
        for _ in range(round(100 * float(request.query["wait"]))):
            if all(each["finish_reason"] is not None for each in known):
                break
            await asyncio.sleep(0.01)
        return web.json_response({"object": "list", "data": known})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("x-loraplex-internal-token") != TOKEN:
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        body = await request.json()
        self.requests.append(({k.lower(): v for k, v in request.headers.items()}, body))
        how = body.get("x_engine", {})
        if self.refuses is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.refuses:
            status, code = self.refuses
            detail = {"message": "not now", "type": "server_error", "param": None, "code": code}
            return web.json_response({"error": detail}, status=status, headers={"Retry-After": "7"})
        if (form := body.get("structured_outputs")) is not None and form not in self.compiled:
            if not self.compiles:
                detail = {"message": "CPU time", "param": "structured_outputs", "code": "engine_share_used"}
                return web.json_response({"error": detail | {"type": "t"}}, status=429, headers={"Retry-After": "7"})
            self.compiled.append(form)
        if "status" in how:
            await self._wait_out(lambda: self.holds)
            detail = {"message": f"no: {body['model']}", "type": "t", "param": "prompt", "code": how.get("code", "c")}
            return web.json_response({"error": detail}, status=how["status"])
        mine: Finished = {"id": request.headers.get("x-request-id", ""), "finish_reason": None, **counts(0)}
        if self.remembers:
            self.finished[mine["id"]] = mine
        if self.keeps_allowances and (allowance := request.headers.get("x-loraplex-allowance")) is not None:
            self.allowances[mine["id"]] = int(allowance)
        transport = request.transport
        assert transport is not None
        self._active += 1
        try:
            await self._wait_out(lambda: self.holds)
            if body.get("stream"):
                self.streaming.add(transport)
                response = await self._stream(request, body, how, mine)
                mine["finish_reason"] = mine["finish_reason"] or "stop"
                return response
            report = await self._generate_whole(request, body, how, mine)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._active -= 1
            self.streaming.discard(transport)
            mine["finish_reason"] = mine["finish_reason"] or "abort"
        tokens, ended_by_allowance = mine["completion_tokens"], mine["finish_reason"] == "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": mine["finish_reason"]}
        chat = request.path.endswith("chat/completions")
        text = (self.alphabet * tokens)[:tokens]
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {**self._envelope(body), "choices": [choice], "usage": usage(tokens)}
        if ended_by_allowance:
            answer["loraplex"] = {**counts(tokens), "ended_by_allowance": True}
        if report is not None:
            data = json.dumps(answer).encode()
            head = {"status": 200, "length": len(data), "headers": self._receipt(body)}
            await report.write(json.dumps({"completion_tokens": tokens, "answer": head}).encode() + b"\n" + data)
            return report
        return web.json_response(answer, headers=self._receipt(body))

    async def _probe(self, request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        self.probed += 1
        if self.probed <= self.waiting_probes:
            await self.probes_go_on.wait()
        if self.probe_status:
            sizes = dict.fromkeys(("rank", "num_modules", "host_bytes", "device_bytes", "device_pages"), 1)
            answer = {"digest": model, "reasons": [], "base_digest": self.base_digest, **sizes}
            return web.json_response(answer if self.probe_status == 200 else {}, status=self.probe_status)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def _allow(self, request: web.Request) -> web.Response:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        body = await request.json()
        self.allowances[body["id"]] = max(self.allowances.get(body["id"], 0), body["tokens"])
        return web.json_response({"is_running": True})

    def _left(self, mine: Finished) -> float:
        return self.allowances.get(mine["id"], math.inf) - mine["completion_tokens"]

    async def _generate_whole(
        self, request: web.Request, body: dict[str, Any], how: dict[str, Any], mine: Finished
    ) -> web.StreamResponse | None:
        """Return the report, if the request needed one."""
        report: web.StreamResponse | None = None
        tokens = min(how.get("tokens", 2), body["max_tokens"])
        for made in range(1, tokens + 1):
            await asyncio.sleep(how.get("delay", 0))
            mine["completion_tokens"] = made
            if how.get("pause") and made == 1:
                await self._wait_out(lambda: self.paused)
            if self._left(mine) < ASK_TOKENS:
                if report is None:
                    report = web.StreamResponse(headers={"Content-Type": REPORT_TYPE})
                    await report.prepare(request)
                await report.write(json.dumps({"completion_tokens": made}).encode() + b"\n")
            if how.get("drop_after") == made:
                assert request.transport is not None
                request.transport.abort()
            if self._left(mine) <= 0 and made < tokens:
                mine["finish_reason"] = "length"
                return report
        mine["finish_reason"] = "stop"
        return report

    def _receipt(self, body: dict[str, Any]) -> dict[str, str]:
        asked = body["model"] if body["model"].startswith("sha256:") else "base"
        if is_mixture(asked):
            terms = parse_terms(asked)
            asked = digest_name(Mixture.of(terms, [bare_digest(term.name) for term in terms]).digest)
        said = asked if self.receipt is True else self.receipt
        return {} if said is None else {"x-loraplex-adapter-digest": said}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], how: dict[str, Any], mine: Finished
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.headers.update(self._receipt(body))
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        tokens, step = min(how.get("tokens", 2), body["max_tokens"]), how.get("per_event", 1)
        for made in range(step, tokens + 1, step):
            await asyncio.sleep(how.get("delay", 0))
            mine["completion_tokens"] = made if self.says_progress else 0
            ended = self._left(mine) <= 0 and made + step <= tokens
            reason = "length" if ended else "stop" if made + step > tokens else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            said = [self.says[number % len(self.says)] for number in range(made - step, made)]
            choice |= {"delta": {"content": "".join(said)}} if chat else {"text": "".join(said)}
            if chat and body.get("logprobs"):
                choice["logprobs"] = {"content": [logprob(text) for text in said]}
            event = {**self._envelope(body), "choices": [choice], "usage": None}
            if self.says_progress:
                event["loraplex"] = counts(made)
                if how.get("mixed_after") == made:
                    event["loraplex"]["adapter_digest"] = "mixed"
                if ended:
                    event["loraplex"]["ended_by_allowance"] = True
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.events += 1
            if how.get("pause") and made == step:
                await self._wait_out(lambda: self.paused)
            if how.get("drop_after") == made:
                assert request.transport is not None
                request.transport.abort()
                return response
            if how.get("fail_after") == made:
                await response.write(b'data: {"error": {"message": "out of luck", "type": "server_error"}}\n\n')
                return response
            if ended:
                tokens, mine["finish_reason"] = made, "length"
                break
        if body["stream_options"]["include_usage"]:
            event = {**self._envelope(body), "choices": [], "usage": usage(tokens)}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def cut_off(self) -> None:
        """Close the connections of all streams, as a server or proxy that limits the time of a write."""
        while self.streaming:
            self.streaming.pop().abort()

    def _envelope(self, body: dict[str, Any]) -> dict[str, Any]:
        pad = {"pad": "x" * body["x_engine"]["pad"]} if "pad" in body.get("x_engine", {}) else {}
        return {"id": "cmpl-1", "object": "completion", "created": 1, "model": body["model"], **pad}
