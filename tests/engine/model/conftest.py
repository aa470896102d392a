"""A tiny model for tests of checkpoints, which change copies of its files. No server runs on it."""

from pathlib import Path

import pytest

from testing.tiny import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder
