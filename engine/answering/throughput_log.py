"""A log line every 10 s with the engine's throughput, like vLLM's; none while the engine is idle."""

import asyncio
import logging
import time
from collections import Counter

from engine.core.client import CoreClient
from engine.errors import EngineUnavailable
from engine.scheduling.drafter import Outcome
from engine.state import EngineState

logger = logging.getLogger(__name__)

EVERY_S = 10.0
_REASONS: dict[Outcome, str] = {
    "catching_up": "the draft model has yet to catch up with requests",
    "cost": "a draft costs more time than it saves",
    "measuring": "steps without drafts are measured",
    "no_proposal": "nothing is proposed",
    "no_room": "there are too many requests or too few blocks",
    "prompts": "steps have prompts",
}


async def log_throughput(core: CoreClient) -> None:
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
        f"adapters resident {len(now.resident_adapters)}{_drafts(before, now)}"
    )


def _drafts(before: EngineState, now: EngineState) -> str:
    """Return the end of the line: the drafts between two readings, and the most frequent reason of steps without."""
    steps = Counter(now.draft_steps)
    steps.subtract(before.draft_steps)
    if not (total := steps.total()):
        return ""
    drafted = sum(count.drafted for count in now.drafts) - sum(count.drafted for count in before.drafts)
    accepted = sum(count.accepted for count in now.drafts) - sum(count.accepted for count in before.drafts)
    held_back = total - steps.pop("drafted", 0)
    line = f", drafts: {accepted} accepted of {drafted}, held back in {held_back / total:.0%} of steps"
    if not held_back:
        return line
    [(outcome, _)] = steps.most_common(1)
    return f"{line}, mostly because {_REASONS[outcome]} ({outcome})"
