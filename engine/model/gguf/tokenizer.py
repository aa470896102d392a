"""The tokenizer and chat template in a GGUF file's metadata, as the `Tokenizer` that a model folder would give.

Supported are byte-level vocabularies (`gpt2`) with the pre-tokenizers of the served families, and SentencePiece ones
(`llama`), whose merges follow from the pieces' scores. Any other raises TokenizerError, which asks for a tokenizer
folder.
"""

from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.model.gguf.file import GgufFile, end_ids
from wire.text.tokenizer import Tokenizer, TokenizerError

_CONTROL, _USER_DEFINED = 3, 4
_HINT = "pass a folder with a tokenizer.json as --tokenizer"

# Split patterns of the families' own tokenizer.json, by their name in the metadata (tokenizer.ggml.pre).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}
_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)


class Parts(NamedTuple):
    """The arguments of a `Tokenizer`."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    template: str | None
    eos: list[int]


def read_tokenizer(path: Path) -> Tokenizer:
    """Return a GGUF file's tokenizer. Raises TokenizerError or ConfigError, as `read_parts` does."""
    return Tokenizer(*read_parts(path))


def read_parts(path: Path) -> Parts:
    """Return the parts of a GGUF file's tokenizer.

    Raises TokenizerError for a vocabulary that cannot be rebuilt exactly, ConfigError for a damaged file.
    """
    gguf = GgufFile.open(path)
    gguf.file.close()
    tokens, kind = gguf.get_list("tokenizer.ggml.tokens", str), gguf.get("tokenizer.ggml.model", str)
    if not tokens:
        raise TokenizerError(f"{path} has no vocabulary; {_HINT}")
    if kind == "gpt2":
        backend = _byte_level(gguf, tokens, path)
    elif kind == "llama":
        backend = _sentence_piece(gguf, tokens, path)
    else:
        raise TokenizerError(f"{path}: tokenizer.ggml.model {kind!r} is not known; {_HINT}")
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in _of_type(gguf, _USER_DEFINED, tokens)])
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in _of_type(gguf, _CONTROL, tokens)])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: gguf.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in names.items()}
    ids = {name: i for name, i in found.items() if i is not None}
    if any(not 0 <= i < len(tokens) for i in ids.values()):
        raise TokenizerError(f"{path}: a special token's id is outside of the vocabulary of {len(tokens)} tokens")
    special = {name: tokens[i] for name, i in ids.items()}
    adds_bos = gguf.get("tokenizer.ggml.add_bos_token", bool)
    if adds_bos is None:
        adds_bos = kind == "llama" or gguf.get("tokenizer.ggml.pre", str) == "llama-bpe"
    if gguf.get("tokenizer.ggml.add_eos_token", bool):
        raise TokenizerError(f"{path}: a vocabulary that adds an end token to each text is not served; {_HINT}")
    if adds_bos and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, ids["bos_token"])]
        )
    return Parts(backend, special, gguf.get("tokenizer.chat_template", str), end_ids(gguf, len(tokens)))


def _of_type(gguf: GgufFile, kind: int, tokens: list[str]) -> list[int]:
    types = gguf.get_list("tokenizer.ggml.token_type", int)[: len(tokens)]
    return [i for i, found in enumerate(types) if found == kind]


def _byte_level(gguf: GgufFile, tokens: list[str], path: Path) -> tokenizers.Tokenizer:
    pre = gguf.get("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre {pre!r} is unknown; expected one of {', '.join(_PRE_TOKENIZERS)}; {_HINT}"
        )
    merges: list[tuple[str, str]] = []
    for merge in gguf.get_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not merges or any(not vocabulary.keys() >= {left, right, left + right} for left, right in merges):
        raise TokenizerError(f"{path}: its merges do not fit its vocabulary; is the file damaged?")
    # Llama 3's vocabulary has words that no sequence of its merges produces, hence ignore_merges.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre in _SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(gguf: GgufFile, tokens: list[str], path: Path) -> tokenizers.Tokenizer:
    scores, types = gguf.get_list("tokenizer.ggml.scores", float), gguf.get_list("tokenizer.ggml.token_type", int)
    if not len(scores) == len(types) == len(tokens):
        raise TokenizerError(f"{path}: expected a score and a type for each of {len(tokens)} tokens; {_HINT}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if types[i] not in (1, _USER_DEFINED):
            continue
        for at in range(1, len(token)):
            left, right = vocabulary.get(token[:at]), vocabulary.get(token[at:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right))
    merges.sort()  # best score first, the order in which SentencePiece merges
    unknown = gguf.get("tokenizer.ggml.unknown_token_id", int) or 0
    if not 0 <= unknown < len(tokens):
        raise TokenizerError(f"{path}: unknown_token_id {unknown} is outside of the vocabulary")
    pairs = [(tokens[left], tokens[right]) for _, left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = [] if gguf.get("tokenizer.ggml.add_space_prefix", bool) is False else [normalizers.Prepend("▁")]
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
