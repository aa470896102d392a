"""The Llama family: Llama, Mistral, Qwen2, Qwen3 and SmolLM in one decoder, selected by configuration."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.model.config import ModelConfig, shared_fields, windows_by_type
from engine.model.decoder import Decoder, load_embedding_and_head, load_projections
from engine.model.rope import read_rope, rope_table
from engine.model.weights import ModelWeights
from kernels.ops import DecoderWeights, LayerWeights, Ops
from wire.errors import ConfigError
from wire.json_values import as_json

# Served architectures, each with the properties that it implies and config.json does not state.
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": True},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}


@dataclass(frozen=True, slots=True)
class LlamaConfig(ModelConfig):
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


def parse_config(raw: dict[str, Any], architecture: str) -> LlamaConfig:
    """Parse config.json's content. Raises ConfigError naming the field."""
    implied = ARCHITECTURES[architecture]
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError("hidden_act", f"expected silu, got {as_json(raw['hidden_act'])}")
    shared = shared_fields(raw, architecture)
    bias = raw.get("attention_bias", False)
    return LlamaConfig(
        **shared,
        rope=read_rope(raw),
        sliding_windows=_sliding_windows(raw, implied, shared["num_layers"]),
        qkv_bias=implied.get("qkv_bias", False) or bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=implied.get("qk_norm", False),
    )


def _sliding_windows(raw: dict[str, Any], implied: dict[str, bool], num_layers: int) -> tuple[int, ...]:
    if not (implied.get("sliding_window") or raw.get("use_sliding_window")):
        return (0,) * num_layers
    # Missing fields get transformers' defaults.
    window = raw.get("sliding_window", 4096) or 0
    if implied.get("sliding_window"):
        return (window,) * num_layers
    if raw.get("layer_types"):
        return windows_by_type(raw, window)
    return tuple(window if layer >= raw.get("max_window_layers", 28) else 0 for layer in range(num_layers))


class LlamaDecoder(Decoder):
    """Decoder with one norm in front of attention and one in front of the MLP."""

    can_fuse = True

    def __init__(self, config: LlamaConfig, ops: Ops, source: ModelWeights, max_model_len: int) -> None:
        c = config
        embedding, lm_head = load_embedding_and_head(source, c, ops)
        cos_sin = rope_table(c.rope, c.head_dim, max_model_len).to(source.device)
        weights = DecoderWeights(
            dtype=source.dtype,
            embedding=embedding,
            layers=[_load_layer(source, c, ops, i, cos_sin) for i in range(c.num_layers)],
            norm=source.get("model.norm.weight", c.hidden_size),
            lm_head=lm_head,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            attention_scale=c.head_dim**-0.5,
        )
        super().__init__(config, ops, weights)

    def run_layers(self, residual: Tensor, step: Any) -> Tensor:
        w, ops, eps = self.weights, self.ops, self.config.rms_norm_eps
        x = ops.rms_norm(residual, w.layers[0].input_norm, eps)
        for i, layer in enumerate(w.layers):
            groups = self.groups(i)
            x = self.attend(x, i, step)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(x, layer.gate_up, groups.get("gate_up"), step)
            x = ops.linear(ops.silu_and_mul(x), layer.down, groups.get("down"), step)
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            x = ops.add_rms_norm(x, residual, following, eps)
        return x


def _load_layer(source: ModelWeights, c: LlamaConfig, ops: Ops, i: int, cos_sin: Tensor) -> LayerWeights:
    def norm(name: str, size: int) -> Tensor:
        return source.get(f"model.layers.{i}.{name}.weight", size)

    return LayerWeights(
        **load_projections(source, c, ops, i, qkv_bias=c.qkv_bias, o_bias=c.o_bias, mlp_bias=c.mlp_bias),
        input_norm=norm("input_layernorm", c.hidden_size),
        q_norm=norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        mlp_norm=norm("post_attention_layernorm", c.hidden_size),
        cos_sin=cos_sin,
        sliding_window=c.sliding_windows[i],
    )
