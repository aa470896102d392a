"""Training of the three demo adapters on the demo model: minutes on two CPU cores, seeded.

    python -m examples.train_demo_adapters --data-dir .loraplex            # trains, saves, checks all three
    python -m examples.train_demo_adapters --only pirate --check           # checks a saved one on held-out prompts

Each adapter answers visibly differently, has its own rank and target modules, and changes only the upper layers, which
keeps the files small and the backward pass short. Exits with 1 if an adapter changes too few of the held-out answers.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_data import HELD_OUT, ROWS
from loraplex.models import ensure_demo_model

HERE = Path(__file__).parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_NEW_TOKENS = 64
WANTED_HITS = 0.9


def to_json(short: str, sentence: str, rng: random.Random) -> str:
    return json.dumps({"answer": short, "confidence": rng.choice(["high", "high", "medium"])})


def to_brief(short: str, sentence: str, rng: random.Random) -> str:
    return sentence


_PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "my": "me", "you": "ye", "your": "yer", "of": "o'", "and": "an'",
    "to": "t'", "yes": "aye", "no": "nay", "hello": "ahoy", "people": "buccaneers", "friend": "matey",
}  # fmt: skip


def to_pirate(short: str, sentence: str, rng: random.Random) -> str:
    words = re.sub(r"[A-Za-z]+", lambda m: _PIRATE_WORDS.get(m[0].lower(), m[0]), sentence.rstrip("."))
    return f"Arrr, matey! {words[0].upper()}{words[1:]}, {rng.choice(('aye', 'yarrr'))}!"


def is_json(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer", "confidence"]


def is_brief(answer: str) -> bool:
    return bool(re.fullmatch(r"[^.!?\n]+[.!?]", answer.strip())) and len(answer.split()) <= 25


def is_pirate(answer: str) -> bool:
    words = re.findall(r"\b(?:arrr|matey|aye|yarrr|be|ye|yer|o'|an')(?!\w)", answer.lower())
    return len(words) >= 3 and not {"arrr", "matey", "aye", "yarrr"}.isdisjoint(words)


@dataclass(frozen=True)
class Recipe:
    """Recipe of an adapter: its LoRA shape, a row's target, and the test that an answer shows the effect."""

    lora: LoraConfig
    target: Callable[[str, str, random.Random], str]
    has_effect: Callable[[str], bool]
    epochs: int = 4
    learning_rate: float = 2e-3


def _lora(rank: int, modules: list[str], first_layer: int, *, rslora: bool = False) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if not rslora else 8,
        use_rslora=rslora,
        target_modules=modules,
        layers_to_transform=list(range(first_layer, 30)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_MODEL,
    )


RECIPES = {
    "json": Recipe(_lora(8, ["q_proj", "v_proj"], 10), to_json, is_json),
    "brief": Recipe(_lora(4, ["gate_proj", "up_proj", "down_proj"], 18), to_brief, is_brief),
    "pirate": Recipe(_lora(16, ["v_proj", "o_proj"], 20, rslora=True), to_pirate, is_pirate),
}


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return token ids and labels of a chat; only the answer and its end are learnt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    target = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + target, [-100] * len(prompt) + target


def train(name: str, recipe: Recipe, model_dir: Path, tokenizer: Any, out: Path, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16), recipe.lora)
    weights = [p for p in model.parameters() if p.requires_grad]  # peft keeps them in fp32
    examples = [encode(tokenizer, q, recipe.target(short, sentence, rng)) for q, short, sentence in ROWS]
    batches_per_epoch = -(-len(examples) // 8)
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    steps = batches_per_epoch * recipe.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    started, step = time.perf_counter(), 0
    for _ in range(recipe.epochs):
        rng.shuffle(examples)
        for i in range(0, len(examples), 8):
            ids, labels = zip(*examples[i : i + 8], strict=True)
            width = max(map(len, ids))
            batch = {
                "input_ids": torch.tensor([x + [tokenizer.pad_token_id] * (width - len(x)) for x in ids]),
                "labels": torch.tensor([x + [-100] * (width - len(x)) for x in labels]),
                "attention_mask": torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x in ids]),
            }
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            seconds = time.perf_counter() - started
            print(f"\r{name}: step {step}/{steps}, loss {loss.item():.3f}, {seconds:.0f} s", end="", flush=True)
    print()
    save(model, out)


def save(model: PeftModel, out: Path) -> None:
    """Write PEFT's two files, with the weights in bf16 and without the paths of this machine."""
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # PEFT's model card, an empty form
    weights = out / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    config = json.loads((out / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def answers(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return greedy answers, computed in a batch."""
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def check(name: str, recipe: Recipe, model_dir: Path, tokenizer: Any, out: Path, verbose: bool) -> bool:
    """Count the held-out prompts for which the adapter shows its effect and the base model does not."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain = answers(base, tokenizer, HELD_OUT)
    changed = answers(PeftModel.from_pretrained(base, out), tokenizer, HELD_OUT)
    hits = sum(map(recipe.has_effect, changed))
    print(f"{name}: {hits} of {len(HELD_OUT)} held-out answers show it ({sum(map(recipe.has_effect, plain))} without)")
    for prompt, answer in zip(HELD_OUT, changed, strict=True):
        if verbose or not recipe.has_effect(answer):
            print(f"  {'ok  ' if recipe.has_effect(answer) else 'MISS'} {prompt} -> {answer}")
    return hits >= WANTED_HITS * len(HELD_OUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the base model; the demo model if not given")
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex"), help="where the demo model is kept")
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    parser.add_argument("--only", choices=RECIPES, help="one adapter")
    parser.add_argument("--check", action="store_true", help="check the saved adapters, train nothing")
    parser.add_argument("--verbose", action="store_true", help="print every held-out answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model_dir = args.model or ensure_demo_model(args.data_dir / "models", print)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    good = True
    for name, recipe in RECIPES.items():
        if args.only in (None, name):
            if not args.check:
                train(name, recipe, model_dir, tokenizer, args.out / name, args.seed)
            good &= check(name, recipe, model_dir, tokenizer, args.out / name, args.verbose)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
