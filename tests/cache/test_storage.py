from __future__ import annotations

import torch

from specdec.cache.blocks import BLOCK_SIZE
from specdec.cache.storage import KVShape, KVStorage

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)


def test_a_token_is_written_to_its_place_and_nowhere_else() -> None:
    storage = KVStorage(SHAPE, 5, torch.device("cpu"))
    keys, values = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    places = [(4, 0), (1, BLOCK_SIZE - 1), (4, 7)]
    blocks, offsets = torch.tensor(places).unbind(1)
    storage.write(1, keys, values, blocks, offsets)
    for token, (block, offset) in enumerate(places):
        assert torch.equal(storage.keys[1][block, :, offset], keys[token])
        assert torch.equal(storage.values[1][block, :, offset], values[token])
        storage.keys[1][block, :, offset] = 0.0
        storage.values[1][block, :, offset] = 0.0
    assert not any(tensor.any() for tensor in storage.keys + storage.values)


def test_the_bytes_of_a_block_are_those_of_its_tensors() -> None:
    storage = KVStorage(SHAPE, 5, torch.device("cpu"))
    total = sum(tensor.numel() * tensor.element_size() for tensor in storage.keys + storage.values)
    assert 5 * SHAPE.bytes_per_block == total


def test_a_run_of_neighbouring_blocks_is_a_contiguous_view() -> None:
    storage = KVStorage(SHAPE, 5, torch.device("cpu"))
    run = storage.keys[0][1:4]
    assert run.is_contiguous()
    assert run.data_ptr() == storage.keys[0][1].data_ptr()
