from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.cache.blocks import BLOCK_SIZE
from specdec.cache.storage import KVShape, KVStorage

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)


def test_columns_swap_the_last_two_dimensions_of_keys_alone() -> None:
    rows = KVStorage(SHAPE, 5, torch.device("cpu"))
    columns = KVStorage(SHAPE, 5, torch.device("cpu"), keys_as_columns=True)
    assert rows.keys[1].shape == rows.values[1].shape == (5, 3, BLOCK_SIZE, 4)
    assert columns.keys[1].shape == (5, 3, 4, BLOCK_SIZE)
    assert columns.values[1].shape == (5, 3, BLOCK_SIZE, 4)


def test_fresh_memory_is_zero() -> None:
    # A masked position is multiplied by 0, which does not help against NaN.
    storage = KVStorage(SHAPE, 5, torch.device("cpu"))
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


@pytest.mark.parametrize("keys_as_columns", [False, True])
def test_a_copied_block_is_equal_in_all_layers_and_nothing_else_changes(keys_as_columns: bool) -> None:
    storage = KVStorage(SHAPE, 5, torch.device("cpu"), keys_as_columns=keys_as_columns)
    tensors = storage.keys + storage.values
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    storage.copy_block(3, 1)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[1], old[3])
        assert torch.equal(tensor[[0, 2, 3, 4]], old[[0, 2, 3, 4]])


def test_layouts_have_different_names() -> None:
    layouts = {
        KVStorage(SHAPE, 1, torch.device("cpu")).layout,
        KVStorage(SHAPE, 1, torch.device("cpu"), keys_as_columns=True).layout,
        KVStorage(replace(SHAPE, num_layers=3), 1, torch.device("cpu")).layout,
        KVStorage(replace(SHAPE, num_kv_heads=4, head_dim=3), 1, torch.device("cpu")).layout,
    }
    assert len(layouts) == 4
