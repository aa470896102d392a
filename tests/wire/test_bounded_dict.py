"""The entries that a bounded dictionary keeps."""

from wire.bounded_dict import BoundedDict


def test_the_oldest_entry_leaves_a_full_dictionary():
    kept = BoundedDict[str, int](2)
    for number, key in enumerate("abc"):
        kept.put(key, number)
    assert list(kept.items()) == [("b", 1), ("c", 2)]


def test_an_entry_that_is_put_again_becomes_the_newest():
    kept = BoundedDict[str, int](2)
    for key in "aba":
        kept.put(key, len(kept))
    kept.put("c", 9)
    assert list(kept.items()) == [("a", 2), ("c", 9)]


def test_reading_does_not_keep_an_entry():
    kept = BoundedDict[str, int](2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept["a"] == kept.get("a") == 1
    kept.put("c", 3)
    assert kept.get("a") is None
