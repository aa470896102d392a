"""Blocks of the paged KV cache: holders, sharing and eviction order. Independent of tensors.

The key of a full block is a hash chained over its tokens and all tokens before it, salted with adapter and tenant, so
two tenants never share a block, and two adapters only the blocks before an activated LoRA applies (vLLM's automatic
prefix caching; the chain is blake2b, so that keys of different prompts do not collide). A block without holders keeps
its content until it is needed: the least recently freed one is evicted first.

A preempted request's blocks keep their content in the same way. Its blocks without a shared key (the last, partly
filled one, or all of them without prefix caching) get a key that only this request uses. So a request that is preempted
while memory is free continues without computing anything again.
"""

import hashlib
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.scheduling.request import Request

# Number of blocks hashed between two pauses, about 0.3 ms.
HASHED_AT_ONCE = 128


@dataclass(slots=True)
class Block:
    """A block of the KV cache. holders: number of requests that use it. key: its content's key in the prefix cache."""

    index: int
    holders: int = 0
    key: bytes | None = None


class KVCache:
    """The blocks of one engine: `num_blocks` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._by_key: dict[bytes, int] = {}
        self._num_evictions = 0
        self.hit_tokens = 0
        self.query_tokens = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Return the blocks of the request's longest cached prefix. At least one token is left to compute."""
        if request.wants_prompt_logprobs or not (self.enable_prefix_caching or request.num_kept):
            return []
        # Called in every step for a waiting request. Without an eviction since the last call, its hit can only have
        # grown.
        evictions, found = request.prefix_hit
        if evictions != self._num_evictions:
            found = []
            request.prefix_hit = (self._num_evictions, found)
        full = request.num_tokens - 1 if self.enable_prefix_caching else request.num_kept
        for i in range(len(found), full // self.block_size):
            key = self._key(request, i) if self.enable_prefix_caching else _own_key(request, i)
            index = self._by_key.get(key)
            if index is None:
                break
            found.append(index)
        if request.num_kept and len(found) == request.num_kept // self.block_size:
            last = self._by_key.get(_own_key(request, len(found)))
            if last is not None:
                return [*found, last]
        return found

    def has_start(self, request: Request) -> bool:
        """Return whether the first block of the request is cached."""
        if not self.enable_prefix_caching or request.wants_prompt_logprobs or request.num_tokens <= self.block_size:
            return False
        return self._key(request, 0) in self._by_key

    def num_missing_blocks(self, request: Request, num_tokens: int, prefix: list[int]) -> int:
        """Return the number of blocks that the first `num_tokens` tokens need beyond the free ones, given the cached
        blocks `prefix`. 0 or less: they fit.
        """
        held_by_none = sum(self._blocks[i].holders == 0 for i in prefix)
        return self.blocks_for(num_tokens) - len(prefix) + held_by_none - len(self._free)

    def num_freed(self, request: Request, leaving: Counter[int]) -> int:
        """Return the number of blocks that become free when the request leaves. leaving: how many holders of each
        shared block leave before it; the request is added.
        """
        number = 0
        for index in request.blocks:
            holders = self._blocks[index].holders
            if holders > 1:
                leaving[index] += 1
                number += leaving[index] == holders
            else:
                number += 1
        return number

    def start(self, request: Request, prefix: list[int]) -> None:
        """Start a waiting request with its cached prefix."""
        for index in prefix:
            block = self._blocks[index]
            if block.holders == 0:
                del self._free[index]
            block.holders += 1
        request.blocks = list(prefix)
        request.prefix_hit = (0, [])
        num_cached = len(prefix) * self.block_size
        if request.num_kept:
            if prefix and self._blocks[prefix[-1]].key == _own_key(request, len(prefix) - 1):
                num_cached = min(num_cached, request.num_kept)
            self.forget(request)
        request.start(num_cached)
        request.num_registered_blocks = num_cached // self.block_size
        self.hit_tokens += request.num_computed
        self.query_tokens += request.num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens. If too few are free, allocate none and return False."""
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            index, _none = self._free.popitem(last=False)
            block = self._blocks[index]
            if block.key is not None:
                del self._by_key[block.key]
                self._num_evictions += 1
                block.key = None
            block.holders = 1
            request.blocks.append(index)
        return True

    def advance(self, request: Request, num_computed: int) -> None:
        """Record that the request's first `num_computed` tokens are in its blocks, and publish the keys of the blocks
        that are full now. The tokens must be final: a draft is recorded once it is accepted.
        """
        request.num_computed = num_computed
        if num_computed >= (request.num_registered_blocks + 1) * self.block_size:
            self.register(request)

    def register(self, request: Request) -> None:
        """Publish the keys of the blocks that this step filled."""
        if not self.enable_prefix_caching:
            return
        full = request.num_computed // self.block_size
        for i in range(request.num_registered_blocks, full):
            key = self._key(request, i)
            if key not in self._by_key:
                block = self._blocks[request.blocks[i]]
                block.key = key
                self._by_key[key] = block.index
        request.num_registered_blocks = max(full, request.num_registered_blocks)

    def keep(self, request: Request) -> None:
        """Give a preempted request's computed blocks keys of the request where they lack a shared one. Call it before
        `free`.
        """
        request.num_kept = request.num_computed
        for i, index in enumerate(request.blocks[: self.blocks_for(request.num_computed)]):
            block = self._blocks[index]
            if block.key is None and block.holders == 1:
                block.key = _own_key(request, i)
                self._by_key[block.key] = index

    def forget(self, request: Request) -> None:
        """Remove the keys that `keep` gave to the request's blocks. Those that are free are the next to be taken."""
        for i in range(self.blocks_for(request.num_kept)):
            index = self._by_key.pop(_own_key(request, i), None)
            if index is not None:
                self._blocks[index].key = None
                if index in self._free:
                    self._free.move_to_end(index, last=False)
        request.num_kept = 0

    def free(self, request: Request) -> None:
        """Release the request's blocks, last first, so that the start of a prompt stays cached longer than its end."""
        self.truncate(request, 0)

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Release the blocks beyond the request's first `num_tokens` tokens: those of rejected drafts."""
        num_kept = self.blocks_for(num_tokens)
        for index in reversed(request.blocks[num_kept:]):
            block = self._blocks[index]
            block.holders -= 1
            if block.holders == 0:
                self._free[index] = None
                if block.key is None:
                    self._free.move_to_end(index, last=False)
        if num_kept < len(request.blocks):
            # A new list: the planner keeps a table of blocks up to date only while the list grows.
            request.blocks = request.blocks[:num_kept]

    def _key(self, request: Request, i: int) -> bytes:
        keys = request.block_hashes
        if len(keys) <= i:
            digest, start = request.adapter_digest, request.adapter_start
            if keys and (digest is None or len(keys) > start // self.block_size):
                salts = _NO_SALTS
            else:
                salts = _salts(digest, request.tenant_id, request.cache_salt, start, self.block_size)
            _extend(keys, request.token_ids, self.block_size, salts, i + 1)
        return keys[i]


def _own_key(request: Request, i: int) -> bytes:
    """Return the request's own key of a preempted block. It is longer than any hash, so it equals no shared key."""
    return b"preempted request %b, block %d" % (request.request_id.encode(), i)


def prefix_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    adapter_digest: str | None,
    tenant_id: str,
    cache_salt: str,
    adapter_start: int = 0,
) -> list[bytes]:
    """Return the keys of a prompt's full blocks. Call it outside the engine's thread, because 128k tokens take 12 ms.
    It pauses often, so that the engine's thread waits little for the interpreter's lock.
    """
    keys: list[bytes] = []
    salts = _salts(adapter_digest, tenant_id, cache_salt, adapter_start, block_size)
    num_blocks = len(token_ids) // block_size
    while len(keys) < num_blocks:
        _extend(keys, token_ids, block_size, salts, min(len(keys) + HASHED_AT_ONCE, num_blocks))
        time.sleep(0)
    return keys


class _Salts(NamedTuple):
    """Salts of a chain: for its first block, and for the first block with a token that uses the adapter.

    The blocks before `adapter_block` have the same keys as in a request for the base model, so the tenant's requests
    for the base model share them.
    """

    base: bytes
    adapter: bytes
    adapter_block: int

    def parent(self, keys: list[bytes]) -> bytes:
        """Return the bytes that precede the tokens of the next block in its hash."""
        before = keys[-1] if keys else b""
        if len(keys) == self.adapter_block:
            return before + self.adapter
        return before or self.base


# Salts for extending a chain that already contains every salted block: later keys depend on the key before them only.
_NO_SALTS = _Salts(b"", b"", -1)


def _extend(keys: list[bytes], token_ids: Sequence[int], block_size: int, salts: _Salts, num_blocks: int) -> None:
    """Extend the chain to `num_blocks` keys."""
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        tokens = array("i", token_ids[start : start + block_size])
        keys.append(hashlib.blake2b(salts.parent(keys) + tokens.tobytes(), digest_size=16).digest())


def _salts(adapter_digest: str | None, tenant_id: str, cache_salt: str, adapter_start: int, block_size: int) -> _Salts:
    base = _salt("", tenant_id, cache_salt)
    if adapter_digest is None:
        return _Salts(base, b"", -1)
    # The block's content depends on the adapter's first position, which may lie inside the block.
    digest = f"{adapter_digest}@{adapter_start}" if adapter_start else adapter_digest
    return _Salts(base, _salt(digest, tenant_id, cache_salt), adapter_start // block_size)


def _salt(adapter: str, tenant_id: str, cache_salt: str) -> bytes:
    # The lengths are included, so that no two triples (adapter, tenant, client's salt) give the same salt.
    parts = [part.encode() for part in (adapter, tenant_id, cache_salt)]
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)
