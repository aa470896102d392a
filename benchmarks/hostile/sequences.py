"""Attacks by requests of very many sequences: prompts times `n`."""

from typing import Any

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker

AT_ONCE = 8
# Half of the places of a vLLM server without `requests` in its address, and of our engine's batch and queue on a CPU.
FOREIGN_MOST, OWN_MOST = 32, 544
LONG_ANSWER = 64
FOREIGN_LARGEST: dict[str, Any] = {"prompt": ["a"] * FOREIGN_MOST}
OWN_LARGEST: dict[str, Any] = {"prompt": ["a"] * (OWN_MOST // 16), "n": 16, "temperature": 1}
# Refused by both engines: more sequences than half of the places, or `n` above its limit of 16.
REFUSED: list[dict[str, Any]] = [
    {"prompt": ["a"] * 1000},
    {"prompt": "a", "n": 128},
    {"prompt": [[1, 2, 3]] * 1000, "n": 16, "best_of": 16},
    {"prompt": ["a"] * 2048, "stream": True},
]


async def send(attacker: Attacker, body: dict[str, Any]) -> None:
    """Send a request and check that it is served, or refused with an error that names the field."""
    answer = await attacker.complete(**{"max_tokens": 2, "ignore_eos": True} | body)
    # A full engine answers 503; a request that no engine takes is a 400 even then.
    busy = (429,) if body in REFUSED else (429, 503)
    if answer is None or answer.status in busy:
        await attacker.pause(0.3)
    elif body in REFUSED:
        param = answer.json["error"]["param"] if answer.status == 400 else None
        attacker.check(param in ("prompt", "n"), f"expected a 400 of prompt or n, got {answer.status} of {param}")
    else:
        attacker.check(answer.status == 200, f"the largest request was refused: {answer.status} {answer.code}")


async def too_many(attacker: Attacker, largest: dict[str, Any]) -> None:
    """Send the refused requests and the largest one that is served in turn, `AT_ONCE` loops at once."""
    bodies = [*REFUSED, largest]

    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            await send(attacker, bodies[turn % len(bodies)])
            turn += 1

    await attacker.side_by_side(AT_ONCE, one)


@attack(
    "many-sequences",
    f"128 to 16,000 sequences in a request to a vLLM server, {AT_ONCE} at once, and the largest that it takes",
    place="vllm",
)
async def many_foreign(attacker: Attacker) -> None:
    await too_many(attacker, FOREIGN_LARGEST)


@attack(
    "long-sequences",
    f"the largest requests that a vLLM server takes, {AT_ONCE} at once, with answers of {LONG_ANSWER} tokens",
    place="vllm",
)
async def long_foreign(attacker: Attacker) -> None:
    """Send requests of half the server's places, two of which would fill it. The server runs sequences in order of
    arrival, so a neighbour behind both would wait for a whole answer.
    """

    async def one(index: int) -> None:
        while attacker.going:
            await send(attacker, FOREIGN_LARGEST | {"max_tokens": LONG_ANSWER})

    await attacker.side_by_side(AT_ONCE, one)


@attack(
    "many-own-sequences",
    f"128 to 16,000 sequences in a request to our engine, {AT_ONCE} at once, and the largest that it takes",
    # Each tenant may fill its part of the batch, so only the refused requests and the concurrency are judged.
    honest="sequences-in-turn",
)
async def many_own(attacker: Attacker) -> None:
    await too_many(attacker, OWN_LARGEST)


@attack("sequences-in-turn", "the served requests of many-own-sequences", shown=False)
async def in_turn(attacker: Attacker) -> None:
    await attacker.as_served(lambda _: send(attacker, OWN_LARGEST))
