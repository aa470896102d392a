"""Grammars compiled for one vocabulary, and their matchers. No other module uses llguidance.

A `Grammar` is compiled once, outside the step loop, and shared. Each sequence has its own `Matcher`, whose state
depends on the sequence's output tokens only. docs/lab-notes.md gives the reasons for llguidance and the source of the
limits.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from engine.structured.cost import check_lark, check_regex, check_schemas
from wire.errors import BadRequest
from wire.structured import GrammarSpec

logger = logging.getLogger(__name__)

# Whitespace between JSON tokens: none, a space, or a newline with indentation. Without a bound, a small model may write
# spaces until max_tokens.
WHITESPACE = r"[ ]?|\n[ ]{0,32}"
# Limits that make a hostile grammar end its own request instead of stalling the steps that it shares. "Fuel" is
# llguidance's measure of work: masks take at most some 20 ms, and few take that long. 500 items in a row allow an
# object of about 120 optional properties; required ones do not count. Each lexer state takes some 1 kB and lives as
# long as the grammar.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

# Masks that take longer are charged to their tenant. An ordinary mask takes 0.01 to 0.5 ms; one that explores new lexer
# states takes up to 20 ms.
DEAR_MASK_SECONDS = 0.002

_BESIDE_MESSAGE = re.compile(r"<|\d+ \||\^+$")
# Position of an error; the client cannot use it if the grammar was generated from its schema or list.
_PLACE = re.compile(r"^at \d+\(\d+\): ")


def _free(_: float) -> None:
    pass


class Matcher:
    """The state of a sequence in its grammar. Owned by the engine's thread.

    charge: called with the CPU seconds of each mask that takes more than `DEAR_MASK_SECONDS`; must not block.
    Its methods never raise: a failure of the library, panics included, ends this sequence and no other of the same
    step.
    """

    __slots__ = ("_charge", "_end_ids", "_fault", "_state", "ended", "param")

    def __init__(
        self,
        state: llguidance.LLMatcher,
        end_ids: frozenset[int],
        param: str,
        charge: Callable[[float], object] = _free,
    ) -> None:
        self._state = state
        self._charge = charge
        self._end_ids = end_ids
        self.param = param
        self.ended = False
        self._fault = ""

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next: bit i of uint32 `[ceil(vocab / 32)]` is token i.

        An end token is allowed only where the grammar accepts, and is the only one where nothing else can follow.
        """
        began = time.thread_time()
        try:
            self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        except BaseException as exc:  # noqa: BLE001 - pyo3's PanicException is not an Exception
            self._fail(exc)
            for end_id in self._end_ids:
                bits[end_id // 32] |= np.uint32(1 << end_id % 32)
        took = time.thread_time() - began
        if took > DEAR_MASK_SECONDS:
            self._charge(took)

    def advance(self, token_id: int) -> bool:
        """Consume the sampled token. Return False if the grammar's limits were exceeded or the library failed; `error`
        gives the reason.
        """
        if self._fault:
            return False
        try:
            taken = self._state.consume_token(token_id)
            self.ended = token_id in self._end_ids and self._state.is_stopped()
        except BaseException as exc:  # noqa: BLE001 - as in `fill`
            self._fail(exc)
            return False
        return taken

    def copy(self) -> "Matcher":
        """Return a matcher in the same state that advances independently."""
        return Matcher(self._state.deep_copy(), self._end_ids, self.param, self._charge)

    @property
    def error(self) -> str:
        return self._fault or _first_line(self._state.get_error())

    def _fail(self, exc: BaseException) -> None:
        logger.error("the grammar library failed on %s: %s", self.param, type(exc).__name__)
        self._fault = "the grammar library failed on it"


class Grammar:
    """A compiled grammar; `matcher()` takes microseconds. charge: see `Matcher`."""

    __slots__ = ("_charge", "_end_ids", "_start", "param")

    def __init__(
        self,
        start: llguidance.LLMatcher,
        end_ids: frozenset[int],
        param: str,
        charge: Callable[[float], object] = _free,
    ) -> None:
        self._start = start
        self._end_ids = end_ids
        self.param = param
        self._charge = charge

    def matcher(self) -> Matcher:
        return Matcher(self._start.deep_copy(), self._end_ids, self.param, self._charge)

    def blaming(self, param: str) -> "Grammar":
        """Return the same grammar for a request that passed it as parameter `param`, which its errors then name."""
        return self if param == self.param else Grammar(self._start, self._end_ids, param, self._charge)

    def charging(self, charge: Callable[[float], object]) -> "Grammar":
        """Return the same grammar, whose expensive masks call `charge` on the engine's thread."""
        return Grammar(self._start, self._end_ids, self.param, charge)


class GrammarCompiler:
    """Thread-safe compiler for one vocabulary. `compile` blocks for milliseconds.

    tokenizer_json: returns the text of a tokenizer.json; called once. vocab_size: width of the model's logits.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None

    def prepare(self) -> None:
        """Read the vocabulary before requests run, because the library holds the interpreter lock meanwhile: 0.5 to 1 s
        for 49,152 tokens. `compile` names the fault of a vocabulary that cannot be read.
        """
        try:
            self._read_vocabulary("")
        except BadRequest as error:
            logger.info("no grammar can be enforced: %s", error)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            logger.warning("the grammars' vocabulary cannot be read: %s", type(error).__name__)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar. Raises BadRequest naming `spec.param` if it does not compile, or if no text fits it."""
        vocabulary = self._read_vocabulary(spec.param)
        try:
            text = _to_llguidance(spec)
        except BadRequest:
            raise
        except (ValueError, RecursionError) as exc:
            raise BadRequest.of(
                spec.param, f"the {_name(spec)} cannot be read: {_first_line(str(exc)).rstrip('.')}."
            ) from None
        limits = llguidance.LLParserLimits(**LIMITS)
        start = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if not start.is_error():
            # The first mask is the most expensive one, and reveals a well-formed grammar that no text fits.
            start.compute_bitmask()
        error = _first_line(start.get_error())
        if error in ("NoExtension", "NoExtensionBias") or (start.is_stopped() and not error):
            raise BadRequest.of(spec.param, f"no text matches the {_name(spec)}.")
        if error and spec.param == "tools":
            raise BadRequest.of(spec.param, f"a function's parameters cannot be enforced: {_PLACE.sub('', error)}.")
        if error:
            error = error if spec.kind == "grammar" else _PLACE.sub("", error)
            raise BadRequest.of(spec.param, f"the {_name(spec)} cannot be compiled: {error.rstrip('.')}.")
        return Grammar(start, self._end_ids, spec.param)

    def _read_vocabulary(self, param: str) -> llguidance.LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                if not self._end_ids:
                    raise BadRequest.of(
                        param, "this model has no end token, so no grammar can be enforced on its text."
                    )
                try:
                    self._vocabulary = llguidance.LLTokenizer(
                        self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=sorted(self._end_ids)
                    )
                except ValueError as exc:
                    raise BadRequest.of(
                        param,
                        f"no grammar can be enforced with this model's tokenizer: {_first_line(str(exc)).rstrip('.')}.",
                    ) from None
            return self._vocabulary


def _to_llguidance(spec: GrammarSpec) -> str:
    matcher = llguidance.LLMatcher
    if spec.kind == "json":
        check_schemas([json.loads(spec.text)], spec.param)
        # Overrides are applied last, so that an "x-guidance" in the schema cannot change them.
        options: Any = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": spec.lenient}
        return matcher.grammar_from_json_schema(spec.text, overrides=options)
    if spec.kind == "regex":
        check_regex(spec.text, spec.param)
        return matcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return matcher.grammar_from_regex("|".join(_literal(choice) for choice in json.loads(spec.text)))
    try:
        text = any_to_lark(spec.text)
    except Exception as exc:  # noqa: BLE001 - the library raises nothing narrower
        raise ValueError(f"it is neither Lark nor GBNF: {exc}") from None
    check_lark(text, spec.param)
    return matcher.grammar_from_lark(text)


def _literal(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def _name(spec: GrammarSpec) -> str:
    return {"json": "JSON schema", "regex": "regular expression", "choice": "list", "grammar": "grammar"}[spec.kind]


def _first_line(error: str) -> str:
    """Return llguidance's message in one line of at most 300 characters, without the excerpt of the grammar and the
    parser's state that follow it.
    """
    lines = [line.strip() for line in error.splitlines()]
    return " ".join(line for line in lines if line and not _BESIDE_MESSAGE.match(line))[:300]
