"""Device copies of an adapter's LoRA on embed_tokens and lm_head, which are separate tensors outside the pages."""

from collections.abc import Callable

from torch import Tensor

from adapters.manifest import EMBEDDING, LM_HEAD, NO_LAYER
from adapters.tiers.adapter_reader import HostAdapter
from kernels.ops import EmbeddingLora, HeadLora
from kernels.platform import CopyStream
from kernels.weights import LinearWeights


def upload_embedding_head_lora(
    adapter: HostAdapter, copy_stream: CopyStream, pack: Callable[[Tensor], LinearWeights]
) -> tuple[EmbeddingLora | None, HeadLora | None]:
    """Upload the adapter's LoRA on the embedding and on the head. Returns None for each that it lacks."""
    embedding, head = adapter.modules.get((NO_LAYER, EMBEDDING)), adapter.modules.get((NO_LAYER, LM_HEAD))
    embedding_lora = (
        None
        if embedding is None
        else EmbeddingLora(
            copy_stream.upload(embedding.a.T.contiguous()), pack(copy_stream.upload(embedding.b)), embedding.scale
        )
    )
    head_lora = (
        None
        if head is None
        else HeadLora(pack(copy_stream.upload(head.a)), pack(copy_stream.upload(head.b)), head.scale)
    )
    return embedding_lora, head_lora
