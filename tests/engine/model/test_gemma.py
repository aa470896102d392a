"""Gemma 2 and Gemma 3 against transformers: each part of the block, each backend, the configs, a chat over HTTP.

`tests/engine/test_engine_matches_peft.py` compares whole answers, with adapters on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch import Tensor

from engine.model.config import read_config
from engine.model.decoder import Decoder
from engine.model.families import load_decoder, parse_model_config
from engine.model.gemma import GemmaConfig
from engine.model.rope import rope_frequencies
from kernels.batch import Batch
from kernels.cpu import native, native_build
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.ops import KvCache, Ops
from testing import tiny
from testing.engine import Client, RunningServer
from wire.errors import ConfigError
from wire.text.tokenizer import ChatTemplateError, Tokenizer

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT = torch.randint(2, 160, (40,), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12,
    "max_position_embeddings": 256, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    # Caps low enough to change the answers.
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def save(folder: Path, family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    fields = SIZES | FAMILIES[family] | changes
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Return the path of a saved model, and transformers' logits for PROMPT in fp32."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, theirs(save(folder, request.param))


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(PROMPT[None]).logits[0].float()


def native_ops() -> Ops:
    library = native_build.load()
    assert library is not None, "the tests need a C++ compiler"
    return native.NativeOps(library)


def decoder_of(folder: Path, ops: Ops, dtype: torch.dtype = torch.float32) -> Decoder:
    config = parse_model_config(read_config(folder))
    decoder = load_decoder(folder, config, ops, dtype, CPU, 64, lambda *_: None)
    attach(decoder)
    return decoder


def attach(decoder: Decoder) -> None:
    c = decoder.config
    shape = (4, c.num_kv_heads, BLOCK_SIZE, c.head_dim)
    dtype = decoder.weights.dtype
    names = ("qkv", "o", "gate_up", "down")
    no_lora = [dict.fromkeys(names) for _ in range(c.num_layers)]

    class NoLora:
        groups, embeddings, heads, page_rank = no_lora, {}, {}, 8

    decoder.kv = [KvCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in no_lora]
    decoder._lora = NoLora()  # type: ignore[assignment]


def batch(first: int, last: int) -> Batch:
    """Return a step with PROMPT's tokens from `first` to `last`, exclusive, on shuffled blocks."""
    blocks = torch.tensor([2, 0, 3, 1])
    at = torch.arange(first, last)
    return Batch(
        token_ids=PROMPT[first:last].clone(),
        positions=at,
        slot_mapping=blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE,
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        context_lens=torch.tensor([last], dtype=torch.int32),
        block_tables=blocks.int()[None],
        adapter_index=torch.full((last - first,), -1, dtype=torch.int32),
        logits_rows=torch.arange(last - first),
        max_query_len=last - first,
        adapter_slots=(),
    )


def logits_of(decoder: Decoder) -> Tensor:
    """Return the prompt's logits, computed as a chunk longer than the window, a shorter one, and single tokens."""
    bounds = [0, 25, 34, *range(35, len(PROMPT) + 1)]
    with torch.inference_mode():
        steps = [decoder.forward_by_ops(batch(a, b)) for a, b in pairwise(bounds)]
    return torch.cat(steps)


@pytest.mark.parametrize("make", [native_ops, TorchOps, pytest.param(TritonOps, marks=pytest.mark.heavy)])
def test_every_backend_equals_transformers(model: tuple[Path, Tensor], make: Callable[[], Ops]) -> None:
    if make is TritonOps and torch.cuda.is_available():
        pytest.skip("the tensors of this test are the CPU's")
    folder, expected = model
    torch.testing.assert_close(logits_of(decoder_of(folder, make())), expected, atol=1e-4, rtol=0)


def test_bf16_is_as_close_to_fp32_as_transformers_is(model: tuple[Path, Tensor]) -> None:
    """The embedding factor, the norms and the caps are rounded where transformers rounds them, or later."""
    import transformers

    folder, expected = model
    in_bf16 = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    their_error = (theirs(in_bf16) - expected).abs().mean()
    for ops in (native_ops(), TorchOps()):
        error = (logits_of(decoder_of(folder, ops, torch.bfloat16)) - expected).abs().mean()
        assert error < 1.3 * their_error


NORMS = ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm", "q_norm", "k_norm")
PARTS = [
    *((family, part) for family in FAMILIES for part in (*NORMS[:4], "norm", "window", "scale", "embedding_scale")),
    ("gemma2", "softcap"), ("gemma2", "logits_softcap"),
    ("gemma3", "q_norm"), ("gemma3", "k_norm"), ("gemma3", "local rope"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "part"), PARTS, indirect=["model"])
