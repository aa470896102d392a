"""Short grammars that would take seconds and a gigabyte to compile: refused before the library gets them."""

import json
from typing import Any

import pytest

from engine.structured.cost import _lexemes, check_lark, check_regex, check_schemas
from wire.errors import BadRequest

MULTIPLE = {"type": "integer", "multipleOf": 1_000_003}


def doubled(levels: int, least: str = "/.?/") -> str:
    """Return terminals that each repeat the previous terminal twice."""
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
    with pytest.raises(BadRequest, match=r"together, counting each|multipleOf|pattern: all patterns") as refused:
        check_lark(text, "guided_grammar")
    assert refused.value.param == "guided_grammar"
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


@pytest.mark.parametrize("text", ['"' + '\\"' * 8000, "/" + "\\/" * 8000])
def test_a_text_without_its_end_is_read_once(text: str) -> None:
    # Otherwise the search for the end begins again at each quote: 16 KiB took 3 s.
    assert [lexeme for _, lexeme in _lexemes(text)] == [text]


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
    check_schemas([*primes, {"items": [{"multipleOf": 313}]}], "tools")
    with pytest.raises(BadRequest, match="least common multiple"):
        check_schemas([{"allOf": primes}], "tools")
    with pytest.raises(BadRequest, match="multipleOf: the sum of all: expected at most 10000, got 10614"):
        check_schemas([*primes, {"items": [{"multipleOf": 9996}]}], "tools")
    with pytest.raises(BadRequest, match="pattern: all patterns together have 6000 characters"):
        check_schemas([{"pattern": "a" * 3000}, {"patternProperties": {"b" * 3000: {}}}], "tools")


def patterns(count: int, form: str = "a{}.*b") -> list[dict[str, str]]:
    return [{"pattern": form.format(i)} for i in range(count)]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": patterns(20)}, "different ones beside allOf, anyOf or .ref: expected at most 12, got 20"),
        ({"properties": {"a": {"$ref": "#/x", "pattern": "a"}}, "x": patterns(12)}, "expected at most 12, got 13"),
        (
            {"patternProperties": {f"^k{i}_": {} for i in range(100)}},
            "patternProperties: patterns: expected at most 64",
        ),
        ({"anyOf": [{"minimum": i, "maximum": i + 5.5} for i in range(700)]}, "different ranges: expected at most 300"),
        ({"enum": [{"a": i} for i in range(2000)]}, "enum: objects and lists: expected at most 500, got 2000"),
        ({"allOf": [{"anyOf": [{}, {}, {}]} for _ in range(6)]}, "combinations of alternatives: expected at most 128"),
        ({"type": "number", "multipleOf": 99991}, "multipleOf: the sum of all"),
    ],
)
def test_schemas_that_would_take_seconds_or_never_end(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_schemas([schema], "guided_json")


THREE: dict[str, Any] = {"anyOf": [{"required": [name]} for name in "abc"]}
TO_THREE = {"$defs": {"three": THREE}}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {**TO_THREE, "allOf": [{"$ref": "#/$defs/three"}] * 7},
        {"allOf": [{"properties": {"x": THREE}}] * 7},
        {"allOf": [{"properties": {"x": {"properties": {"y": THREE}}}}] * 7},
        {"allOf": [{"allOf": [THREE]}] * 7},
        {"allOf": [{"items": THREE}] * 4 + [{"prefixItems": [THREE]}] * 3},
        {"allOf": [{"additionalProperties": THREE}] * 4 + [{"properties": {"x": THREE}}] * 3},
        {"allOf": [{"anyOf": [THREE, {}]}] * 4},
        {"$defs": {f"d{i}": {**THREE, "$ref": f"#/$defs/d{i + 1}"} for i in range(7)}, "$ref": "#/$defs/d0"},
        {
            "properties": {"x": {**THREE, "oneOf": [{**THREE, "$ref": "#/y/a~1b"}]}},
            "y": {"a/b": {"allOf": [THREE] * 4}},
        },
        {"$defs": {"d": {"properties": {"x": THREE}}}, "allOf": [{"$ref": "#/$defs/d"}] * 7},
        {"anyOf": [{"allOf": [{"properties": {"x": THREE}}] * 7}]},
    ],
)
def test_combinations_are_counted_behind_references_and_in_properties(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="combinations of alternatives: expected at most 128"):
        check_schemas([schema], "guided_json")


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"properties": {"x": OPTIONAL, "y": OPTIONAL}} for _ in range(40)]},
        {"properties": {f"p{i}": OPTIONAL for i in range(100)}},
        {"$defs": {f"d{i}": {"properties": {"x": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, OPTIONAL]}}}
                   for i in range(40)}, "$ref": "#/$defs/d0"},
        {"properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "right": {"$ref": "#"}}},
        {"allOf": [{"properties": {f"p{i}": THREE}} for i in range(30)]},
        {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"x": OPTIONAL}}],
         "$defs": {"base": {"properties": {"x": {"type": ["string", "null"]}, "y": THREE}}}},
        {"allOf": [THREE, THREE]},
        {"$ref": "#/nowhere", "allOf": [{"$ref": "http://example.com"}, {"$ref": "#/a/b/c"}]},
    ],
)  # fmt: skip
def test_alternatives_that_do_not_meet_are_not_multiplied(schema: dict[str, Any]) -> None:
    check_schemas([schema], "guided_json")


@pytest.mark.heavy
def test_counting_combinations_ends_in_time() -> None:
    """Shapes with shared parts are counted in bounded time: each pair is merged once, and all merges are bounded."""
    twice = {f"d{i}": {"properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "abcd"}} for i in range(100)}
    check_schemas([{"$defs": twice, "allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}]}], "guided_json")
    many = {f"d{i}": {"properties": {f"p{j}": THREE for j in range(4 * i, 4 * i + 6)}} for i in range(550)}
    with pytest.raises(BadRequest, match="steps to count their combinations: expected at most 500000"):
        check_schemas([{"$defs": many, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in many]}], "guided_json")


def test_many_patterns_of_different_values_are_served() -> None:
    fields: dict[str, Any] = {f"f{i}": pattern for i, pattern in enumerate(patterns(100))}
    check_schemas([{"properties": {**fields, "g": {"allOf": [{"$ref": "#"}]}}}], "guided_json")
    check_schemas([{"anyOf": [{"enum": [f"v{i}" for i in range(4000)]}, {"type": "null"}]}], "guided_json")


def test_repetitions_count_for_more_than_characters() -> None:
    check_regex("a" * 4096, "guided_regex")
    check_regex(r"\*\+\?\{(?:a)" * 300, "guided_regex")
    with pytest.raises(BadRequest, match="has 8000 characters, counting each repetition as 6"):
        check_regex(r"\w*" * 1000, "guided_regex")


def test_intersections_of_terminals_are_few() -> None:
    terms = [f"/(.|\\n)*a.{{{i}}}b.*/" for i in range(12)]
    check_lark("start: T\nT: " + " & ".join(terms[:4]), "guided_grammar")
    with pytest.raises(BadRequest, match="intersections and complements"):
        check_lark("start: T\nT: " + " & ".join(terms), "guided_grammar")
