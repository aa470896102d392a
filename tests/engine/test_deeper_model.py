"""A deeper copy of a model for benchmarks of draft models has the model's answers."""

from pathlib import Path

import torch

from benchmarks.random_models import save_deeper_model
from testing.tiny import save_model


def test_a_deeper_copy_has_more_layers_and_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # takes 7 s, so it is not imported at collection

    (model := tmp_path / "model").mkdir()
    save_model(model)
    (tmp_path / "deeper").mkdir()
    first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    second = AutoModelForCausalLM.from_pretrained(save_deeper_model(model, tmp_path / "deeper", 3), dtype=torch.float32)
    assert second.config.num_hidden_layers == 3 * first.config.num_hidden_layers
    layers = second.model.layers
    for i, layer in enumerate(layers):
        assert bool(layer.mlp.gate_proj.weight.any()), "every layer takes the time of a layer"
        assert bool(layer.mlp.down_proj.weight.any()) == (i < len(layers) // 3)
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(first(tokens).logits, second(tokens).logits)
