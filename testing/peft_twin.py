"""Reference for the engine's answers: the model in transformers, with its adapters in peft."""

from pathlib import Path
from typing import Any

import torch


class PeftTwin:
    """The model of a folder, and adapters with random weights, saved to `<folder>/<name>`."""

    def __init__(self, model: Path, folder: Path, adapters: dict[str, dict[str, Any]], scale: float = 0.3) -> None:
        """adapters: fields of `LoraConfig` by name. scale: standard deviation of the weights of A and B."""
        import transformers
        from peft import LoraConfig, get_peft_model  # takes 5 s, so it is not imported at collection

        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.model: Any = None
        torch.manual_seed(5)
        for name, fields in adapters.items():
            config = LoraConfig(task_type="CAUSAL_LM", **fields)
            if self.model is None:
                self.model = get_peft_model(base, config, adapter_name=name).eval()
            else:
                self.model.add_adapter(name, config)
        for key, parameter in self.model.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(0, scale)
        self.model.save_pretrained(folder, save_embedding_layers=False)
        self.paths = {name: folder / name for name in adapters}

    def logprobs(self, adapter: str | None, token_ids: list[int]) -> list[float]:
        """Return the log-probability of each token after the first."""
        with torch.no_grad():
            if adapter is None:
                with self.model.disable_adapter():
                    logits = self.model(torch.tensor([token_ids])).logits[0]
            else:
                self.model.set_adapter(adapter)
                logits = self.model(torch.tensor([token_ids])).logits[0]
        following = torch.tensor(token_ids[1:])
        return logits[:-1].log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()

    def generate(self, adapter: str, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation, by peft's own `generate`."""
        self.model.set_adapter(adapter)
        ids = torch.tensor([token_ids])
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        with torch.no_grad():
            found = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return found[0, len(token_ids) :].tolist()
