"""Attacks on mixtures, records and the console: always new weights and labels, and pages in a loop."""

import asyncio
import contextlib
import re
from typing import Any

import aiohttp

from benchmarks.hostile.archives import CONFIG, WEIGHTS
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker
from benchmarks.hostile.weights import config, tensors

# Adapters of a mixture, which are as many as it may have.
PARTS = 8
PAGES = (
    "/console/",
    "/console/requests?end_user=%25_%25_%25_%25&period=30d",
    "/console/requests?status=failed&min_latency_ms=1&period=30d&format=csv",
    "/console/usage?period=30d&by=model",
    "/console/usage?period=30d&by=day&format=csv",
    "/console/adapters?q=%25_%25_%25_%25&sort=-name",
    "/console/keys",
    "/console/audit?format=csv",
    "/console/playground",
)
STREAMS = 40


async def upload_parts(attacker: Attacker) -> None:
    for number in range(PARTS):
        await attacker.upload(f"part{number}", {CONFIG: config(8), WEIGHTS: tensors(8, seed=number)})


async def ask_mixtures(attacker: Attacker, weight_of: Any) -> None:
    await upload_parts(attacker)

    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            turn += 8
            model = "+".join(f"part{number}*{weight_of(turn, number)}" for number in range(PARTS))
            answer = await attacker.call(
                "POST", "/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1}
            )
            if answer is None or answer.status != 200:
                await attacker.pause(0.1)

    await attacker.side_by_side(8, one)


@attack(
    "new-mixtures",
    "mixtures of 8 adapters with always new weights, 8 requests of one token at once",
    least_seconds=6.0,
    # The same requests for one mixture, which is made once.
    honest="one-mixture",
)
async def new_mixtures(attacker: Attacker) -> None:
    await ask_mixtures(attacker, lambda turn, number: f"0.{turn:05}{number}")


@attack("one-mixture", "as new-mixtures, with the same weights", least_seconds=6.0, shown=False)
async def one_mixture(attacker: Attacker) -> None:
    await ask_mixtures(attacker, lambda turn, number: f"0.0{number}")


@attack(
    "new-labels",
    "requests of one token, each with a new end user, prompt cache key, session and Idempotency-Key",
    # Its requests are ordinary use of the engine.
    honest="one-token-answers",
)
async def new_labels(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            turn += 8
            headers = {"Idempotency-Key": f"{turn:0255}", "x-loraplex-session": f"{turn:0120}"}
            body = {"model": attacker.target.base_model, "prompt": "a", "max_tokens": 1}
            body |= {"user": f"{turn:0128}", "prompt_cache_key": f"{turn:064}", "safety_identifier": f"{turn:064}"}
            answer = await attacker.call("POST", "/v1/completions", json=body, headers=headers)
            if answer is None or answer.status != 200:
                await attacker.pause(0.1)

    await attacker.side_by_side(8, one)


@attack("console-flood", "pages and CSV files of the console in a loop, and 40 live streams, of which none is read")
async def flood_console(attacker: Attacker) -> None:
    own = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), connector=aiohttp.TCPConnector(limit=0))
    async with own as browser:
        home = f"{attacker.target.url}/console"
        async with browser.get(f"{home}/login") as answer:
            [csrf] = re.findall(r'name="csrf" value="(\w+)"', await answer.text())
        form = {"csrf": csrf, "key": attacker.target.key, "next": ""}
        async with browser.post(f"{home}/login", data=form, allow_redirects=False) as answer:
            if answer.status != 303:
                attacker.check(answer.status == 429, f"log-in: {answer.status}")
                return

        async def look(index: int) -> None:
            turn = index
            while attacker.going:
                turn += 1
                async with browser.get(attacker.target.url + PAGES[turn % len(PAGES)]) as answer:
                    attacker.count(answer.status, 0.0, b"" if answer.status < 500 else await answer.read())
                    await answer.read()
                    if answer.status == 429:
                        await attacker.pause(0.1)

        async def watch(_: int) -> None:
            while attacker.going:
                async with browser.get(f"{home}/events") as answer:
                    attacker.count(answer.status)
                    await attacker.pause(attacker.left if answer.status == 200 else 0.5)

        with contextlib.suppress(aiohttp.ClientError):
            await asyncio.gather(attacker.side_by_side(8, look), attacker.side_by_side(STREAMS, watch))
