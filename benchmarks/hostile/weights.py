"""Attacks by uploaded content (headers, patterns, ranks, values, names), and by its use on engines."""

import asyncio
import json
import math
import random
import struct
from functools import cache

from benchmarks.hostile.archives import CONFIG, WEIGHTS, good
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker
from testing.gateway.mutated_uploads import mutated

# The demo model's projections: [out, in] of q, k, v, o.
HIDDEN, KEY_VALUE = 576, 192
QUESTION = "Why is the sky blue?"


def tensors(rank: int, layers: int = 1, value: float | None = None, seed: int = 0) -> bytes:
    """Return a safetensors file of LoRA on v_proj of the first layers. value: every number in it; None: small random
    numbers.
    """
    rng, header, parts, position = random.Random(seed), {}, [], 0
    for layer in range(layers):
        for side, shape in (("A", (rank, HIDDEN)), ("B", (KEY_VALUE, rank))):
            count = math.prod(shape)
            numbers = [value] * count if value is not None else [rng.uniform(-0.01, 0.01)] * count
            data = struct.pack(f"<{count}f", *numbers)
            name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{side}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + len(data)]}
            position += len(data)
            parts.append(data)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"".join(parts)


def config(rank: int, **more: object) -> bytes:
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["v_proj"]}
    return json.dumps(fields | more).encode()


@cache
def header_of_16_mib() -> bytes:
    entries, size, index = [], 2, 0
    while size < 16 * 2**20 - 64:
        entries.append(f'"{index:x}":{{}}')
        size, index = size + len(entries[-1]) + 1, index + 1
    raw = ("{" + ",".join(entries) + "}").encode()
    return struct.pack("<Q", len(raw)) + raw


@cache
def dear_patterns() -> dict[str, bytes]:
    """Return keys of rank_pattern that cost a matcher the most for each module name."""
    nested = "(" * 40 + "(.*)*" + ")*" * 40 + "x"
    ahead = "(?=.*a)(?=.*b)(?=.*c)" * 90 + "x"
    wide = "(?:" + "|".join(f".*{i}.*" for i in range(400)) + "){4}x"
    return {
        "nested": config(8, rank_pattern={nested + str(i): 4 for i in range(60)}),
        "look-ahead": config(8, rank_pattern={ahead + str(i): 4 for i in range(60)}),
        "wide": config(8, rank_pattern={wide + str(i): 4 for i in range(200)}),
        "alpha": config(8, alpha_pattern={wide + str(i): 4 for i in range(200)}),
        "targets": config(8, target_modules=f"(?:{wide})|.*v_proj"),
        "many-plain": config(8, rank_pattern={f"nothing.{i}.v_proj": 4 for i in range(20_000)}),
    }


@attack("header-of-16-mib", "safetensors header of 16 MiB of empty entries", prepare=header_of_16_mib)
async def send_header(attacker: Attacker) -> None:
    while attacker.going:
        await attacker.refused_upload("header", {CONFIG: config(8), WEIGHTS: header_of_16_mib()})


@attack(
    "dear-patterns", "rank_pattern, alpha_pattern and target_modules that cost the most to match", prepare=dear_patterns
)
async def send_patterns(attacker: Attacker) -> None:
    weights = tensors(8, layers=30)

    async def one(index: int) -> None:
        while attacker.going:
            for name, content in dear_patterns().items():
                if not attacker.going:
                    break
                answer = await attacker.upload(f"p{index}-{name}", {CONFIG: content, WEIGHTS: weights})
                if answer is None or answer.status in (429, 503):
                    await attacker.pause(0.5)
                    continue
                attacker.check(answer.seconds <= 5.0, f"{name}: answered after {answer.seconds:.1f} s")
                if answer.status == 201:
                    await attacker.chat(model=f"p{index}-{name}", max_tokens=1)

    await asyncio.gather(*(one(index) for index in range(4)))


@cache
def ranks() -> dict[int, bytes]:
    return {rank: tensors(rank) for rank in (65, 256, 1000)}


@attack("rank-65", "adapters of rank 65 to 1000, then request after request on them", prepare=ranks)
async def send_ranks(attacker: Attacker) -> None:
    for rank, weights in ranks().items():
        answer = await attacker.upload(f"rank-{rank}", {CONFIG: config(rank), WEIGHTS: weights})
        attacker.check(answer is None or answer.status != 201, f"rank {rank}, which no engine serves, is stored")

    async def one(index: int) -> None:
        while attacker.going:
            await attacker.chat(model=f"rank-{(65, 256, 1000)[index % 3]}", max_tokens=1)
            await attacker.pause(0.05)

    await attacker.side_by_side(6, one)


