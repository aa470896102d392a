"""The tokenizer and chat template that lie in a GGUF file's metadata, as the `Tokenizer` that a folder would give.

Byte-level vocabularies (`gpt2`) with the pre-tokenizers of the families we serve, and SentencePiece ones (`llama`),
whose merges follow from the pieces' scores. For any other: TokenizerError, which asks for a tokenizer folder.
"""

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.model.gguf_file import GgufFile
from engine.tokenizer import Tokenizer, TokenizerError

_CONTROL, _USER_DEFINED = 3, 4
_HINT = "give a folder with a tokenizer.json by --tokenizer"

# Splits of the families' own tokenizer.json. `pre` names them in the metadata.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}
_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)


class Parts(NamedTuple):
    """What a `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    template: str | None
    eos: list[int]


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises TokenizerError or ConfigError, as `read_parts`."""
    return Tokenizer(*read_parts(path))


def read_parts(path: Path) -> Parts:
    """Raises TokenizerError for a vocabulary that we can't rebuild exactly, ConfigError for a damaged file."""
    gguf = GgufFile.open(path)
    gguf.file.close()
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in gguf.metadata.items()}
    tokens, kind = meta.get("tokens"), meta.get("model")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TokenizerError(f"{path} holds no vocabulary; {_HINT}")
    if kind == "gpt2":
        backend = _byte_level(meta, tokens, path)
    elif kind == "llama":
        backend = _sentence_piece(meta, tokens, path)
    else:
        raise TokenizerError(f"{path}: tokenizer.ggml.model {kind!r} is not known; {_HINT}")
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in _of_type(meta, _USER_DEFINED)])
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in _of_type(meta, _CONTROL)])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta[f"{key}_token_id"] for name, key in names.items() if meta.get(f"{key}_token_id") is not None}
    if any(not isinstance(i, int) or not 0 <= i < len(tokens) for i in ids.values()):
        raise TokenizerError(f"{path}: a special token's id is outside of the vocabulary of {len(tokens)} tokens")
    special = {name: tokens[i] for name, i in ids.items()}
    adds_bos = meta.get("add_bos_token", kind == "llama" or meta.get("pre") == "llama-bpe")
    if meta.get("add_eos_token"):
        raise TokenizerError(f"{path}: a vocabulary that ends each text with a token is not served; {_HINT}")
    if adds_bos and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, ids["bos_token"])]
        )
    ends = [meta[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if meta.get(key) is not None]
    return Parts(backend, special, meta.get("tokenizer.chat_template"), ends)


def _of_type(meta: dict[str, Any], kind: int) -> list[int]:
    return [i for i, found in enumerate(meta.get("token_type") or ()) if found == kind]


def _byte_level(meta: dict[str, Any], tokens: list[str], path: Path) -> tokenizers.Tokenizer:
    pre = meta.get("pre")
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not known; these are: {', '.join(_PRE_TOKENIZERS)}; {_HINT}"
        )
    merges = [tuple(merge.split(" ")) for merge in meta.get("merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not merges or any(len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)} for pair in merges):
        raise TokenizerError(f"{path}: its merges do not fit its vocabulary; is the file damaged?")
    # Llama 3's vocabulary has words that no chain of its merges reaches.
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


def _sentence_piece(meta: dict[str, Any], tokens: list[str], path: Path) -> tokenizers.Tokenizer:
    scores, types = meta.get("scores"), meta.get("token_type")
    if not isinstance(scores, list) or not isinstance(types, list) or not len(scores) == len(types) == len(tokens):
        raise TokenizerError(f"{path}: expected a score and a type of each of {len(tokens)} tokens; {_HINT}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if types[i] not in (1, _USER_DEFINED):
            continue
        for at in range(1, len(token)):
            left, right = vocabulary.get(token[:at]), vocabulary.get(token[at:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right))
    merges.sort()  # best score first, as SentencePiece merges
    unknown = meta.get("unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise TokenizerError(f"{path}: unknown_token_id {unknown} is outside of the vocabulary")
    pairs = [(tokens[left], tokens[right]) for _, left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if meta.get("add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
