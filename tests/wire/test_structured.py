"""The request forms of a constraint: each becomes one spec, and every other form is refused with its field."""

import json
import subprocess
import sys
from typing import Any

import pytest

from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.structured import (
    ANY_OBJECT,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SPEC_BYTES,
    GrammarSpec,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'


def read(**fields: Any) -> GrammarSpec | None:
    body = {"model": "m", "prompt": "p"} | fields
    spec = decode(CompletionRequest, json.dumps(body).encode()).grammar_spec()
    chat = {"model": "m", "messages": [{"role": "user", "content": "p"}]} | fields
    assert decode(ChatCompletionRequest, json.dumps(chat).encode()).grammar_spec() == spec
    return spec


def openai(**json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA} | json_schema}


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json", ANY_OBJECT)),
        ({"response_format": openai(strict=True)}, GrammarSpec("json", SCHEMA_TEXT)),
        ({"response_format": openai()}, GrammarSpec("json", SCHEMA_TEXT, lenient=True)),
        ({"response_format": openai(strict=None, description="d")}, GrammarSpec("json", SCHEMA_TEXT, lenient=True)),
        ({"guided_json": SCHEMA}, GrammarSpec("json", SCHEMA_TEXT)),
        ({"guided_json": json.dumps(SCHEMA, indent=2)}, GrammarSpec("json", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["a", "ü"]}, GrammarSpec("choice", '["a","ü"]')),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("grammar", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a", "choice": None}}, GrammarSpec("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarSpec("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"json_object": True, "regex": None}}, GrammarSpec("json", ANY_OBJECT)),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, GrammarSpec("regex", "a")),
    ],
)
def test_every_form_is_read(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert read(**fields) == spec


FORMAT = "response_format"
BAD = [
    ({FORMAT: "json"}, FORMAT),
    ({FORMAT: []}, FORMAT),
    ({FORMAT: {}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": ["text"]}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"schema": {}}}}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(name="")}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(name="two words")}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(name="x\n")}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(name="x" * 65)}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(name=5)}, f"{FORMAT}.json_schema.name"),
    ({FORMAT: openai(strict="yes")}, f"{FORMAT}.json_schema.strict"),
    ({FORMAT: openai(description=5)}, f"{FORMAT}.json_schema.description"),
    ({FORMAT: openai(schema=None)}, f"{FORMAT}.json_schema.schema"),
    ({FORMAT: openai(schema="{}")}, f"{FORMAT}.json_schema.schema"),
    ({FORMAT: openai(schema={"enum": ["x" * MAX_SPEC_BYTES]})}, f"{FORMAT}.json_schema.schema"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": True}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "5"}, "guided_json"),
    ({"guided_json": " " * MAX_SPEC_BYTES + "{}"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": {}}, "guided_regex"),
    ({"guided_regex": "ü" * (MAX_REGEX_BYTES // 2 + 1)}, "guided_regex"),
    ({"guided_grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
    ({"guided_choice": ["a" * 100] * 700}, "guided_choice"),
    ({"guided_grammar": ["a"]}, "guided_grammar"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"whitespace_pattern": "a", "json": {}}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": {}, FORMAT: {"type": "json_object"}}, FORMAT),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(**fields)
    assert refused.value.param == param
    assert param in refused.value.message
    assert len(refused.value.message) < 300


def test_who_asked_under_which_name_makes_no_other_grammar() -> None:
    first, second = read(guided_regex="a"), read(structured_outputs={"regex": "a"})
    assert first is not None
    assert second is not None
    assert (first, hash(first)) == (second, hash(second))
    assert (first.param, second.param) == ("guided_regex", "structured_outputs.regex")


def test_the_gateway_reads_constraints_without_the_library() -> None:
    code = "import sys, wire.requests; assert not {'llguidance', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
