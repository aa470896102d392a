"""A log line every 10 s with the engine's throughput, like vLLM's; none while the engine is idle."""

import asyncio
import logging
import time

from engine.core.client import Core
from engine.core.errors import EngineUnavailable
from engine.state import EngineState

logger = logging.getLogger(__name__)

EVERY_S = 10.0


async def log_throughput(core: Core) -> None:
    """Log a line every `EVERY_S` seconds, until the engine has failed or is shut down."""
    try:
        before, read_at = (await core.state()).state, time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            state, now = (await core.state()).state, time.monotonic()
            if (line := throughput_line(before, state, now - read_at)) is not None:
                logger.info("%s", line)
            before, read_at = state, now
    except EngineUnavailable:
        return


def throughput_line(before: EngineState, now: EngineState, seconds: float) -> str | None:
    """Return the log line for the `seconds` between two readings; None if the engine was idle."""
    prompt = now.num_prompt_tokens - before.num_prompt_tokens
    generated = now.num_generated_tokens - before.num_generated_tokens
    if not (now.num_running or now.num_waiting or prompt or generated):
        return None
    queried = now.prefix_query_tokens - before.prefix_query_tokens
    hit = (now.prefix_hit_tokens - before.prefix_hit_tokens) / queried if queried else 0.0
    used = 1 - now.num_free_blocks / now.num_blocks
    return (
        f"running {now.num_running}, waiting {now.num_waiting}, prompts {prompt / seconds:.1f} tokens/s, "
        f"generated {generated / seconds:.1f} tokens/s, KV cache {used:.1%} used, prefix hits {hit:.1%}, "
        f"adapters resident {len(now.resident_adapters)}"
    )
