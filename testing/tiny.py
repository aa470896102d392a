"""A model small enough for a test: two random Llama layers and tokenizers trained on a few lines."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<|start|>", "<|end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Grüße aus Köln! naïve café, 你好世界, こんにちは, мир, 🎉🎊",
]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_byte_level_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Save a byte-level tokenizer like GPT-2's, Llama 3's and SmolLM's: 256 byte tokens, and merges, cover any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>", "two words"])
    _save(tokenizer, folder, template)


def save_byte_fallback_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Save a tokenizer like Llama 2's and Mistral's: a marker for the space, byte tokens for uncovered characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _save_byte_fallback(tokenizer, folder, template)


def save_gemma_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Save a tokenizer like Gemma's: byte tokens, a marker for each space but none at the start, a start token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 1)])
    _save_byte_fallback(tokenizer, folder, template)


def _save_byte_fallback(tokenizer: Tokenizer, folder: Path, template: str | None) -> None:
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    _save(Tokenizer.from_str(json.dumps(content)), folder, template)


def _save(tokenizer: Tokenizer, folder: Path, template: str | None) -> None:
    """Save the files that `PreTrainedTokenizerFast` saves; its import takes 3 s."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing("$A", pair="$A:0 $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend"}
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    _write(folder / "tokenizer_config.json", {**kind, **special, "model_max_length": int(1e30)})
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def save_model(
    folder: Path,
    max_model_len: int = 4096,
    save_tokenizer: Callable[[Path], None] = save_byte_level_tokenizer,
    *,
    hidden: int = 64,
    head_dim: int = 16,
    seed: int = 0,
) -> None:
    """Save weights in fp32, tokenizer and configs as a folder that the engine loads. Four heads, two of keys.

    The files are those that transformers saves; its import takes 7 s.
    """
    import torch
    from safetensors.torch import save_file
    from torch import nn

    save_tokenizer(folder)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    heads = 4 * head_dim
    sizes = {"q": (hidden, heads), "k": (hidden, heads // 2), "v": (hidden, heads // 2), "o": (heads, hidden)}
    sizes = {f"self_attn.{name}": size for name, size in sizes.items()}
    sizes |= {"mlp.gate": (hidden, 128), "mlp.up": (hidden, 128), "mlp.down": (128, hidden)}
    # The order of the draws is that of transformers, which discards those of the layers' constructors.
    torch.manual_seed(seed)
    drawn: dict[str, nn.Embedding | nn.Linear] = {"model.embed_tokens": nn.Embedding(vocab_size, hidden)}
    for layer in range(2):
        drawn |= {f"model.layers.{layer}.{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()}
    for module in drawn.values():
        module.weight.data.normal_(0, 0.2)
    drawn["lm_head"] = nn.Linear(hidden, vocab_size, bias=False)
    drawn["lm_head"].weight.data.normal_(0, 0.2)
    tensors = {f"{name}.weight": module.weight.data for name, module in drawn.items()}
    norms = [f"layers.{layer}.{name}_layernorm" for layer in range(2) for name in ("input", "post_attention")]
    tensors |= {f"model.{name}.weight": torch.ones(hidden) for name in (*norms, "norm")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.23.0", "use_cache": True}
    shape = {"vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    shape |= {"max_position_embeddings": max_model_len}
    floats = {"initializer_range": 0.2, "rms_norm_eps": 1e-06}
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    other = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "dtype": "float32"}
    other |= {"attention_dropout": 0.0, "pad_token_id": None, "pretraining_tp": 1, "rope_parameters": rope}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    _write(folder / "config.json", {**kind, **shape, **floats, **other, **ids})
    generation = {"_from_model_config": True, "output_attentions": False, "output_hidden_states": False}
    _write(folder / "generation_config.json", generation | ids)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def save_adapter(
    folder: Path,
    rank: int = 4,
    seed: int = 1,
    hidden: int = 64,
    outputs: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Save a LoRA on every layer's q_proj, strong enough to change the generated text. outputs: its features out.
    vocab_size: if given, the LoRA is also on embed_tokens and lm_head.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs or hidden, rank, generator=generator)
    targets = ["q_proj"]
    if vocab_size is not None:
        targets += ["embed_tokens", "lm_head"]
        name = "base_model.model.model.embed_tokens.lora_embedding_"
        tensors[f"{name}A"] = torch.randn(rank, vocab_size, generator=generator)
        tensors[f"{name}B"] = torch.randn(hidden, rank, generator=generator)
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(vocab_size, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))


def save_base_and_adapters(folder: Path, ranks: Sequence[int]) -> Path:
    """Write the model as `base` and an adapter of each rank as `adapter-0`, `adapter-1`, ...; return the folder."""
    save_model(folder / "base", max_model_len=256)
    for i, rank in enumerate(ranks):
        save_adapter(folder / f"adapter-{i}", rank=rank, seed=i)
    return folder
