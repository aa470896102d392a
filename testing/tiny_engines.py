"""Engines of a tiny base model with tiny adapters, for tests that make several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.build import DTYPES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import Grammar
from engine.structured.compiler import GrammarCompiler
from testing.tiny import save_adapter, save_model
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

Make = Callable[..., tuple[Engine, list[str]]]


def save_base_and_adapters(folder: Path, max_model_len: int, ranks: Sequence[int] = (3, 5, 7)) -> Path:
    """Save a base model and an adapter of each rank. Return the folder."""
    save_model(folder / "base", max_model_len=max_model_len)
    for i, rank in enumerate(ranks):
        save_adapter(folder / f"adapter-{i}", rank=rank, seed=i)
    return folder


def regex_grammar(folder: Path) -> Grammar:
    """Return a grammar of a few letters, for the base model of `save_base_and_adapters`."""
    tokenizer = Tokenizer.from_dir(folder / "base")
    compiler = GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, {2})
    return compiler.compile(GrammarSpec("regex", "(ab|cd){3,9}z"))


def engine_maker(folder: Path, request: pytest.FixtureRequest, **defaults: Any) -> Make:
    """Return a factory of engines on a folder of `save_base_and_adapters`; they are closed with the fixture.

    The factory takes fields of `EngineConfig`, and returns an engine and its adapters' digests. defaults: fields of all
    its engines.
    """

    def make(**options: Any) -> tuple[Engine, list[str]]:
        options = defaults | options
        dtype = DTYPES.get(options.get("dtype", ""), torch.float32)
        host = HostCache(None, BaseShape.from_config_dir(folder / "base"), 1 << 20, dtype)
        request.addfinalizer(host.close)
        engine = Engine(EngineConfig(model=str(folder / "base"), **options), host)
        request.addfinalizer(engine.close)
        return engine, [host.add_path(path) for path in sorted(folder.glob("adapter-*"))]

    return make
