"""Cost model of fair share: the cost of planned work, in units of one prompt token.

- A prompt token costs 1, because it takes a share of a batch. A cached one costs nothing, because it is not computed.
- A prompt token with log-probabilities (`prompt_logprobs`, `logprobs` with `echo`) costs 1.4, because the head computes
  its scores and the likeliest are searched for, which other prompt tokens do not need: with 0 to 20 likeliest, prompts
  of 512 tokens took 1.33 to 1.40 times as long (SmolLM2-135M in bf16, a vocabulary of 49,152, on the CPU).
- An output token costs 2, because it takes a whole step of its sequence's time, and 1 more for each 1,024 tokens of
  context, which the step reads and whose blocks the request holds: at 64 streams an 8B model reads 250 MB of weights
  for each stream, and 131 KB for each token of context.
- A prompt's last token costs what an output token does: its row reads the whole context and gives the first output
  token. Otherwise a request for one token after a cached prompt would cost 1: with 4,000 cached tokens, three computed
  ones took 2.4 times as long as three of a prompt without context (the same model).
- An output token costs 1 more for each 8 pages of its adapter, which the step reads and the request holds: 8 pages
  (rank 64) are 2 % of an 8B model's weights.
- A draft costs 1 like a prompt token, because it takes a row of a step that runs anyway. An accepted one costs what an
  output token does instead.
- A page copied to the device costs 64, because the copy takes the time of about 80 prompt tokens (42 MB at 25 GB/s) and
  evicts another adapter.
- A token that a preemption makes the engine compute again costs nothing, because its tenant has paid for it.

The gateway knows the computed prompt tokens and the output tokens only, and counts them with the same costs
(`wire/costs.py`).
"""

from engine.scheduling.request import Request
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN

SCORED = 1.4 * PROMPT_TOKEN
DRAFT = PROMPT_TOKEN
CONTEXT_TOKENS = 1024
HELD_PAGES = 8
LOADED_PAGE = 64.0


def step_cost(request: Request, num_tokens: int) -> float:
    """Return the cost of computing the next `num_tokens` tokens of a request."""
    start = request.num_computed
    end = start + num_tokens
    if start < request.num_paid:
        start = request.num_paid
    if end <= start:
        return 0.0
    last = request.num_prompt_tokens - 1
    num_outputs = end - (start if start > last else last)
    cost = 0.0
    if num_outputs > 0:
        cost = num_outputs * (OUTPUT_TOKEN + end / CONTEXT_TOKENS + request.num_adapter_pages / HELD_PAGES)
        end -= num_outputs
    if end > start:
        cost += (end - start) * (SCORED if request.wants_prompt_logprobs else PROMPT_TOKEN)
    return cost


def load_cost(num_pages: float) -> float:
    """Return the cost of copying an adapter's pages to the device."""
    return num_pages * LOADED_PAGE
