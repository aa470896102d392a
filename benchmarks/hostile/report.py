"""Report of the attacks: lines, verdicts against the controls, the table, totals and the JSON file."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.hostile.ratios import Ratio
from benchmarks.hostile.run import Limits, Result, as_json

# Runs that send nothing.
CONTROLS = ("nothing", "busy-loop")
# An attacker that waited for a CPU for a larger part of its rounds was starved.
MAX_WAITED = 0.5
STARVED = "the attacker was starved"


class Report:
    """Results in the order of the runs. path: JSON file, rewritten after each result.

    The ratio of a control shows by how much two quiet rounds differ on this machine. So a latency counts as missed only
    if it is above the limit as a multiple of the largest control too; otherwise it is undecided. An attacker that was
    starved attacked less than it could: then a latency that is not missed is undecided. Results are judged again when a
    control has been added.
    """

    def __init__(self, limits: Limits, path: Path | None) -> None:
        self._limits, self._path = limits, path
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        for each in [result] if result.name not in CONTROLS else self.results:
            self._judge(each)
        if self._path is not None:
            self._path.write_bytes(as_json(self.results))

    @property
    def attacks(self) -> list[Result]:
        return [result for result in self.results if result.name not in CONTROLS]

    @property
    def controls(self) -> list[Result]:
        return [result for result in self.results if result.name in CONTROLS]

    def _judge(self, result: Result) -> None:
        result.of_control = (
            self._of_control(result.p50.value, lambda control: control.p50),
            self._of_control(result.p99.value, lambda control: control.p99),
        )
        result.slow, result.undecided = [], []
        limit = self._limits.latency
        if limit is None or not result.judges_latency:
            return
        for name, found, of_control in zip(("p50", "p99"), (result.p50, result.p99), result.of_control, strict=True):
            if found.value > limit:
                is_certain = found.low > limit and (of_control is None or of_control > limit)
                (result.slow if is_certain else result.undecided).append(f"{name} {found.value:.2f} times quiet")
        if result.waited > MAX_WAITED:
            result.undecided.append(STARVED)

    def _of_control(self, value: float, part: Callable[[Result], Ratio]) -> float | None:
        """Return a ratio as a multiple of the largest control; None without controls. A control below 1 counts as 1."""
        known = [part(control).value for control in self.controls if part(control).value]
        return value / max(1.0, *known) if known else None

    def totals(self) -> str:
        """Return the numbers of attacks that hold, are undecided and missed, their names, and the controls."""
        missed = [result.name for result in self.attacks if result.all_missed]
        undecided = [result.name for result in self.attacks if result.undecided and not result.all_missed]
        holds = len(self.attacks) - len(missed) - len(undecided)
        lines = [f"total: {holds} hold, {len(undecided)} undecided, {len(missed)} missed"]
        lines += [f"missed: {', '.join(missed)}"] if missed else []
        lines += [f"undecided: {', '.join(undecided)}"] if undecided else []
        if self.controls:
            lines.append(
                "controls: " + ", ".join(f"{each.name} p50 {each.p50} p99 {each.p99}" for each in self.controls)
            )
        return "\n".join(lines)

    def table(self) -> str:
        """Return the results as a table in Markdown."""
        head = ["attack", "p50", "of control", "p99", "of control", "upload", "gateway", "stall (quiet)"]
        head += ["quiet load", "requests/s (quiet)", "waited", "statuses", "verdict"]
        rows = [tuple(head), ("---",) * len(head)]
        for each in self.results:
            verdict = "; ".join([*each.all_missed, *each.undecided])
            prefix = "**missed**: " if each.all_missed else "undecided: " if each.undecided else "holds"
            stall = f"{each.stall * 1000:.0f} ({each.quiet_stall * 1000:.0f}) ms{_causes(each)}"
            ratios = (str(each.p50), _plain(each.of_control[0]), str(each.p99), _plain(each.of_control[1]))
            sizes = (f"{each.upload:.2f} s", f"{each.memory / 2**20:+.0f} MiB", stall)
            attacker = (each.quiet_load, _rates(each), f"{each.waited:.0%}", _statuses(each))
            rows.append((each.name, *ratios, *sizes, *attacker, prefix + verdict))
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows
        )


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rates(result: Result) -> str:
    return f"{result.rate:.1f} ({result.quiet_rate:.1f})"


def _causes(result: Result) -> str:
    """Return the causes of the stalls that the gateway's log explains, each with the innermost function."""
    found = [_cause(each) for each in result.explained]
    found += [f"quiet: {_cause(each)}" for each in result.quiet_explained]
    return "".join(f"; {each}" for each in found)


def _cause(words: str) -> str:
    head, _, stack = words.partition(" stack=")
    fields = dict(word.partition("=")[::2] for word in head.split())
    cause = fields.get("cause", "")
    return f"{fields.get('held_ms')} ms, {fields.get(f'{cause}_ms')} {cause}, {stack.partition(' < ')[0]}"


def _statuses(result: Result) -> str:
    return " ".join(f"{status}:{number}" for status, number in sorted(result.statuses.items()))


def show(result: Result) -> str:
    """Return an attack's lines of the report."""
    verdict = "holds"
    if result.undecided:
        verdict = "UNDECIDED " + "; ".join(result.undecided)
    if result.all_missed:
        verdict = "MISSED " + "; ".join([*result.all_missed, *result.undecided])
    return (
        f"{result.name:20} p50 {result.p50}  p99 {result.p99}  {result.upload:6.2f} s "
        f"{result.memory / 2**20:+6.0f} MiB {result.children / 2**20:5.0f} MiB "
        f"{result.stall * 1000:6.0f} ({result.quiet_stall * 1000:.0f}) ms {result.cpu:5.1f} s "
        f"{result.busy:.2f} {result.waited:.0%} {_rates(result)}/s  {_statuses(result)}\n"
        f"{'':20} of control p50 {_plain(result.of_control[0])} p99 {_plain(result.of_control[1])}; {result.samples} "
        f"chats; quiet ({result.quiet_load}) {result.quiet_ms[0]:.0f} {result.quiet_ms[1]:.0f} ms, its rounds differ "
        f"by {result.quiet_spread[0]:.2f} {result.quiet_spread[1]:.2f}; took {result.seconds:.0f} s\n"
        f"{'':20} {verdict}"
        + "".join(f"\n{'':20} {note}" for note in result.notes)
        + "".join(f"\n{'':20} stall: {words}" for words in result.explained)
        + "".join(f"\n{'':20} stall while quiet: {words}" for words in result.quiet_explained)
    )
