"""Resources that a gateway opens at its start: model folder, adapter store, tracing, clients of other services."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from adapters.manifest import BaseShape
from adapters.open_store import open_store
from adapters.store import AdapterStore
from adapters.store_s3 import Bucket
from gateway.fleet.client import new_session
from gateway.metrics import Metrics
from gateway.process.loop_lag import LoopLag
from gateway.process.loop_stalls import StallLog
from gateway.records.bases.base import Base, Shape
from gateway.records.sql.database import Database
from gateway.redis.client import connect
from gateway.settings import Problems, Settings, SettingsError
from wire.model_config import context_length
from wire.telemetry.spans import Tracing
from wire.telemetry.start import TracingError, start_tracing
from wire.text.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Model:
    """The base model of LORAPLEX_BASE_MODEL, with the tokenizer of its folder."""

    tokenizer: Tokenizer
    base: Base


@dataclass(frozen=True, slots=True)
class Resources:
    """The settings, and the objects that hold connections, files or threads.

    model: None without LORAPLEX_BASE_MODEL. import_sources: prefixes of imports, each with its
    bucket if it is in an S3 service.
    """

    settings: Settings
    model: Model | None
    store: AdapterStore
    import_sources: dict[str, Bucket | None]
    tracing: Tracing | None
    metrics: Metrics
    lag: LoopLag
    database: Database
    redis: Any
    session: aiohttp.ClientSession


async def open_resources(settings: Settings) -> Resources:
    """Open what the settings name. Raises SettingsError for all that cannot be used."""
    problems = Problems()
    with problems.collect():
        model = await asyncio.to_thread(_read_model, settings)
    with problems.collect():
        store = await asyncio.to_thread(_open_store, settings)
    with problems.collect():
        import_sources = _open_import_sources(settings)
    with problems.collect():
        tracing = _start_tracing()
    problems.report()
    metrics = Metrics()
    lag = LoopLag(StallLog(metrics.loop_stalled).report)
    metrics.watch_loop(lambda: lag.last, lambda: lag.longest)
    return Resources(
        settings,
        model,
        store,
        import_sources,
        tracing,
        metrics,
        lag,
        Database(settings.database_url),
        connect(settings.redis_url, settings.redis_timeout),
        new_session(settings.engine_timeout),
    )


def _read_model(settings: Settings) -> Model | None:
    """Read the tokenizer, the shapes that adapters must fit, and the context length. Reads no weights."""
    folder, name = settings.model_dir, settings.base_model
    if folder is None or name is None:
        return None
    try:
        tokenizer, shape = Tokenizer.from_dir(folder), BaseShape.from_config_dir(folder)
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (TokenizerError, ValueError, OSError) as error:
        raise SettingsError("LORAPLEX_MODEL_DIR", str(error)) from error
    if settings.max_model_len is None and not isinstance(config.get("max_position_embeddings"), int):
        raise SettingsError("LORAPLEX_MAX_MODEL_LEN", "is required: config.json has no max_position_embeddings")
    length = settings.max_model_len or context_length(config)
    return Model(tokenizer, Base(name=name, shape=Shape.of(shape), context_length=length, tokenizer=str(folder)))


def _open_store(settings: Settings) -> AdapterStore:
    try:
        return open_store(settings.adapter_store, settings.adapter_cache, settings.adapter_cache_bytes)
    except (ValueError, OSError) as error:
        raise SettingsError("LORAPLEX_ADAPTER_STORE", str(error)) from error


def _open_import_sources(settings: Settings) -> dict[str, Bucket | None]:
    """Return the prefixes of imports, each with its bucket if it is in an S3 service. Connects to none."""
    for source in settings.import_sources:
        if any(_overlap(source, place) for place in (settings.adapter_store, str(settings.adapter_cache))):
            # A tenant could test whether the store has a content of another tenant, and copy it.
            raise SettingsError(
                "LORAPLEX_IMPORT_SOURCES", f"{source} holds adapters of tenants; expected another place"
            )
    try:
        return {each: Bucket(each) if each.startswith("s3://") else None for each in settings.import_sources}
    except ValueError as error:
        raise SettingsError("LORAPLEX_IMPORT_SOURCES", str(error)) from error


def _overlap(first: str, second: str) -> bool:
    """Return whether one of two places, URLs or paths, lies within the other."""
    a, b = _place(first), _place(second)
    return a.is_relative_to(b) or b.is_relative_to(a)


def _place(url_or_path: str) -> PurePath:
    url = urlsplit(url_or_path)
    if url.scheme in ("", "file"):
        return Path(unquote(url.path) if url.scheme else url_or_path).expanduser().resolve()
    return PurePath(f"{url.scheme}:", url.netloc, url.path.strip("/"))


def _start_tracing() -> Tracing | None:
    try:
        return start_tracing("loraplex-gateway")
    except TracingError as error:
        raise SettingsError(error.field, error.message) from error
