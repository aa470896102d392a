"""The committed demo adapters: small, different from each other, and for the demo model."""

import json
from pathlib import Path

import pytest

from adapters.checkpoint import open_checkpoint
from adapters.manifest import BaseShape

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"
NAMES = ("brief", "json", "pirate")
DEMO_MODEL = BaseShape.from_config(
    {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    }
)


def test_there_are_three_together_under_2_mb():
    assert sorted(path.name for path in FOLDER.iterdir()) == list(NAMES)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_each_fits_the_demo_model_and_names_no_machine(name):
    checkpoint = open_checkpoint(FOLDER / name)
    checkpoint.check_base(DEMO_MODEL)
    assert sorted(path.name for path in (FOLDER / name).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert '"/' not in json.dumps(config)  # no absolute path


def test_ranks_targets_and_digests_differ():
    checkpoints = [open_checkpoint(FOLDER / name) for name in NAMES]
    assert [checkpoint.rank for checkpoint in checkpoints] == [4, 8, 16]
    assert len({frozenset(projection for _, projection in c.modules) for c in checkpoints}) == 3
    assert len({checkpoint.digest for checkpoint in checkpoints}) == 3
    assert [checkpoint.manifest.use_rslora for checkpoint in checkpoints] == [False, False, True]
