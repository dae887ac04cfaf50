"""Which replicas a floor admits, and what is wanted of those that lag."""

from __future__ import annotations

from seamless_verl.staleness.floors import ServingVersions

LOADS = {"a": 5, "b": 0, "c": 2}


def test_where_nobody_tells_versions_every_replica_is_as_good_as_any() -> None:
    versions = ServingVersions()
    assert versions.able(7, LOADS) is LOADS, "no copy for each request"
    assert versions.oldest(LOADS) is None


def test_a_replica_below_the_floor_is_left_out_and_who_left_is_forgotten() -> None:
    versions = ServingVersions()
    versions.tell(["a", "b"], 3)
    versions.tell(["c"], 4)
    assert versions.able(3, LOADS) is LOADS
    assert versions.able(4, LOADS) == {"c": 2}
    assert versions.able(5, LOADS) == {}
    assert (versions.oldest(LOADS), versions.of("b")) == (3, 3)
    versions.forget(["a", "b"])
    assert versions.oldest(LOADS) == 4
    versions.tell(["b"], 5)
    assert versions.able(5, LOADS) == {"a": 5, "b": 0}, "nobody tells of the new a"


def test_wanted_is_the_highest_floor_that_waits_and_that_nobody_serves() -> None:
    versions = ServingVersions()
    versions.tell(["a"], 3)
    assert versions.wanted(["a"]) is None
    for floor in (3, 4, 5, 5):
        versions.waits(floor)
    assert versions.wanted(["a"]) == 5
    versions.waits_no_more(5)
    assert versions.wanted(["a"]) == 5, "another one waits for it"
    versions.waits_no_more(5)
    assert versions.wanted(["a"]) == 4
    assert versions.wanted(["a"], held=[6]) == 6
    versions.tell(["a"], 6)
    assert versions.wanted(["a"], held=[6]) is None
