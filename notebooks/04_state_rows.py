# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · State rows, idx_mapping and slot 207
#
# vLLM 0.14 has two model runners. The default one keeps a **persistent batch**: the rows of its
# arrays *are* the batch, and when a request leaves and no other takes its row, the last row moves into
# the hole. The newer one (`VLLM_USE_V2_MODEL_RUNNER=1`) gives each request a **state row** that never
# moves, and gathers a batch anew in each step. Then there are two numbers for one request:
#
# - `req_state_idx`: its row in the state table, the same from step to step;
# - `batch_idx`: its row in this step's batch.
#
# `idx_mapping` leads from the second to the first. This notebook follows a known example, in which one
# token ends in **slot 207**, and compares each list with what the real kernels of vLLM 0.14.1 gave
# (`data/state_rows.json`; sources: `vllm/v1/worker/gpu/states.py`, `…/model_runner.py`,
# `…/block_table.py`).

# %%
import json

import torch

from pagedlab import SamplingParams
from pagedlab.display.tables import IndexTable
from pagedlab.kernels.block_tables import gather_block_tables_reference
from pagedlab.kernels.slot_mapping import compute_slot_mapping_reference
from pagedlab.worker.block_tables import BlockTables
from pagedlab.worker.flat_indices import flatten_batch
from pagedlab.worker.request_table import RequestTable
from pagedlab.worker.requests import CachedRequestState

with open("data/state_rows.json") as file:
    recorded = {case["name"]: case for case in json.load(file)["cases"]}
case = recorded["two-requests"]
cpu, block_size, K = torch.device("cpu"), case["block_size"], case["K"]
for request in case["requests_in_scheduling_order"]:
    print(request)

# %% [markdown]
# Two requests. B has 31 tokens computed and gets 1 more in this step. A has 16 computed and gets 8.
# Blocks have 16 places.
#
# ## Who sits in which state row?
#
# The free rows are a stack. A table with 8 rows starts with the stack 0, 1, …, 7, and the top is taken
# first.
#
# > **Predict.** B was scheduled for the first time before A. Which state rows do they get?

# %% tags=["answer"]
table = RequestTable(max_num_reqs=8, max_model_len=K * block_size, device=cpu)
block_tables = BlockTables(max_num_reqs=8, max_num_blocks=[K], device=cpu)
requests = {
    "B": CachedRequestState("B", list(range(32)), SamplingParams(), ([37, 12],), 31, None),
    "A": CachedRequestState("A", list(range(100, 124)), SamplingParams(), ([81, 44],), 16, None),
}
for name, request in requests.items():
    row = table.add_request(request)
    block_tables.append_block_ids(row, request.block_ids, overwrite=True)
    print(f"{name} → state row {row}")
table.apply_staged_writes()
block_tables.apply_staged_writes()
assert table.req_state_indices == {"B": 7, "A": 6}

# %% [markdown]
# A row is taken when a request is first *scheduled*, not when it arrives. It is given back when the
# request is finished, and also when it is preempted. Its number says nothing about its age.
#
# ## Who sits in which batch row?
#
# The scheduler's message says: A 8 tokens, B 1 token, in this order. The runner sorts the batch by the
# number of new tokens, fewest first.
#
# One article about this example puts B into batch row 2 and A into batch row 1. It also says that
# `query_start_loc` is [0, 1, 9].
#
# > **Predict.** Can both be true? Rows are counted from 0. In which batch row is B, in which is A, and
# > what is `idx_mapping`?

# %% tags=["answer"]
counts = {"A": 8, "B": 1}
batch = sorted(counts, key=counts.__getitem__)  # stable: ties keep the scheduler's order
idx_mapping = torch.tensor([table.req_state_indices[name] for name in batch], dtype=torch.int32)
new_tokens = torch.tensor([counts[name] for name in batch], dtype=torch.int32)
computed = table.num_computed_tokens.tensor[idx_mapping, 0]
flat = flatten_batch(new_tokens, computed, num_tokens=9)

