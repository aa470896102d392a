"""The Gemma family: Gemma 2 and the text models of Gemma 3.

Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024; "Gemma 3 Technical Report", 2025.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig, required, shared_fields, windows_by_type
from engine.model.decoder import Decoder, load_embedding_and_head, load_projections
from engine.model.rope import RopeConfig, read_rope, rope_table
from engine.model.weights import ModelWeights
from kernels.ops import DecoderWeights, LayerWeights, Ops
from wire.errors import ConfigError
from wire.json_values import as_json
from wire.model_config import positive, positive_number

ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")


@dataclass(frozen=True, slots=True)
class GemmaConfig(ModelConfig):
    """Config of a Gemma model. A soft cap of 0 means no cap."""

    local_rope: RopeConfig
    """Rotary embedding of the layers with a sliding window."""
    attention_scale: float
    attention_softcap: float
    logits_softcap: float
    bias: bool
    qk_norm: bool


def parse_config(raw: dict[str, Any], architecture: str) -> GemmaConfig:
    """Parse config.json's content. Missing fields get transformers' defaults.

    Raises ConfigError naming the field.
    """
    is_third = architecture == "Gemma3ForCausalLM"
    activation = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ConfigError("hidden_activation", f"expected gelu_pytorch_tanh, got {as_json(activation)}")
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention", "expected false: only causal attention is served")
    required(raw, "head_dim")  # it is not hidden_size / num_attention_heads
    if is_third and raw.get("attn_logit_softcapping"):
        raise ConfigError("attn_logit_softcapping", "expected null: Gemma 3 does not cap attention scores")
    rope, local_rope = _ropes(raw) if is_third else (read_rope(raw),) * 2
    query_scalar = raw.get("query_pre_attn_scalar")
    return GemmaConfig(
        **shared_fields({"tie_word_embeddings": True, **raw}, architecture),
        rope=rope,
        sliding_windows=_sliding_windows(raw, default_pattern=6 if is_third else 2),
        local_rope=local_rope,
        attention_scale=positive_number("query_pre_attn_scalar", 256 if query_scalar is None else query_scalar) ** -0.5,
        attention_softcap=0.0 if is_third else _softcap(raw, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(raw, "final_logit_softcapping", None if is_third else 30.0),
        bias=raw.get("attention_bias", False),
        qk_norm=is_third,
    )


def _softcap(raw: dict[str, Any], name: str, default: float | None) -> float:
    value = raw.get(name, default)
    return 0.0 if value is None else positive_number(name, value)


def _ropes(raw: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return Gemma 3's rotary embeddings for full and for local layers.

    transformers 5 writes rope_parameters by layer type. Older versions write rope_theta and rope_scaling for full
    layers, and rope_local_base_freq for local ones.
    """
    given, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or not all(isinstance(fields or {}, dict) for fields in given.values()):
        raise ConfigError("rope_parameters", f"expected objects by type of layer, got {as_json(given)}")
    if not isinstance(scaling, dict):
        raise ConfigError("rope_scaling", f"expected an object, got {as_json(scaling)}")
    full = {"rope_theta": raw.get("rope_theta") or 1e6, **scaling, **(given.get("full_attention") or {})}
    local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, **(given.get("sliding_attention") or {})}
    return read_rope({**raw, "rope_parameters": full}), read_rope({**raw, "rope_parameters": local})


def _sliding_windows(raw: dict[str, Any], default_pattern: int) -> tuple[int, ...]:
    """Return each layer's window. Without layer_types, every `sliding_window_pattern`-th layer has full attention."""
    window = positive("sliding_window", raw.get("sliding_window") or 4096)
    if raw.get("layer_types"):
        return windows_by_type(raw, window)
    pattern = positive("sliding_window_pattern", raw.get("sliding_window_pattern") or default_pattern)
    return tuple(window if (i + 1) % pattern else 0 for i in range(required(raw, "num_hidden_layers")))


class GemmaDecoder(Decoder):
    """Decoder with norms in front of and behind attention and MLP, and windows on most layers."""

    can_fuse = True

    def __init__(self, config: GemmaConfig, ops: Ops, source: ModelWeights, max_model_len: int) -> None:
        c = config
        embedding, lm_head = load_embedding_and_head(source, c, ops)
        full, local = (rope_table(rope, c.head_dim, max_model_len).to(source.device) for rope in (c.rope, c.local_rope))
        weights = DecoderWeights(
            dtype=source.dtype,
            embedding=embedding,
            layers=[
                _load_layer(source, c, ops, i, local if window else full) for i, window in enumerate(c.sliding_windows)
            ],
            norm=_norm(source, "model.norm", c.hidden_size),
            lm_head=lm_head,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            attention_scale=c.attention_scale,
            attention_softcap=c.attention_softcap,
            # The published weights expect the factor rounded to the model's dtype.
            embedding_scale=float(torch.tensor(c.hidden_size**0.5, dtype=source.dtype)),
            activation="gelu",
        )
        super().__init__(config, ops, weights)
        self._logits_softcap = c.logits_softcap

    def run_layers(self, residual: Tensor, step: Any) -> Tensor:
        w, ops, eps = self.weights, self.ops, self.config.rms_norm_eps
        x = ops.rms_norm(residual, w.layers[0].input_norm, eps)
        for i, layer in enumerate(w.layers):
            groups = self.groups(i)
            x = self.attend(x, i, step)
            assert layer.attention_output_norm is not None
            assert layer.mlp_output_norm is not None
            x = ops.rms_norm(x, layer.attention_output_norm, eps)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(x, layer.gate_up, groups.get("gate_up"), step)
            x = ops.linear(ops.gelu_and_mul(x), layer.down, groups.get("down"), step)
            x = ops.rms_norm(x, layer.mlp_output_norm, eps)
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            x = ops.add_rms_norm(x, residual, following, eps)
        return x

    def finish_logits(self, logits: Tensor) -> Tensor:
        if self._logits_softcap:
            logits.div_(self._logits_softcap).tanh_().mul_(self._logits_softcap)
        return logits


def _load_layer(source: ModelWeights, c: GemmaConfig, ops: Ops, i: int, cos_sin: Tensor) -> LayerWeights:
    def norm(name: str, size: int = c.hidden_size) -> Tensor:
        return _norm(source, f"model.layers.{i}.{name}", size)

    return LayerWeights(
        **load_projections(source, c, ops, i, qkv_bias=c.bias, o_bias=c.bias, mlp_bias=False),
        input_norm=norm("input_layernorm"),
        q_norm=norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        attention_output_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp_output_norm=norm("post_feedforward_layernorm"),
        cos_sin=cos_sin,
        sliding_window=c.sliding_windows[i],
    )


def _norm(source: ModelWeights, name: str, size: int) -> Tensor:
    """Return a norm's weight in fp32. The checkpoint stores the weight minus 1."""
    return source.get(f"{name}.weight", size).float() + 1
