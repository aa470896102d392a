"""Our tokenizer against transformers' on the same files, and the incremental detokenizer against a whole decode."""

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from testing.tiny import TEMPLATE, save_byte_fallback_tokenizer, save_byte_level_tokenizer, save_gemma_tokenizer
from wire.text.tokenizer import ChatTemplateError, TextTooLong, Tokenizer, TokenizerError

SAVE = {
    "byte_level": save_byte_level_tokenizer,
    "byte_fallback": save_byte_fallback_tokenizer,
    "gemma": save_gemma_tokenizer,
}
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and  double   spaces ",
    "line\n\n\tbreaks\r\n",
    "naïve café — “quotes” … ½",
    "你好，世界！ こんにちは 안녕하세요",
    "👩‍👩‍👧‍👦 family, 🎉🏳️‍🌈 flags, e\u0301 combining, \u200b zero width",
    "мир \u200fשלום\u200e مرحبا",
    "<|start|>user\nhi<|end|> <think>two words</think>",
    "\ufffd replacement \x00 control \x7f",
    "1234567890 3.14 -1e9 0xFF",
    "a" * 500,
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "你好 🎉"},
        {"role": "assistant", "content": "<|end|>"},
        {"role": "user", "content": "And\nthen?"},
    ],
]


@pytest.fixture(scope="module", params=SAVE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    SAVE[request.param](path)
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(ours, theirs, text):
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(ours, theirs, messages, add_generation_prompt):
    expected = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert ours.encode_chat(messages, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("trim", [" | trim", ""])
@pytest.mark.parametrize("words", ["Well, ", "Well,", " Well, <|end|> é", "a\n\n"])
def test_a_continued_message_ends_as_transformers_ends_it(tmp_path, words, trim):
    import transformers

    save_byte_level_tokenizer(tmp_path, TEMPLATE.replace(" | trim", trim))
    messages = [{"role": "user", "content": "Well, well"}, {"role": "assistant", "content": words}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert Tokenizer.from_dir(tmp_path).encode_chat(messages, None, False, True) == expected


def test_a_template_that_leaves_the_message_out_cannot_continue_it(tmp_path):
    save_byte_level_tokenizer(tmp_path, "{{ messages[0].role }}")
    with pytest.raises(ChatTemplateError) as caught:
        Tokenizer.from_dir(tmp_path).encode_chat([{"role": "user", "content": "x"}], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_variables_of_the_template(tmp_path):
    save_byte_level_tokenizer(tmp_path, "{{ self_ }}{{ enable_thinking | default('yes') }}{{ add_generation_prompt }}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.render_chat([]) == "yesTrue"
    kwargs = {"enable_thinking": False, "self": 1, "range": None, "messages": "x"}
    assert tokenizer.render_chat([], template_kwargs=kwargs) == "FalseTrue"


@pytest.mark.parametrize("added", [{"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("post_processor", [True, False])
def test_bos_and_eos_are_added_as_transformers_adds_them(tmp_path, added, post_processor):
    """BOS and EOS follow tokenizer.json's post-processor; transformers 5 ignores the flags beside a tokenizer.json."""
    import transformers

    save_byte_level_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | added))
    if post_processor:
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        backend.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
        backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_dir(tmp_path).encode("Hello")
    assert ids == transformers.AutoTokenizer.from_pretrained(tmp_path)("Hello")["input_ids"]
    assert (ids[0] == 1) is post_processor


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages | tojson }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}<&>{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') }} {{ {'b': 1, 'a': 'é<'} | tojson(indent=2) }} {{ tools is none }}",
    ],
)
def test_template_features_render_as_in_transformers(tmp_path, template):
    import transformers

    save_byte_level_tokenizer(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "<b>é</b>"}, {"role": "user", "content": "2"}]
    assert Tokenizer.from_dir(tmp_path).render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_whole_decode(ours, text):
    ids = ours.encode(text)
    stream = ours.stream()
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces) + stream.finish() == ours.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces), "half a character went out"


@pytest.mark.parametrize(
    "text", ["The capital of France is Paris, and more", "你好 and 🎉🎊 then", "<|start|>a b<|end|> c"]
)
def test_an_answer_is_written_as_what_follows_its_prompt(ours, theirs, text):
    """An answer is decoded as the continuation of its prompt; alone, SentencePiece would drop its first space."""
    ids = theirs(text)["input_ids"]
    whole = theirs.decode(ids, skip_special_tokens=True)
    for cut in range(1, len(ids)):
        before = theirs.decode(ids[:cut], skip_special_tokens=True)
        if not whole.startswith(before):
            continue  # cut within a character
        stream = ours.stream(after=ids[:cut])
        assert before + stream.push(ids[cut:]) + stream.finish() == whole


