"""Messages and frames between front and core: what is sent arrives, whatever the pieces."""

import errno
import random

import msgspec
import pytest

from adapters.manifest import AdapterError, AdapterNotFound
from engine.answering.token_rules import pack
from engine.core.frames import Frames, head
from engine.core.messages import Abort, Add, TokenRules, decode_commands, encode
from engine.errors import EngineUnavailable, Fault, QueueFull, TenantQueueFull
from engine.scheduling.request import NewRequest, SamplingParams
from wire.errors import BadRequest, ConfigError
from wire.structured import GrammarSpec


def test_frames_arrive_whole_whatever_the_pieces():
    draw = random.Random(5)
    for _ in range(50):
        sent = [draw.randbytes(draw.choice([0, 1, 3, 200, 70_000])) for _ in range(draw.randint(1, 6))]
        stream, frames, found = b"".join(head(frame) + frame for frame in sent), Frames(), []
        while stream:
            size = draw.choice([1, 2, 5, 300, 65_536])
            piece, stream = stream[:size], stream[size:]
            found += frames.feed(piece)
        assert found == sent


def test_choices_share_their_prompt_on_the_wire_and_have_it_after():
    prompts, keys = [list(range(1000)), list(range(500))], [b"k" * 32]
    news = [
        NewRequest(
            f"r-{i}-{choice}", prompt, SamplingParams(seed=2**63 - 1 - choice), "d" * 64, "acme",
            prefix_keys=keys, ttft_target=0.5, arrived_at=12.5,
        )
        for i, prompt in enumerate(prompts)
        for choice in range(64)
    ]  # fmt: skip
    rules = TokenRules(GrammarSpec("regex", "a+", param="guided_regex"), pack([1, 2]), [[3, 4]], {5: -1.5, 6: 100.0})
    frame = encode([Add.of(news, rules), Abort("r-0-1")])
    add, abort = decode_commands(frame)
    assert (add.new_requests(), add.rules, abort) == (news, rules, Abort("r-0-1"))
    assert add.rules.grammar.param == "guided_regex"
    alone = encode([Add.of(news[:1], rules)])
    assert len(frame) < 2 * len(alone) + 128 * 700


@pytest.mark.parametrize(
    "error",
    [
        BadRequest.of("prompt", "expected a text"),
        BadRequest(None, "the body", "code"),
        EngineUnavailable("gone"),
        QueueFull("full", 3),
        TenantQueueFull("yours", 2, "guided_json"),
        AdapterError("r", "expected 8, got \udce9\n"),
        AdapterNotFound("adapter", "no adapter"),
        ConfigError("model", "no such folder"),
        OSError(errno.ENOENT, "No such file or directory", "/a"),
        OSError("the store's answer is no JSON"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_with_their_fields(error: Exception):
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(Fault.of(error)), type=Fault).error()
    assert type(found) is type(error)
    assert (str(found), found.__dict__) == (str(error), error.__dict__)


def test_an_unforeseen_error_crosses_without_its_text(caplog: pytest.LogCaptureFixture):
    found = Fault.of(KeyError("private words")).error()
    assert type(found) is RuntimeError
    assert "private" not in str(found)
    assert "private words" in caplog.text
