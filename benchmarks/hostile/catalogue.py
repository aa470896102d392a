"""All attacks, in the order in which they run: family after family."""

from benchmarks.hostile import (
    answers,
    archives,
    bodies,
    catalogue_attacks,
    connections,
    doubles_attacks,
    engine_work,
    mixtures_and_pages,
    readers,
    sequences,
    weights,
)
from benchmarks.hostile.attack import REGISTER, Attack

MODULES = (
    archives,
    weights,
    catalogue_attacks,
    connections,
    bodies,
    readers,
    answers,
    engine_work,
    sequences,
    mixtures_and_pages,
    doubles_attacks,
)
FAMILIES = [module.__name__ for module in MODULES]
ATTACKS: dict[str, Attack] = REGISTER
# sorted() keeps the order within a family.
SHOWN = sorted((attack for attack in ATTACKS.values() if attack.shown), key=lambda a: FAMILIES.index(a.run.__module__))