def test_streamed_random_tokens_join_to_the_whole_decode(ours):
    """Random tokens include cut and invalid UTF-8, special tokens and ids beyond the vocabulary."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(ours.vocab_size + 3) for _ in range(rng.randrange(1, 40))]
        stream, text, sent = ours.stream(), "", 0
        while sent < len(ids):
            size = rng.randrange(1, 5)
            text += stream.push(ids[sent : sent + size])
            sent += size
        assert text + stream.finish() == ours.decode(ids)


def test_streaming_costs_the_same_late_as_early(ours, monkeypatch):
    """Each push reads a bounded number of tokens, however many came before."""
    ids = ours.encode("Hello world, 你好! ") * 100
    read = 0

    def counted(plain):
        def call(given):
            nonlocal read
            read += len(given) if isinstance(given, list) else 1
            return plain(given)

        return call

    for name in ("decode", "token_bytes"):
        monkeypatch.setattr(ours, name, counted(getattr(ours, name)))
    stream = ours.stream()
    per_push = []
    for token_id in ids:
        before = read
        stream.push([token_id])
        per_push.append(read - before)
    assert sum(per_push) >= len(ids), "the reads are counted"
    assert max(per_push[-100:]) <= max(per_push[:100]) <= 40


def test_end_ids_come_from_the_generation_config_first(tmp_path):
    save_byte_level_tokenizer(tmp_path)
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == {2}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == {2, 5}


def test_refusals_say_what_is_wrong(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    save_byte_level_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match="no tools here"):
        Tokenizer.from_dir(tmp_path).encode_chat([{"role": "tool", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TokenizerError, match="chat template"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_dir(tmp_path).encode_chat([{"role": "user", "content": "x"}])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


REPEATS = "{% for m in messages %}{{ padding }}{% endfor %}"
INDENTS = "{% for m in messages %}{{ m.content | tojson(indent=4) }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "size"),
    [
        (REPEATS, [{"role": "user", "content": "a"}] * 1000, 16_000_000),
        (INDENTS, [{"content": [[1] * 200_000]}], 2_000_000),
    ],
)
def test_rendering_stops_at_a_text_that_is_too_long_for_certain(tmp_path, template, messages, size):
    save_byte_level_tokenizer(tmp_path, template)
    tokenizer = Tokenizer.from_dir(tmp_path)
    padding = {"padding": "x" * 16_000}
    assert len(tokenizer.render_chat(messages, template_kwargs=padding)) >= size
    tracemalloc.start()
    try:
        with pytest.raises(TextTooLong) as caught:
            tokenizer.encode_chat(messages, template_kwargs=padding, limit=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.at_least == 1000
    assert peak < size / 2


def test_template_kwargs_do_not_replace_special_tokens(tmp_path):
    save_byte_level_tokenizer(tmp_path, "{{ eos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(messages, template_kwargs={"eos_token": "b"}) == tokenizer.render_chat(messages)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path):
    save_byte_level_tokenizer(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError):
        Tokenizer.from_dir(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_a_text_far_too_long_is_not_encoded_to_its_end(ours, monkeypatch):
    encoded = 0

    class Backend:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            nonlocal encoded
            encoded += sum(map(len, texts))
            return backend.encode_batch_fast(texts, **options)

    backend = ours._backend
    monkeypatch.setattr(ours, "_backend", Backend())
    text = "ab " * 200_000
    with pytest.raises(TextTooLong) as caught:
        ours.encode(text, limit=1000)
    assert caught.value.at_least == 1000
    assert encoded < len(text) / 10
    with pytest.raises(TextTooLong):
        ours.encode_chat([{"role": "user", "content": ""}] * 1001, limit=1000)
    # A text that may fit is encoded normally, and so is any text without a limit.
    assert ours.encode(text[:3000], limit=1000) == ours.encode(text[:3000])
    assert len(ours.encode(text)) > 200_000
    # Few tokens of many characters are within the limit.
    assert ours.encode("<|start|>" * 900, limit=1000) == ours.encode("<|start|>" * 900)


@pytest.mark.parametrize("module", ["wire.text.tokenizer", "wire.requests", "wire.responses"])
def test_the_gateway_can_import_it_without_torch(module):
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_special_tokens_can_be_shown(ours):
    """Special tokens can be shown, because some models mark the tags of their tool calls as special."""
    end = ours.token_id("<|end|>")
    ids = [*ours.encode("one", add_special_tokens=False), end, *ours.encode("two", add_special_tokens=False)]
    hidden, shown = ours.stream(), ours.stream(frozenset({end}))
    assert hidden.push(ids) + hidden.finish() == ours.decode(ids)
    text = shown.push(ids) + shown.finish()
    assert text.replace(" ", "") == "one<|end|>two"
    assert ours.token_id("no such token") is None


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("tokenizer_config.json", "bos_token", 5),
        ("tokenizer_config.json", "eos_token", {"text": "<|end|>"}),
        ("tokenizer_config.json", "unk_token", ["x"]),
        ("tokenizer_config.json", "chat_template", 5),
        ("tokenizer_config.json", "chat_template", [{"name": "default", "template": 5}]),
        ("generation_config.json", "eos_token_id", {"a": 1}),
        ("generation_config.json", "eos_token_id", [2, "x"]),
    ],
)
def test_fields_of_another_kind_are_refused_by_name(tmp_path, file, field, value):
    save_byte_level_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    content = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(content | {field: value}))
    with pytest.raises(TokenizerError, match=rf"{file}: {field}: expected .*, got"):
        Tokenizer.from_dir(tmp_path)
