"""Choice of the adapters whose running requests are preempted for overdue reservations."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from adapters.tiers.eviction import Resident
from adapters.tiers.reservations import PAGE_WAIT_S, Amount, PageReservation

Claim = tuple[PageReservation, Iterable[str]]
"""A reservation, and the adapters whose requests may be preempted for it, first choice first."""


class Preemption(NamedTuple):
    """Result of `choose_victims`.

    victims: adapters whose running requests are preempted, each with the tenant of the reservation that needs its
    pages. placed: reservations that fit once the victims have stopped. displacing: the part of `placed` that
    needs victims.
    """

    victims: dict[str, str]
    placed: list[PageReservation]
    displacing: list[PageReservation]


def choose_victims(
    claims: Iterable[Claim], residents: Mapping[str, Resident], fits: Callable[[Amount, Amount], bool], now: float
) -> Preemption:
    """Choose adapters until the reservations fit, in the order of the claims. Nothing is preempted for a reservation
    that would still not fit beside those before it.

    fits(wanted, freed): whether `wanted` fits once `freed` is released. An adapter that became resident less than
    `PAGE_WAIT_S` ago is not chosen, so that two adapters do not take each other's pages in every step.
    """
    wanted, freed, chosen = Amount(), Amount(), Preemption({}, [], [])
    for reservation, holders in claims:
        wanted.add(reservation.size)
        taken: list[str] = []
        for holder in holders:
            if fits(wanted, freed):
                break
            resident = residents.get(holder)
            if resident is None or not resident.pins or now - resident.ready_at < PAGE_WAIT_S:
                continue
            if holder not in chosen.victims and holder not in taken:
                taken.append(holder)
                freed.add(resident.size)
        if fits(wanted, freed):
            chosen.victims.update(dict.fromkeys(taken, reservation.tenant_id))
            chosen.placed.append(reservation)
            if taken:
                chosen.displacing.append(reservation)
            continue
        wanted.remove(reservation.size)
        for holder in taken:
            freed.remove(residents[holder].size)
    return chosen
