"""A request's token rules as the core gets them."""

import numpy as np

from engine.answering.token_rules import PIECE, pack


class Recorded(list[int]):
    """A list that records the lengths of the pieces read from it."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.pieces: list[int] = []

    def __getitem__(self, key):  # type: ignore[no-untyped-def, override]
        found = super().__getitem__(key)
        self.pieces.append(len(found))
        return found


def test_many_allowed_tokens_become_bytes_in_pieces_between_which_other_threads_run():
    token_ids = Recorded([*range(2 * PIECE), 2**31 - 1])
    assert np.frombuffer(pack(token_ids), np.int32).tolist() == list(token_ids)
    assert token_ids.pieces == [PIECE, PIECE, 1]
    assert pack([]) == b""
