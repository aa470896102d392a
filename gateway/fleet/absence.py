"""Errors of requests that no engine, or no available one, serves."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.errors import BadRequest, NoEngine, NoEngineOfBase
from gateway.fleet.call import Call, EngineRefused
from gateway.fleet.engine import EngineRecord

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

NO_ADAPTERS = "The available engines serve the base model only, no adapters."
ONLY_ADAPTERS = (
    "The available engines serve adapters only, because they may answer a base-model request with an adapter's weights."
)


def absence(available: Sequence[EngineRecord], model: "Model") -> NoEngine:
    """Return the error of a request for the model that none of the available engines can serve."""
    if not available or any(engine.takes(model) for engine in available):
        return NoEngine()
    if not any(engine.serves(model.binding) for engine in available):
        return NoEngineOfBase()
    return NoEngine(NO_ADAPTERS if model.adapters else ONLY_ADAPTERS)


def check_sequences(engines: Sequence[EngineRecord], call: Call) -> None:
    """Refuse a request with more sequences than any engine of its model takes, available or not.

    Raises EngineRefused.
    """
    most = max((engine.max_sequences for engine in engines if engine.takes(call.model)), default=math.inf)
    if call.sequences > most:
        choices = call.body.get("n") or 1
        field = "n" if call.sequences == choices else "prompt"
        message = (
            f"{field}: the request has {call.sequences} sequences (prompts times n); the engines of this model take at "
            f"most {most:.0f} in a request. Send several requests."
        )
        raise EngineRefused(BadRequest(message, param=field), unserved=True)
