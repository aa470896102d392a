"""Short form of a load, without a scenario file: one source of requests to all targets."""

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.bench.arrivals import HIGHEST_RATE, LOWEST_RATE, Arrival, Closed, Poisson
from loraplex.bench.load import Api, Load, Source, Target, Tenant
from loraplex.bench.sampling import Fixed, Zipf
from wire.options import option


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `n` measured requests after `warmup` others.

    Closed loop: `concurrency` requests at any time. Open loop, if `rate` (requests per second) is given: Poisson
    arrivals, independent of the number of requests in flight. Target i is chosen with probability proportional to
    `1 / (i + 1)**zipf`.
    """

    n: int = option(64, least=1, most=1_000_000, help="Number of measured requests.")
    concurrency: int = option(16, flag="--c", least=1, most=10_000, help="Concurrent requests (closed loop).")
    rate: float | None = option(
        None, least=LOWEST_RATE, most=HIGHEST_RATE, help="Poisson arrivals per second, instead of --c."
    )
    zipf: float = option(0.0, least=0, most=10, help="Skew of the models; 0 is even.")
    input_words: int = option(64, least=1, most=10_000_000, help="Words per prompt.")
    output_tokens: int = option(64, least=1, most=10_000_000, help="Tokens per answer.")
    warmup: int = option(4, least=0, help="Warm-up requests.")
    seed: int = option(0, help="Seed of prompts, models and arrivals.")
    api: Api = option("completions", help="Route: /v1/completions or /v1/chat/completions.")
    ignore_eos: bool = option(
        True, help="Send vLLM's field ignore_eos, so that answers have their full length; some servers refuse it."
    )

    def load(self, targets: Sequence[Target]) -> Load:
        """Return the load: tenants share the requests by their numbers of targets and the targets' popularity."""
        arrival: Arrival = Closed(self.concurrency) if self.rate is None else Poisson(self.rate)
        source = Source(
            "all",
            tuple(targets),
            arrival,
            Zipf(self.zipf),
            Fixed(self.input_words),
            Fixed(self.output_tokens),
            requests=self.n,
        )
        names = dict.fromkeys(target.tenant for target in targets)
        return Load(
            tuple(Tenant(name) for name in names),
            (source,),
            self.seed,
            warmup=self.warmup,
            api=self.api,
            ignore_eos=self.ignore_eos,
        )
