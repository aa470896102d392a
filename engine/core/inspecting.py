"""Inspection of an adapter's weights for its probe (`engine.probing.prober`)."""

from adapters.manifest import NO_LAYER
from adapters.tiers.adapter_reader import HostAdapter, LoraModule


def has_effect(adapter: HostAdapter) -> bool:
    """Return whether any module's product of B, A and scale can differ from zero."""
    return any(_changes(module) for module in adapter.modules.values())


def _changes(module: LoraModule) -> bool:
    # NaN counts as a value, so that the forward pass refuses it.
    used = (module.a != 0).any(dim=1) & (module.b != 0).any(dim=0)
    return module.scale != 0 and bool(used.any())


def trained_tokens(adapter: HostAdapter) -> list[list[int]]:
    """Return a prompt of the token whose embedding the adapter changes most; none without LoRA on embed_tokens.

    Such an adapter may change only the tokens that its training data contained.
    """
    module = adapter.modules.get((NO_LAYER, "embed_tokens"))
    if module is None:
        return []
    return [[int(module.a.float().norm(dim=0).argmax())]]
