"""Parser of PEFT's `adapter_config.json`; refuses unsupported configs with the field and the reason.

Every field of PEFT's `LoraConfig` is honoured, ignored (it does not change a trained adapter's output) or refused. An
unknown field is refused unless it is empty. No torch.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from adapters.patterns import Budget, ModulePattern, PatternError, pattern_key_matcher
from wire.escaping import escaped

# Modules of the embedding and the head. They belong to no layer, so NO_LAYER stands for their layer number.
EMBEDDING, LM_HEAD = "embed_tokens", "lm_head"
NO_LAYER = -1
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Projections that read the same input form a group: one shrink, one expand.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MAX_PATTERNS = 4096
# No engine serves a larger rank; uploads are also checked against the limit of this deployment's engines.
MAX_RANK = 4096
# The search for the invocation of an activated LoRA takes a pass over the prompt for each of these tokens.
MAX_INVOCATION_TOKENS = 128

HONOURED = {
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "ensure_weight_tying"),
    "alora_invocation_tokens",
}
# The adapter's origin and training, or options of settings that are refused when on.
HARMLESS = {
    *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    # PEFT itself resets it to false for the linear layers of the served families.
    *("qalora_group_size", "fan_in_fan_out"),
}
REFUSED = {
    "use_dora": "DoRA's magnitude vectors are not served",
    "modules_to_save": "fully trained copies of base modules are not served",
    "lora_bias": "a bias on LoRA B is not served",
    "trainable_token_indices": "trained token embeddings are not served",
    "layer_replication": "replicated layers are not served",
    "megatron_config": "Megatron's parallel layers are not served",
    "use_qalora": "QA-LoRA's pooled inputs are not served",
    "velora_config": "VeLoRA is not served",
    "monteclora_config": "MonteCLoRA's sampled weights are not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "kasa_config": "KaSA's singular values are not served",
    "target_parameters": "LoRA on bare parameters is not served",
}
# PEFT treats an empty object as a setting that is on, with its defaults.
_OFF: tuple[Any, ...] = (None, False, [])
# These initialise the adapter by changing the base weights, so the file is not a delta to the served base model.
_BASE_CHANGING_INIT = ("pissa", "olora", "corda", "lora_ga", "loftq")
_PLAIN_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


# A refusal quotes uploaded names and values, so its field and message are cut to these lengths.
MAX_FIELD_CHARS = 160
MAX_MESSAGE_CHARS = 400
# A module's full name as in the canonical patterns. It matches only itself as a regular expression.
_FULL_NAME = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj|model\.embed_tokens|lm_head", re.ASCII)


class AdapterError(ValueError):
    """An adapter that is refused. `field` names the PEFT field, tensor or file; `message` states what was expected.

    Both are cut and escaped, so that they fit any log and any encoding.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = escaped(field, MAX_FIELD_CHARS)
        self.message = escaped(message, MAX_MESSAGE_CHARS)
        super().__init__(f"{self.field}: {self.message}")


def quoted(value: object) -> str:
    """Return the beginning of a value's repr, for use in a message."""
    return escaped(repr(value), 80)


class AdapterNotFound(AdapterError):
    """The store has no adapter of this digest, or the folder does not exist."""


