"""Figures of a set of samples: latencies, rates, goodput, errors. docs/design/bench.md defines each.

Times in seconds, rates per second over the whole run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loraplex.bench.load import Slo
from loraplex.bench.sending import UNFINISHED, Sample

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], p: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value not exceeded by at least p percent. None for no values."""
    return sorted(values)[max(0, math.ceil(p / 100 * len(values)) - 1)] if values else None


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Return mean, percentiles and maximum; each None for no values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES), "max"))
    ranks = {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def ttft(sample: Sample) -> float | None:
    return None if sample.first is None else sample.first - sample.due


def waits(samples: Iterable[Sample]) -> list[float]:
    """Return each request's time to first token, infinite for a request without one: refused, timed out or unfinished.

    Percentiles of only the served requests would fall as a server refuses more.
    """
    return [math.inf if (value := ttft(sample)) is None else value for sample in samples]


def tpot(sample: Sample) -> float | None:
    """Return the time per output token after the first; None for answers of one token."""
    if not sample.times or sample.output_tokens < 2:
        return None
    return (sample.times[-1] - sample.times[0]) / (sample.output_tokens - 1)


def gaps(sample: Sample) -> list[float]:
    """Return the times between the events of an answer."""
    return [after - before for before, after in zip(sample.times, sample.times[1:], strict=False)]


def latency(sample: Sample) -> float | None:
    return None if sample.ended is None else sample.ended - sample.due


def meets(sample: Sample, slo: Slo) -> bool:
    """Return whether a request has a whole answer within every target. A target without a value is met."""
    pairs = ((ttft(sample), slo.ttft), (tpot(sample), slo.tpot), (latency(sample), slo.latency))
    return sample.error is None and all(limit is None or value is None or value <= limit for value, limit in pairs)


def figures(samples: Sequence[Sample], seconds: float, slos: Mapping[str, Slo]) -> dict[str, Any]:
    """Return the figures as JSON-ready values. slos: by tenant."""
    done = [sample for sample in samples if sample.error is None]
    failed = [sample for sample in samples if sample.error not in (None, UNFINISHED)]
    prompt, output = sum(s.input_tokens for s in done), sum(s.output_tokens for s in done)
    rate = 1 / seconds if seconds > 0 else 0.0
    return {
        "requests": len(samples),
        "completed": len(done),
        "failed": len(failed),
        "unfinished": len(samples) - len(done) - len(failed),
        "requests_per_second": len(done) * rate,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": output * rate,
        "total_tokens_per_second": (prompt + output) * rate,
        "without_first_token": sum(1 for s in samples if s.first is None),
        "wait": {name: finite(value) for name, value in spread(waits(samples)).items()},
        "ttft": spread(value for s in done if (value := ttft(s)) is not None),
        "inter_token": spread(gap for s in done for gap in gaps(s)),
        "tpot": spread(value for s in done if (value := tpot(s)) is not None),
        "latency": spread(value for s in done if (value := latency(s)) is not None),
        "goodput": _goodput(samples, slos, rate),
        "errors": dict(Counter(s.error.kind for s in failed if s.error is not None).most_common()),
        "counts": _counts(done),
    }


def finite(value: float | None) -> float | None:
    """Return a value as JSON, which has no infinity: None for an infinite one."""
    return None if value is None or math.isinf(value) else value


def wait_at(figures_: Mapping[str, Any], p: str) -> float | None:
    """Return a percentile such as `p99` of the waits in a report's figures.

    Infinite if the percentile's request had no first token; None without requests.
    """
    value: float | None = figures_["wait"][p]
    return math.inf if value is None and figures_["requests"] else value


def _goodput(samples: Sequence[Sample], slos: Mapping[str, Slo], rate: float) -> dict[str, float] | None:
    """Return the requests that met their targets: a second, and as a share of all sent. None without targets."""
    judged = [sample for sample in samples if slos[sample.planned.target.tenant].exists]
    if not judged:
        return None
    good = sum(1 for sample in judged if meets(sample, slos[sample.planned.target.tenant]))
    return {"requests_per_second": good * rate, "share": good / len(judged)}


def _counts(done: Sequence[Sample]) -> dict[str, int | float | None]:
    """Compare the server's token counts with the streams and with the requested lengths.

    more_events: answers with more events than tokens, which cannot be. longer: answers above their max_tokens.
    """
    counted = [s for s in done if s.completion_tokens is not None]
    tokens = sum(s.completion_tokens or 0 for s in counted)
    return {
        "without_usage": len(done) - len(counted),
        "more_events": sum(1 for s in counted if len(s.times) > (s.completion_tokens or 0)),
        "longer": sum(1 for s in counted if (s.completion_tokens or 0) > s.planned.output_tokens),
        "shorter": sum(1 for s in counted if (s.completion_tokens or 0) < s.planned.output_tokens),
        "events_per_token": sum(len(s.times) for s in counted) / tokens if tokens else None,
        "prompt_tokens_per_planned": _ratio(
            sum(s.prompt_tokens or 0 for s in counted), sum(s.planned.input_tokens for s in counted)
        ),
    }


def _ratio(value: float, total: float) -> float | None:
    return value / total if total else None
