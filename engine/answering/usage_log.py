"""Token counts of the gateways' latest requests, running and ended, so that a gateway can settle with the real counts.

A ring of fixed slots in shared memory, backed by a file if a path is given. The file outlives the process however it
ends, because the kernel keeps writes to shared memory. Counts are written before the tokens that they count are sent.
"""

import asyncio
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

from wire.responses import FinishedRequest

logger = logging.getLogger(__name__)

NUM_SLOTS = 100_000
MAX_ID_BYTES = 64
# Magic with version, number of slots, next slot, and sums over all ended requests: number, prompt tokens, completion
# tokens.
HEADER = struct.Struct("<16sQQqqq")
MAGIC = b"loraplex ended 1"
# Id, finish reason (empty while it runs), prompt tokens, completion tokens, cached prompt tokens.
SLOT = struct.Struct(f"<{MAX_ID_BYTES}s16sqqq")
COUNTS = struct.Struct("<qqq")
REASON_AT = MAX_ID_BYTES
COUNTS_AT = MAX_ID_BYTES + 16
# Finish reason of a request whose engine was killed. Its counts are the last ones written.
KILLED = "killed"


def _ignore(_: int) -> None:
    pass


class UsageSlot:
    """The slot of one running request. Counts are totals of the request so far."""

    __slots__ = ("_at", "_ring", "allow", "cached_tokens", "completion_tokens", "ended", "prompt_tokens", "request_id")

    def __init__(self, ring: "UsageLog", at: int, request_id: str) -> None:
        self._ring = ring
        self._at = at
        self.request_id = request_id
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.ended = asyncio.Event()
        # Called with the new allowance when the gateway raises it.
        self.allow: Callable[[int], None] = _ignore

    def count(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = prompt_tokens, completion_tokens, cached_tokens
        self._ring.write_counts(self._at, self)

    def end(self, reason: str) -> None:
        """Record the finish reason; called once, after the last count."""
        self._ring.end(self._at, self, reason)
        self.ended.set()


class UsageLog:
    """Ring of slots, for use on the event loop only. Raises OSError or ValueError for a file that cannot be used.

    path: file that keeps the slots; None keeps them in memory.
    """

    def __init__(self, path: Path | None = None, num_slots: int = NUM_SLOTS) -> None:
        self._memory, self._lock = _map(path, HEADER.size + num_slots * SLOT.size)
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}
        self._running: dict[str, UsageSlot] = {}
        self._next = self.num_ended = self.prompt_tokens = self.completion_tokens = 0
        magic, slots, *rest = HEADER.unpack_from(self._memory)
        if magic == bytes(16):
            self._write_header()
        elif (magic, slots) != (MAGIC, num_slots):
            raise ValueError(f"{path}: expected a usage log of {num_slots} requests, found something else")
        else:
            self._next, self.num_ended, self.prompt_tokens, self.completion_tokens = rest
            self._recover()

    def open(self, request_id: str, prompt_tokens: int) -> UsageSlot:
        """Open a slot for a request; it overwrites the oldest. request_id: at most MAX_ID_BYTES ASCII characters."""
        at = HEADER.size + self._next * SLOT.size
        self._next = (self._next + 1) % self._num_slots
        overwritten = self._id(at)
        if self._slots.get(overwritten) == at:
            del self._slots[overwritten]
        SLOT.pack_into(self._memory, at, request_id.encode("ascii"), b"", prompt_tokens, 0, 0)
        self._write_header()
        self._slots[request_id] = at
        slot = self._running[request_id] = UsageSlot(self, at, request_id)
        slot.prompt_tokens = prompt_tokens
        return slot

    def get(self, request_id: str) -> FinishedRequest | None:
        at = self._slots.get(request_id)
        if at is None:
            return None
        _, reason, prompt, completion, cached = SLOT.unpack_from(self._memory, at)
        return FinishedRequest(request_id, _text(reason) or None, prompt, completion, cached)

    def allow(self, request_id: str, tokens: int) -> bool:
        """Raise a request's allowance. Return False if it is not running."""
        slot = self._running.get(request_id)
        if slot is not None:
            slot.allow(tokens)
        return slot is not None

    def close(self) -> None:
        """Release the file's lock, so that another engine can open it. Later counts are still written."""
        if self._lock is not None:
            # Unlock explicitly, because the mapping keeps the file open, and an open file keeps its lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def ids(self) -> list[str]:
        """Return the ids of all known requests."""
        return list(self._slots)

    async def wait(self, request_ids: list[str], seconds: float) -> None:
        """Wait until none of the requests runs, for at most `seconds`."""
        ends = [asyncio.ensure_future(self._running[id_].ended.wait()) for id_ in request_ids if id_ in self._running]
        try:
            if ends:
                await asyncio.wait(ends, timeout=seconds)
        finally:  # also if the caller leaves
            for end in ends:
                end.cancel()

    def write_counts(self, at: int, slot: UsageSlot) -> None:
        if self._slots.get(slot.request_id) == at:
            counts = (slot.prompt_tokens, slot.completion_tokens, slot.cached_tokens)
            COUNTS.pack_into(self._memory, at + COUNTS_AT, *counts)

    def end(self, at: int, slot: UsageSlot, reason: str) -> None:
        if self._running.get(slot.request_id) is slot:
            del self._running[slot.request_id]
        self._add(slot.prompt_tokens, slot.completion_tokens)
        if self._slots.get(slot.request_id) == at:
            struct.pack_into("<16s", self._memory, at + REASON_AT, reason.encode("ascii"))

    def _add(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.num_ended += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self._write_header()

    def _write_header(self) -> None:
        sums = (self.num_ended, self.prompt_tokens, self.completion_tokens)
        HEADER.pack_into(self._memory, 0, MAGIC, self._num_slots, self._next, *sums)

    def _recover(self) -> None:
        """Read the previous process's slots. Requests that ran until it ended are recorded as killed."""
        killed = 0
        # Starts with the oldest slot, so that a repeated id refers to its latest request.
        for i in range(self._num_slots):
            at = HEADER.size + (self._next + i) % self._num_slots * SLOT.size
            request_id = self._id(at)
            if not request_id:
                continue
            self._slots[request_id] = at
            _, reason, prompt, completion, cached = SLOT.unpack_from(self._memory, at)
            if not _text(reason):
                killed += 1
                # A request that failed before its first token costs nothing.
                prompt = prompt if completion else 0
                SLOT.pack_into(
                    self._memory, at, request_id.encode("ascii"), KILLED.encode(), prompt, completion, cached
                )
                self._add(prompt, completion)
        if killed:
            logger.warning("%d requests were running when the previous engine ended", killed)

    def _id(self, at: int) -> str:
        return _text(self._memory[at : at + MAX_ID_BYTES])


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


def _allocate(descriptor: int, size: int) -> None:
    # Allocated blocks fail on a full disk now, instead of with SIGBUS later. macOS has only files with holes.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _map(path: Path | None, size: int) -> tuple[mmap.mmap, int | None]:
    """Return the memory, and the descriptor whose lock keeps other engines away until this process ends."""
    if path is None:
        return mmap.mmap(-1, size), None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size not in (0, size):
            raise ValueError(f"{path}: expected a file of {size} bytes, or none")
        _allocate(descriptor, size)
        return mmap.mmap(descriptor, size), descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"{path}: another engine uses this file") from error
    except (OSError, ValueError):
        os.close(descriptor)
        raise
