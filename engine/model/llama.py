"""The decoder of all served families (Llama, Mistral, Qwen2, Qwen3, SmolLM), selected by configuration, with LoRA on
all weights.

Knows no scheduler, no sampling and no device: the ops come from `kernels.ops`.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.execution import outside_lora
from engine.model.config import ModelConfig, rope_frequencies
from engine.model.weights import Checkpoint, Progress, open_weights
from kernels.batch import Batch
from kernels.ops import DecoderWeights, FusedForward, KvCache, LayerWeights, LoraTables, Ops, PackedLinear
from kernels.reference import LoraGroup


class Decoder:
    """Weights and forward pass. `attach` sets the caches and rank pages that it uses."""

    def __init__(self, config: ModelConfig, ops: Ops, source: Checkpoint, max_model_len: int) -> None:
        self.config, self.ops = config, ops
        c = config
        embedding = source.get("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = [self._load_layer(source, i) for i in range(c.num_layers)]
        tied = c.tie_word_embeddings or "lm_head.weight" not in source
        head = embedding if tied else source.get("lm_head.weight", c.vocab_size, c.hidden_size)
        self.weights = DecoderWeights(
            embedding=embedding,
            layers=layers,
            norm=source.get("model.norm.weight", c.hidden_size),
            lm_head=ops.pack_linear(head),
            cos_sin=rope_table(c, max_model_len).to(embedding.device),
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
        )
        self.kv: list[KvCache] = []
        self._lora: LoraTables | None = None
        self._fused: FusedForward | None = None

    def attach(self, kv: list[KvCache], lora: LoraTables) -> None:
        """Set the caches and the adapters. kv: each layer's cache, written by `forward`. lora: the adapters' rank
        pages.
        """
        self.kv, self._lora = kv, lora
        self._fused = self.ops.fuse(self.weights, kv, lora)

    def forward(self, batch: Batch) -> Tensor:
        """Run one step of T flat tokens. Return `[L, vocab]` fp32 logits of the batch's `logits_rows`."""
        if self._fused is None:
            return self.forward_by_ops(batch)
        inputs = outside_lora.embed(self.weights.embedding, batch, self.ops, self._lora)
        logits = self._fused(batch, self._lora, inputs)
        outside_lora.add_to_logits(logits, self._fused.hidden(len(logits)), batch, self.ops, self._lora)
        return logits

    def forward_by_ops(self, batch: Batch) -> Tensor:
        """Run the same step op by op: on a backend without a fused form, and as the slow twin of that form."""
        w, ops, eps = self.weights, self.ops, self.config.rms_norm_eps
        plan = ops.plan(batch, self._lora)
        inputs = outside_lora.embed(w.embedding, batch, ops, self._lora)
        residual = ops.embed(w.embedding, batch.token_ids) if inputs is None else inputs
        x = ops.rms_norm(residual, w.layers[0].input_norm, eps)
        for i, (layer, kv) in enumerate(zip(w.layers, self.kv, strict=True)):
            groups = self._lora.groups[i] if self._lora is not None else _NO_LORA
            qkv = ops.linear(x, layer.qkv, groups.get("qkv"), plan)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv = self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            q = ops.rope_and_write_kv(qkv, w.cos_sin, kv, plan)
            x = ops.paged_attention(q, kv, plan, w.head_dim**-0.5, layer.sliding_window)
            x = ops.linear(x.view(len(x), -1), layer.o, groups.get("o"), plan)
            x = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = ops.linear(x, layer.gate_up, groups.get("gate_up"), plan)
            x = ops.linear(ops.silu_and_mul(x), layer.down, groups.get("down"), plan)
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            x = ops.add_rms_norm(x, residual, following, eps)
        hidden = x[batch.logits_rows]
        logits = ops.linear(hidden, w.lm_head, None, plan).float()
        outside_lora.add_to_logits(logits, hidden, batch, ops, self._lora)
        return logits

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        c = self.config
        q_end, k_end = c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim
        q, k, v = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
        eps = c.rms_norm_eps
        q = self.ops.rms_norm(q.reshape(-1, c.head_dim), q_norm, eps).view(q.shape)
        k = self.ops.rms_norm(k.reshape(-1, c.head_dim), k_norm, eps).view(k.shape)
        return torch.cat((q, k, v), -1)

    def _load_layer(self, source: Checkpoint, i: int) -> LayerWeights:
        c, pack = self.config, self.ops.pack_linear
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
        gate_up = [(mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size)]

        def linear(parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> PackedLinear:
            weight = source.fused([(name + ".weight", rows) for name, rows in parts], in_features)
            bias = source.fused([(name + ".bias", rows) for name, rows in parts]) if has_bias else None
            return pack(weight, bias)

        def norm(name: str, size: int) -> Tensor:
            return source.get(f"model.layers.{i}.{name}.weight", size)

        return LayerWeights(
            input_norm=norm("input_layernorm", c.hidden_size),
            qkv=linear(qkv, c.hidden_size, c.qkv_bias),
            q_norm=norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
            o=linear([(attention + "o_proj", c.hidden_size)], q, c.o_bias),
            post_norm=norm("post_attention_layernorm", c.hidden_size),
            gate_up=linear(gate_up, c.hidden_size, c.mlp_bias),
            down=linear([(mlp + "down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias),
            sliding_window=c.sliding_windows[i],
        )


_NO_LORA: dict[str, LoraGroup] = {}


def rope_table(config: ModelConfig, max_model_len: int) -> Tensor:
    """Return `[max_model_len, head_dim]` fp32: per position, cos of every frequency, then sin."""
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), torch.tensor(frequencies))
    return torch.cat((angles.cos(), angles.sin()), -1) * factor


def load_decoder(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress,
) -> Decoder:
    """Load a decoder. path: a folder of safetensors, or a GGUF file."""
    with open_weights(path, dtype, device, progress) as source:
        decoder = Decoder(config, ops, source, max_model_len)
        source.finish()
    return decoder
