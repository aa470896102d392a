"""Engine double for gateway measurements: it speaks our engine's protocol and makes up tokens at almost no cost.

It answers a whole completion after 0.5 to 1.5 times `--answer-ms` (equal delays would let requests start and end in
step) and reports that delay in the answer, or it streams `max_tokens` events `--event-ms` apart. Each event carries the
time at which it was made (CLOCK_MONOTONIC in microseconds, one clock for all processes of a machine), so that a reader
can compute the event's transit time. Prints its port as soon as it listens.
"""

import argparse
import asyncio
import json
import random
import time
from typing import cast

PROMPT_TOKENS = 50
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def now_us() -> int:
    return time.monotonic_ns() // 1000


def usage(tokens: int) -> dict[str, object]:
    total = PROMPT_TOKENS + tokens
    counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": total}
    return {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """A keep-alive connection that serves one request at a time, as HTTP clients without pipelining use it."""

    def __init__(self, answer_seconds: float, event_seconds: float) -> None:
        self.answer_seconds, self.event_seconds = answer_seconds, event_seconds
        self.buffer = bytearray()
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end])
        mark = head.lower().find(b"content-length:")
        length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
        if len(self.buffer) < end + 4 + length:
            return
        body = bytes(self.buffer[end + 4 : end + 4 + length])
        del self.buffer[: end + 4 + length]
        path = head.split(b" ", 2)[1]
        if path == b"/health":
            self.transport.write(whole(b'{"status": "ok"}'))
        elif path.split(b"?")[0] == b"/state":
            state = {"revision": 1, "model": "base", "adapters_resident": [], "running": 0, "waiting": 0}
            self.transport.write(whole(json.dumps(state | {"max_num_seqs": 4096}).encode()))
        elif path.split(b"?")[0] == b"/finished":
            self.transport.write(whole(b'{"data": [], "object": "list"}'))
        else:
            self.generate(json.loads(body))

    def generate(self, asked: dict[str, object]) -> None:
        tokens = int(str(asked["max_tokens"]))
        envelope = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        if asked.get("stream"):
            self.transport.write(STREAM_HEAD)
            self.timer = self.loop.call_later(self.event_seconds, self.event, envelope, 1, tokens)
            return
        message = {"role": "assistant", "content": "word " * tokens}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {**envelope, "choices": [choice], "usage": usage(tokens)}
        if self.answer_seconds:
            seconds = self.answer_seconds * random.uniform(0.5, 1.5)
            self.timer = self.loop.call_later(seconds, self.answer, answer, now_us())
        else:
            self.answer(answer, now_us())

    def answer(self, answer: dict[str, object], asked_us: int) -> None:
        taken = f"engine_us={now_us() - asked_us} "
        self.transport.write(whole(json.dumps({**answer, "system_fingerprint": taken}).encode()))

    def event(self, envelope: dict[str, object], made: int, tokens: int) -> None:
        choice = {"index": 0, "delta": {"content": f" made_us={now_us()} "}, "finish_reason": None}
        progress = {"completion_tokens": made, "prompt_tokens": PROMPT_TOKENS, "cached_tokens": 0}
        event = {**envelope, "choices": [choice], "usage": None, "loraplex": progress}
        self.transport.write(chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        if made < tokens:
            self.timer = self.loop.call_later(self.event_seconds, self.event, envelope, made + 1, tokens)
            return
        last = {**envelope, "choices": [], "usage": usage(tokens)}
        self.transport.write(chunk(b"data: " + json.dumps(last).encode() + b"\n\n"))
        self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(answer_seconds: float, event_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answer_seconds, event_seconds), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer-ms", type=float, default=0.0, help="time that a whole answer takes")
    parser.add_argument("--event-ms", type=float, default=50.0, help="time between two events of a stream")
    flags = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    run(serve(flags.answer_ms / 1000, flags.event_ms / 1000))
