"""Attacks and their registry."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """name: as on the command line. words: one line for the report. place: the stack that it needs, by name.

    prepare: makes the payloads, once, before the clock runs. honest: the name of an attack that does the same work for
    the same tenant without malice; the neighbour's latency is compared with a run beside that one, because an engine
    that computes what a tenant may ask for is slower for everybody.
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


REGISTER: dict[str, Attack] = {}


def attack(name: str, words: str, **options: Any) -> Callable[[Run], Run]:
    """Put a coroutine function of an `Attacker` on the register."""

    def register(run: Run) -> Run:
        assert name not in REGISTER, name
        REGISTER[name] = Attack(name, words, run, **options)
        return run

    return register
