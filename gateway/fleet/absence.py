"""Errors of requests that no engine, or no available one, serves."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gateway.errors import BadRequest, NoEngine, NoEngineOfBase
from gateway.fleet.engines.engine import EngineRecord

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

NO_ADAPTERS = "The available engines serve the base model only, no adapters."
LOADING = "No engine is available to serve this request. One loads its model and will serve it then; try again shortly."
ONLY_ADAPTERS = (
    "The available engines serve adapters only, because they may answer a base-model request with an adapter's weights."
)


def no_engine_error(engines: Sequence[EngineRecord], available: Sequence[EngineRecord], model: "Model") -> NoEngine:
    """Return the error of a request for the model that none of the available engines of its base can serve.

    engines: all of the base. `Retry-After` is the time until an engine has loaded, if it takes as long as before.
    """
    loading = [each for each in engines if each.condition.is_loading and each.drained is None and each.takes(model)]
    if not available and loading:
        seconds = min(each.condition.seconds_to_load() for each in loading)
        return NoEngine(LOADING, retry_after=max(1, math.ceil(seconds)))
    if not available or any(engine.takes(model) for engine in available):
        return NoEngine()
    if not any(engine.serves(model.binding) for engine in available):
        return NoEngineOfBase()
    return NoEngine(NO_ADAPTERS if model.adapters else ONLY_ADAPTERS)


def too_many_sequences_error(
    engines: Iterable[EngineRecord], model: "Model", body: dict[str, Any], sequences: int
) -> BadRequest | None:
    """Return the error of a request with more sequences than any engine of its model takes, available or not.

    Return None for fewer sequences.
    """
    most = max((engine.max_sequences for engine in engines if engine.takes(model)), default=math.inf)
    if sequences <= most:
        return None
    field = "n" if sequences == (body.get("n") or 1) else "prompt"
    message = (
        f"{field}: the request has {sequences} sequences (prompts times n); the engines of this model take at most "
        f"{most:.0f} in a request. Send several requests."
    )
    return BadRequest(message, param=field)
