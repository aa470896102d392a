"""All attacks, in the order in which they run: family after family."""

from benchmarks.hostile import answers, archives, connections, doubles_attacks, engine_work, weights
from benchmarks.hostile.attack import REGISTER, Attack

FAMILIES = [family.__name__ for family in (archives, weights, connections, answers, engine_work, doubles_attacks)]
ATTACKS: dict[str, Attack] = REGISTER
# sorted() keeps the order within a family.
SHOWN = sorted((attack for attack in ATTACKS.values() if attack.shown), key=lambda a: FAMILIES.index(a.run.__module__))
