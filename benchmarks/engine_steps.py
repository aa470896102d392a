"""Made-up times of an engine's steps."""

import random
import time


def steps(chance: random.Random) -> list[dict[str, float]]:
    """Return an engine's steps of the last four minutes, by second."""
    found = []
    for at in range(int(time.time()) - 240, int(time.time())):
        mean, prompts = 0.021 + 0.004 * chance.random(), 900 * (chance.random() < 0.3)
        number = int(0.94 / (mean + 0.012 * bool(prompts)))
        found.append(
            {
                "at": at,
                "steps": number,
                "seconds": 0.94,
                "longest": mean * (1.2 + 1.5 * bool(prompts)),
                "prompt_tokens": int(prompts * chance.random()),
                "decodes": number * chance.randint(9, 13),
                "roofline": 0.55 + 0.1 * chance.random(),
            }
        )
    return found
