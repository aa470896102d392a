"""Adapters of the store for a vLLM server: fetched by digest, verified once, and kept in place while the server names
them. Imports no vLLM, so that it is tested without one.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from adapters.open_store import open_store
from adapters.store import AdapterStore
from adapters.verified_files import VerifiedFiles
from engine.probing.base_digest import base_digest
from wire.digests import digest_name

STORE, CACHE, CACHE_BYTES = "LORAPLEX_ADAPTER_STORE", "LORAPLEX_ADAPTER_CACHE", "LORAPLEX_ADAPTER_CACHE_BYTES"
BASE_DIGEST = "LORAPLEX_BASE_DIGEST"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
DEFAULT_CACHE, DEFAULT_CACHE_BYTES = "~/.cache/loraplex/adapters", 16 << 30


class AdapterRefused(ValueError):
    """The server cannot serve this adapter. vLLM answers 400 with the message, which clients may read."""


class AdapterUnavailable(RuntimeError):
    """The store or the server has a fault. vLLM answers 500, and a gateway asks another server."""


class Base(NamedTuple):
    """The server's base model. digest: None for a model whose files are not known. shape: None if it is not known."""

    digest: str | None = None
    shape: BaseShape | None = None


class Held(NamedTuple):
    """An adapter's folder, which stays in place until `release` is called."""

    folder: Path
    release: Callable[[], None]


class StoredAdapters:
    """Adapters by digest. base_digest: digest of the only base model that the server may run; None: any."""

    def __init__(self, store: AdapterStore, base_digest: str | None = None) -> None:
        self._store = store
        self._base_digest = base_digest
        self._verified = VerifiedFiles()

    def hold(self, digest: str, model: str) -> Held | None:
        """Return the adapter, or None if the store lacks it. model: folder or hub id of the server's base model.

        Raises AdapterRefused, AdapterUnavailable.
        """
        base = self.check_base(model)
        with ExitStack() as stack:
            try:
                checkpoint = stack.enter_context(self._verified.use(self._store, digest))
            except AdapterNotFound:
                return None
            except AdapterError as error:
                raise AdapterUnavailable(
                    f"the adapter {digest_name(digest)} in the store is damaged: {error}"
                ) from error
            except OSError as error:
                raise AdapterUnavailable(f"the adapter store cannot be read: {error.strerror or error}") from error
            if checkpoint.manifest.invocation:
                # vLLM ignores the field and would apply the adapter to all tokens.
                raise AdapterRefused("this engine serves no activated LoRA (alora_invocation_tokens)")
            if base.shape is not None:
                try:
                    checkpoint.check_base(base.shape)
                except AdapterError as error:
                    raise AdapterRefused(f"the adapter does not fit the base model: {error}") from error
            return Held(checkpoint.folder, stack.pop_all().close)

    def check_base(self, model: str) -> Base:
        """Return the server's base model. Raises AdapterUnavailable if it is not the expected one."""
        base = read_base(model)
        if self._base_digest is not None and base.digest != self._base_digest:
            found = base.digest or "unknown, because its files were not found"
            raise AdapterUnavailable(f"{BASE_DIGEST}: expected {self._base_digest}, the digest of {model} is {found}")
        return base


@cache
def read_base(model: str) -> Base:
    """Return what is known of a base model by its folder, its .gguf file, or its hub id in Hugging Face's cache."""
    path = Path(model)
    try:
        if not path.exists():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, local_files_only=True))
        digest = base_digest(path)
    except (ImportError, OSError, ValueError):
        return Base()
    try:
        return Base(digest, BaseShape.from_config_dir(path))
    except (OSError, ValueError):
        return Base(digest)


def open_adapters(environment: Mapping[str, str] = os.environ) -> StoredAdapters | None:
    """Return the adapters of the store that the environment names; None if it names none.

    Raises ValueError naming the variable.
    """
    url = environment.get(STORE)
    if not url:
        return None
    if environment.get(RUNTIME, "0").strip().lower() not in ("1", "true"):
        raise ValueError(f"{STORE} is set, but vLLM asks for adapters only with {RUNTIME}=1")
    if "://" not in url and not Path(url).is_dir():
        raise ValueError(f"{STORE}: no such folder: {url}")
    size = environment.get(CACHE_BYTES, str(DEFAULT_CACHE_BYTES))
    if not size.isdecimal() or not int(size):
        raise ValueError(f"{CACHE_BYTES}: expected a number of bytes, got {size!r}")
    digest = environment.get(BASE_DIGEST) or None
    if digest is not None and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        raise ValueError(f"{BASE_DIGEST}: expected 64 hexadecimal digits")
    try:
        store = open_store(url, Path(environment.get(CACHE) or DEFAULT_CACHE), int(size))
    except (ValueError, OSError) as error:
        raise ValueError(f"{STORE}: {error}") from error
    return StoredAdapters(store, digest)
