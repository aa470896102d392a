"""The steps that engines report: each second once, gaps filled, and the utilisation of the last minute."""

from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.history import LAG_SECONDS, STEP_SECONDS, UTILISATION_SECONDS, EngineHistory
from wire.responses import StepSecond

NOW = 1_800_000_000


def reporting(history: EngineHistory, *seconds: StepSecond, instance: str = "one") -> None:
    engine = EngineRecord(Address("http://engine:8000"))
    engine.state = EngineState(instance=instance, recent_steps=list(seconds))
    history.look(engine)


def test_each_second_is_kept_once_and_gaps_are_filled():
    history = EngineHistory()
    assert history.steps(NOW) == []
    first, second = StepSecond(NOW - 10, steps=2, seconds=0.5), StepSecond(NOW - 8, steps=1, seconds=0.1)
    reporting(history, first)
    reporting(history, first, second)
    shown = history.steps(NOW)
    assert len(shown) == STEP_SECONDS
    assert shown[-1].at == NOW - LAG_SECONDS - 1
    assert [each.steps for each in shown if NOW - 10 <= each.at <= NOW - 8] == [2, 0, 1]
    # Another process, whose clock is behind.
    reporting(history, StepSecond(NOW - 20, steps=7), instance="two")
    assert sum(each.steps for each in history.steps(NOW)) == 7


def test_the_utilisation_is_of_the_last_minute():
    history = EngineHistory()
    reporting(history, StepSecond(NOW - 30, steps=1, seconds=0.5))
    assert history.utilisation(NOW) is None
    old, new = StepSecond(NOW - 100, roofline=0.9), StepSecond(NOW - 30, roofline=0.3)
    reporting(history, old, new, instance="two")
    assert history.utilisation(NOW) == 0.3 / UTILISATION_SECONDS