@cache
def huge_values() -> dict[str, bytes]:
    """Return numbers that are finite but whose products overflow, and other numbers that no training produces."""
    made = {str(value): tensors(8, 2, value) for value in (1.6e38, -1.6e38, 1e30, 3e-39)}
    raw = bytearray(tensors(8))
    raw[-4:] = struct.pack("<f", math.nan)
    return made | {"nan": bytes(raw)}


async def greedy_answer(attacker: Attacker, words: str = QUESTION) -> str | None:
    """Return the neighbour's own greedy answer, requested with the neighbour's key."""
    body: dict[str, object] = {"model": attacker.target.base_model, "messages": [{"role": "user", "content": words}]}
    body |= {"temperature": 0, "max_tokens": 12, "cache_salt": str(random.random())}
    headers = {"Authorization": f"Bearer {attacker.target.neighbour_key}"}
    answer = await attacker.call("POST", "/v1/chat/completions", json=body, headers=headers)
    return answer.json["choices"][0]["message"]["content"] if answer is not None and answer.status == 200 else None


@attack(
    "huge-values",
    "adapters of 1.6e38 and NaN beside a victim, whose answer must not change",
    prepare=huge_values,
    # The prompts' computation is ordinary use.
    honest="mild-values",
    place="unprobed",
)
async def send_huge_values(attacker: Attacker) -> None:
    await use_beside_victim(attacker, huge_values())


@attack("mild-values", "as huge-values, with ordinary numbers and one token", shown=False)
async def send_mild_values(attacker: Attacker) -> None:
    # Requests with huge values end at their first token, so these generate no more.
    await use_beside_victim(attacker, {str(seed): tensors(8, 2, seed=seed) for seed in range(4)}, max_tokens=1)


async def use_beside_victim(attacker: Attacker, values: dict[str, bytes], max_tokens: int = 24) -> None:
    """Store adapters of these weights and generate with them, while the neighbour requests the same answer again."""
    expected = await greedy_answer(attacker)
    names = []
    for number, (value, weights) in enumerate(values.items()):
        # A value such as 1e+30 is no adapter's name.
        answer = await attacker.upload(f"values-{number}", {CONFIG: config(8), WEIGHTS: weights})
        if answer is not None and answer.status == 201:
            names.append(f"values-{number}")
        elif answer is not None and value != "nan":
            attacker.check(False, f"the adapter of {value} was to reach the engine: {answer.status} {answer.code}")

    async def one(index: int) -> None:
        while attacker.going and names:
            for name in names:
                await attacker.chat("word " * (10 + 30 * index), model=name, max_tokens=max_tokens)

    async def victim() -> None:
        while attacker.going:
            found = await greedy_answer(attacker)
            attacker.check(found in (expected, None), f"the neighbour's answer became {found!r}, expected {expected!r}")
            await attacker.pause(0.2)

    await attacker.side_by_side(7, lambda index: victim() if index == 0 else one(index))
    for name in names:
        await attacker.call("DELETE", f"/v1/adapters/{name}")


@attack("surrogates", "names, fields and JSON with lone surrogates, NUL and 1 MB of letters")
async def send_surrogates(attacker: Attacker) -> None:
    names = [
        "\ud800",
        "a\udfff",
        "nul\0",
        "a" * 900,
        "../up",
        "%2e%2e",
        "ümlaut",
        "a\r\nb",
        "\u202e",
        "base:latest",
        "",
    ]
    configs = [
        b'{"peft_type":"LORA","r":8,"lora_alpha":8,"target_modules":["\\ud800"]}',
        b'{"peft_type":"LORA","r":8,"lora_alpha":8,"target_modules":["v_proj"],"\\udc00":1}',
        b'{"peft_type":"\\ud800"}',
        b'{"peft_type":"' + b"a" * 900_000 + b'"}',
        b"[" * 100_000,
        b'{"r":' + b"9" * 5000 + b"}",
        b'{"r":1e999,"peft_type":"LORA"}',
        b"\xff\xfe",
    ]
    header = b'{"\\ud800":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'
    while attacker.going:
        for name in names:
            await attacker.refused_upload(name, good())
            await attacker.call("GET", "/v1/adapters/" + name.encode("utf-8", "surrogatepass").hex() + "%ED%A0%80")
        for content in configs:
            await attacker.refused_upload("fields", {CONFIG: content, WEIGHTS: good()[WEIGHTS]})
        await attacker.refused_upload(
            "tensor", {CONFIG: config(8), WEIGHTS: struct.pack("<Q", len(header)) + header + bytes(4)}
        )
        for body in (b'{"model":"\\ud800","prompt":"a"}', b'{"model":"a","prompt":"\\ud800"}', b'{"model":"a\\u0000"}'):
            await attacker.call("POST", "/v1/completions", data=body, headers={"Content-Type": "application/json"})
        for query in ("%ED%A0%80", "a" * 4000, "%00"):
            await attacker.call("GET", f"/v1/usage?since={query}")
        await attacker.pause(0.1)


