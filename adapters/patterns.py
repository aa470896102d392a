"""Regular expressions from uploads, matched against module names in bounded time.

PEFT allows regular expressions in `target_modules`, `rank_pattern` and others. They are untrusted input, and Python's
`re` backtracks: `(\\w+)+x` over one module name can occupy a process for ever. Here the parsed pattern runs over the
set of all positions at once (Thompson 1968, with the set as bits of an int), so a match costs pattern length times name
length.
"""

import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_LENGTH = 4096
# Budget of all patterns of one adapter. Real ones take a few hundred steps per module; hostile ones stop within
# seconds.
MAX_STEPS = 1_000_000
# Price of a pattern's step; matching a plain key, which `re` does, costs half of it (measured: 1.5 and 0.7 us).
_PATTERN_STEP = 2
# Steps charged for compiling one pattern with `re` (measured: 100 to 200 us).
_COMPILE_STEPS = 200
_LITERAL = re.compile(r"[\w.\\^$-]*", re.ASCII)
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class PatternError(ValueError):
    """A pattern that is not a regular expression, uses an unsupported feature, or costs too much."""


class Budget:
    """The steps shared by all patterns of one adapter."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take steps from the budget. Raises PatternError when it is used up."""
        self._left -= steps
        if self._left < 0:
            raise PatternError("too costly to match; use simpler patterns or a list of names")


class ModulePattern:
    """A regular expression. `fullmatch(name)` and `match(name)` return whether `re` would find a match.

    Refused: back-references, look-behind, possessive and atomic groups, conditionals, inline flags.
    """

    def __init__(self, pattern: str, budget: Budget | None = None) -> None:
        self._budget = budget or Budget()
        self._budget.spend(_COMPILE_STEPS + len(pattern))
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise PatternError(f"a pattern may have {MAX_PATTERN_LENGTH} characters, this one has {len(pattern)}")
        try:
            parsed = sre_parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"not a regular expression: {str(error) or 'nested too deeply'}") from None
        if parsed.state.flags & ~re.UNICODE:
            raise PatternError("inline flags such as (?i) are not supported")
        self._nodes = parsed

    def fullmatch(self, name: str) -> bool:
        return bool(self._run(name) >> len(name))

    def match(self, name: str) -> bool:
        return self._run(name) != 0

    def _run(self, name: str) -> int:
        """Return the bits of the positions where a match that begins at 0 may end."""
        try:
            return self._sequence(self._nodes, name, {}, 1)
        except RecursionError:
            raise PatternError("nested too deeply") from None

    def _sequence(self, nodes: Any, name: str, classes: dict[int, int], starts: int) -> int:
        for node in nodes:
            if not starts:
                break
            self._budget.spend(_PATTERN_STEP)
            starts = self._node(node, name, classes, starts)
        return starts

    def _node(self, node: Any, name: str, classes: dict[int, int], starts: int) -> int:
        op, arg = node
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            key = id(node)
            if key not in classes:
                self._budget.spend(_PATTERN_STEP * len(name) * (len(arg) if op is sre.IN else 1) // 4)
                accepts = _predicate(op, arg)
                classes[key] = sum(1 << i for i, c in enumerate(name) if accepts(c))
            return (starts & classes[key]) << 1
        if op is sre.SUBPATTERN:
            _, add_flags, del_flags, nodes = arg
            if add_flags or del_flags:
                raise PatternError("inline flags such as (?i:...) are not supported")
            return self._sequence(nodes, name, classes, starts)
        if op is sre.BRANCH:
            ends = 0
            for nodes in arg[1]:
                ends |= self._sequence(nodes, name, classes, starts)
            return ends
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(arg, name, classes, starts)
        if op is sre.AT:
            return starts & _anchor(arg, name)
        if op in (sre.ASSERT, sre.ASSERT_NOT) and arg[0] == 1:
            return self._look_ahead(op is sre.ASSERT, arg[1], name, classes, starts)
        raise PatternError(f"{str(op).lower().replace('_', ' ')} is not supported")

    def _repeat(self, arg: Any, name: str, classes: dict[int, int], starts: int) -> int:
        least, most, nodes = arg
        current = starts
        # After as many rounds as the name has positions, the set no longer changes, because a path of that length has a
        # loop.
        for _ in range(min(least, len(name) + 1)):
            self._budget.spend(_PATTERN_STEP)
            current = self._sequence(nodes, name, classes, current)
        ends = fresh = current
        for _ in range(min(most - least, len(name) + 1)):
            self._budget.spend(_PATTERN_STEP)
            fresh = self._sequence(nodes, name, classes, fresh) & ~ends
            if not fresh:
                break
            ends |= fresh
        return ends

    def _look_ahead(self, wanted: bool, nodes: Any, name: str, classes: dict[int, int], starts: int) -> int:
        kept = 0
        for position in range(len(name) + 1):
            here = starts & (1 << position)
            if here and bool(self._sequence(nodes, name, classes, here)) == wanted:
                kept |= here
        return kept


def pattern_key_matcher(key: str, budget: Budget | None = None) -> Callable[[str], bool]:
    """Return PEFT's matcher for a key of `rank_pattern` or `alpha_pattern`.

    The key must match the end of the name, after a dot or at the name's start.
    """
    spending = budget or Budget()
    pattern = rf"(.*\.)?({key})$"
    if len(key) <= MAX_PATTERN_LENGTH and _LITERAL.fullmatch(key):
        try:
            spending.spend(_COMPILE_STEPS + len(pattern))
            compiled = re.compile(pattern)  # without repeats or branches in the key, `re` is fast and safe
        except re.error as error:
            raise PatternError(f"not a regular expression: {error}") from None

        def matches(name: str) -> bool:
            spending.spend(1)
            return compiled.match(name) is not None

        return matches
    return ModulePattern(pattern, spending).match


def _predicate(op: Any, arg: Any) -> Callable[[str], bool]:
    if op is sre.LITERAL:
        return lambda c: ord(c) == arg
    if op is sre.NOT_LITERAL:
        return lambda c: ord(c) != arg
    if op is sre.ANY:
        return lambda c: c != "\n"
    negate = bool(arg) and arg[0][0] is sre.NEGATE
    items = arg[1:] if negate else arg
    return lambda c: any(_in_item(c, kind, value) for kind, value in items) != negate


def _in_item(c: str, kind: Any, value: Any) -> bool:
    if kind is sre.LITERAL:
        return ord(c) == value
    if kind is sre.RANGE:
        return bool(value[0] <= ord(c) <= value[1])
    return _CATEGORIES[value](c)


def _anchor(where: Any, name: str) -> int:
    """Return the bits of the positions at which an anchor matches."""
    if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return 1
    if where in (sre.AT_END, sre.AT_END_STRING):
        return 1 << len(name)
    word = [_CATEGORIES[sre.CATEGORY_WORD](c) for c in name]
    edges = sum(1 << i for i, (a, b) in enumerate(zip([False, *word], [*word, False], strict=True)) if a != b)
    return edges if where is sre.AT_BOUNDARY else ~edges & ((2 << len(name)) - 1)
