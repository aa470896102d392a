"""Attacks on versions, aliases, canaries, probes, and uploads in parts."""

import asyncio
import hashlib
import io
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.hostile.archives import CONFIG, WEIGHTS
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Answer, Attacker
from benchmarks.hostile.connections import close
from benchmarks.hostile.weights import config, tensors

MIB = 2**20
# The first of two parts.
PART = 3 * MIB
RAW = "Content-Type: application/octet-stream"
# Contents that a probe storm pushes. The first upload of each is answered, so that its digest is known.
SEEDS = 3


async def push(attacker: Attacker, name: str, seed: int) -> Answer | None:
    """Push a version of a small adapter, other content for each seed."""
    return await attacker.upload(name, {CONFIG: config(8), WEIGHTS: tensors(8, seed=seed)})


async def move(attacker: Attacker, alias: str, targets: list[dict[str, Any]], etag: str | None) -> Answer | None:
    headers = {} if etag is None else {"If-Match": etag}
    path = f"/v1/adapters/moved/aliases/{alias}"
    return await attacker.call("PUT", path, json={"targets": targets}, headers=headers)


@attack(
    "alias-churn",
    "aliases moved from one ETag at once, rolled back and deleted beside canaried requests",
    # Its canaried requests are ordinary use of the engine.
    honest="one-token-answers",
    least_seconds=6.0,
)
async def churn_aliases(attacker: Attacker) -> None:
    await asyncio.gather(*(push(attacker, "moved", seed) for seed in (1, 2)))
    canary = [{"version": 1, "weight": 95}, {"version": 2, "weight": 5}]
    await move(attacker, "prod", canary, None)

    async def race() -> None:
        """Move the alias six times from one ETag; one move at most may succeed."""
        while attacker.going:
            found = await attacker.call("GET", "/v1/adapters/moved/aliases/prod")
            etag = found.headers.get("ETag") if found is not None and found.status == 200 else None
            versions = [[{"version": 1 + index % 2}] if index % 3 else canary for index in range(6)]
            answers = await asyncio.gather(*(move(attacker, "prod", targets, etag) for targets in versions))
            moved = sum(answer is not None and answer.status in (200, 201) for answer in answers)
            attacker.check(moved <= 1, f"{moved} moves from one ETag succeeded")
            await attacker.pause(0.2)

    async def spoil(index: int) -> None:
        bad: list[tuple[str, str, Any]] = [
            ("PUT", "prod", {"targets": [{"version": 1, "weight": 10**30}]}),
            ("PUT", "prod", {"targets": [{"version": 1}] * 5000}),
            ("PUT", "latest", {"targets": [{"version": 2**31}]}),
            ("POST", "prod/rollback", None),
            ("DELETE", "latest", None),
            ("PUT", "%ED%A0%80", {"targets": [{"version": 1}]}),
        ]
        while attacker.going:
            method, path, body = bad[random.randrange(len(bad))]
            headers = {"If-Match": ('"' * 200, "*", "W/\x80", '"1"')[index % 4]}
            await attacker.call(method, f"/v1/adapters/moved/aliases/{path}", json=body, headers=headers)
            await attacker.pause(0.05)

    async def ask(index: int) -> None:
        """Request canaries, sessions without number, and versions that do not exist."""
        turn = index
        while attacker.going:
            turn += 7
            model = ("moved:prod", "moved@2", f"moved@{turn}", f"moved:a{turn}", "moved:prod*0.5+moved@1*0.5")[turn % 5]
            headers = {"x-loraplex-session": f"{turn}" * 400}
            body = {"model": model, "prompt": "a", "max_tokens": 1}
            await attacker.call("POST", "/v1/completions", json=body, headers=headers)
            await attacker.pause(0.05)

    await asyncio.gather(
        attacker.side_by_side(2, lambda _: race()),
        attacker.side_by_side(4, spoil),
        attacker.side_by_side(4, ask),
    )


@attack("one-token-answers", "the served requests of alias-churn, of the base model", shown=False)
async def answers(attacker: Attacker) -> None:
    await attacker.as_served(lambda _: attacker.complete("a", max_tokens=1))


@attack(
    "expiry-storm",
    "12 aliases and their targets that end at the same moment, requested until and after it",
    least_seconds=8.0,
    # The same uploads and requests until the end; only the requests after it differ.
    honest="aliases",
)
async def expire(attacker: Attacker) -> None:
    await request_aliases(attacker, is_after_end=True)


@attack("aliases", "as expiry-storm, without requests after the end", least_seconds=8.0, shown=False)
async def aliases(attacker: Attacker) -> None:
    await request_aliases(attacker, is_after_end=False)


