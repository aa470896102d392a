"""Construction of the draft model that `speculative_config` names: checks, weights, and its part of the KV cache."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.execution.draft_model import DraftModel, DraftSizes
from engine.execution.no_adapters import NoAdapters
from engine.execution.runner import Runner, RunnerLimits, StepRunner
from engine.execution.warmup import Measured, WarmUp
from engine.model.config import ModelConfig, read_config
from engine.model.decoder import Decoder
from engine.model.families import parse_model_config
from engine.scheduling.kv_cache import KVCache
from engine.speculative_config import refused
from kernels.ops import DecoderWeights
from kernels.platform import Platform
from wire.errors import ConfigError


def find_draft(config: EngineConfig, model: ModelConfig, platform: Platform) -> tuple[EngineConfig, ModelConfig] | None:
    """Return the draft model as an engine's own model, in the form of its checkpoint, and its config; None without a
    draft model. model: config of the base model.

    Raises ConfigError, naming speculative_config and the field, for a model that cannot be read or has another
    vocabulary, and on a simulated device.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.method != "draft_model":
        return None
    if not platform.has_ops:
        raise refused("method", "expected ngram: a simulated device runs no draft_model")
    path = Path(speculation.model).expanduser()
    if not path.exists():
        expected = "expected a local model folder or .gguf file; a hub id is not downloaded here"
        raise refused("model", f"no such folder or file: {speculation.model}: {expected}")
    draft = replace(config, model=str(path), quantization="auto", max_model_len=None, speculative_config=None)
    try:
        found = parse_model_config(read_config(path))
    except ConfigError as error:
        raise refused("model", error.message) from None
    _check_vocabulary(Path(config.model), model, path, found)
    return draft, found


def _check_vocabulary(base: Path, model: ModelConfig, path: Path, draft: ModelConfig) -> None:
    if draft.vocab_size != model.vocab_size:
        raise refused(
            "model",
            f"expected a model of the base model's vocabulary of {model.vocab_size} tokens, {path} has "
            f"{draft.vocab_size}",
        )
    own, others = _read_vocabulary(base), _read_vocabulary(path)
    different = sorted(i for i in own.keys() & others.keys() if own[i] != others[i])
    if different:
        first = different[0]
        raise refused(
            "model",
            f"expected a model of the base model's vocabulary: {len(different)} tokens of {path} have other texts, "
            f"the first is {first}: {others[first]!r} instead of {own[first]!r}",
        )


def _read_vocabulary(path: Path) -> dict[int, str]:
    """Return the texts of a tokenizer.json by token, without added tokens; none if the model has no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        vocabulary: Any = json.loads(file.read_text())["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return {i: text for text, i in vocabulary.items()}
        return {i: text for i, (text, _) in enumerate(vocabulary)}
    except (ValueError, KeyError, TypeError) as error:
        raise refused("model", f"{file} has no vocabulary: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model. kv_bytes: bytes of a token's keys and values. context: maximum tokens of a sequence."""

    decoder: Decoder
    limits: RunnerLimits
    most_tokens: int
    kv_bytes: int

    def make_runner(self, limits: RunnerLimits, captured: Callable[[int, int], None]) -> StepRunner:
        tables = NoAdapters(self.decoder.config.num_layers)
        return Runner(self.decoder, tables, limits, self.decoder.weights.norm.device, captured)

    def warmup(self, limits: RunnerLimits) -> WarmUp:
        """Return the steps that measure and warm up the model."""
        return WarmUp(limits, self.most_tokens, 0, 1)

    def measure(self, platform: Platform, progress: Callable[[int, int], None]) -> Measured:
        """Return the bytes that the runner needs beside its KV cache."""
        return self.warmup(self.limits).measure(self.make_runner, platform, progress)

    def start(
        self, config: EngineConfig, num_blocks: int, base: int, platform: Platform,
        warming: Callable[[int, int], None],
    ) -> DraftModel:  # fmt: skip
        """Return the proposer, with `num_blocks` blocks of its own. base: number of weights of the base model."""
        limits = replace(self.limits, num_blocks=num_blocks)
        runner = self.make_runner(limits, lambda *_: None)
        if not platform.is_host:
            self.warmup(limits).run(runner, warming)
        assert config.speculative_config is not None
        sizes = DraftSizes(
            context=limits.max_model_len,
            most_tokens=self.most_tokens,
            most_drafts=config.speculative_config.num_speculative_tokens,
            token_cost=min(1.0, num_weights(self.decoder.weights) / base),
        )
        cache = KVCache(num_blocks, config.block_size, config.enable_prefix_caching)
        return DraftModel(runner, cache, sizes)


def num_weights(weights: DecoderWeights) -> int:
    """Return the number of weights of the matrices that a token is multiplied by."""
    return sum(matrix.in_features * matrix.out_features for matrix in weights.matrices)