@dataclass(frozen=True)
class BaseShape:
    """Sizes of the base model on which adapters depend. projections: name -> (out_features, in_features).

    embedding_head: the same for embed_tokens (vocabulary in, hidden out) and lm_head; empty if the vocabulary is
    unknown.
    groups: the projections of each group, in the order of their columns in the base model's fused output.
    """

    num_layers: int
    projections: Mapping[str, tuple[int, int]]
    embedding_head: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GROUPS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BaseShape":
        """Read the sizes from a Hugging Face `config.json`. All served families have the same projections.

        Raises ValueError naming the key.
        """

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"base model's config.json: {key}: expected a positive integer, got {value!r}")
            return value

        hidden, heads, inner = size("hidden_size"), size("num_attention_heads"), size("intermediate_size")
        head_dim = size("head_dim", hidden // heads)
        q, kv = heads * head_dim, size("num_key_value_heads", heads) * head_dim
        shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        embedding_head = {}
        if config.get("vocab_size") is not None:
            vocabulary = size("vocab_size")
            embedding_head = {EMBEDDING: (hidden, vocabulary), LM_HEAD: (vocabulary, hidden)}
        return cls(size("num_hidden_layers"), shapes, embedding_head)

    @classmethod
    def from_config_dir(cls, path: str | PathLike[str]) -> "BaseShape":
        """Read the sizes from a model folder's `config.json`. Raises ValueError, OSError."""
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("base model's config.json: expected a JSON object")
        return cls.from_config(config)


@dataclass(frozen=True)
class AdapterManifest:
    """The checked fields of an adapter's config that change the result.

    Module names below are PEFT's, such as `model.layers.3.self_attn.q_proj`. invocation: tokens that
    switch an activated LoRA (aLoRA) on, from their last occurrence in the prompt; empty for a plain LoRA.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str = ()
    layers: frozenset[int] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    ensure_weight_tying: bool = False
    invocation: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        budget = Budget()
        matchers = {
            "target_modules": _module_matcher("target_modules", self.target_modules, budget),
            "exclude_modules": _module_matcher("exclude_modules", self.exclude_modules, budget),
            "rank_pattern": _pattern_lookup("rank_pattern", self.rank_pattern, self.rank, budget),
            "alpha_pattern": _pattern_lookup("alpha_pattern", self.alpha_pattern, self.alpha, budget),
        }
        object.__setattr__(self, "_matchers", matchers)

    def targets(self, module: str, layer: int) -> bool:
        """Return whether PEFT would put LoRA on this module of this layer. Raises AdapterError for a costly pattern."""
        if self._ask("exclude_modules", module) or not self._ask("target_modules", module):
            return False
        # A module's full name overrides layers_to_transform, and lm_head's name is a full name.
        return self.layers is None or layer in self.layers or module in self.target_modules

    def rank_of(self, module: str) -> int:
        return int(self._ask("rank_pattern", module))

    def scale_of(self, module: str) -> float:
        """Return the factor on B A x: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank, alpha = self.rank_of(module), float(self._ask("alpha_pattern", module))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _ask(self, name: str, module: str) -> Any:
        matchers: dict[str, Callable[[str], Any]] = self._matchers  # type: ignore[attr-defined]
        try:
            return matchers[name](module)
        except PatternError as error:
            raise AdapterError(name, str(error)) from None


def parse_manifest(config: object) -> AdapterManifest:
    """Check a parsed `adapter_config.json`. Raises AdapterError naming the field."""
    if not isinstance(config, dict):
        raise AdapterError("adapter_config.json", "expected a JSON object")
    _refuse(config)
    layers = _layers(config)
    targets = _names(config, "target_modules", default=("q_proj", "v_proj"))  # PEFT's, for Llama, Mistral and Qwen
    if isinstance(targets, str) and layers is not None:
        raise AdapterError("layers_to_transform", "works only with a list of target_modules, not with a pattern")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = PROJECTIONS
    return AdapterManifest(
        rank=_rank("r", config.get("r", 8)),
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=_flag(config, "use_rslora"),
        ensure_weight_tying=_flag(config, "ensure_weight_tying"),
        invocation=_invocation(config),
        target_modules=targets,
        exclude_modules=_names(config, "exclude_modules", default=()),
        layers=layers,
        rank_pattern={k: _rank(f"rank_pattern[{quoted(k)}]", v) for k, v in _patterns(config, "rank_pattern").items()},
        alpha_pattern={
            k: _number(f"alpha_pattern[{quoted(k)}]", v) for k, v in _patterns(config, "alpha_pattern").items()
        },
    )


def _refuse(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError("peft_type", f"expected 'LORA', got {quoted(config.get('peft_type'))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError("task_type", f"expected 'CAUSAL_LM' or null, got {quoted(config['task_type'])}")
    for name, why in REFUSED.items():
        if config.get(name) not in _OFF:
            raise AdapterError(name, why)
    if config.get("bias") not in (None, "none"):
        raise AdapterError("bias", f"expected 'none', got {quoted(config['bias'])}; trained biases are not served")
    _flag(config, "fan_in_fan_out")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INIT):
        raise AdapterError(
            "init_lora_weights",
            f"{quoted(init)} changes the base weights; save the adapter with path_initial_model_for_weight_conversion",
        )
    if not isinstance(init, str | bool | None) or init not in _PLAIN_INIT:
        raise AdapterError("init_lora_weights", f"{quoted(init)} is not known")
    for name, value in config.items():
        if name not in HONOURED and name not in HARMLESS and name not in REFUSED and value:
            raise AdapterError(name, "this field is unknown, so its effect cannot be applied; remove it if it has none")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(name, f"expected a positive integer, got {quoted(value)}")
    if value > MAX_RANK:
        raise AdapterError(name, f"expected a rank of at most {MAX_RANK}, got {quoted(value)}")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise AdapterError(name, f"expected a finite number, got {quoted(value)}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(name, f"expected true or false, got {quoted(value)}")
    return bool(value)


def _names(config: Mapping[str, Any], name: str, default: tuple[str, ...]) -> tuple[str, ...] | str:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise AdapterError(name, "expected a list of module names or one pattern")
    return tuple(value)


def _invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    name = "alora_invocation_tokens"
    value = config.get(name)
    if value in _OFF:
        return ()
    if not isinstance(value, list) or not all(_is_int(token) and 0 <= token < 1 << 31 for token in value):
        raise AdapterError(name, f"expected a list of token ids, got {quoted(value)}")
    if len(value) > MAX_INVOCATION_TOKENS:
        raise AdapterError(name, f"expected at most {MAX_INVOCATION_TOKENS} token ids, got {len(value)}")
    return tuple(value)


def _patterns(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(name, "expected an object of module patterns")
    if len(value) > MAX_PATTERNS:
        raise AdapterError(name, f"has {len(value)} patterns; the limit is {MAX_PATTERNS}")
    return value


def _layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if value is None and config.get("layers_pattern"):
        raise AdapterError("layers_pattern", "works only with layers_to_transform")
    if value is None or value == []:
        return None
    if config.get("layers_pattern") not in (None, "", [], "layers", ["layers"]):
        raise AdapterError("layers_pattern", "expected 'layers', the name of the decoder's layers")
    indexes = value if isinstance(value, list) else [value]
    if not all(_is_int(i) and i >= 0 for i in indexes):
        raise AdapterError("layers_to_transform", "expected a layer index or a list of them")
    return frozenset(indexes)


def _module_matcher(name: str, wanted: tuple[str, ...] | str, budget: Budget) -> Callable[[str], bool]:
    if isinstance(wanted, str):
        if not wanted:
            return lambda module: False
        try:
            return ModulePattern(wanted, budget).fullmatch
        except PatternError as error:
            raise AdapterError(name, str(error)) from None
    names = frozenset(wanted)

    def matches(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[i:]) in names for i in range(len(parts)))

    return matches


def _pattern_lookup(name: str, patterns: Mapping[str, Any], default: float, budget: Budget) -> Callable[[str], float]:
    """Return a lookup in which the first matching pattern in the file's order wins, as in PEFT.

    Patterns that are full module names, such as the store's, need no regular expression.
    """
    if all(_FULL_NAME.fullmatch(key) for key in patterns):
        return lambda module: patterns.get(module, default)
    try:
        matchers = [(pattern_key_matcher(key, budget), value) for key, value in patterns.items()]
    except PatternError as error:
        raise AdapterError(name, str(error)) from None

    def lookup(module: str) -> float:
        return next((value for matches, value in matchers if matches(module)), default)

    return lookup
