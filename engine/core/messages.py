"""Messages between a front and its core, in both directions: data only, msgpack on the wire.

The front tokenizes, detokenizes and speaks HTTP; the core schedules, steps, and has everything that steps read:
adapters in host memory, compiled grammars, masks. A frame to the core has the front's commands of one iteration of its
event loop, in order. A frame to the front has one event; a step is one event.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from adapters.tiers.state import LoadResult
from engine.config import EngineConfig
from engine.errors import Fault
from engine.scheduling.outputs import StepOutputs
from engine.scheduling.request import NewRequest, RequestOutput
from engine.state import EngineState
from wire.structured import GrammarSpec


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message. Its class is its first element, its fields follow in order."""


class TokenRules(msgspec.Struct, array_like=True, frozen=True):
    """A request's rules for its tokens, which are sent and compiled once for all of its sequences. allowed: token ids
    as int32; as integers, 2**18 would hold the event loops of both sides for milliseconds. banned: token sequences that
    the output may not contain. bias: `logit_bias`. Empty: no such rule.
    """

    grammar: GrammarSpec | None = None
    allowed: bytes = b""
    banned: list[list[int]] = []
    bias: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self.grammar or self.allowed or self.banned or self.bias)


NO_RULES = TokenRules()


class Prompt(msgspec.Struct, array_like=True):
    """A prompt's tokens and their keys in the prefix cache, sent once for all choices."""

    token_ids: list[int]
    prefix_keys: Sequence[bytes]


# Commands.


class Add(Message):
    """Queue a request's sequences. sequences: each with the index of its prompt, and without the prompt itself."""

    prompts: list[Prompt]
    sequences: list[tuple[int, NewRequest]]
    rules: TokenRules

    @classmethod
    def of(cls, new_requests: Sequence[NewRequest], rules: TokenRules) -> "Add":
        """Return the command for a request's sequences."""
        prompts: list[Prompt] = []
        indices: dict[tuple[int, int], int] = {}
        sequences = []
        for new in new_requests:
            if (key := (id(new.prompt_token_ids), id(new.prefix_keys))) not in indices:
                indices[key] = len(prompts)
                prompts.append(Prompt(new.prompt_token_ids, new.prefix_keys))
            sequences.append((indices[key], replace(new, prompt_token_ids=[], prefix_keys=())))
        return cls(prompts, sequences, rules)

    def new_requests(self) -> list[NewRequest]:
        """Return the sequences with their prompts."""
        return [
            replace(new, prompt_token_ids=self.prompts[i].token_ids, prefix_keys=self.prompts[i].prefix_keys)
            for i, new in self.sequences
        ]


class Abort(Message):
    """End a sequence before the next step; `Released` follows. Outputs of the step in flight may come before.

    is_complete: whether a stop string ended its text. The scheduler then learns from its length.
    """

    request_id: str
    is_complete: bool = False


class AddMixture(Message):
    """Make a mixture of adapters loadable. parts: see `wire.mixtures.Mixture`."""

    parts: tuple[tuple[str, float], ...]


class RemoveMixture(Message):
    """Free a mixture that no request uses. Its pages stay until their room is needed."""

    digest: str


class Ask(Message):
    """Ask a question; `Reply` follows. call: number of the question, which its `Reply` repeats."""

    call: int
    question: "Question"


class Cancel(Message):
    """Cancel an unanswered question. No answer follows."""

    call: int


# Questions, each with the type of its answer.


class LoadModel(Message):
    """Load the model -> EngineFacts. adapter_store: as in `ServerConfig`."""

    config: EngineConfig
    adapter_store: str | None
    adapter_cache: str
    adapter_cache_bytes: int


class PrepareGrammars(Message):
    """Read the vocabulary of grammars -> None. tokenizer: text of a tokenizer.json."""

    tokenizer: str


class ReadState(Message):
    """Read the state between two steps -> StateReading. host_version: version of the front's list of adapters."""

    host_version: int = -1


class MeasureRoofline(Message):
    """Measure the device -> None; see `Engine.measure_roofline`."""


