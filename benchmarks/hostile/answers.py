"""Attacks by large answers to requests of few tokens."""

import asyncio
import random

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "into", "a", "wood", "where"]


def prompt(tokens: int, seed: float) -> str:
    """Return text of about this many tokens that no prefix cache holds."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


async def logprobs_of(attacker: Attacker, prompts: int, tokens: int, **more: object) -> None:
    while attacker.going:
        texts = [prompt(tokens, random.random()) for _ in range(prompts)]
        answer = await attacker.complete(texts, max_tokens=1, seconds=80, **more)
        if answer is None or answer.status != 200:
            await attacker.pause(1.0)
        else:
            attacker.note(f"an answer of {len(answer.body) / 2**20:.0f} MiB")


# Both are refused before any work, so the quiet round is the neighbour alone.
@attack("prompt-logprobs", "prompt_logprobs 20 over 16 prompts of 1,800 tokens in one request")
async def prompt_logprobs(attacker: Attacker) -> None:
    await logprobs_of(attacker, 16, 1800, prompt_logprobs=20)


@attack("echo-logprobs", "echo with logprobs 20 over 24 prompts of 1,200 tokens")
async def echo_logprobs(attacker: Attacker) -> None:
    await logprobs_of(attacker, 24, 1200, echo=True, logprobs=20)


async def choices(attacker: Attacker, **more: object) -> None:
    async def one() -> None:
        while attacker.going:
            body = {"n": 16, "max_tokens": 256, "temperature": 1, "ignore_eos": True} | more
            answer = await attacker.chat("Tell a story.", seconds=80, **body)
            if answer is None or answer.status == 429:
                await attacker.pause(1.0)
            elif answer.status == 200:
                attacker.note(f"an answer of {len(answer.body) / 2**20:.0f} MiB")

    await asyncio.gather(one(), one())


@attack("many-choices", "as choice-logprobs, without them", shown=False)
async def many_choices(attacker: Attacker) -> None:
    await choices(attacker)


# The same choices are generated in both rounds; only the answers' logprobs differ.
@attack("choice-logprobs", "16 choices of 256 tokens with top_logprobs 20, not streamed", honest="many-choices")
async def choice_logprobs(attacker: Attacker) -> None:
    await choices(attacker, logprobs=True, top_logprobs=20)


@attack("many-prompts", "2,048 prompts in one request, each with 16 choices")
async def many_prompts(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            await attacker.complete(["a"] * 2048, n=16, best_of=16, max_tokens=1)
            await attacker.complete([[1, 2, 3]] * 2048, max_tokens=1, logprobs=20)
            await attacker.complete([1] * 500_000, max_tokens=1)
            await attacker.pause(0.5)

    await attacker.side_by_side(2, one)