@attack("name-churn", "one small adapter pushed and deleted under new names as fast as it goes")
async def churn(attacker: Attacker) -> None:
    parts = {CONFIG: config(1), WEIGHTS: tensors(1)}

    async def one(index: int) -> None:
        turn = 0
        while attacker.going:
            name, turn = f"churn-{index}-{turn}", turn + 1
            answer = await attacker.upload(name, parts)
            if answer is not None and answer.status == 201:
                await attacker.call("DELETE", f"/v1/adapters/{name}")
            elif answer is None or answer.status in (429, 503):
                await attacker.pause(0.2)

    await attacker.side_by_side(4, one)


@cache
def many_adapters() -> list[bytes]:
    """Return 24 adapters of 10 MB, together larger than a host cache of a quarter GiB."""
    return [tensors(64, layers=50 // 2, seed=seed) for seed in range(24)]


@attack(
    "adapter-cycling",
    "24 adapters of 5 MB in turn, one token each, so that caches hold nothing else",
    prepare=many_adapters,
    # The uploads, and single tokens at the attack's rate, are ordinary use; loads and evictions are judged.
    honest="adapter-steady",
    # The 24 uploads, checked one at a time, precede the cycling.
    least_seconds=20.0,
)
async def cycle(attacker: Attacker) -> None:
    names = await push_many(attacker)

    async def one(index: int) -> None:
        turn = index
        while attacker.going and names:
            await attacker.chat(model=names[turn % len(names)], max_tokens=1)
            turn += 5

    await attacker.side_by_side(8, one)
    await delete_all(attacker, names)


@attack("adapter-steady", "as adapter-cycling, with one of the adapters", prepare=many_adapters, shown=False)
async def stay(attacker: Attacker) -> None:
    names = await push_many(attacker)
    if names:
        await attacker.as_served(lambda _: attacker.chat(model=names[0], max_tokens=1))
    await delete_all(attacker, names)


async def push_many(attacker: Attacker) -> list[str]:
    """Store 24 adapters, as far as the time allows, and return their names."""
    names = []
    for index, weights in enumerate(many_adapters()):
        answer = await attacker.upload(f"cycle-{index}", {CONFIG: config(64), WEIGHTS: weights})
        if answer is not None and answer.status == 201:
            names.append(f"cycle-{index}")
        if not attacker.going:
            break
    attacker.note(f"{len(names)} of 24 adapters stored")
    return names


async def delete_all(attacker: Attacker, names: list[str]) -> None:
    for name in names:
        await attacker.call("DELETE", f"/v1/adapters/{name}")


@attack(
    "mutated-uploads",
    "mutated headers, shapes, archives, names and JSON, each refused with a reason in under 5 s",
    # A tenant with the default limits would need four minutes for a round. So the latency says nothing here.
    limits={"adapter_changes_per_minute": None, "max_concurrent_uploads": None},
    judges_latency=False,
)
async def send_mutated(attacker: Attacker) -> None:
    pending = mutated(good(), seed=attacker.target.mutations, count=attacker.target.mutations)
    waits: list[int] = []

    async def one() -> None:
        for upload in pending:
            headers = {"Content-Type": upload.content_type}
            answer = await attacker.call("POST", "/v1/adapters", data=upload.body, headers=headers)
            while answer is not None and answer.code == "too_many_refused_uploads":
                # Expensive ones came before it. It is sent again, because each one has its own reason of refusal.
                waits.append(int(answer.headers["Retry-After"]))
                await asyncio.sleep(waits[-1])
                answer = await attacker.call("POST", "/v1/adapters", data=upload.body, headers=headers)
            if answer is None:
                attacker.check(False, f"{upload.kind}: no answer")
                continue
            reasoned = 400 <= answer.status < 500 and answer.status != 429 and answer.json["error"]["message"]
            attacker.check(bool(reasoned), f"{upload.kind}: {answer.status}")
            limit = attacker.target.max_upload_seconds
            attacker.check(answer.seconds <= limit, f"{upload.kind}: refused after {answer.seconds:.1f} s")

    await asyncio.gather(one(), one())
    if waits:
        attacker.note(f"told to wait {len(waits)} times, for up to {max(waits)} s")
