"""Costs in reports: exact decimals beside micro-units."""

from typing import Any

from gateway.records.money.prices import exact_money


def with_money(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures in which each `cost` is an exact decimal, and in micro-units `cost_micros`, at any depth.

    A curve of costs is in micro-units only.
    """
    found = {name: _inside(value) for name, value in figures.items()}
    if "cost" in found:
        cost = found.pop("cost")
        found |= {"cost_micros": cost} if isinstance(cost, list) else {"cost": exact_money(cost), "cost_micros": cost}
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return with_money(value)
    if isinstance(value, list):
        # A list of figures by step has None for a step without any.
        return [with_money(item) if isinstance(item, dict) else item for item in value]
    return value
