"""Names of KV blocks: equal keys mean equal contents.

KV at a position is a function of the model and of all tokens up to it. So the key of a block is a hash over whatever
decides the numbers in it and how they lie, the key of the block before it, and the block's own token ids. The chain
makes one key stand for the whole prefix. A key means the same in every process.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT_TAG = b"specdec kv root 1"
_BLOCK_TAG = b"specdec kv block 1"


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What the contents of a worker's KV blocks depend on, beside the tokens.

    Attributes:
        model_fingerprint: of what decides the logits.
        dtype: of the stored numbers.
        layout: their number and order in a block.
    """

    model_fingerprint: str
    dtype: str
    layout: str

    def root_key(self, cache_salt: str | None) -> bytes:
        """The parent of every first block.

        Args:
            cache_salt: requests with different salts share no block, so that none can tell by the time of its first
                token what another has sent.
        """
        digest = hashlib.sha256(_ROOT_TAG)
        for text in (self.model_fingerprint, self.dtype, self.layout, cache_salt or ""):
            field = text.encode()
            # With its length, no field can pass for a part of its neighbour.
            digest.update(len(field).to_bytes(8, "little") + field)
        return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block after the block of key ``parent`` (or after `KVIdentity.root_key`): 32 bytes."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(_BLOCK_TAG + parent + ids.tobytes()).digest()
