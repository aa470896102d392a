"""Patterns of `benchmarks.fairness`: the scenarios of `examples/scenarios/` in short forms of the same shape.

A factor compresses a scenario in time: rates are multiplied by it; prompts, answers and phases are divided by it. The
requested service per second stays the same, and requests are short enough for all seats to fill within seconds.

Independent of the server.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testing.stack import ROOT

SCENARIOS = ROOT / "examples" / "scenarios"
RATES = ("rate", "start_rate", "end_rate")
TIMES = ("on", "off", "over")
LENGTHS = ("tokens", "min", "max", "median")


@dataclass(frozen=True)
class Pattern:
    """A short form of a scenario.

    seconds: length of the arrivals. drain: seconds until the requests in flight are cut. factor: the factor of the
    compression. phase: seconds of an on or off phase, instead of the compressed ones. start: seconds until a tenant
    that starts late, instead of the scenario's. has_baseline: False leaves out the run without the flooding tenants.
    adapters: number of adapters of each tenant, for which its requests are, by zipf popularity (exponent 1); 0: the
    base model. scenario: name of the scenario, if it is not the pattern's.
    """

    name: str
    seconds: float
    drain: float = 1.0
    factor: float = 1.0
    phase: float | None = None
    start: float | None = None
    has_baseline: bool = True
    adapters: int = 0
    scenario: str = ""

    def spec(self) -> dict[str, Any]:
        """Return the scenario's content in this form."""
        spec = self._content()
        spec |= {"seconds": self.seconds, "drain": self.drain}
        if not self.has_baseline:
            spec.pop("baseline", None)
        for tenant in spec["tenants"]:
            if self.adapters:
                tenant["popularity"] = {"kind": "zipf", "s": 1.0}
            _compress(tenant["arrival"], RATES, self.factor)
            _compress(tenant["arrival"], TIMES, 1 / self.factor)
            for length in (tenant["input"], tenant["output"]):
                for key in LENGTHS:
                    if key in length:
                        length[key] = max(1, round(length[key] / self.factor))
            if self.phase is not None and tenant["arrival"]["kind"] == "onoff":
                tenant["arrival"] |= {"on": self.phase, "off": self.phase}
            if self.start is not None and "start" in tenant:
                tenant["start"] = self.start
        return spec

    @property
    def longest(self) -> float:
        """Return the seconds that this form takes at most, without warm-up."""
        runs = 2 if self.has_baseline and "baseline" in self._content() else 1
        return runs * (self.seconds + self.drain)

    def _content(self) -> dict[str, Any]:
        """Return the scenario's content in its own form."""
        name = self.scenario or self.name
        content: dict[str, Any] = tomllib.loads((SCENARIOS / f"{name}.toml").read_text())
        return content

    def in_full(self) -> "Pattern":
        """Return the pattern with the scenario's own length. Every request is awaited for up to a minute."""
        seconds = self._content()["seconds"]
        return Pattern(self.name, seconds, 60, adapters=self.adapters, scenario=self.scenario)


# The scenarios of two or more tenants, and `weights` with adapters in place of the base model. Left out:
# `azure-like-replay` (the requests of `azure-like` again), `slora-power-law` (a single tenant), `many-adapters`
# (measured by `benchmarks.residency`, which makes 64 adapters), and, so that a round takes eleven minutes,
# `vtc-poisson-on-off-overload` and `vtc-poisson-short-long-2`, which are second forms of other patterns, and the 15
# minutes of `vtc-dist-shift`.
SHORT = [
    Pattern("weights", 11),
    Pattern("flood", 9),
    Pattern("late-tenant", 12, start=5),
    Pattern("vtc-overload", 9, factor=4),
    Pattern("vtc-proportional", 9, factor=4),
    Pattern("vtc-eight-clients", 9, factor=4),
    Pattern("vtc-poisson-short-long", 9, factor=4),
    Pattern("vtc-on-off", 12, factor=6, phase=4),
    Pattern("vtc-on-off-overload", 12, factor=6, phase=4),
    Pattern("vtc-ramp", 12, factor=8, has_baseline=False),
    Pattern("azure-like", 9, factor=4),
    Pattern("weights-of-adapters", 11, adapters=4, scenario="weights"),
]
# Longer forms, used for patterns that are named on the command line: more requests of the tenants with few of them, and
# time for the seats to fill on slow machines, where the prompts of a flood take 15 s.
LONG = [
    Pattern("weights", 45, 0),
    Pattern("flood", 40, 5),
    Pattern("late-tenant", 40, 5),
    Pattern("weights-of-adapters", 45, 0, adapters=4, scenario="weights"),
]
ALL = "all"
NAMES = [pattern.name for pattern in SHORT]


def chosen(names: Sequence[str]) -> list[Pattern]:
    """Return the patterns of these names; `all` is every pattern in its short form."""
    if ALL in names:
        return SHORT
    known = {pattern.name: pattern for pattern in [*SHORT, *LONG]}
    return [known[name] for name in names]


def text_of(pattern: Pattern) -> str:
    """Return the pattern as a scenario file."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in pattern.spec().items())


def _compress(table: dict[str, Any], keys: Sequence[str], factor: float) -> None:
    for key in keys:
        if key in table:
            table[key] *= factor


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
