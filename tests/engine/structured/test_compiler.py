"""Compilation of grammars: supported forms, refused forms and their errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.structured.compiler import GrammarCompiler
from testing.tiny import save_byte_level_tokenizer
from wire.errors import BadRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_level_tokenizer(folder)
    return Tokenizer.from_dir(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, tokenizer.eos_token_ids)


def spec(kind: Any, text: Any, **fields: Any) -> GrammarSpec:
    return GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text), param="guided_x", **fields)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, given: GrammarSpec, text: str) -> bool:
    """Return whether the grammar accepts the text's bytes, one token each, and then the end."""
    matcher = compiler.compile(given).matcher()
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    if not all(matcher.advance(byte_ids[bytes([b])]) for b in text.encode()):
        return False
    [end] = tokenizer.eos_token_ids
    bits = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32)
    matcher.fill(bits)
    return bool(bits[end // 32] >> end % 32 & 1) and matcher.advance(end) and matcher.ended


NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (spec("json", NAME), ['{"name":"a"}', '{"name": "a"}', '{\n  "name": "ü🎉"\n}'], ["{}", '{"name":  "a"}']),
        (spec("json", {"type": "object"}), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"{}"']),
        (spec("json", {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
         ["[]", "[[],[[]]]"], ["[1]", "[[]"]),
        (spec("json", {"type": "string", "format": "date"}), ['"2026-11-21"'], ['"2026-13-21"', '"today"']),
        (spec("json", {"type": "string", "pattern": "^[a-c]{2}$"}), ['"ab"'], ['"abc"', '"ad"']),
        (spec("json", {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, lenient=True),
         ["[1,1]"], ["[a]"]),
        (spec("regex", r"\+?[0-9]{2,4}|no"), ["+49", "1234", "no"], ["+1", "12345", "yes"]),
        (spec("choice", ["red", 'gr"een', "blue 🎉\n\\"]), ["red", 'gr"een', "blue 🎉\n\\"], ["green", "re", "redd"]),
        (spec("grammar", 'start: "a" b+\nb: "b" | "c"'), ["ab", "abcc"], ["a", "b"]),
        (spec("grammar", 'root ::= "a" b+\nb ::= "b" | "c"'), ["ab", "abcc"], ["a", "b"]),
    ],
)  # fmt: skip
def test_what_fits_is_accepted_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, given: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(compiler, tokenizer, given, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, given, text)] == []


@pytest.mark.parametrize(
    "given",
    [
        spec("json", {"type": "foo"}),
        spec("json", {"type": "array", "uniqueItems": True}),
        spec("json", {"$ref": "#/nowhere"}),
        spec("json", {"$ref": "http://127.0.0.1:1/schema.json"}),
        spec("json", {"$ref": "#"}),
        spec("json", {"type": "string", "pattern": "(a)\\1"}),
        spec("json", {"type": "string", "minLength": 3, "maxLength": 2}),
        spec("json", {"enum": []}),
        spec("json", '{"items":' * 200 + "{}" + "}" * 200),
        spec("json", {"type": "integer", "multipleOf": 10**6 + 3}),
        spec("json", {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}),
        spec("json", {"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for j in range(20)]} for i in range(12)]}),
        spec("json", {"properties": {f"p{i}": {"type": "string", "pattern": ".*" * 250} for i in range(9)}}),
        spec("json", {"patternProperties": {"a" * 5000: {}}}),
        spec("regex", "a("),
        spec("regex", "(?=a)b"),
        spec("regex", "(" * 20000 + "a" + ")" * 20000),
        spec("grammar", "start: nothing"),
        spec("grammar", "root ::= ::="),
        spec("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
        spec("grammar", "hello"),
        spec("regex", "[^\\x00-\\U0010FFFF]"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_and_soon(compiler: GrammarCompiler, given: GrammarSpec) -> None:
    with pytest.raises(BadRequest) as refused:
        compiler.compile(given)
    assert refused.value.param == "guided_x"
    assert refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (spec("grammar", "start: a\na: nope"), 'the grammar cannot be compiled: at 2(4): unknown name: "nope"'),
        (spec("regex", "a(b"), 'invalid regex "a(b" (in regex): regex parse error: a(b error: unclosed group'),
        (GrammarSpec("grammar", 'start: %json {"required": "a"}', param="tools"),
         "tools: a function's parameters cannot be enforced: failed to compile JSON schema: Expected array for"),
    ],
)  # fmt: skip
def test_a_refusal_quotes_no_grammar_but_the_clients(
    compiler: GrammarCompiler, given: GrammarSpec, expected: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        compiler.compile(given)
    assert expected in str(refused.value)
    assert " | " not in str(refused.value)
    assert "start:" not in str(refused.value)


def test_strict_refuses_naming_the_keyword(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadRequest, match="uniqueItems"):
        compiler.compile(spec("json", {"type": "array", "uniqueItems": True}))


@pytest.mark.parametrize(
    "given", [spec("json", {"$ref": "#"}), spec("regex", "[a&&b]"), spec("json", {"enum": [[]]} | {"minItems": 1})]
)
def test_what_no_text_fits_is_refused(compiler: GrammarCompiler, given: GrammarSpec) -> None:
    with pytest.raises(BadRequest, match=r"no text matches|Unsatisfiable"):
        compiler.compile(given)


def test_a_schema_cannot_turn_the_checks_off(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadRequest, match="uniqueItems"):
        compiler.compile(spec("json", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}))


def test_a_model_without_an_end_token_is_said_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="end token"):
        GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, ()).compile(spec("regex", "a"))


def test_a_tokenizer_that_the_library_cannot_read_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="tokenizer"):
        GrammarCompiler(lambda: "{}", 100, {2}).compile(spec("regex", "a"))


def test_a_prepared_compiler_reads_its_vocabulary_no_more(tokenizer: Tokenizer):
    read: list[str] = []

    def to_json() -> str:
        read.append("once")
        return tokenizer.to_json()

    compiler = GrammarCompiler(to_json, tokenizer.vocab_size, tokenizer.eos_token_ids)
    compiler.prepare()
    assert read == ["once"]
    compiler.compile(spec("regex", "a"))
    assert read == ["once"]
    # The first request with a form names the fault.
    GrammarCompiler(lambda: "{}", 100, {2}).prepare()
