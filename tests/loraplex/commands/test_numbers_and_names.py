"""Numbers that JSON does not have, and empty names: one line that names the flag."""

import pytest

from tests.loraplex.test_cli import refused, run

GATEWAY = ("--gateway", "http://127.0.0.1:9", "--admin-key", "k")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "heavy"])
def test_a_weight_is_a_finite_number(value: str):
    says = f"'--weight': expected a number from 0.01 to 1,000; got {value}"
    assert says in refused(run("tenant", "create", "x", "--weight", value), 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tenant", "create", "x", "--ttft-target", "nan"), "'--ttft-target': 'nan' is not a number of seconds"),
        (("tenant", "create", "x", "--budget-warn-at", "0.5,inf"), "'--budget-warn-at': '0.5,inf' is not a list"),
        (("chat", "--temperature", "nan"), "'--temperature': expected a number from 0 to 2; got nan"),
        (("top", "--interval", "nan"), "'--interval': expected a number from 0.5 to 60; got nan"),
        (
            ("price", "set", "", "--input", "1", "--output", "1", *GATEWAY),
            "expected a name among the prices, got an empty text",
        ),
        (("tenant", "show", "", *GATEWAY), "expected a name among the tenants, got an empty text"),
    ],
)
def test_other_values_are_refused_by_name(arguments: tuple[str, ...], says: str):
    assert says in refused(run(*arguments), 2)
