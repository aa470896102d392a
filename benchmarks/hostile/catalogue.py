"""All attacks, in the order in which they run."""

from benchmarks.hostile import answers, archives, connections, doubles_attacks, engine_work, weights
from benchmarks.hostile.attack import REGISTER, Attack

FAMILIES = (archives, weights, connections, answers, engine_work, doubles_attacks)
ATTACKS: dict[str, Attack] = REGISTER
SHOWN = [attack for attack in ATTACKS.values() if attack.shown]
