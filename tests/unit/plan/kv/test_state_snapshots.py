from hypothesis import given
from hypothesis import strategies as st

from engine.plan.kv.state_snapshots import StateSnapshots

HASHES = [bytes([number]) for number in range(8)]


def everywhere(_: bytes) -> bool:
    return True


def keep(snapshots: StateSnapshots, request_id: str, *num_blocks: int) -> None:
    """Save and publish behind so many blocks of a prompt."""
    for count in num_blocks:
        snapshots.reserve(request_id, count, is_output=False)
    snapshots.publish(request_id, HASHES, len(HASHES), everywhere)


def test_the_longest_prefix_that_has_a_snapshot_is_found_once_it_is_published() -> None:
    snapshots = StateSnapshots(4)
    slot = snapshots.reserve("a", 3, is_output=False)
    assert slot is not None and snapshots.longest(HASHES) == 0
    assert snapshots.pending("a") == (3,)
    snapshots.publish("a", HASHES[:2], 8, everywhere)
    assert snapshots.longest(HASHES) == 0, "its blocks are not good yet"
    snapshots.publish("a", HASHES[:5], 8, everywhere)
    assert [snapshots.longest(HASHES[:count]) for count in (2, 3, 8)] == [0, 3, 3]
    snapshots.close("a")
    assert snapshots.begin_on("b", HASHES[2]) == slot
    snapshots.check_integrity(everywhere)


def test_the_one_that_was_of_use_longest_ago_is_taken_and_no_pending_one() -> None:
    snapshots = StateSnapshots(2)
    keep(snapshots, "a", 1, 2)
    snapshots.begin_on("b", HASHES[0])
    assert snapshots.reserve("b", 5, is_output=False) is not None
    assert snapshots.longest(HASHES) == 1, "the second was used less recently"
    assert snapshots.reserve("b", 6, is_output=False) is not None
    assert snapshots.reserve("b", 7, is_output=False) is None
    snapshots.close("b")
    assert snapshots.reserve("c", 7, is_output=False) is not None, "what is not published is free again"
    snapshots.check_integrity(everywhere)


def test_of_an_output_only_the_newest_is_kept() -> None:
    snapshots = StateSnapshots(4)
    keep(snapshots, "a", 2)
    for count in (3, 4, 5):
        snapshots.reserve("a", count, is_output=True)
        snapshots.publish("a", HASHES[:count], 2, everywhere)
    assert [snapshots.longest(HASHES[:count]) for count in (2, 4, 5)] == [2, 2, 5]
    assert len(snapshots) == 2


def test_a_snapshot_goes_with_its_block_and_with_a_request_that_was_bad() -> None:
    snapshots = StateSnapshots(4)
    keep(snapshots, "a", 1, 2)
    keep(snapshots, "b", 3)
    snapshots.forget(HASHES[1])
    assert snapshots.longest(HASHES[:2]) == 1
    snapshots.begin_on("b", HASHES[0])
    snapshots.withdraw("b")
    assert len(snapshots) == 0, "what it saved and what it began on"
    snapshots.reserve("a", 4, is_output=False)
    snapshots.publish("a", HASHES[:4], 8, lambda block_hash: False)
    assert len(snapshots) == 0, "its block cannot be found"
    snapshots.check_integrity(everywhere)


def test_what_two_requests_save_is_kept_once() -> None:
    snapshots = StateSnapshots(2)
    snapshots.reserve("a", 1, is_output=False)
    snapshots.reserve("b", 1, is_output=False)
    for request_id in "ab":
        snapshots.publish(request_id, HASHES, 8, everywhere)
    assert len(snapshots) == 1
    snapshots.check_integrity(everywhere)


Action = tuple[str, str, int]
SAVES = {"reserve": False, "output": True}


@given(
    st.integers(0, 4),
    st.lists(
        st.tuples(
            st.sampled_from([*SAVES, "publish", "begin", "forget", "drop_pending", "withdraw", "close"]),
            st.sampled_from("abc"),
            st.integers(1, len(HASHES)),
        )
    ),
)
def test_no_snapshot_is_ever_lost_or_has_two_contents(num_slots: int, actions: list[Action]) -> None:
    """A pending one is nobody else's, and what is found behind a block was saved there."""
    snapshots = StateSnapshots(num_slots)
    written: dict[int, int] = {}  # by snapshot, the blocks in front of what was saved in it
    for action, name, count in actions:
        if action in SAVES:
            slot = snapshots.reserve(name, count, is_output=SAVES[action])
            written |= {} if slot is None else {slot: count}
        elif action == "publish":
            snapshots.publish(name, HASHES[:count], 4, everywhere)
        elif action == "begin":
            if found := snapshots.longest(HASHES[:count]):
                assert written[snapshots.begin_on(name, HASHES[found - 1])] == found
        elif action == "forget":
            snapshots.forget(HASHES[count - 1])
            assert snapshots.longest(HASHES[:count]) < count
        else:
            getattr(snapshots, action)(name)
        snapshots.check_integrity(everywhere)
