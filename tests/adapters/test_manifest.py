"""Every field of PEFT's LoraConfig is applied, ignored as harmless, or refused; ranks and scales equal PEFT's."""

import copy
import dataclasses
import json
import math
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.checkpoint import CONFIG_NAME, open_checkpoint
from adapters.manifest import HARMLESS, HONOURED, NO_LAYER, REFUSED, AdapterError, BaseShape, parse_manifest
from adapters.store import DirectoryStore
from testing.adapter_files import BASE, CONFIG, write

ON = {
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2], [1, 3]],
    "megatron_config": {"tensor_parallel": 2},
    "velora_config": {"num_groups": 4},
    "monteclora_config": {"num_samples": 2},
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "target_parameters": ["mlp.experts.gate_up_proj"],
}


def test_every_field_of_peft_is_decided():
    from peft import LoraConfig  # takes 5 s, so it is not imported at collection

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - HONOURED - HARMLESS - set(REFUSED) == set()
    assert HONOURED & HARMLESS == HONOURED & set(REFUSED) == HARMLESS & set(REFUSED) == set()


def test_the_defaults_of_peft_are_taken(tmp_path):
    from peft import LoraConfig

    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    manifest = parse_manifest(json.loads((tmp_path / "adapter_config.json").read_text()))
    assert (manifest.rank, manifest.alpha, manifest.use_rslora) == (8, 8, False)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_output_is_refused_by_name(name):
    off = parse_manifest({**CONFIG, name: None})
    assert off.rank == 4
    with pytest.raises(AdapterError) as refusal:
        parse_manifest({**CONFIG, name: ON.get(name, True)})
    assert refusal.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("ensure_weight_tying", 1),
        ("fan_in_fan_out", "yes"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "something_new"),
        ("init_lora_weights", ["x"]),
        ("a_field_of_tomorrow", {"strength": 2}),
        ("r", 0),
        ("r", -1),
        ("r", 4.0),
        ("r", True),
        ("r", "8"),
        ("r", None),
        ("lora_alpha", "16"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**400),
        ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", []),
        ("alpha_pattern", ""),
        ("alpha_pattern", "q_proj"),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj[": 4}),
        ("rank_pattern", {str(i): 1 for i in range(5000)}),
        ("target_modules", 3),
        ("target_modules", [1]),
        ("target_modules", "("),
        ("target_modules", "(?i)Q_PROJ"),
        ("target_modules", "a" * 5000),
        ("exclude_modules", {"q_proj": 1}),
        ("layers_to_transform", "all"),
        ("layers_to_transform", [0, -1]),
        ("layers_to_transform", True),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(AdapterError) as refusal:
        parse_manifest({**CONFIG, name: value})
    assert refusal.value.field == name
    assert str(refusal.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**CONFIG, "rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']"),
        ({**CONFIG, "alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({**CONFIG, "layers_to_transform": [0], "layers_pattern": "blocks"}, "layers_pattern"),
        ({**CONFIG, "layers_to_transform": [0], "target_modules": ".*q_proj"}, "layers_to_transform"),
        ({**CONFIG, "layers_to_transform": [0], "target_modules": "all-linear"}, "layers_to_transform"),
        ({**CONFIG, "layers_pattern": "layers"}, "layers_pattern"),
        ({**CONFIG, "kasa_config": {}}, "kasa_config"),  # PEFT reads this as KaSA with its defaults
        ([CONFIG], "adapter_config.json"),
    ],
)
def test_combinations_are_refused(config, field):
    with pytest.raises(AdapterError) as refusal:
        parse_manifest(config)
    assert refusal.value.field == field


@pytest.mark.parametrize("init", [None, True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_ways_to_start_that_leave_the_base_alone_are_taken(init):
    assert parse_manifest({**CONFIG, "init_lora_weights": init}).rank == 4


def test_unknown_fields_are_taken_while_they_are_empty():
    assert parse_manifest({**CONFIG, "a": None, "b": False, "c": [], "d": {}, "e": ""}).rank == 4


def test_base_shape_of_a_config(tmp_path):
    assert BASE.projections["k_proj"] == (8, 16)
    config = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "num_key_value_heads": None}))
    base = BaseShape.from_config_dir(tmp_path)
    assert (base.num_layers, base.projections["q_proj"]) == (2, (128, 64))
    assert (base.projections["k_proj"], base.projections["o_proj"]) == ((128, 64), (64, 128))
    assert (base.projections["up_proj"], base.projections["down_proj"]) == ((96, 64), (64, 96))
    with pytest.raises(ValueError, match="num_hidden_layers: expected a positive integer, got None"):
        BaseShape.from_config(config)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        BaseShape.from_config_dir(tmp_path)


