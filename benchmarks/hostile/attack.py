"""Attacks and their registry."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """A registered attack.

    name: as on the command line. words: one line for the report. place: name of the stack that it needs. prepare: makes
    the payloads once, before the measurement. honest: name of an attack that does the same work for the same tenant
    without malice. The neighbour's latency is compared with a run beside that attack, because legitimate work makes an
    engine slower for every tenant. It may do no more work than the attack causes, or its load hides the attack's; a
    comment at each says why it does not. judges_latency: whether the neighbour's latency counts; not with lifted
    limits.
    """

    name: str
    words: str
    run: Run
    place: str = "up"
    prepare: Callable[[], object] | None = None
    honest: str | None = None
    least_seconds: float = 0.0
    limits: Mapping[str, int | None] = field(default_factory=dict)
    shown: bool = True
    judges_latency: bool = True


REGISTER: dict[str, Attack] = {}


def attack(name: str, words: str, **options: Any) -> Callable[[Run], Run]:
    """Register a coroutine function of an `Attacker`."""

    def register(run: Run) -> Run:
        assert name not in REGISTER, name
        REGISTER[name] = Attack(name, words, run, **options)
        return run

    return register