for batch_idx, name in enumerate(batch):
    print(f"batch row {batch_idx}: {name}, state row {int(idx_mapping[batch_idx])}")
print("idx_mapping    ", idx_mapping.tolist(), "  recorded", case["idx_mapping"])
print("query_start_loc", flat.query_start_loc.tolist(), "recorded", case["query_start_loc"])
assert batch == case["batch_order"] == ["B", "A"]
assert idx_mapping.tolist() == case["idx_mapping"] == [7, 6]
assert flat.query_start_loc.tolist() == case["query_start_loc"] == [0, 1, 9]

# %% [markdown]
# They cannot. [0, 1, 9] says that the request in row 0 has one token, and that is B. **B is batch row
# 0, A is batch row 1.** With two requests there is no batch row 2. If A came first, the list would be
# [0, 8, 9]. The recorded kernels were also given that order, and here are both:

# %%
other = recorded["two-requests-in-state-row-order"]
assert other["query_start_loc"] == [0, 8, 9] and other["batch_order"] == ["A", "B"]
print("B, A:", case["query_start_loc"], "idx_mapping", case["idx_mapping"])
print("A, B:", other["query_start_loc"], "idx_mapping", other["idx_mapping"])

# %% [markdown]
# ## From B's token to slot 207
#
# > **Predict.** B's only new token is its 32nd. What is its position? Its logical block and offset? Its
# > block, and its slot?

# %% tags=["answer"]
position = int(flat.positions[0])
logical_block, offset = divmod(position, block_size)
block_id = requests["B"].block_ids[0][logical_block]
slot = block_id * block_size + offset
print(f"position {position} = {logical_block} · {block_size} + {offset}; "
      f"block {block_id}; slot {block_id} · {block_size} + {offset} = {slot}")
assert (position, logical_block, offset, block_id, slot) == (31, 1, 15, 12, 207)

# %% [markdown]
# ## The table is gathered first
#
# Attention wants the block table of batch row *b* in row *b*. So the runner first copies the rows of
# this batch, and the slots are then looked up in the copy.

# %%
gathered = torch.full((8, K), 99, dtype=torch.int32)  # 99: left behind by earlier steps
gather_block_tables_reference(block_tables.block_tables.tables[0], gathered,
                              block_tables.num_blocks[0], idx_mapping)
print(gathered[:2, :4])
valid = block_tables.num_blocks[0, idx_mapping]
slots = compute_slot_mapping_reference(gathered[:2], valid, flat.query_start_loc,
                                       flat.positions, block_size)
rows = flat.req_indices.tolist()
assert [gathered[row, :2].tolist() for row in range(2)] == case["gathered_block_table"]

# %%
lists = {
    "batch_row_of_token": rows,
    "positions": flat.positions.tolist(),
    "slot_mapping": slots.tolist(),
}
shown = {}
for name, values in lists.items():
    assert values == case[name]
    shown |= {name: values, f"{name} (vLLM)": case[name]}
IndexTable({"state row": idx_mapping[flat.req_indices].tolist(), **shown}, rows,
           title="B's token and A's eight", strong=["slot_mapping"])

# %% [markdown]
# The first slot is 207. A's tokens go to 704 … 711: block 44, offsets 0 to 7.
#
# Two things that are said about slots, and what is so:
#
# - The unit of `slot_mapping` is **one token's place in a KV-cache group**. vLLM knows no "attention
#   banking" that would define it.
# - How many bytes a slot takes follows from the model: 2 (key and value) · KV heads · head size · bytes
#   per number, for *one* layer. The factor is the number of **KV** heads, not of query heads.

# %%
from pagedlab.kv.specs import AttentionSpec

