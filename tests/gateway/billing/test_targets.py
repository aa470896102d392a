"""Targets of the time to first token by the gateway's clock: which requests count, and how."""

import pytest

from gateway.billing.charges import Ending
from gateway.billing.targets import is_met


@pytest.mark.parametrize(
    ("ending", "first_token", "ended", "expected"),
    [
        (Ending.FINISHED, 0.9, 5.0, True),
        (Ending.FINISHED, 1.1, 5.0, False),
        # An answer without tokens came when it ended.
        (Ending.FINISHED, None, 0.9, True),
        (Ending.FINISHED, None, 1.1, False),
        # Its first token came in time, however the answer ended.
        (Ending.BROKEN, 0.9, 5.0, True),
        (Ending.CANCELLED, 0.9, 5.0, True),
        # Without a token, the target was not missed yet when the client left.
        (Ending.CANCELLED, None, 0.9, None),
        (Ending.CANCELLED, None, 1.1, False),
        (Ending.REVOKED, None, 0.9, None),
        (Ending.REVOKED, None, 1.1, False),
        # The request was invalid.
        (Ending.REFUSED, None, 0.1, None),
        *((ending, None, 0.1, False) for ending in (Ending.OVERLOADED, Ending.NO_ENGINE, Ending.LIMITED)),
        *((ending, None, 0.1, False) for ending in (Ending.UNABLE, Ending.BROKEN, Ending.NOT_BEGUN, Ending.MISMATCHED)),
    ],
)
def test_a_request_meets_its_target_of_a_second(
    ending: Ending, first_token: float | None, ended: float, expected: bool | None
):
    assert is_met(1.0, ending, first_token, ended) is expected
    assert is_met(None, ending, first_token, ended) is None
