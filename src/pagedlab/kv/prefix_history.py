"""Why a prefix look-up missed: kept only while somebody traces, read only to fill an event.

The cache itself forgets a block's key when the block is handed out again. This remembers, per key
that was cached while tracing, what it was made of and who had it evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_KEYS = 1 << 17  # keys remembered, the oldest are forgotten; some tens of megabytes


@dataclass(slots=True)
class CachedKey:
    """The parts of one block's key."""

    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_id: int
    evicted_at_step: int | None = None
    evicted_for: str | None = None
    lost_in_reset: bool = False


@dataclass(slots=True)
class Miss:
    """What is known about a key that was looked for and not found."""

    why: str                               # never_cached, evicted, reset or miss (unknown)
    key_differs: str | None = None         # tokens, parent or cache_salt
    similar_block_id: int | None = None
    evicted_at_step: int | None = None
    evicted_for: str | None = None


class PrefixHistory:
    """Written by the BlockPool, inside its trace guards."""

    def __init__(self) -> None:
        self.step_id = -1
        self.num_recorded = 0  # keys recorded; fewer than the pool cached means: we joined late
        self._keys: dict[tuple[int, bytes], CachedKey] = {}
        self._by_tokens: dict[tuple[int, tuple[int, ...]], CachedKey] = {}
        self._by_start: dict[tuple[int, bytes | None, int], CachedKey] = {}

    def cached(
        self, group_id: int, block_hash: bytes, parent_hash: bytes | None, token_ids: tuple[int, ...], block_id: int
    ) -> None:
        key = CachedKey(parent_hash, token_ids, block_id)
        self.num_recorded += 1
        self._keys[group_id, block_hash] = key
        self._by_tokens[group_id, token_ids] = key
        self._by_start[group_id, parent_hash, token_ids[0]] = key
        if len(self._keys) > MAX_KEYS:
            self._forget(next(iter(self._keys)))

    def _forget(self, oldest: tuple[int, bytes]) -> None:
        """From now on a key that is not found may have been cached long ago: the history is not complete."""
        key = self._keys.pop(oldest)
        self.num_recorded -= 1
        by_tokens, by_start = (oldest[0], key.token_ids), (oldest[0], key.parent_hash, key.token_ids[0])
        if self._by_tokens.get(by_tokens) is key:
            del self._by_tokens[by_tokens]
        if self._by_start.get(by_start) is key:
            del self._by_start[by_start]

    def evicted(self, group_id: int, block_hash: bytes, for_request: str) -> None:
        key = self._keys.get((group_id, block_hash))
        if key is not None:
            key.evicted_at_step, key.evicted_for = self.step_id, for_request

    def reset(self) -> None:
        for key in self._keys.values():
            key.lost_in_reset = key.evicted_at_step is None  # what was evicted before was not there to lose

    def explain(
        self, group_id: int, block_hash: bytes, parent_hash: bytes | None, token_ids: tuple[int, ...], complete: bool
    ) -> Miss:
        """Say why ``block_hash`` is not cached; ``complete`` if everything ever cached was recorded."""
        same = self._keys.get((group_id, block_hash))
        if same is not None:
            why = "reset" if same.lost_in_reset else "evicted"
            return Miss(why, None, same.block_id, same.evicted_at_step, same.evicted_for)
        why = "never_cached" if complete else "miss"
        other = self._by_tokens.get((group_id, token_ids))
        if other is not None:
            return Miss(why, "cache_salt" if parent_hash is None else "parent", other.block_id)
        other = self._by_start.get((group_id, parent_hash, token_ids[0]))
        if other is not None:
            return Miss(why, "tokens", other.block_id)
        return Miss(why)
