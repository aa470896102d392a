"""Tiny random models of the families that the engine serves, saved by transformers."""

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
WINDOWS = {"sliding_window": 12, "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0},
    "gemma3_text": WINDOWS,
}


def save_family(folder: Path, family: str, max_model_len: int = 256) -> None:
    """Save a model of two layers without a tokenizer. family: a key of FAMILIES."""
    import torch
    import transformers  # takes 7 s, so it is not imported at collection

    sizes = SIZES | {"max_position_embeddings": max_model_len} | FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
