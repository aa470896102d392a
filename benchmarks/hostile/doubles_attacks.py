"""Attacks that need a misbehaving engine, or its record of received requests: a gateway before engine doubles."""

import asyncio
import time
from typing import Any

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker
from benchmarks.hostile.doubles import LARGE_ANSWER_BYTES, POISON

# Fields of vLLM that only its operator may set.
INTERNAL: dict[str, Any] = {
    "kv_transfer_params": {"prompt_token_ids": [1] * 4000, "remote_host": "127.0.0.1", "remote_port": 1},
    "ec_transfer_params": {"a": 1},
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": {}},
    "logprob_token_ids": [1],
    "documents": [{"a": "b"}],
    "prompt_embeds": "AAAA",
    "stream_interval": 1000,
    "truncate_prompt_tokens": 1,
    "logits_processors": ["os.system"],
    "chat_template": "{{ 1 }}",
    "repetition_detection": {"a": 1},
    "request_id": "mine",
    "priority": -100,
    "bootstrap_host": "127.0.0.1",
    "lora_path": "/etc",
    "x_unheard_of": 1,
}
LIMIT = 60_000
HELD = 4_000


async def seen(attacker: Attacker) -> dict[str, Any]:
    async with attacker.session.get(f"{attacker.target.control}/seen") as response:
        return await response.json()


@attack("vllm-fields", "vLLM's internal fields in a client's body", place="vllm")
async def vllm_fields(attacker: Attacker) -> None:
    while attacker.going:
        for name, value in INTERNAL.items():
            await attacker.chat(max_tokens=2, **{name: value})
            await attacker.complete("Hi", max_tokens=2, **{name: value})
        await attacker.chat(max_tokens=2, cache_salt="s" * 1024)
        await attacker.pause(0.3)
    record = await seen(attacker)
    passed = sorted(set(record["fields"]) & set(INTERNAL))
    attacker.check(not passed, f"vLLM was given {', '.join(passed)}")
    attacker.check(all(len(salt) <= 1024 for salt in record["salts"]), "vLLM was given a cache_salt of more than 1,024")


# 24 MiB a second: 300 streams of 50 tokens a second with 20 log-probabilities each, more than one server generates.
@attack("large-foreign-answers", "4 whole answers of 6 MiB a second from a vLLM server", place="vllm")
async def large_foreign(attacker: Attacker) -> None:
    sizes = []

    async def one(index: int) -> None:
        while attacker.going:
            began = time.monotonic()
            answer = await attacker.complete("Hi", max_tokens=2, logprobs=5)
            if answer is not None and answer.status == 200:
                sizes.append(len(answer.body))
            await attacker.pause(max(0.0, began + 1.0 - time.monotonic()))

    await attacker.side_by_side(4, one)
    attacker.check(bool(sizes) and min(sizes) > LARGE_ANSWER_BYTES, "no answer was as large as it should be")


@attack("redirects", "one of two engines answers 307 to another host", place="redirecting")
async def redirects(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            await attacker.chat("a secret of mine", max_tokens=2, stream=bool(index % 2))
            await attacker.pause(0.1)

    await attacker.side_by_side(4, one)
    trapped = (await seen(attacker)).get("trapped", [])
    attacker.check(not trapped, f"{len(trapped)} prompts followed a redirect")
    attacker.check(not any(each["secret"] for each in trapped), "the internal token followed a redirect")


@attack("poison", "a request that kills each engine that it meets, sent again and again", place="poison")
async def poison(attacker: Attacker) -> None:
    attacker.by_design.add(502)  # its engine died
    before = (await seen(attacker))["deaths"]
    while attacker.going:
        answer = await attacker.chat(f"{POISON} {before}", max_tokens=2)
        if answer is not None:
            attacker.note(f"{answer.status} {answer.code}")
        await attacker.pause(0.3)
    deaths = (await seen(attacker))["deaths"] - before
    # Two beside the neighbour's requests, and one without them, which shows the cause.
    attacker.check(deaths <= 3, f"{deaths} engines died of one request, at most 3 should")
    attacker.note(f"{deaths} engines died")


BANK: dict[str, Any] = {"place": "slow", "least_seconds": 40.0, "limits": {"tokens_per_minute": LIMIT}}


def bank_opens(attacker: Attacker) -> float:
    """Return the time at which `token-bank` and its honest use begin to use tokens (monotonic)."""
    return attacker.began + 0.7 * (attacker.ends - attacker.began)


async def use_tokens(attacker: Attacker) -> tuple[int, float]:
    """Ask for an answer of HELD tokens. Return the used tokens, 0 if it is refused, and the time of its end."""
    answer = await attacker.complete("a", max_tokens=HELD, x_engine={"tokens": HELD})
    used = answer.json["usage"]["total_tokens"] if answer is not None and answer.status == 200 else 0
    return used, time.monotonic()


@attack("token-burst", f"{LIMIT:,} tokens a minute, used at once without reservations before", shown=False, **BANK)
async def burst(attacker: Attacker) -> None:
    await attacker.pause(bank_opens(attacker) - time.monotonic())
    while attacker.going:
        used, _ = await use_tokens(attacker)
        await attacker.pause(0.05 if used else 0.2)


# A tenant may use its limit at once, so the quiet round does that too: only reservations and refunds differ.
@attack(
    "token-bank",
    f"{LIMIT:,} tokens a minute: reservations held without use, then given back and used at once",
    honest="token-burst",
    **BANK,
)
async def bank(attacker: Attacker) -> None:
    """Reserve all free quota for most of the time, then end every request and use the refund."""
    holders = []
    held = {"model": attacker.target.base_model, "prompt": "a", "max_tokens": HELD, "stream": True}
    held["x_engine"] = {"tokens": 2, "delay": 600}
    end = bank_opens(attacker)
    while time.monotonic() < end:
        url = f"{attacker.target.url}/v1/completions"
        response = await attacker.session.post(url, json=held, headers=attacker.headers)
        attacker.count(response.status)
        if response.status == 200:
            holders.append(response)
        else:
            response.release()
            await attacker.pause(0.3)
    attacker.note(f"{len(holders)} reservations of {HELD:,} tokens held for up to {end - attacker.began:.0f} s")
    began, last, used = time.monotonic(), time.monotonic(), 0
    while attacker.going:
        if holders:
            holders.pop().close()
            await asyncio.sleep(0.05)
        tokens, at = await use_tokens(attacker)
        if tokens:
            used, last = used + tokens, at
        elif not holders:
            await attacker.pause(0.2)
    promise = LIMIT * (1 + (last - began) / 60)
    attacker.note(f"{used:,} tokens used within {last - began:.1f} s; the limit allows {promise:,.0f}")
    attacker.check(used <= promise * 1.02, f"{used / promise:.2f} times the tokens that the limit promises")
