"""Values as people write them, completion in shells, and an adapter in place of a model."""

from datetime import UTC, datetime, timedelta

import pytest

from gateway.limits.kinds import BUDGET_NAMES
from loraplex.commands.output import BUDGETS
from loraplex.commands.values import Duration, Limit, Moment, Money, given
from tests.loraplex.test_cli import refused, run


def test_every_budget_is_shown_as_money():
    assert set(BUDGETS) == set(BUDGET_NAMES)


def test_limits_money_and_moments_as_people_write_them():
    assert given({"a": Limit().convert("none", None, None), "b": Limit().convert("7", None, None), "c": None}) == {
        "a": None,
        "b": 7,
    }
    assert [Limit().convert(text, None, None) for text in ("20k", "1M", "1.5M", "2G")] == [
        20_000,
        10**6,
        1_500_000,
        2 * 10**9,
    ]
    budget = Money(or_none=True)
    assert [budget.convert(text, None, None) for text in ("12.50", "0.000001", "none")] == [12_500_000, 1, "none"]
    assert Duration().convert("36h", None, None) == timedelta(days=1.5)
    assert Moment(ahead=True).convert("2027-01-31", None, None) == "2027-01-31T00:00:00+00:00"
    assert Moment(ahead=True).convert("2027-01-31T12:00:00+02:00", None, None) == "2027-01-31T12:00:00+02:00"
    for ahead in (True, False):
        moment = datetime.fromisoformat(Moment(ahead=ahead).convert("30d", None, None))
        assert (moment > datetime.now(UTC)) == ahead


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script_for_completion(shell: str):
    script = run(prog_name="loraplex", env={"_LORAPLEX_COMPLETE": f"{shell}_source"})
    assert "_LORAPLEX_COMPLETE" in script.stdout
    words = {"COMP_WORDS": "loraplex tenant cre", "COMP_CWORD": "2"}
    if shell == "bash":
        completed = run(prog_name="loraplex", env=words | {"_LORAPLEX_COMPLETE": "bash_complete"})
        assert completed.stdout == "plain,create\n"


def test_an_adapter_in_place_of_a_model_is_named():
    line = refused(run("engine", "--model", "examples/adapters/pirate"), 1)
    assert line.endswith(
        "examples/adapters/pirate is a LoRA adapter, not a model: upload it with `loraplex adapter push`"
    )


@pytest.mark.parametrize(
    "command",
    [
        ("engine", "--model", "~nobody-here/model"),
        ("size", "--model", "~nobody-here/model"),
        ("up", "--demo", "--data-dir", "~nobody-here/data"),
        ("engine", "--model", "m", "--lora-modules", "sql=~nobody-here/sql"),
        ("base", "add", "qwen", "--gateway", "http://127.0.0.1:1", "--admin-key", "k", "--model", "~nobody-here/model"),
    ],
)
def test_a_path_of_an_unknown_person_is_one_line(command: tuple[str, ...]):
    got = run(*command)
    assert isinstance(got.exception, SystemExit), got.exception
    assert got.exit_code != 0
    assert "~nobody-here" in got.output.splitlines()[-1]
