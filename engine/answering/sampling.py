"""Sampling parameters of a request, with the model's defaults for the fields that it leaves out."""

from engine.sampling_defaults import OPENAIS, SamplingDefaults
from engine.scheduling.request import SamplingParams
from wire.requests import SamplingRequest

# Below these bounds sampling always draws the likeliest token, and its numbers would overflow fp32.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6


def sampling_params(
    request: SamplingRequest,
    max_tokens: int,
    index: int,
    defaults: SamplingDefaults = OPENAIS,
) -> SamplingParams:
    """Return the parameters of the choice `index`. Each choice of a seeded request has its own seed. Only the first
    choice computes the prompt's log-probabilities. The core adds the rules (`engine.core.messages.TokenRules`).
    """
    temperature = _or(request.temperature, defaults.temperature)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=max(_or(request.top_p, defaults.top_p), MIN_TOP_P),
        top_k=max(0, defaults.top_k if request.top_k is None else request.top_k),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=None if request.seed is None else (request.seed + index) % 2**63,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs if index == 0 else None,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
