"""The form of a mixture in `model`, and its digest."""

import itertools

import pytest

from wire.errors import BadRequest
from wire.mixtures import MAX_TERMS, Mixture, is_mixture, parse_terms

A, B = "a" * 64, "b" * 64


def mixture(model: str, **digests: str) -> Mixture:
    terms = parse_terms(model)
    return Mixture.of(terms, [digests[term.name] for term in terms])


def test_terms_are_names_with_weights():
    assert parse_terms("a*0.7+b-1.x*-3") == [("a", 0.7), ("b-1.x", -3.0)]
    assert parse_terms("name@3*.5+name:prod*2.+c*1e-05") == [("name@3", 0.5), ("name:prod", 2.0), ("c", 1e-05)]
    assert not is_mixture("a+b")


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("a*0.7+", "''"), ("+a*1", "''"), ("a*0.7+b", "'b'"), ("*1", "'*1'"), ("a*", "'a*'"), ("a*nan", "'a*nan'"),
        ("a*inf", "'a*inf'"), ("a*1e5", "'a*1e5'"), ("a*100.01", "'a*100.01'"), ("a*0x1", "'a*0x1'"),
        ("a* 1", "'a* 1'"), ("a*1_0", "'a*1_0'"), ("a*--1", "'a*--1'"), ("a*1*2", "'a*1*2'"),
        ("a*\u0661", "'a*\u0661'"),
        ("a*0." + "1" * 40, "'a*0.1111"), ("x" * 500 + "*y", "xxx...'"), ("a*1e-9999", "'a*1e-9999'"),
        ("+".join(["a*1"] * (MAX_TERMS + 1)), f"at most {MAX_TERMS} adapters"),
    ],
)  # fmt: skip
def test_a_malformed_term_is_named(model: str, named: str):
    with pytest.raises(BadRequest) as refusal:
        parse_terms(model)
    assert refusal.value.param == "model"
    assert named in refusal.value.message
    assert len(refusal.value.message) < 300


def test_order_and_writing_do_not_change_the_digest():
    first = mixture("a*0.70+b*-.3", a=A, b=B)
    assert first == mixture("b*-0.3+a*7e-1", a=A, b=B)
    assert first.name == f"sha256:{A}*0.7+sha256:{B}*-0.3"
    assert first.digest == mixture("b*-0.3+a*0.7", a=A, b=B).digest
    others = ["a*0.7+b*0.3", "a*0.7", "a*-0.3+b*0.7", "a*0.7000001+b*-0.3", "a*1"]
    digests = {mixture(other, a=A, b=B).digest for other in others} | {first.digest}
    assert len(digests) == len(others) + 1
    assert len(first.digest) == 64
    assert A not in digests


def test_weights_of_one_adapter_are_added_exactly():
    """Two names may have the same content, for example an alias and its version."""
    terms = ["a*0.1", "b*0.2", "c*0.3", "d*1e-17"]
    orders = {mixture("+".join(order), a=A, b=A, c=A, d=A).parts for order in itertools.permutations(terms)}
    assert orders == {((A, 0.6),)}
    assert mixture("a*0.5+b*-0.5", a=A, b=A).name == mixture("a*-0", a=A).name == f"sha256:{A}*0.0"
    with pytest.raises(BadRequest, match="'b' add up to more than 100"):
        mixture("a*60+b*60", a=A, b=A)


def test_the_engines_form_can_be_parsed_again():
    for weight in ("0.1", "1e-12", "99.9999999999999", "-1.2345678901234567e-05"):
        found = mixture(f"a*{weight}", a=A)
        again = parse_terms(found.name)
        assert Mixture.of(again, [A]) == found
