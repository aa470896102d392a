"""Time at which the next step is planned while the device computes a step.

With async scheduling the host may plan step n+1 as soon as step n has begun. A request that arrives after that waits
for the ends of both. So the host plans step n+1 as late as it can without leaving the device idle: at a share of step
n's expected duration, less the time that planning and launching take. The share grows while launches are in time and
shrinks when the device was idle before one, so that it fits the device and the host's load. Has no clock.
"""

# Maximum share of a step that passes before the next step is planned, its growth after a launch in time, and its
# decrease after a late one.
MAX_SHARE, GROWTH, DECREASE = 0.9, 0.005, 0.1
# Factor by which the longest known planning time shrinks with each step.
_FORGOTTEN = 0.99


class LaunchTimer:
    """Planning times. share: part of a step's expected duration after which the next step may be planned."""

    def __init__(self) -> None:
        self.share = 0.0
        self._host_seconds = 0.0

    def observe(self, host_seconds: float, *, is_late: bool) -> None:
        """Record a launch while a step was in flight.

        host_seconds: duration of planning and launching. is_late: whether the device had ended the step in flight.
        """
        self._host_seconds = max(host_seconds, _FORGOTTEN * self._host_seconds)
        self.share = max(0.0, self.share - DECREASE) if is_late else min(MAX_SHARE, self.share + GROWTH)

    def delay(self, step_seconds: float) -> float:
        """Return the seconds between a step's start and the planning of the next one.

        step_seconds: the step's expected duration, 0 if it is unknown.
        """
        return max(0.0, self.share * step_seconds - self._host_seconds)
