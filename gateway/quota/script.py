"""Text of the quota script: tables of the kinds of limits, then quota.lua."""

from collections.abc import Iterable
from importlib import resources

from gateway.quota.kinds import BUDGET, GAUGE, RECALLED, SINGLE, STAGED, WINDOW

SETS = {"SINGLE": SINGLE, "GAUGE": GAUGE, "STAGED": STAGED, "BUDGET": BUDGET, "RECALLED": RECALLED}


def source() -> str:
    """Return the script's text. Its digest differs between releases with different kinds, so both can run at once."""
    tables = {name: _flags(kinds) for name, kinds in SETS.items()}
    tables["WINDOW"] = ", ".join(f"{letter} = {window}" for letter, window in WINDOW.items())
    lines = "".join(f"local {name} = {{{content}}}\n" for name, content in tables.items())
    return lines + resources.files("gateway.quota").joinpath("quota.lua").read_text("utf-8")


def _flags(kinds: Iterable[str]) -> str:
    return ", ".join(f"{letter} = true" for letter in sorted(kinds))
