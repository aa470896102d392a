"""Tokenizers of the base models, from folders on this machine; without a folder, an engine of the base tokenizes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gateway.errors import BadRequest
from gateway.records.bases.base import Base
from gateway.records.tenants.tenants import Tenant
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

# Seconds after which a folder that could not be read is tried again.
RETRY_SECONDS = 30.0
# Maximum number of texts in a request that engines count, each by a call, before the quota is checked.
MAX_COUNTED = 16
# Fields of a chat request that determine its prompt.
PROMPT_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

# Asks an engine of the base for the token ids of a tenant's `/tokenize` body.
Ask = Callable[[Base, dict[str, Any], Tenant], Awaitable[list[int]]]


class Tokenizers:
    """Tokenizers by base model. own: name and tokenizer of the base of LORAPLEX_BASE_MODEL, already in memory."""

    def __init__(self, ask: Ask, own: tuple[str, Tokenizer] | None = None) -> None:
        self._ask = ask
        self._own = own
        # By folder and time of the base's last change: the tokenizer, or the time of a failure to read it.
        self._known: dict[tuple[str, Any], Tokenizer | float] = {}
        # The running reads. A slow file system delays the requests of its own base only.
        self._reading: dict[tuple[str, Any], asyncio.Task[Tokenizer | None]] = {}

    async def of(self, base: Base) -> Tokenizer | None:
        """Return the tokenizer in the base's folder, or None if this machine has no readable one."""
        if self._own is not None and self._own[0] == base.name:
            return self._own[1]
        if base.tokenizer is None:
            return None
        key = base.tokenizer, base.updated_at
        known = self._known.get(key)
        if isinstance(known, Tokenizer):
            return known
        if known is not None and time.monotonic() - known < RETRY_SECONDS:
            return None
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._read(base.name, key))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        # Other requests wait for the same read, so a client that leaves must not end it.
        return await asyncio.shield(reading)

    async def _read(self, base: str, key: tuple[str, Any]) -> Tokenizer | None:
        folder = key[0]
        try:
            found: Tokenizer | float = await asyncio.to_thread(_load, folder)
        except (TokenizerError, OSError) as error:
            log.warning(
                "the tokenizer of the base model %s cannot be read, so engines count its prompts: %s", base, error
            )
            found = time.monotonic()
        self._known = {each: value for each, value in self._known.items() if each[0] != folder} | {key: found}
        return found if isinstance(found, Tokenizer) else None

    async def count(
        self, base: Base, request: ChatCompletionRequest | CompletionRequest, raw: bytes, tenant: Tenant
    ) -> list[int]:
        """Return the number of tokens of each prompt, counted by an engine in the tenant's turn. raw: the request's
        body.

        Raises BadRequest, also for more than MAX_COUNTED texts, TextTooLong and NoEngine.
        """
        if isinstance(request, ChatCompletionRequest):
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            names = PROMPT_FIELDS if request.tool_choice == "none" else (*PROMPT_FIELDS, "tools")
            return [len(await self._ask(base, {name: fields[name] for name in names if name in fields}, tenant))]
        prompts = request.prompts()
        if (texts := sum(isinstance(prompt, str) for prompt in prompts)) > MAX_COUNTED:
            raise BadRequest(
                f"prompt: expected at most {MAX_COUNTED} texts in a request to '{base.name}', got {texts}; send token "
                "ids, or several requests.",
                param="prompt",
            )
        special = {"add_special_tokens": request.add_special_tokens is not False}
        return [
            len(prompt if not isinstance(prompt, str) else await self._ask(base, {"prompt": prompt, **special}, tenant))
            for prompt in prompts
        ]

    async def encode(self, base: Base, text: str, tenant: Tenant) -> list[int]:
        """Return the tokens of a tenant's text, without special tokens. Raises TextTooLong, NoEngine."""
        tokenizer = await self.of(base)
        if tokenizer is not None:
            return tokenizer.encode(text, add_special_tokens=False)
        return await self._ask(base, {"prompt": text, "add_special_tokens": False}, tenant)


def _load(folder: str) -> Tokenizer:
    """Read a folder. Raises TokenizerError, OSError."""
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:
        # `~name` without such a user on this machine; other machines may have one.
        raise TokenizerError(f"tokenizer: {folder}: {error}") from error
    return Tokenizer.from_dir(path)
