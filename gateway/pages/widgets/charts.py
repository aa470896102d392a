"""Reduction of a chart's points: every n-th point, or means."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def thin(points: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the points, evenly spaced, with the last one."""
    step = -(-len(points) // most) or 1
    return list(points[(len(points) - 1) % step :: step])


def means(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most `most` means of consecutive values; None where all of them are missing."""
    width = -(-len(values) // most) or 1
    parts = [[value for value in values[i : i + width] if value is not None] for i in range(0, len(values), width)]
    return [sum(part) / len(part) if part else None for part in parts]
