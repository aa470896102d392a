"""Uploaded patterns match like `re`, and none can block the process."""

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.manifest import AdapterError, parse_manifest
from adapters.patterns import MAX_STEPS, Budget, ModulePattern, PatternError, pattern_key_matcher

NAME = "model.layers.3.self_attn.q_proj"
_ATOM = st.sampled_from(["a", "b", "_", ".", r"\.", r"\d", r"\w", r"\W", r"\s", "[ab]", "[^a]", "[a-b1]", r"[^\d]", ""])
_ANCHOR = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z"])
_PATTERN = st.recursive(
    _ATOM | _ANCHOR,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
        inner.map(lambda p: f"(?={p})"),
        inner.map(lambda p: f"(?!{p})"),
    ),
    max_leaves=8,
)


@settings(deadline=None, derandomize=True)
@given(pattern=_PATTERN, name=st.text("ab1_. ", min_size=1, max_size=6))
def test_matches_as_re_does(pattern, name):
    ours = ModulePattern(pattern)
    assert ours.match(name) == (re.match(pattern, name) is not None)
    assert ours.fullmatch(name) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        # as a popular fine-tuning library writes target_modules
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
        r"^(?!.*visual).*(?:q_proj|v_proj)$",
    ],
)
def test_patterns_seen_in_the_wild(pattern):
    assert ModulePattern(pattern).fullmatch(NAME)
    assert not ModulePattern(pattern).fullmatch(NAME.replace("q_proj", "o_proj"))


@pytest.mark.parametrize(
    "key", ["q_proj", "layers.3.self_attn.q_proj", "proj", "^model", r"model.*q_proj", "(q|k)_proj"]
)
def test_keys_of_rank_pattern(key):
    assert pattern_key_matcher(key)(NAME) == (re.match(rf"(.*\.)?({key})$", NAME) is not None)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of nodes of patterns that are matched, each of which costs some microseconds."""
    count, plain = [0], ModulePattern._node

    def counted(*given):
        count[0] += 1
        return plain(*given)

    monkeypatch.setattr(ModulePattern, "_node", counted)
    return count


@pytest.mark.parametrize(
    "pattern",
    [r"(\w+)+x", r"([a-z_.0-9]*)*!", r"(a|a?)+(.|.)*(.*)*.*.*.*.*.*.*x", "((((.*)*)*)*)*y", "(.{1,999}){999}z"],
)
def test_hostile_patterns_cost_little(pattern, nodes):
    with contextlib.suppress(PatternError):  # some are refused as too costly, the others don't match
        assert not ModulePattern(pattern).fullmatch(NAME)
    assert nodes[0] <= MAX_STEPS


def test_the_cost_of_all_matches_of_one_adapter_is_bounded(nodes):
    manifest = parse_manifest({"peft_type": "LORA", "target_modules": "(((((.?)*.?)*.?)*.?)*.?)*!"})
    with pytest.raises(AdapterError, match="target_modules: too costly"):
        sum(manifest.targets(f"model.layers.{layer}.mlp.up_proj", layer) for layer in range(100_000))
    assert nodes[0] <= MAX_STEPS


@pytest.mark.parametrize(
    "pattern", ["(", "[", "a{2,1}", "(" * 3000, r"(a)\1", "(?<=a)b", "(?i)a", "(?i:a)", "(?>a)", "a*+", "(a)?(?(1)b|c)"]
)
def test_what_is_not_matched_is_refused(pattern):
    with pytest.raises(PatternError):
        ModulePattern(pattern).match("abcabc")


def test_a_common_training_tools_pattern_fits_the_budget_of_the_largest_models():
    blocks, parts = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)", "q k v o gate up down"
    ends = "(?:" + "|".join(f"{part}_proj" for part in parts.split()) + ")"
    pattern = ModulePattern(
        rf"(?:.*?(?:language|text).*?{blocks}.*?{ends}.*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.{blocks}\.{ends})", Budget()
    )
    for layer in range(126):
        for part in parts.split():
            block = "self_attn" if part in "qkvo" else "mlp"
            assert pattern.fullmatch(f"model.layers.{layer}.{block}.{part}_proj")
