"""One block of the pool, and the queue that free blocks wait in (vllm/v1/core/kv_cache_utils.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class KVCacheBlock:
    """Metadata of one physical block; its keys and values live on the device.

    ``ref_cnt`` and the hash are written only by the BlockPool, the links only by the queue. A free
    block keeps its hash: it can still be hit until it is handed out again.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0                        # tables that hold it
        self.block_hash: bytes | None = None    # set once it is full and cached
        self.group_id = 0                       # the KV-cache group its hash belongs to
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    @property
    def is_null(self) -> bool:
        """Block 0 stands for 'nothing here any more'; it is never handed out."""
        return self.block_id == 0

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order they will be handed out: least recently freed first.

    A doubly linked list through the blocks themselves, between two sentinels, so that a hit takes a
    block out of the middle in constant time:

        head <-> 4 <-> 7 <-> 2 <-> tail      popleft -> 4, append goes before tail
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block, self._tail.prev_free_block = self._tail, self._head
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the n blocks at the front.

        Raises:
            ValueError: fewer than n blocks are free; nothing is taken.
        """
        if n > self.num_free_blocks:
            raise ValueError(f"cannot take {n} blocks, {self.num_free_blocks} are free")
        taken = []
        block = self._head.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        assert block is not None
        self._head.next_free_block, block.prev_free_block = block, self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take one block out of the middle."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the back, in the order given."""
        last = self._tail.prev_free_block
        assert last is not None
        for block in blocks:
            last.next_free_block, block.prev_free_block = block, last
            last = block
            self.num_free_blocks += 1
        last.next_free_block, self._tail.prev_free_block = self._tail, last

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Front to back."""
        block = self._head.next_free_block
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free_block
