"""Grammars that are short and would take seconds and a gigabyte to compile: refused before the library has them."""

import json
from typing import Any

import pytest

from engine.scheduling.request import RequestError
from engine.structured.cost import check_lark, check_schemas

MULTIPLE = {"type": "integer", "multipleOf": 1_000_003}


def doubled(levels: int, least: str = "/.?/") -> str:
    """Terminals of which each is the one before, twice."""
    lines = [f"T{i}: T{i - 1} T{i - 1}" for i in range(1, levels)]
    return "\n".join([f"T0: {least}", *lines, f"start: T{levels - 1}"])


@pytest.mark.parametrize(
    "text",
    [
        f"start: /{'.*' * 3000}/",
        f"start: %json {json.dumps(MULTIPLE)}",
        'start: "a" %json\n' + json.dumps({"pattern": ".*" * 3000}),
        f"start: T\nT: {'A ' * 2000}\nA: /.*/",
        f"T: {'[A] ' * 2000}\nA: /.*/\nstart: T",
        f"start: T T[capture]: {'A ' * 2000}\nA: /.*/",
        doubled(14),
        doubled(600),
        doubled(14, '"a"?'),
        doubled(14, '%regex {"substring_chars": "abc"}'),
        f"%import common.WORD\nT: {'WORD ' * 200}\nstart: T",
        "start: T\nT: " + '"a"? ' * 2500,
        '# " and /\nT: ' + "A " * 2000 + '// "\nA: /.*/\nstart: <|"|> T',
        "start: A\n" + "".join(f"A{i}: /{'.*' * 100}/\n" for i in range(30)),
    ],
)
def test_what_costs_too_much_is_refused(text: str) -> None:
    assert len(text) < 16_384
    with pytest.raises(RequestError, match=r"together, the most served|multipleOf|pattern: all together") as refused:
        check_lark(text, "guided_grammar")
    assert refused.value.field == "guided_grammar"
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    "text",
    [
        'start: (item ("," item)*)?\nitem: NAME "=" VALUE\nNAME: /[a-z]+/\nVALUE: DIGIT+ ("." DIGIT+)?\nDIGIT: /[0-9]/',
        "start: " + " | ".join(f'"{word}"?' for word in range(2000)),
        f"start: {'a ' * 2000}\na: /.*/",
        'start: <|im_start|> name[capture="x"]\nname[max_tokens=5]: /[a-z "]+/ "//" /\\/\\*/',
        f"start: %json {json.dumps({'type': 'string', 'pattern': 'a' * 4000, 'description': '.*' * 5000})}",
        "%llguidance {}\n%import common.INT\nstart: INT{1,1000}",
        "start: T\nT: T",
    ],
)
def test_what_costs_little_is_not(text: str) -> None:
    check_lark(text, "guided_grammar")


@pytest.mark.parametrize(
    "text",
    ["start: %json {", 'start: %regex "', "start: T999\n" + "".join(f"T{i}: T{i - 1}\n" for i in range(999, 0, -1))],
)
def test_what_cannot_be_read_says_so(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        check_lark(text, "guided_grammar")


def test_schemas_are_summed_up() -> None:
    primes: list[Any] = [{"multipleOf": 307}, {"multipleOf": 311}]
    check_schemas(primes, "tools")
    with pytest.raises(RequestError, match="least common multiple"):
        check_schemas([*primes, {"items": [{"multipleOf": 313}]}], "tools")
    with pytest.raises(RequestError, match="pattern: all together are 6000 characters"):
        check_schemas([{"pattern": "a" * 3000}, {"patternProperties": {"b" * 3000: {}}}], "tools")
