"""Engines of a tiny base model with tiny adapters, for tests that make several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from testing.tiny import save_adapter, save_model

Make = Callable[..., tuple[Engine, list[str]]]


def save_base_and_adapters(folder: Path, max_model_len: int, ranks: Sequence[int] = (3, 5, 7)) -> Path:
    """Save a base model and an adapter of each rank. Return the folder."""
    save_model(folder / "base", max_model_len=max_model_len)
    for i, rank in enumerate(ranks):
        save_adapter(folder / f"adapter-{i}", rank=rank, seed=i)
    return folder


def engine_maker(folder: Path, request: pytest.FixtureRequest, **defaults: Any) -> Make:
    """Return a factory of engines on a folder of `save_base_and_adapters`; they are closed with the test.

    The factory takes fields of `EngineConfig`, and returns an engine and its adapters' digests. defaults: fields of all
    its engines.
    """

    def make(**options: Any) -> tuple[Engine, list[str]]:
        host = HostCache(None, BaseShape.from_config_dir(folder / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        engine = Engine(EngineConfig(model=str(folder / "base"), **(defaults | options)), host)
        request.addfinalizer(engine.close)
        return engine, [host.add_path(path) for path in sorted(folder.glob("adapter-*"))]

    return make
