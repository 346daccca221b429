"""PrefixCache: finds blocks by the tokens they hold and all the tokens before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from operator import eq

from engine.plan.kv.block_pool import BlockPool

_OWNER_END = "\0"
_TAG_BYTES = 8


def owned_salt(owner: str | None, salt: str | None) -> str | None:
    """The salt of blocks that only `owner` (a text without NUL) finds, divided by `salt`; None: no owner."""
    return salt if owner is None else f"{owner}{_OWNER_END}{salt or ''}"


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int, salt: str | None
) -> None:
    """Append the hashes of the full blocks of `token_ids` up to `num_blocks`.

    A block's hash is sha256 over its parent's hash and its tokens; the first block's parent is the salt. The
    owner's tag stands in front of it where the salt has an owner.
    """
    owner, is_owned, _ = ("" if salt is None else salt).partition(_OWNER_END)
    tag = owner_tag(owner) if is_owned else b""
    parent = hashes[-1] if hashes else hashlib.sha256(b"" if salt is None else b"+" + salt.encode()).digest()
    for index in range(len(hashes), num_blocks):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        parent = tag + hashlib.sha256(parent + tokens.tobytes()).digest()
        hashes.append(parent)


def owner_tag(owner: str | None) -> bytes:
    """What the hashes of this owner's blocks begin with; nothing where None stands for all owners."""
    return b"" if owner is None else hashlib.sha256(owner.encode()).digest()[:_TAG_BYTES]


class PrefixCache:
    """Which block holds the contents of a hash, and which request is computing them.

    Only blocks that are not written again are published. The pool keeps them when they are free, until it
    hands them out. At most one block is found for a hash, and at most one request claims it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        pool.on_taken = self._forget
        self.on_gone: Callable[[bytes], None] = lambda block_hash: None  # no block of this hash is found now
        self._block_of: dict[bytes, int] = {}
        self._claimant_of: dict[bytes, str] = {}
        self._claims: dict[str, list[bytes]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._pool.kept

    def has(self, block_hash: bytes) -> bool:
        """True if a block of this hash can be found."""
        return block_hash in self._block_of

    def find(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest run of these hashes from the first on, at most `limit`."""
        found = []
        block_of = self._block_of
        for index in range(limit):
            block_id = block_of.get(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let this block be found, unless another with the same contents is."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block_id
            self._pool.keep(block_id, block_hash)

    def withdraw(self, block_id: int) -> None:
        """Let this block be found no more, if it was."""
        if block_id in self._pool.kept:
            block_hash = self._pool.kept[block_id]
            self._pool.drop(block_id)
            self._forget(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        del self._block_of[block_hash]
        self.on_gone(block_hash)

    def reset(self, owner: str | None = None) -> int:
        """Withdraw every free block of `owner`, or of all if None; how many they were."""
        tag = owner_tag(owner)
        free, kept = self._pool.free_kept_block_ids(), self._pool.kept
        block_ids = [block_id for block_id in free if kept[block_id].startswith(tag)]
        for block_id in block_ids:
            self.withdraw(block_id)
        return len(block_ids)

    def claim(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """This request is computing the blocks of these hashes, where no other request does."""
        claims = [block_hash for block_hash in hashes if block_hash not in self._claimant_of]
        self._claimant_of.update(dict.fromkeys(claims, request_id))
        self._claims[request_id] = claims

    def claimant(self, block_hash: bytes) -> str | None:
        """The request that is computing the block of this hash."""
        return self._claimant_of.get(block_hash)

    def unclaim(self, request_id: str) -> None:
        """This request computes no block that others might wait for."""
        for block_hash in self._claims.pop(request_id, ()):
            del self._claimant_of[block_hash]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two directions agree and the pool keeps what can be found."""
        kept = self._pool.kept
        assert len(self._block_of) == len(kept), "kept and published blocks differ in number"
        assert all(map(eq, map(self._block_of.get, kept.values()), kept)), "kept and published blocks differ"
        claimed = {block_hash: name for name, claims in self._claims.items() for block_hash in claims}
        assert claimed == self._claimant_of, "claims and claimants differ"
