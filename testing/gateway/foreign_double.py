"""Base of the doubles of foreign servers: authentication, the list of models, requests, and streams."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web

from testing.serving import serving

PROMPT_TOKENS = 7
Event = dict[str, Any]


class ForeignDouble(ABC):
    """Double of a foreign server.

    names: paths of the loaded adapters by name. loads, unloads: adapter names in request order. heads: headers of every
    call. requests: headers and body of each request for an answer. redirect: target of redirects, "" sends none.
    fail_loads: the error of every load. hold: while clear, requests run without ending. max_num_seqs: number of
    sequences that run at once, first come, first served. running, waiting: numbers of sequences.
    """

    def __init__(self, base_model: str, root: str) -> None:
        """root: folder of the base model in the list of models."""
        self.url = ""
        self.base_model = base_model
        self._root = root
        self.names: dict[str, str] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.redirect = ""
        self.fail_loads: str | None = None
        # Bodies of `/tokenize`, and the message, delay and number of tokens of its answers.
        self.tokenized: list[dict[str, Any]] = []
        self.refuse_tokenize: str | None = None
        self.tokenize_seconds = 0.0
        self.tokenize_count = PROMPT_TOKENS
        self.max_num_seqs = 1024
        self.running = self.most_running = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self.hold = asyncio.Event()
        self.hold.set()

    @abstractmethod
    def _add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the routes that only this server has."""

    @abstractmethod
    def _wanted_key(self, path: str) -> str | None:
        """Return the API key that a route requires; "" or None: the route is open."""

    @abstractmethod
    def _refusal(self, body: dict[str, Any], is_chat: bool) -> web.Response | None:
        """Return the error of a body that the server refuses, or None."""

    @abstractmethod
    async def _answer(self, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        """Answer a completion or a chat."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        app = web.Application(middlewares=[self._authenticate], client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._add_routes(app.router)
        async with serving(app) as self.url:
            yield self

    async def _stream(
        self,
        request: web.Request,
        options: dict[str, Any],
        envelope: Event,
        pieces: list[Event],
        usage: Callable[[int], Event],
        error: Event | None = None,
    ) -> web.StreamResponse:
        """Send a stream: one event for each piece of the choice's content, or the error.

        options: the request's `stream_options`. envelope: fields of every event. usage: returns the counts after a
        number of tokens.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events: list[Event] = [{"error": error}] if error is not None else []
        if error is None:
            for made, piece in enumerate(pieces, 1):
                choice = {"index": 0, "finish_reason": "length" if made == len(pieces) else None, **piece}
                counts = {"usage": usage(made)} if options.get("continuous_usage_stats") else {}
                events.append({**envelope, "choices": [choice], **counts})
            if options["include_usage"]:
                events.append({**envelope, "choices": [], "usage": usage(len(pieces))})
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.heads.append(lower_case(request))
        wanted = self._wanted_key(request.path)
        if wanted and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": self.base_model, "object": "model", "root": self._root, "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": path, "parent": self.base_model}
            for name, path in self.names.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        await asyncio.sleep(self.tokenize_seconds)
        if self.refuse_tokenize is not None:
            return web.json_response({"error": {"message": self.refuse_tokenize}}, status=400)
        count = self.tokenize_count
        return web.json_response({"count": count, "max_model_len": 4096, "tokens": [1] * count})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect + request.path})
        body = await request.json()
        self.requests.append((lower_case(request), body))
        is_chat = request.path.endswith("/chat/completions")
        if (refusal := self._refusal(body, is_chat)) is not None:
            return refusal
        async with asyncio.TaskGroup() as sequences:
            for _ in range(number_of_sequences(body)):
                sequences.create_task(self._run_sequence())
        return await self._answer(request, body, is_chat)

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def _run_sequence(self) -> None:
        """Wait for a seat in the batch, then run until `hold` is set."""
        if self.running >= self.max_num_seqs:
            turn = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._line:
                    self._line.remove(turn)
                elif not turn.cancelled():
                    self._end_sequence()
                raise
        else:
            self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.hold.wait()
        finally:
            self._end_sequence()

    def _end_sequence(self) -> None:
        """Give the seat of a sequence to the first one that waits."""
        if self._line:
            self._line.popleft().set_result(None)
        else:
            self.running -= 1


def number_of_sequences(body: dict[str, Any]) -> int:
    """Return the number of sequences that a server makes of a body: its prompts times `n`."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return prompts * (body.get("n") or 1)


def lower_case(request: web.Request) -> dict[str, str]:
    """Return the headers by their names in lower case."""
    return {name.lower(): value for name, value in request.headers.items()}


def token_counts(tokens: int) -> dict[str, Any]:
    """Return the counts of an answer that both servers report."""
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