@pytest.fixture(scope="module")
def llama():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config)


LORA_CONFIGS = {
    "list": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "All-Linear"},
    "regex": {"r": 4, "target_modules": r".*\.(1|3)\.(self_attn\.[qk]_proj|mlp\.(gate|down)_proj)"},
    "exclude": {"r": 4, "target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "layers.2.mlp.down_proj"]},
    "exclude-regex": {"r": 4, "target_modules": ["q_proj", "gate_proj"], "exclude_modules": r"model\.layers\.0\..*"},
    "layers": {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 3]},
    "layers-and-full-names": {
        "r": 4,
        "target_modules": ["q_proj", "model.layers.1.mlp.up_proj"],
        "layers_to_transform": [0, 2],
    },
    "one-layer": {"r": 4, "target_modules": ["v_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
    "patterns": {
        "r": 4,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, r".*layers\.[23]\..*v_proj": 2, "down_proj": 6},
        "alpha_pattern": {"v_proj": 20, "model.layers.0.self_attn.q_proj": 1, r"^model\.layers\.3.*": 31},
    },
    "patterns-order": {
        "r": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj"],
        "rank_pattern": {"k_proj": 6, "proj": 9, "q_proj": 5, "self_attn.q_proj": 3},
        "alpha_pattern": {r"layers\.\d\.self_attn\.(q|k)_proj": 12, "k_proj": 100},
    },
    "names-that-end-alike": {"r": 4, "target_modules": ["self_attn.q_proj", "proj", "model.layers.1.mlp.up_proj"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", LORA_CONFIGS)
def test_ranks_and_scales_are_those_of_peft(llama, tmp_path, name):
    """Ranks and scales equal PEFT's after its save, which sorts the pattern keys; their order decides."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora import LoraLayer

    lora = LoraConfig(task_type="CAUSAL_LM", **LORA_CONFIGS[name])
    get_peft_model(copy.deepcopy(llama), lora).save_pretrained(tmp_path, save_embedding_layers=False)
    expected = {}
    for path, module in PeftModel.from_pretrained(copy.deepcopy(llama), tmp_path).named_modules():
        if isinstance(module, LoraLayer):
            parts = path.split(".")
            key = int(parts[parts.index("layers") + 1]), parts[-1]
            expected[key] = module.r["default"], module.scaling["default"]
    checkpoint = open_checkpoint(tmp_path)
    assert {key: (module.rank, module.scale) for key, module in checkpoint.modules.items()} == expected
    assert checkpoint.rank == max(rank for rank, _ in expected.values())
    checkpoint.check_base(BaseShape.from_config(llama.config.to_dict()))


MODULES = [
    *(
        (layer, f"model.layers.{layer}.{module}")
        for layer in (0, 1, 10)
        for module in ("self_attn.q_proj", "mlp.up_proj")
    ),
    (NO_LAYER, "lm_head"),
    (NO_LAYER, "model.embed_tokens"),
]
_NAME = st.sampled_from(
    ("q_proj", "proj", "mlp.up_proj", "1.mlp.up_proj", "model.layers.1.mlp.up_proj", "layers.1", "lm_head")
) | st.sampled_from(("embed_tokens", "model.embed_tokens", ""))
_PATTERN = st.sampled_from(
    (r".*q_proj", r".*\.(1|2)\..*", r"lm_head|.*embed_tokens", "all-linear", "q_proj", r".*layers\.1[01]?\..*")
) | st.sampled_from(
    ("(?!.*mlp).*proj", r"model\.layers\.1", "", r"^model\.layers\.1\..*", r"layers\.1\.", "q_proj|v_proj")
)
_NAMES = st.lists(_NAME, max_size=3)
_BY_MODULE = st.dictionaries(_NAME | _PATTERN | st.just("a)(b"), st.sampled_from([1, 4, 16]), max_size=3)
_LORA_CONFIG = st.fixed_dictionaries(
    {"r": st.sampled_from([1, 9]), "target_modules": _NAMES | _PATTERN},
    optional={
        "lora_alpha": st.sampled_from([1, 7.5, 0, -2]),
        "use_rslora": st.booleans(),
        "exclude_modules": _NAMES | _PATTERN,
        "layers_to_transform": st.sampled_from([None, [], 0, 1, [0, 1], [10], [99]]),
        "layers_pattern": st.sampled_from([None, "layers", ["layers"]]),
        "rank_pattern": _BY_MODULE,
        "alpha_pattern": _BY_MODULE,
    },
)


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    """Import peft before the examples of Hypothesis, because each example has a time limit."""
    import peft
    import peft.tuners.tuners_utils
    import peft.utils.other

    return peft


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(_LORA_CONFIG)
def test_of_any_config_targets_ranks_and_scales_are_those_of_pefts_own_rules(peft, fields):
    try:
        theirs = peft.LoraConfig(**fields)
    except ValueError:  # configs that PEFT does not load are not compared
        return
    ours = parse_manifest({"peft_type": "LORA", **fields})
    if theirs.target_modules == "all-linear":
        theirs.target_modules = {"q_proj", "up_proj"}
    for layer, module in MODULES:
        found = peft.tuners.tuners_utils.check_target_module_exists(theirs, module)
        assert ours.targets(module, layer) == (
            bool(found) and not isinstance(found, peft.tuners.tuners_utils._ExcludedModule)
        )
        rank = theirs.rank_pattern.get(peft.utils.other.get_pattern_key(theirs.rank_pattern, module), theirs.r)
        alpha = theirs.alpha_pattern.get(
            peft.utils.other.get_pattern_key(theirs.alpha_pattern, module), theirs.lora_alpha
        )
        assert ours.rank_of(module) == rank
        assert ours.scale_of(module) == alpha / (math.sqrt(rank) if theirs.use_rslora else rank)


@pytest.mark.parametrize("tokens", [[1, -1], [1, "x"], [True], "ab", {"a": 1}, 5, [1 << 31], [1] * 129])
def test_invocation_tokens_are_a_bounded_list_of_ids(tokens):
    with pytest.raises(AdapterError) as refusal:
        parse_manifest({**CONFIG, "alora_invocation_tokens": tokens})
    assert refusal.value.field == "alora_invocation_tokens"
    assert parse_manifest({**CONFIG, "alora_invocation_tokens": [5, 7]}).invocation == (5, 7)
    assert parse_manifest({**CONFIG, "alora_invocation_tokens": None}).invocation == ()


def test_invocation_tokens_change_the_digest_and_stay_in_the_stored_form(tmp_path):
    plain, *found = (
        write(tmp_path / str(i), config=CONFIG | extra)
        for i, extra in enumerate([{}, {"alora_invocation_tokens": [5, 7]}, {"alora_invocation_tokens": [57]}])
    )
    digests = {open_checkpoint(folder).digest for folder in (plain, *found)}
    assert len(digests) == 3
    store = DirectoryStore(tmp_path / "store")
    stored = store.put(found[0], BASE)
    assert stored.digest == open_checkpoint(found[0]).digest
    assert open_checkpoint(stored.folder).manifest.invocation == (5, 7)
    assert "alora_invocation_tokens" not in json.loads((store.put(plain, BASE).folder / CONFIG_NAME).read_text())
    shape = dataclasses.replace(BASE, embedding_head={"lm_head": (50, 16)})
    with pytest.raises(AdapterError, match="below 50"):
        store.put(found[1], shape)