def test_the_comparison_fails_if_a_part_is_wrong(model: tuple[Path, Tensor], part: str) -> None:
    """The comparison with transformers is sharp enough: if any single part is missing, the logits are far off."""
    folder, expected = model
    decoder = decoder_of(folder, TorchOps())
    w, c = decoder.weights, decoder.config
    layers = w.layers
    if part in NORMS:  # the difference from 1 is lost
        layers = [replace(layers[0], **{part: torch.ones_like(getattr(layers[0], part))}), *layers[1:]]
    elif part == "window":
        layers = [replace(layer, sliding_window=max(layer.sliding_window, 1) - 1) for layer in layers]
    elif part == "local rope":
        layers = [replace(layer, cos_sin=layers[1].cos_sin) for layer in layers]
    changed: dict[str, Any] = {
        "norm": {"norm": torch.ones_like(w.norm)},
        "softcap": {"attention_softcap": 0.0},
        "scale": {"attention_scale": c.head_dim**-0.5},
        "embedding_scale": {"embedding_scale": 1.0},
    }.get(part, {})
    decoder.weights = replace(w, layers=layers, **changed)
    if part == "logits_softcap":
        decoder._logits_softcap = 0.0  # type: ignore[attr-defined]
    assert (logits_of(decoder) - expected).abs().max() > 0.01


GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
    "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "sliding_window": 4096, "query_pre_attn_scalar": 224, "eos_token_id": [1, 107],
}  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        GEMMA3_1B,
        GEMMA3_1B | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 4},
        GEMMA3_1B | {"final_logit_softcapping": 30.0, "layer_types": ["full_attention"] * 26},
        {k: v for k, v in GEMMA3_1B.items() if "rope" not in k and "window" not in k and "scalar" not in k},
        GEMMA2_2B,
        GEMMA2_2B | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": None},
    ],
    ids=["3", "3-linear", "3-capped", "3-defaults", "2", "2-uncapped"],
)
def test_a_published_config_means_what_transformers_reads_in_it(raw: dict[str, Any]) -> None:
    import transformers

    found = parse_model_config(raw)
    assert isinstance(found, GemmaConfig)
    known = {k: v for k, v in raw.items() if v is not None or "softcapping" in k}
    expected = transformers.AutoConfig.for_model(**known)
    windows = [expected.sliding_window if kind == "sliding_attention" else 0 for kind in expected.layer_types]
    assert list(found.sliding_windows) == windows
    assert found.attention_scale == expected.query_pre_attn_scalar**-0.5
    is_third = raw["model_type"] == "gemma3_text"
    assert found.attention_softcap == (0 if is_third else expected.attn_logit_softcapping or 0)
    assert found.logits_softcap == (expected.final_logit_softcapping or 0)
    assert found.tie_word_embeddings
    assert found.eos_token_ids == frozenset(raw["eos_token_id"])
    for kind, rope in (("full_attention", found.rope), ("sliding_attention", found.local_rope)):
        fields = expected.rope_parameters[kind] if is_third else expected.rope_parameters
        plain = [fields["rope_theta"] ** (-2 * i / 256) / fields.get("factor", 1.0) for i in range(128)]
        assert rope_frequencies(rope, 256) == (pytest.approx(plain), 1.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"head_dim": None}, "head_dim"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar"),
        ({"sliding_window": "512"}, "sliding_window"),
        ({"sliding_window_pattern": 0.5}, "sliding_window_pattern"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": "linear"}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters.factor"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
    ],
)
def test_a_config_that_would_be_computed_otherwise_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(GEMMA3_1B | change)
    assert caught.value.field == field


# Format of Gemma's chats: roles user and model, a system message at the start of the first turn, alternating turns.
TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " The quick brown fox? "},
    {"role": "assistant", "content": "It jumps over the lazy dog."},
    {"role": "user", "content": "And then?"},
]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_chat_over_http_equals_transformers(family: str, tmp_path: Path, starts_servers: None) -> None:
    import transformers

    tiny.save_gemma_tokenizer(tmp_path, TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = save(tmp_path, family, vocab_size=len(tokenizer), eos_token_id=2)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.encode_chat(CHAT) == ids
    assert "<start_of_turn>model" in tokenizer.decode(ids)
    with pytest.raises(ChatTemplateError, match="must alternate"):
        ours.encode_chat(CHAT[:2] + CHAT[1:])
    with torch.no_grad():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=-1)[0]
        expected_logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(ids) > SIZES["sliding_window"]

    async def ask(url: str) -> tuple[Any, Any]:
        async with aiohttp.ClientSession() as session:
            client = Client(session, url)
            chat = await client.chat(messages=CHAT, max_tokens=20, ignore_eos=True)
            scored = await client.complete(prompt=ids, max_tokens=1, prompt_logprobs=0)
            return chat, scored

    server = RunningServer(tmp_path)
    try:
        chat, scored = asyncio.run(ask(server.url))
    finally:
        server.close()
    assert chat["usage"]["prompt_tokens"] == len(ids)
    assert chat["choices"][0]["message"]["content"] == tokenizer.decode(whole[len(ids) :], skip_special_tokens=True)
    entries = scored["choices"][0]["prompt_logprobs"][1:]
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
    wanted = [float(expected_logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert found == pytest.approx(wanted, abs=1e-4)
