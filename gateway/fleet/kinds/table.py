"""Table of the engine kinds. A new kind is a module in this folder and a line here."""

from gateway.fleet.kinds.kind import EngineKind, Services
from gateway.fleet.kinds.llmd import Llmd
from gateway.fleet.kinds.loraplex import Loraplex
from gateway.fleet.kinds.sglang import Sglang
from gateway.fleet.kinds.vllm import Vllm

KINDS: tuple[type[EngineKind], ...] = (Loraplex, Vllm, Sglang, Llmd)

Kinds = dict[str, EngineKind]
"""The kinds of a process by name."""


def make_kinds(services: Services) -> Kinds:
    return {kind.traits.name: kind(services) for kind in KINDS}