async def request_aliases(attacker: Attacker, *, is_after_end: bool) -> None:
    await asyncio.gather(*(push(attacker, "moved", seed) for seed in (1, 2)))
    end = datetime.now(UTC) + timedelta(seconds=max(1.0, 0.6 * attacker.left))
    targets = [{"version": number, "weight": 1, "expires_at": end.isoformat()} for number in (1, 2)]
    names = [f"a{index}" for index in range(12)]
    await asyncio.gather(*(move(attacker, name, targets, None) for name in names))
    late = 0

    async def one(index: int) -> None:
        nonlocal late
        turn = index
        while attacker.going and (is_after_end or datetime.now(UTC) < end):
            turn += 1
            began = datetime.now(UTC)
            body = {"model": f"moved:{names[turn % len(names)]}", "prompt": "a", "max_tokens": 1}
            answer = await attacker.call("POST", "/v1/completions", json=body)
            if answer is not None and began > end:
                late += 1
                attacker.check(answer.status != 200, "an alias served a version after the target's end")
            await attacker.pause(0.05)

    await attacker.side_by_side(8, one)
    attacker.note(f"{late} requests after the end")


@attack(
    "probe-storm",
    "the same versions probed again and again, on 8 connections, and new ones pushed to be probed",
    least_seconds=8.0,
)
async def storm(attacker: Attacker) -> None:
    # Each push waits for its probe, which rests while other requests run.
    await asyncio.gather(*(push(attacker, "probed", seed) for seed in range(SEEDS)))

    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            turn += 1
            if turn % 4:
                answer = await attacker.call("POST", f"/v1/adapters/probed/versions/{1 + turn % 7}/probe")
            else:
                answer = await push(attacker, "probed", turn % SEEDS)
            if answer is None or answer.status in (429, 503):
                await attacker.call("GET", f"/v1/adapters/probed/versions/{turn % 5}/probe")
                await attacker.pause(0.3)

    await attacker.side_by_side(8, one)


@attack("false-parts", "parts of 64 MiB with a wrong checksum, four at once, again and again")
async def send_false_parts(attacker: Attacker) -> None:
    part, size = bytes(64 * MIB), 1 << 30
    query = {"name": "false", "size": str(size), "sha256": "0" * 64}
    begun = await attacker.call("POST", "/v1/adapter-uploads", params=query)
    if begun is None or begun.status != 201:
        return
    one, refused = f"/v1/adapter-uploads/{begun.json['id']}", 0

    async def send(_: int) -> None:
        nonlocal refused
        while attacker.going:
            answer = await attacker.call("PUT", one, params={"offset": "0", "sha256": "0" * 64}, data=io.BytesIO(part))
            if answer is not None and answer.status == 400:
                refused += len(part)
            else:
                await attacker.pause(0.2)

    try:
        await attacker.side_by_side(4, send)
    finally:
        await attacker.call("DELETE", one)
    attacker.note(f"{refused >> 20} MiB hashed and refused")


@attack("partial-uploads", "uploads in parts that overlap, end early, lie about their checksum, or never complete")
async def send_parts(attacker: Attacker) -> None:
    content = random.Random(0).randbytes(PART + MIB)
    whole = hashlib.sha256(content).hexdigest()
    begun: set[str] = set()

    async def begin(name: str, size: int, checksum: str) -> str | None:
        query = {"name": name, "size": str(size), "sha256": checksum}
        answer = await attacker.call("POST", "/v1/adapter-uploads", params=query)
        if answer is None or answer.status != 201:
            await attacker.pause(0.2)
            return None
        begun.add(answer.json["id"])
        return answer.json["id"]

    def put(upload: str, offset: int, part: bytes, checksum: str | None = None) -> Any:
        query = {"offset": str(offset), "sha256": checksum or hashlib.sha256(part).hexdigest()}
        return attacker.call("PUT", f"/v1/adapter-uploads/{upload}", params=query, data=part)

    async def overlap(index: int) -> None:
        """Send one part three times at once, then a false one. Complete uploads that lack parts or are no archives.

        At most one of the three counts.
        """
        while attacker.going:
            upload = await begin(f"overlap-{index}", len(content), whole)
            if upload is None:
                continue
            answers = await asyncio.gather(*(put(upload, 0, content[:PART]) for _ in range(3)))
            counted = sum(answer is not None and answer.status == 200 for answer in answers)
            attacker.check(counted <= 1, f"{counted} parts of one offset counted")
            await put(upload, 1, content[1:PART])
            await put(upload, PART, content[PART:], "0" * 64)
            await attacker.call("POST", f"/v1/adapter-uploads/{upload}/complete")
            await put(upload, PART, content[PART:])
            done = await attacker.call("POST", f"/v1/adapter-uploads/{upload}/complete")
            attacker.check(done is None or done.status != 201, "random bytes were stored as an adapter")
            await attacker.pause(0.1)

    async def leave(index: int) -> None:
        """Begin large uploads, and leave in the middle of a part."""
        while attacker.going:
            upload = await begin(f"left-{index}-{random.randrange(30)}", 50 * MIB, whole)
            if upload is None:
                continue
            query = f"offset=0&sha256={'0' * 64}"
            _, writer = await attacker.connect()
            try:
                writer.write(attacker.head("PUT", f"/v1/adapter-uploads/{upload}?{query}", 8 * MIB, RAW) + bytes(MIB))
                await attacker.pause(0.1)
                attacker.count("left")
            finally:
                await close(writer)

    try:
        await attacker.side_by_side(6, lambda index: overlap(index) if index < 3 else leave(index))
    finally:
        # An unfinished upload stays for 24 hours by design, so the attacker aborts its own.
        for upload in begun:
            await attacker.call("DELETE", f"/v1/adapter-uploads/{upload}")
