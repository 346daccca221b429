import pytest

from engine.plan.kv.swap import SwapSpace
from engine.plan.step_records import BlockCopy, BlockMoves, StateCopy


def blocks_of(host: SwapSpace) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
    """Those to copy out, and back."""
    moves = host.copies()
    return moves.swap_out, moves.swap_in


def test_blocks_go_out_and_come_back() -> None:
    host = SwapSpace(4)
    host.save("a", [7, 3])
    assert "a" in host
    assert (host.num_free, host.num_saved) == (2, 1)
    assert blocks_of(host) == (((7, 0), (3, 1)), ())
    assert blocks_of(host) == (((7, 0), (3, 1)), ()), "until they are confirmed"
    host.confirm_copies()
    assert not host.drop_unsaved("a")
    assert blocks_of(host) == ((), ())
    host.restore("a", [5, 6, 9], 0)
    assert blocks_of(host) == ((), ((0, 5), (1, 6)))
    assert (host.num_free, host.num_saved) == (2, 0), "the host keeps them until they are known to be back"
    host.confirm_copies()
    assert "a" not in host
    assert host.num_free == 4
    host.check_integrity()


def test_what_was_found_on_the_device_is_not_brought_back() -> None:
    host = SwapSpace(4)
    host.save("a", [7, 3, 4])
    host.confirm_copies()
    host.restore("a", [7, 3, 5, 6], 2)
    assert blocks_of(host) == ((), ((2, 5),))


def test_what_may_not_have_been_saved_is_given_up() -> None:
    host = SwapSpace(4)
    host.save("a", [7])
    host.confirm_copies()
    host.save("b", [8])
    host.restore("a", [9], 0)
    assert host.drop_unsure() == ("b",)
    assert blocks_of(host) == ((), ((0, 9),)), "what comes back is asked for again"
    assert host.num_free == 3
    host.stay("a")
    assert blocks_of(host) == ((), ())
    assert not host.drop_unsaved("a")
    host.check_integrity()


def test_release_drops_what_was_still_to_be_copied() -> None:
    host = SwapSpace(2)
    host.save("a", [7])
    host.release("a")
    host.release("a")
    assert blocks_of(host) == ((), ())
    host.save("b", [8, 9])
    assert blocks_of(host) == (((8, 0), (9, 1)), ()), "the lowest host blocks come first"
    host.confirm_copies()
    host.restore("b", [1, 2], 0)
    host.release("b")
    host.confirm_copies()
    assert (blocks_of(host), host.num_free, host.num_saved) == (((), ()), 2, 0)


def test_misuse_is_caught() -> None:
    host = SwapSpace(1)
    with pytest.raises(AssertionError, match="found to fit the host"):
        host.save("a", [1, 2])
    host.save("a", [1])
    with pytest.raises(AssertionError, match="on the host already"):
        host.save("a", [])
    with pytest.raises(AssertionError, match="not on the host yet"):
        host.restore("a", [1], 0)
    host._free.append(0)
    with pytest.raises(AssertionError, match="lost or doubled"):
        host.check_integrity()


def test_a_state_is_held_beside_the_blocks() -> None:
    host = SwapSpace(8, 1)
    assert host.has_room(8) and not host.has_room(9)
    host.save("a", [7], 3)
    assert not host.has_room(1), "there is one state"
    assert host.copies() == BlockMoves(swap_out=(BlockCopy(7, 0),), states_out=(StateCopy(3, 0),))
    host.confirm_copies()
    host.restore("a", [5], 0, 2)
    assert host.copies() == BlockMoves(swap_in=(BlockCopy(0, 5),), states_in=(StateCopy(0, 2),))
    host.check_integrity()
    host.confirm_copies()
    assert host.has_room(1)
    host.check_integrity()
    host.save("b", [], 0)
    assert host.drop_unsure() == ("b",) and host.has_room(8)
    host._free_states.append(0)
    with pytest.raises(AssertionError, match="host states are lost or doubled"):
        host.check_integrity()


def test_without_states_there_is_no_room_where_they_are_needed() -> None:
    assert not SwapSpace(8, 0).has_room(1)
