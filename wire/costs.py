"""Costs of tokens in fair share. The unit is one prompt token.

A prompt token takes a share of a batch; an output token takes a whole step of its sequence. The engine's cost model
(`engine/scheduling/cost.py`) adds costs that only the engine can measure; the gateway counts computed tokens only.
"""

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
