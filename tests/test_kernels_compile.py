"""Ahead-of-time compilation for sm_80 and sm_90: what the kernels cost, and what logging costs when off."""

import pytest

pytest.importorskip("triton")

from kernel_compiler import compile_for, instructions, resources, without_logging
from pagedlab.kernels.paged_attention import (
    combine_splits_kernel,
    launch_config,
    longest_block_m,
    paged_attention_kernel,
)
from pagedlab.kernels.reshape_and_cache import TILE, reshape_and_cache_kernel

ARCHS = (80, 90)
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def compile_attention(arch, dtype, head_size, block_m, *, splits=1, group=2, window=0, log=False,
                      source=paged_attention_kernel):
    config = launch_config(head_size, block_m, ELEMENT_SIZE[dtype])
    pointer = f"*{dtype}"
    types = {"query": pointer, "key_cache": pointer, "value_cache": pointer, "scale": "fp32"}
    types |= dict.fromkeys(("output", "partial_sums"), "*fp32" if splits > 1 else pointer)
    types |= dict.fromkeys(
        ("tile_batch_idx", "tile_first_query", "query_start_loc", "seq_lens", "block_table", "log"), "*i32"
    )
    constants = {"GROUP": group, "HEAD_SIZE": head_size, "PADDED_SIZE": 1 << (head_size - 1).bit_length(),
                 "BLOCK_SIZE": 16, "BLOCK_M": block_m, "WINDOW": window, "NUM_SPLITS": splits,
                 "TILE": config["TILE"], "LOG": log, "DOT_IN_FLOAT32": False}
    return compile_for(arch, source, types, constants, config["num_warps"], config["num_stages"], ("table_stride",))


def compile_write(arch, dtype, *, log=False, source=reshape_and_cache_kernel):
    types = dict.fromkeys(("key", "value", "key_cache", "value_cache"), f"*{dtype}")
    types |= {"slot_mapping": "*i64", "log": "*i64"}
    constants = {"NUM_HEADS": 8, "HEAD_SIZE": 128, "TILE": TILE, "LOG": log}
    constants |= dict.fromkeys(("key_stride_d", "value_stride_d", "cache_stride_d"), 1)  # as Triton takes what is 1
    return compile_for(arch, source, types, constants)


def compile_combine(arch, dtype):
    types = {"part": "*fp32", "partial_sums": "*fp32", "output": f"*{dtype}"}
    return compile_for(arch, combine_splits_kernel, types,
                       {"HEAD_SIZE": 128, "PADDED_SIZE": 128, "NUM_SPLITS": 16})


def shipped():
    """Decode, split decode and prefill for every padded head size; one of each with a window and odd groups."""
    for dtype in ("bf16", "fp32"):
        for head_size in (32, 64, 80, 128, 256) if dtype == "bf16" else (32, 64, 128, 256):
            yield dtype, head_size, 16, {}
            yield dtype, head_size, 16, {"splits": 4}
            yield dtype, head_size, longest_block_m(head_size, ELEMENT_SIZE[dtype]), {}
    yield "fp16", 128, 16, {}
    yield "fp16", 128, 64, {"window": 4096, "group": 3}
    yield "bf16", 128, 16, {"window": 4096, "group": 8}


@pytest.mark.parametrize("arch", ARCHS)
def test_no_shipped_configuration_needs_local_memory(arch, capsys):
    table = []
    for dtype, head_size, block_m, more in shipped():
        name = f"paged_attention {dtype} head {head_size} rows {block_m} {more or ''}"
        table.append((name, resources(compile_attention(arch, dtype, head_size, block_m, **more))))
    for dtype in ELEMENT_SIZE:
        table.append((f"reshape_and_cache {dtype}", resources(compile_write(arch, dtype))))
        table.append((f"combine_splits {dtype}", resources(compile_combine(arch, dtype))))
    with capsys.disabled():
        print(f"\nsm_{arch}: registers, stack, local and shared memory in bytes")
        for name, found in table:
            print(f"  {name:60} {found['REG']:4} {found['STACK']:4} {found['LOCAL']:4} {found['SHARED']:6}")
    assert [name for name, found in table if found["STACK"] or found["LOCAL"]] == []


@pytest.mark.parametrize("arch", ARCHS)
def test_logging_that_is_off_leaves_no_instruction_in_cache_writes(arch, tmp_path):
    bare = instructions(compile_write(arch, "bf16", source=without_logging(reshape_and_cache_kernel, tmp_path)))
    assert instructions(compile_write(arch, "bf16")) == bare
    assert instructions(compile_write(arch, "bf16", log=True)) != bare


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_m", [16, 64])
def test_logging_that_is_off_leaves_no_instruction_in_attention(arch, block_m, tmp_path):
    bare = without_logging(paged_attention_kernel, tmp_path)
    expected = instructions(compile_attention(arch, "bf16", 128, block_m, source=bare))
    assert instructions(compile_attention(arch, "bf16", 128, block_m)) == expected
    assert instructions(compile_attention(arch, "bf16", 128, block_m, log=True)) != expected
