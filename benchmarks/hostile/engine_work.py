"""Attacks by engine work before, or beside, the counted tokens: grammars, masks, rules."""

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker

# Time limit for another tenant's new grammar.
GRAMMAR_SECONDS = 2.0


async def neighbours_grammar(attacker: Attacker) -> None:
    """Request, as the neighbour, answers under new small grammars, one after the other."""
    headers = {"Authorization": f"Bearer {attacker.target.neighbour_key}"}
    while attacker.going:
        body = {"model": attacker.target.base_model, "prompt": "a", "max_tokens": 2}
        body["structured_outputs"] = {"regex": f"[ab]{{1,2}}{random.randrange(10**6)}"}
        began = time.monotonic()
        answer = await attacker.call("POST", "/v1/completions", json=body, headers=headers)
        took = time.monotonic() - began
        attacker.check(took <= GRAMMAR_SECONDS, f"the neighbour's new grammar took more than {GRAMMAR_SECONDS:g} s")
        if answer is not None:
            attacker.check(answer.status == 200, f"the neighbour's new grammar: {answer.status} {answer.code}")
        await attacker.pause(0.5)


async def dear(attacker: Attacker, wide: int, make: Callable[[float], dict]) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            answer = await attacker.complete("a", max_tokens=2, structured_outputs=make(random.random()))
            if answer is None or answer.status in (429, 503):
                await attacker.pause(0.3)

    await attacker.side_by_side(wide + 1, lambda i: neighbours_grammar(attacker) if i == 0 else one(i))


def dear_regex(seed: float) -> dict[str, str]:
    """Return the most expensive accepted pattern of 4 KiB, unique per seed."""
    return {"regex": f"{seed}" + r"\w*" * 500}


def dear_grammar(seed: float) -> dict[str, str]:
    """Return a grammar of 100 terminals: 0.07 s, and a mask of 14 ms."""
    terminals = [rf"A{i}: /x{i}\w*\w*\w*\w*/" for i in range(100)]
    return {"grammar": "\n".join([f'start: "{seed}" ' + " ".join(f"A{i}" for i in range(100)), *terminals])}


def dear_schema(seed: float) -> dict[str, object]:
    """Return a schema with the accepted maximum of three expensive features: 1 s, and masks of 16 ms."""
    fields = {
        "objects": {"enum": [{f"{seed}-{i}": i} for i in range(500)]},
        "ranges": {"anyOf": [{"type": "number", "minimum": i, "maximum": 7 * i + 5.5} for i in range(300)]},
        "multiple": {"type": "integer", "multipleOf": 9973},
    }
    return {"json": {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}}


# The default of 32 requests would keep 48 grammars from waiting together.
MANY_AT_ONCE = {"max_concurrent": 64}


@attack(
    "plain-completions",
    "plain completions at the rate of expensive grammars, beside a small grammar",
    shown=False,
    limits=MANY_AT_ONCE,
)
async def plain(attacker: Attacker) -> None:
    async def completions() -> None:
        await attacker.as_served(lambda _: attacker.complete("a", max_tokens=2))

    await attacker.side_by_side(2, lambda i: neighbours_grammar(attacker) if i == 0 else completions())


@attack(
    "dear-grammars",
    "48 expensive grammars at once, always new ones, beside a neighbour's small one",
    # The grammars' own cost is judged, as for dear-regexes.
    honest="plain-completions",
    limits=MANY_AT_ONCE,
)
async def grammars(attacker: Attacker) -> None:
    await dear(attacker, 48, lambda seed: (dear_grammar, dear_schema)[int(seed * 1000) % 2](seed))


@attack(
    "dear-regexes",
    "24 expensive regular expressions at once, always new ones, beside a neighbour's small one",
    # A served answer of two tokens slows the engine whatever its grammar; the grammars' own cost is judged.
    honest="plain-completions",
)
async def regexes(attacker: Attacker) -> None:
    await dear(attacker, 24, dear_regex)


@attack("refused-grammars", "grammars that are refused after the work, as fast as it goes")
async def refused(attacker: Attacker) -> None:
    def make(seed: float) -> dict[str, str]:
        # Takes 1.1 s before the library finds its lexer too large; every second one is refused by its size at once.
        return {"grammar": f'start: "{seed}" A\nA: /' + r"\w*" * (500 if seed < 0.5 else 1000) + "/"}

    await dear(attacker, 16, make)


async def completions_in_turn(attacker: Attacker, bodies: list[dict[str, Any]]) -> None:
    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            body = {"max_tokens": 4} | bodies[turn % len(bodies)]
            await attacker.complete(body.pop("prompt", "a"), **body)
            turn += 1

    await attacker.side_by_side(8, one)


@attack(
    "huge-token-ids",
    "allowed_token_ids up to 2^31 - 1, stop ids, biases and bad words without sense",
    # Three of ten requests are served, one of them with 16 choices. These are ordinary use.
    honest="token-ids-free",
)
async def token_ids(attacker: Attacker) -> None:
    served: list[dict[str, Any]] = [
        {"logit_bias": {str(i): 100 for i in range(1024)}},
        {"bad_words": [f"word{i}" * 6 for i in range(400)]},
        {"seed": -(2**63), "n": 16, "stop": ["a" * 1024] * 16},
    ]
    refused: list[dict[str, Any]] = [
        {"allowed_token_ids": [2**31 - 1]},
        {"allowed_token_ids": list(range(200_000))},
        {"allowed_token_ids": [2**26 - 1, 5]},
        {"stop_token_ids": [2**31 - 1] * 256},
        {"logit_bias": {str(2**31 - 1): 1}},
        {"bad_words": [f"word{i}" * 10 for i in range(1024)]},
        {"prompt": [2**31 - 1]},
    ]
    await completions_in_turn(attacker, served + refused)


@attack("token-ids-free", "the served requests of huge-token-ids, without ids, biases and words", shown=False)
async def token_ids_free(attacker: Attacker) -> None:
    await attacker.as_served(lambda turn: attacker.complete("a", max_tokens=4, n=16 if turn % 3 == 2 else 1))


# Both rounds have 32 streams all the time. A slow mask makes the attack's streams longer, not more.
@attack("dear-masks", "32 streams under schemas whose masks cost the most, with penalties", honest="mask-free")
async def masks(attacker: Attacker) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}

    async def one(index: int) -> None:
        while attacker.going:
            answer = await attacker.chat(
                "word " * 300,
                max_tokens=64,
                ignore_eos=True,
                structured_outputs={"json": schema | {"title": str(index)}},
                repetition_penalty=1.1,
                presence_penalty=1,
            )
            if answer is None or answer.status == 429:
                await attacker.pause(0.5)

    await attacker.side_by_side(32, one)


@attack("mask-free", "as dear-masks, without schemas and penalties", shown=False)
async def mask_free(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            answer = await attacker.chat("word " * 300, max_tokens=64, ignore_eos=True)
            if answer is None or answer.status == 429:
                await attacker.pause(0.5)

    await attacker.side_by_side(32, one)
