"""The two forms of tool calls, whole and split at any position: every split gives the same outcome."""

import random
from typing import get_args

import pytest

from engine.answering.tool_calls.format import ToolFormat
from engine.answering.tool_calls.scanner import CallScanner
from engine.answering.tool_calls.table import FORMATS, format_of
from engine.config import ToolFormatName
from tests.engine.answering.tools import TEMPLATES
from wire.chat import FunctionDefinition, Tool
from wire.errors import BadRequest

NAMES = ("f", "g")
HERMES, LLAMA3_JSON = FORMATS["hermes"], FORMATS["llama3_json"]
CASES = [
    (HERMES, 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>\\"", "b": [1, {}]}}\n</tool_call>',
     "Sure.", [("f", '{"a": "}<tool_call>\\"", "b": [1, {}]}')]),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>\n<tool_call>{"name": "f"}</tool_call> bye ',
     "bye ", [("g", '{"x": 1}'), ("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "arguments": {"b": 2}, "k": 1.5}</tool_call>',
     "", [("f", "{}")]),
    (HERMES, "a < b <tool_cal ", "a < b <tool_cal ", []),
    (HERMES, '<tool_call>{"name": "nope", "arguments": {}}</tool_call> x',
     '<tool_call>{"name": "nope", "arguments": {}}</tool_call> x', []),
    (HERMES, "<tool_call>not json</tool_call> t", "<tool_call>not json</tool_call> t", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    (HERMES, '<tool_call>{"name": "f", ', '<tool_call>{"name": "f", ', []),
    (HERMES, " \n text\n\n", " \n text\n\n", []),
    (LLAMA3_JSON, ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
     "", [("f", '{"a": 1}'), ("g", "{}")]),
    (LLAMA3_JSON, '<|python_tag|>{"type": "function", "name": "f", "parameters": null}', "", [("f", "{}")]),
    (LLAMA3_JSON, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3_JSON, 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    (LLAMA3_JSON, "", "", []),
]  # fmt: skip


def read(form: ToolFormat, pieces: list[str], parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    parser = form.parser(NAMES, parallel)
    content, calls, ids = "", [], set()
    for parsed in [*map(parser.push, pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                ids.add(delta.call_id)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    assert len(ids) == len(calls)
    assert parser.has_calls == bool(calls)
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), CASES, ids=[f"{type(c[0]).__name__}-{c[1][:30]}" for c in CASES]
)
def test_calls_and_content_however_the_text_is_cut(form, text, content, calls):
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)
    for seed in range(40):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(form, pieces) == (content, calls)


def test_arguments_go_out_before_they_are_complete():
    parser = HERMES.parser(NAMES)
    assert parser.push("I'll look. <tool_call>").content == "I'll look."
    first = parser.push('{"name": "f", "arguments": {"city": "Os').calls
    assert [(c.name, c.arguments) for c in first] == [("f", '{"city": "Os')]
    assert [(c.name, c.call_id, c.arguments) for c in parser.push('lo"').calls] == [(None, None, 'lo"')]


def test_without_parallel_calls_the_first_one_counts():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert read(HERMES, [text], parallel=False) == ("", [("f", "{}")])


def test_a_long_value_costs_the_same_late_as_early(monkeypatch: pytest.MonkeyPatch):
    """Each character is read once, and what was read before is not copied: an adapter writes what it likes."""
    read, plain, longest = 0, CallScanner._read, 0

    def counted(scanner: CallScanner, char: str, out: list[str]) -> None:
        nonlocal read, longest
        read += 1
        plain(scanner, char, out)
        longest = max([longest, *map(len, scanner._token[-1:])])

    monkeypatch.setattr(CallScanner, "_read", counted)
    parser, text = HERMES.parser(NAMES), '{"arguments": {"x": "' + "a" * 20_000
    parser.push("<tool_call>")
    for start in range(0, len(text), 10):
        parser.push(text[start : start + 10])
        assert len(parser._buffer) < 10
        assert len(parser._scanner._raw[-1]) <= 10
    assert read == len(text)
    assert longest == 1, "a text that grows by appending is copied each time"


def test_every_name_of_the_flag_has_a_format():
    assert set(FORMATS) == set(get_args(ToolFormatName))


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_says_which(name):
    assert format_of(TEMPLATES[name]) is FORMATS[name]


def test_schemas_too_large_to_enforce_are_refused():
    tool = Tool("function", FunctionDefinition("f", parameters={"enum": ["x" * 70_000]}))
    for form in FORMATS.values():
        with pytest.raises(BadRequest) as caught:
            form.grammar([tool], "required", True)
        assert caught.value.param == "tools"


def test_other_templates_are_neither():
    assert format_of(None) is None
    assert format_of("{{ tools }} [TOOL_CALLS]") is None
    assert format_of("{{ tools }} <tool_call><function=name><parameter=x>") is None
