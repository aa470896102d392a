"""Base of the decoders of all families: embedding, logits, LoRA on the embedding and head, and loading.

A family's own module has its layers. Independent of scheduling, sampling and the device: the ops come from
`kernels.ops`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypedDict

from torch import Tensor

from engine.model import embedding_head_lora
from engine.model.config import ModelConfig
from engine.model.weights import ModelWeights
from kernels.batch import Batch
from kernels.ops import DecoderWeights, FusedForward, KvCache, LoraTables, Ops
from kernels.reference import HeadNorms, LoraGroup
from kernels.weights import DENSE, SERVED, LinearWeights
from wire.errors import ConfigError


class Decoder(ABC):
    """Weights and forward pass. `attach` sets the caches and rank pages of the forward pass.

    can_fuse: whether `DecoderWeights` describes the family's layers completely, so that a backend may run them in one
    call.
    """

    can_fuse: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, ops: Ops, weights: DecoderWeights) -> None:
        self.config, self.ops, self.weights = config, ops, weights
        self.kv: list[KvCache] = []
        self._lora: LoraTables | None = None
        self._fused: FusedForward | None = None

    def attach(self, kv: list[KvCache], lora: LoraTables) -> None:
        """Set the caches and the adapters. kv: each layer's cache, written by `forward`. lora: the adapters' rank
        pages.
        """
        self.kv, self._lora = kv, lora
        self._fused = self.ops.fuse(self.weights, kv, lora) if self.can_fuse else None

    def detach(self) -> None:
        """Drop the caches and the adapters, so that the caches' memory is free."""
        self.kv, self._lora, self._fused = [], None, None

    def forward(self, batch: Batch) -> Tensor:
        """Run one step of T flat tokens. Return `[L, vocab]` fp32 logits of the batch's `logits_rows`."""
        if self._fused is None:
            return self.forward_by_ops(batch)
        inputs = self.embed(batch.token_ids, batch.embedding_rows) if batch.embedding_rows else None
        logits = self._fused(batch, self._lora, inputs)
        return self._finish(logits, self._fused.hidden(len(logits)), batch.head_rows)

    def forward_by_ops(self, batch: Batch) -> Tensor:
        """Run the same step op by op: on backends without a fused form, and as the fused form's slow twin in tests."""
        return self.logits(self.hidden(self.embed(batch.token_ids, batch.embedding_rows), batch), batch.head_rows)

    def embed(self, token_ids: Tensor, rows: Mapping[int, Tensor]) -> Tensor:
        """Return the first layer's input, `[T, hidden]`. rows: the tokens of each slot with LoRA on the embedding."""
        w, scale = self.weights, self.weights.embedding_scale
        inputs = self.ops.embed(w.embedding, token_ids, w.dtype)
        if scale != 1:
            inputs *= scale
        if rows and self._lora is not None:
            embedding_head_lora.add_to_inputs(inputs, token_ids, scale, rows, self.ops, self._lora)
        return inputs

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Run the layers. Return lm_head's input for the batch's `logits_rows`, `[L, hidden]`. inputs: overwritten.

        Launches only device work that a graph can contain.
        """
        return self.run_layers(inputs, self.ops.step_tables(batch, self._lora))[batch.logits_rows]

    def logits(self, hidden: Tensor, head_rows: Mapping[int, Tensor]) -> Tensor:
        """Return `[L, vocab]` fp32 logits. head_rows: the rows of each slot with LoRA on lm_head."""
        return self._finish(self.ops.linear(hidden, self.weights.lm_head, None, None).float(), hidden, head_rows)

    def _finish(self, logits: Tensor, hidden: Tensor, head_rows: Mapping[int, Tensor]) -> Tensor:
        if head_rows and self._lora is not None:
            embedding_head_lora.add_to_logits(logits, hidden, head_rows, self.ops, self._lora)
        return self.finish_logits(logits)

    @abstractmethod
    def run_layers(self, residual: Tensor, step: Any) -> Tensor:
        """Return the input of lm_head for every row, `[T, hidden]`. residual: the embeddings; overwritten."""

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Return the logits after the family's last operation on them, perhaps in place."""
        return logits

    def groups(self, layer: int) -> Mapping[str, LoraGroup]:
        """Return a layer's rank pages by group of projections."""
        return self._lora.groups[layer] if self._lora is not None else {}

    def attend(self, x: Tensor, layer: int, step: Any) -> Tensor:
        """Return the output of a layer's attention, before any norm, and write its keys and values. x: its normed
        input, `[T, hidden]`.
        """
        w, ops, groups, kv = self.weights.layers[layer], self.ops, self.groups(layer), self.kv[layer]
        qkv = ops.linear(x, w.qkv, groups.get("qkv"), step)
        norms = None
        if w.q_norm is not None and w.k_norm is not None:
            norms = HeadNorms(w.q_norm, w.k_norm, self.config.rms_norm_eps)
        q = ops.rope_and_write_kv(qkv, w.cos_sin, kv, step, norms)
        scale, softcap = self.weights.attention_scale, self.weights.attention_softcap
        x = ops.paged_attention(q, kv, step, scale, w.sliding_window, softcap)
        return ops.linear(x.view(len(x), -1), w.o, groups.get("o"), step)


class Projections(TypedDict):
    """A layer's fused projections, by their name in `LayerWeights`."""

    qkv: LinearWeights
    o: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights


def load_embedding_and_head(source: ModelWeights, config: ModelConfig, ops: Ops) -> tuple[LinearWeights, LinearWeights]:
    """Return the embedding and the packed head. In a tied model both have the same weights; quantised ones are the same
    object, so they are in memory once.
    """
    sizes = config.vocab_size, config.hidden_size
    embedding = source.embedding("model.embed_tokens", *sizes)
    table = embedding if embedding.scheme == DENSE else pack(ops, embedding, "model.embed_tokens")
    if source.has_module("lm_head") and not config.tie_word_embeddings:
        return table, pack(ops, source.embedding("lm_head", *sizes), "lm_head")
    return table, pack(ops, table, "model.embed_tokens") if embedding.scheme == DENSE else table


def pack(ops: Ops, weights: LinearWeights, name: str) -> LinearWeights:
    """Pack a layer. Raises ConfigError, naming the tensor and the scheme, if the backend does not serve the scheme."""
    if not ops.serves(weights.scheme):
        raise ConfigError("quantization", f"tensor {name} is {weights.scheme}; served are {SERVED}")
    return ops.pack(weights)


def load_projections(
    source: ModelWeights, config: ModelConfig, ops: Ops, layer: int, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool
) -> Projections:
    """Load a layer's projections. Raises ConfigError naming a tensor that is missing or has the wrong shape."""
    c = config
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
    gate_up = [(mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size)]

    def linear(parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> LinearWeights:
        return pack(ops, source.linear(parts, in_features, has_bias=has_bias), parts[0][0])

    return {
        "qkv": linear(qkv, c.hidden_size, qkv_bias),
        "o": linear([(attention + "o_proj", c.hidden_size)], q, o_bias),
        "gate_up": linear(gate_up, c.hidden_size, mlp_bias),
        "down": linear([(mlp + "down_proj", c.hidden_size)], c.intermediate_size, mlp_bias),
    }
