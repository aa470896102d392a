"""The gateway counts the tokens that the engine will see: the same tokenizer and template, tools included."""

import copy
import json
from typing import Any

import pytest

from gateway.api.requests.memory import BodyMemory, BodyShare
from gateway.api.requests.prompts import CHAT, PromptReader
from gateway.fleet.kinds.vllm import VllmFields
from testing.gateway.bases import measured, one_base, with_tokenizer
from testing.tiny import save_byte_level_tokenizer
from tests.engine.answering.tools import HISTORY, TEMPLATES, TOOLS
from wire.errors import BadRequest
from wire.text.tokenizer import ChatTemplateError, Tokenizer


async def count(tokenizer: Tokenizer, **fields: object) -> int:
    raw = json.dumps({"model": "m", "messages": HISTORY, "max_tokens": 1} | fields).encode()
    reader = PromptReader(with_tokenizer(tokenizer), default_max_tokens=16)
    with BodyMemory(2**26).share("acme") as share:
        return (await measured(reader, raw, CHAT, share, one_base())).prompt_tokens


@pytest.mark.parametrize("name", TEMPLATES)
async def test_tools_are_counted_as_transformers_renders_them(tmp_path, name):
    import transformers  # not at collection

    save_byte_level_tokenizer(tmp_path, TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = copy.deepcopy(HISTORY)
    messages[1]["content"] = ""
    call = messages[1]["tool_calls"][0]["function"]
    call["arguments"] = json.loads(call["arguments"])
    ours = Tokenizer.from_dir(tmp_path)
    for tools in (TOOLS, None):
        text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        expected = len(theirs(text, add_special_tokens=False).input_ids)
        assert await count(ours, tools=tools) == expected
    assert await count(ours, tools=TOOLS, tool_choice="none") == expected


async def test_a_template_without_tools_is_named_as_the_reason(tmp_path):
    save_byte_level_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="does not support tools") as refused:
        await count(Tokenizer.from_dir(tmp_path), tools=TOOLS)
    assert refused.value.param == "tools"


async def test_a_template_of_its_own_for_tools(tmp_path):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_byte_level_tokenizer(tmp_path, plain)
    (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["hermes"])
    (tmp_path / "chat_template.jinja").write_text(plain)
    ours = Tokenizer.from_dir(tmp_path)
    assert await count(ours, tools=TOOLS) > await count(ours) + 50


@pytest.mark.parametrize("other_engines", [True, False])
async def test_fields_that_only_other_engines_serve(tmp_path, other_engines):
    save_byte_level_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    reader = PromptReader(
        with_tokenizer(Tokenizer.from_dir(tmp_path)), 16, own_fields=[VllmFields] if other_engines else None
    )
    share = BodyShare(BodyMemory(2**26), "acme")
    asked = {"thinking_token_budget": 3}
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | asked).encode()
    if other_engines:
        body = (await measured(reader, raw, CHAT, share, one_base())).body
        assert {name: body[name] for name in asked} == asked
    else:
        with pytest.raises(BadRequest) as refused:
            await reader.parse(raw, CHAT, share)
        assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_longer_than_the_context_is_refused_before_the_prompt_is_counted(
    tmp_path, field: str, monkeypatch: pytest.MonkeyPatch
):
    save_byte_level_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer, counted = Tokenizer.from_dir(tmp_path), []

    def encode(*arguments: Any, **options: Any) -> list[int]:
        counted.append(arguments)
        return [1]

    monkeypatch.setattr(tokenizer, "encode_chat", encode)
    with pytest.raises(BadRequest) as refused:
        await count(tokenizer, **{"max_tokens": None, field: 4097})
    assert (refused.value.param, refused.value.code) == (field, "context_length_exceeded")
    assert not counted
    await count(tokenizer, **{"max_tokens": None, field: 4095})
    assert counted