# As in Qwen3-0.6B: 16 query heads, 8 KV heads, 28 layers.
spec = AttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="float16")
per_slot = spec.page_size_bytes // 16
print(f"one KV head: {2 * 128 * 2:7,} bytes")
print(f"one slot of one layer: {per_slot:,}; one block of it: {spec.page_size_bytes:,}")
print(f"one token in 28 layers: {28 * per_slot:,}")
assert spec.page_size_bytes == 65_536

# %% [markdown]
# ## All recorded cases
#
# > **Predict.** Three requests, C with 8 new tokens, A with 8, B with 1, scheduled in this order. In
# > which order do they stand in the batch?

# %% tags=["answer"]
for name, each in recorded.items():
    wanted = {r["name"]: r for r in each["requests_in_scheduling_order"]}
    order = sorted(wanted, key=lambda r: wanted[r]["num_new_tokens"])
    if "for contrast" in each["batch_order_rule"]:
        order = each["batch_order"]  # an order the runner would not choose
    assert order == each["batch_order"]
    new = torch.tensor([wanted[r]["num_new_tokens"] for r in order])
    done = torch.tensor([wanted[r]["num_computed_tokens"] for r in order])
    step = flatten_batch(new, done, int(new.sum()))
    ids = [wanted[r]["block_ids"] for r in order]
    table_of_batch = torch.tensor([row + [99] * (each["K"] - len(row)) for row in ids])
    got = compute_slot_mapping_reference(table_of_batch, torch.tensor([len(row) for row in ids]),
                                         step.query_start_loc, step.positions, each["block_size"])
    assert got.tolist() == each["slot_mapping"]
    assert step.query_start_loc.tolist() == each["query_start_loc"]
    print(f"{name:31} {' '.join(order):8} slots {got.tolist()}")
assert recorded["three-with-a-tie"]["batch_order"] == ["B", "C", "A"]

# %% [markdown]
# B first; C and A tie and keep the scheduler's order.
#
# ## What never moves, and what does
#
# Both designs, live, on the same three requests. r0 finishes while r1 and r2 go on.
#
# > **Predict.** When r0 leaves, whose row changes in the persistent batch? And in the state table?

# %% tags=["answer"]
from pagedlab import LLM, tracing
from pagedlab.trace.events import RowAssigned, RowFreed, RowMoved

prompts = ["I am", "Mr. Darcy", "It was a truth which she could not deny"]
lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 4, 4)]
texts, traces = {}, {}
for runner in ("persistent", "state-table"):
    with tracing("kernels") as traces[runner]:
        llm = LLM(runner=runner, block_size=4, num_blocks=24, max_num_seqs=4, max_model_len=32)
        texts[runner] = [output.outputs[0].text for output in llm.generate(prompts, lengths)]
    print(runner)
    for event in traces[runner]:
        if isinstance(event, RowAssigned):
            print(f"  step {event.step}: {event.request_id} takes row {event.row}")
        elif isinstance(event, RowFreed):
            print(f"  step {event.step}: {event.request_id} gives row {event.row} back")
        elif isinstance(event, RowMoved):
            print(f"  step {event.step}: {event.request_id} moves from row {event.from_row} "
                  f"to row {event.row}")

moves = {name: [e for e in trace if isinstance(e, RowMoved)] for name, trace in traces.items()}
assert [(e.request_id, e.from_row, e.row) for e in moves["persistent"]] == [("r2", 2, 0)]
assert moves["state-table"] == []
assert texts["persistent"] == texts["state-table"]

# %% [markdown]
# In the persistent batch r2, the last row, closes the hole. In the state table nothing moves. The
# answers are the same: rows are bookkeeping.

# %%
traces["state-table"].slot_mapping(step=2)

# %%
traces["state-table"].view()

# %% [markdown]
# **You saw** two row numbers per request and the list that joins them; that `query_start_loc` tells who
# comes first, so B is batch row 0; and each step of the way to slot 207. Next: [prefix
# caching](05_prefix_caching.md).
