"""The index kernels compile for GPUs that are not there, without local memory."""

from __future__ import annotations

import pytest

from kernel_compiler import compile_for, resources
from pagedlab.kernels.block_tables import TILE as GATHER_TILE
from pagedlab.kernels.block_tables import gather_block_tables_kernel
from pagedlab.kernels.slot_mapping import PAD_SLOT_ID, TILE, slot_mapping_kernel

pytest.importorskip("triton")

KERNELS = {
    "slot_mapping": (
        slot_mapping_kernel,
        {"block_table_ptrs": "*u64", "table_strides": "*i64", "block_sizes": "*i32", "query_start_loc": "*i32",
         "positions": "*i64", "slot_mapping": "*i64", "slot_stride": "i64"},
        {"TILE": TILE, "PAD_SLOT": PAD_SLOT_ID},
    ),
    "gather_block_tables": (
        gather_block_tables_kernel,
        {"block_table_ptrs": "*u64", "input_block_table_ptrs": "*u64", "table_strides": "*i64", "num_blocks": "*i32",
         "idx_mapping": "*i32"},
        {"TILE": GATHER_TILE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_index_kernel_compiles_without_local_memory(name, arch):
    source, types, constants = KERNELS[name]
    usage = resources(compile_for(arch, source, types, constants, unaligned=("slot_stride", "num_blocks_stride")))
    print(f"{name} sm_{arch}: {usage}")
    assert usage["LOCAL"] == 0 and usage["STACK"] == 0
