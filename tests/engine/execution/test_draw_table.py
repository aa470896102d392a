"""Parameters of draws: those that a table keeps for the same requests equal those that a new table reads from them."""

import random

import numpy as np
import torch

from engine.execution.sampling_tables import DrawColumns, DrawTable
from engine.scheduling.request import NewRequest, Request, SamplingParams

CPU = torch.device("cpu")


def make_request(seat: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=1000, temperature=seed / 10, top_k=seed, top_p=1 / (seed + 1), min_p=seed / 100)
    request = Request(NewRequest(str(seed), [1] * seed, params), seed=seed)
    request.seat = seat
    return request


def check(table: DrawTable, requests: list[Request], seats: np.ndarray | None) -> None:
    lengths = None if seats is None else np.array([request.num_tokens for request in requests])
    found: DrawColumns = table.columns(requests, seats, lengths)
    uploaded = table.upload(CPU, found)
    expected = DrawTable(4).columns(requests)
    for name, column, tensor, wanted in zip(DrawColumns._fields, found, uploaded, expected, strict=True):
        np.testing.assert_array_equal(column, wanted, err_msg=name, strict=True)
        np.testing.assert_array_equal(tensor.numpy(), wanted, err_msg=name)


def test_streams_that_alternate_with_others_and_with_plain_calls() -> None:
    """The two streams and the plain call have seats in common, and several steps may pass between two calls."""
    chance, table = random.Random(1), DrawTable(4)
    groups = [[make_request(seat, 10 * i + seat + 1) for seat in taken] for i, taken in enumerate([(0, 1), (1, 2, 3)])]
    alone = [make_request(seat, 30 + seat) for seat in (3, 0)]
    seats = [np.array([request.seat for request in requests]) for requests in groups]
    for _ in range(200):
        turn = chance.randrange(3)
        requests = alone if turn == 2 else groups[turn]
        check(table, requests, None if turn == 2 else seats[turn])
        for request in requests:
            request.token_ids += [5] * chance.choice([0, 1, 1, 3])
        if turn < 2 and chance.random() < 0.1:  # another request in a seat: streams have a new list then
            groups[turn] = [make_request(request.seat, chance.randrange(1, 60)) for request in requests]