class LoadAdapter(Message):
    """Load an adapter into host memory, in the tenant's turn -> AdapterFacts | None.

    weight: the tenant's share of the loading threads; None if unknown. may_be_on_device: answer None without a load if
    the adapter is on the device. The front has its facts then.
    """

    digest: str
    tenant_id: str
    weight: float | None = None
    may_be_on_device: bool = False


class InspectAdapter(Message):
    """Load an adapter and inspect its weights -> Inspection."""

    digest: str
    tenant_id: str


class RegisterFolder(Message):
    """Register an adapter's folder -> its digest."""

    path: str


class ForgetAdapter(Message):
    """Free an adapter's host memory, its folder and its pages -> None. Pages in use are freed when needed."""

    digest: str


class Prefetch(Message):
    """Load an adapter ahead of its request -> whether it is in host memory."""

    digest: str
    tenant_id: str


class PinAdapters(Message):
    """Pin the operator's adapters in host memory for a time -> number of adapters pinned."""

    digests: list[str]


class ChargeElsewhere(Message):
    """Charge tenants for service at other engines, in cost units -> number of those with requests here."""

    tenants: dict[str, float]


class Close(Message):
    """End the steps and free the engine -> None. Sequences must be aborted before."""


Question = (
    LoadModel
    | PrepareGrammars
    | ReadState
    | MeasureRoofline
    | LoadAdapter
    | InspectAdapter
    | RegisterFolder
    | ForgetAdapter
    | Prefetch
    | PinAdapters
    | ChargeElsewhere
    | Close
)
Command = Add | Abort | AddMixture | RemoveMixture | Ask | Cancel


class AdapterFacts(msgspec.Struct, array_like=True, frozen=True):
    """An adapter in host memory. num_pages: device pages it occupies. invocation: see `AdapterManifest`. is_new:
    whether it was loaded for this question.
    """

    digest: str
    rank: int
    num_pages: int
    num_bytes: int
    invocation: tuple[int, ...]
    is_new: bool


class Inspection(msgspec.Struct, array_like=True, frozen=True):
    """An adapter's weights, for its probe. has_effect: whether any module can change a score. embedding_head_bytes:
    bytes of LoRA on embed_tokens and lm_head. trained_tokens: prompts of tokens whose embedding it changes.
    """

    adapter: AdapterFacts
    num_modules: int
    embedding_head_bytes: int
    has_effect: bool
    trained_tokens: list[list[int]]


class StateReading(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state. host: digests in host memory, the most recently used ones first; None if they did not change
    since the version that the front has.
    """

    state: EngineState
    host_version: int
    host: list[str] | None


# Events.


class Stepped(Message):
    """The outputs of a step that took `seconds`; see `engine.scheduling.outputs.StepOutputs`.

    plain_ids, token_ids: sequences with one new token each and nothing else to report, and these tokens.
    """

    seconds: float
    outputs: list[RequestOutput]
    plain_ids: list[str]
    token_ids: list[int]

    @classmethod
    def of(cls, seconds: float, outputs: StepOutputs) -> "Stepped":
        plain_ids = [request.request_id for request in outputs.plain]
        return cls(seconds, outputs.whole, plain_ids, list(outputs.token_ids))


class Refused(Message):
    """A sequence could not be added. The core does not know it."""

    request_id: str
    fault: Fault


class Released(Message):
    """An aborted sequence has ended; no output of it follows."""

    request_id: str


class Reply(Message):
    """Answer to a question: a value or an error. value: the answer as msgpack, of the type that the question's
    docstring names.
    """

    call: int
    value: msgspec.Raw
    fault: Fault | None = None


class AdapterLoaded(Message):
    """A load into host memory has ended after `seconds`."""

    result: LoadResult
    seconds: float


class Loading(Message):
    """The model's load has advanced; see `engine.progress.StartProgress`."""

    phase: str
    done: int
    total: int


class Failed(Message):
    """The core has failed. No event but answers follows, and every sequence in it is lost. reason: text for clients."""

    reason: str


Event = Stepped | Refused | Released | Reply | AdapterLoaded | Loading | Failed

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
