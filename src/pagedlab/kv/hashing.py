"""Block hashes: a block stands for its tokens and for everything before them.

    hash(block i) = sha256(hash(block i - 1) · its tokens · tagged extra keys)

so that "Call me Ishmael" cached after "Dear reader," is not found at the start of a prompt. Source:
hash_block_tokens and get_request_block_hasher in vllm/v1/core/kv_cache_utils.py. Keys are compared,
tokens never; values differ from vLLM's (which pickles), decisions do not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from pagedlab.request import Request

NONE_HASH = bytes(32)  # parent of a first block


def hash_block_tokens(parent_hash: bytes | None, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """The key of one full block, 32 bytes.

    ``extra_keys`` are tagged, so that a salt cannot be mistaken for another kind of key.
    """
    return sha256((parent_hash or NONE_HASH) + array("q", token_ids).tobytes() + extra_keys).digest()


def extra_keys(request: Request, first_token: int) -> bytes:
    """What besides tokens makes a block's content its own: the cache salt, in the first block.

    Later blocks inherit it through their parent.
    """
    if first_token > 0 or request.cache_salt is None:
        return b""
    return b"\x00cache_salt\x00" + request.cache_salt.encode()


def request_block_hasher(block_size: int) -> Callable[[Request], list[bytes]]:
    """A function that hashes the blocks a request has filled since it was last asked."""

    def hash_new_full_blocks(request: Request) -> list[bytes]:
        known = request.block_hashes
        token_ids = request.all_token_ids
        start = len(known) * block_size
        if len(token_ids) - start < block_size:
            return []
        parent = known[-1] if known else None
        new = []
        for first in range(start, len(token_ids) - block_size + 1, block_size):
            parent = hash_block_tokens(parent, token_ids[first : first + block_size], extra_keys(request, first))
            new.append(parent)
        return new

    return hash_new_full_blocks


def merge_hashes(block_hashes: Sequence[bytes], ratio: int) -> list[bytes]:
    """Hashes for a group whose blocks are ``ratio`` times larger than those hashed.

    With hashes [a, b, c, d, e] and ratio 2: [a·b, c·d]; e does not fill a large block.
    """
    whole = len(block_hashes) // ratio * ratio
    return [b"".join(block_hashes[i : i + ratio]) for i in range(0, whole, ratio)]


def short_hash(block_hash: bytes) -> str:
    """Eight hexadecimal digits for people; of a merged hash, its last part."""
    return block_hash[-32:-28].hex()
