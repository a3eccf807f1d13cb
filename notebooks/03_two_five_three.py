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
# # 3 · The [2, 5, 3] example
#
# A step may serve many requests. The model gets their new tokens laid end to end, as one flat list, and
# a list of **slots** that says where each token's key and value go. The classic example has three new
# requests with 2, 5 and 3 tokens, and blocks of 2 places.
#
# You will compute every list on the way with the engine's own functions. Beside each stands what vLLM
# 0.14.1 computed for the same input; it was recorded from the real code, and lies in
# `data/flat_indices.json`. (Sources: `_prepare_inputs` in `vllm/v1/worker/gpu_model_runner.py`,
# `compute_slot_mapping` in `vllm/v1/worker/block_table.py`.)

# %%
import json

import torch

from pagedlab.display.chooser import Chooser
from pagedlab.display.tables import IndexTable
from pagedlab.kernels.slot_mapping import slot_chain
from pagedlab.worker.flat_indices import flatten_batch, token_indices

with open("data/flat_indices.json") as file:
    recorded = {case["name"]: case for case in json.load(file)["cases"]}
for name, case in recorded.items():
    print(f"{name:13} new tokens {case['num_scheduled_tokens']}, computed before "
          f"{case['num_computed_tokens']}, tables {case['block_table']}")

# %% [markdown]
# Take the third: `max_model_len` is 7. The tables were filled by the scheduler: request 0 has block 5,
# request 1 has blocks 8, 6, 2 and request 2 has blocks 11, 10.

# %%
case = recorded["fresh-M7-K4"]
block_size = case["block_size"]
counts = torch.tensor(case["num_scheduled_tokens"])
computed = torch.tensor(case["num_computed_tokens"])
num_tokens = int(counts.sum())

# %% [markdown]
# ## Which token belongs to whom?
#
# > **Predict.** Write down, for the 10 tokens, the index of the request each belongs to. Then its place
# > in its own request. Then where each request begins in the flat list.

# %% tags=["answer"]
flat = flatten_batch(counts, computed, num_tokens)
owners = flat.req_indices.tolist()


def beside(lists, names):
    """Computed here, and recorded from vLLM, row under row; raises if they differ."""
    rows = {}
    for name in names:
        rows[name] = lists[name].tolist()
        rows[f"{name} (vLLM)"] = case[name]
        assert rows[name] == case[name], name
    return IndexTable(rows, owners, strong=names)


assert flat.query_start_loc.tolist() == case["query_start_loc"] == [0, 2, 7, 10]
print("query_start_loc", flat.query_start_loc.tolist())
beside(flat._asdict(), ["req_indices", "arange", "positions"])

# %% [markdown]
# `arange` counts within this step. `positions` counts within the request: tokens computed before, plus
# `arange`. All three requests are new, so the two lists are equal here. Further down they are not.
#
# ## The flattened block table
#
# The worker keeps all block tables in one array, a row per request (a model with several KV-cache groups
# has one array for each). All rows have the same width **K = ⌈max_model_len / block_size⌉**, because a
# row must be able to hold the longest request.
#
# > **Predict.** What is K here? How many of the cells of the three rows hold a valid block id?

# %% tags=["answer"]
K = -(-case["max_model_len"] // block_size)
STALE = 99  # what earlier requests left behind; any number will do, as nobody may read it
table = torch.full((3, K), STALE, dtype=torch.int32)
for row, block_ids in enumerate(case["block_table"]):
    table[row, : len(block_ids)] = torch.tensor(block_ids)
print(table)
valid = int((table != STALE).sum())
print(f"K = {K}, {valid} of {table.numel()} cells valid")
assert (K, valid) == (case["K"], 6) == (4, 6)

# %% [markdown]
# K is the width of a table of *numbers*. It is not memory set aside: request 1 holds three blocks, not
# K, and they are wherever the scheduler found them. Between the rows of two requests lie K cells, and
# that says nothing about where their blocks are.
#
# ## From token to slot
#
# For each token the engine computes an index into the **flattened** table, row · K + position // 2, and
# reads the block id there.
#
# > **Predict.** Write down the ten indices, with K for 4. Then look at the table above and write down
# > the ten block ids.

# %% tags=["answer"]
chain = slot_chain(table, flat.req_indices, flat.positions, block_size)
lists = {
    "block_table_indices": chain.table_index, "block_numbers": chain.block_id,
    "block_offsets": chain.offset, "slot_mapping": chain.slot,
}
value = {"0": 0, "K": K, "K+1": K + 1, "K+2": K + 2, "2K": 2 * K, "2K+1": 2 * K + 1}
symbolic = ["0", "0", "K", "K", "K+1", "K+1", "K+2", "2K", "2K", "2K+1"]
assert [value[word] for word in symbolic] == chain.table_index.tolist()
print("[" + ", ".join(symbolic) + "]  =", chain.table_index.tolist())
beside(lists, ["block_table_indices", "block_numbers", "block_offsets", "slot_mapping"])

# %% [markdown]
# Here is the point that is easy to miss. **`[0, 0, K, K, K+1, …]` are not block ids.** They say where
# to look. The block ids are what stands there:

# %%
IndexTable(
    {"index": list(range(table.numel())), "table.flatten()": table.flatten().tolist()},
    [row for row in range(3) for _ in range(K)],
    title="the flattened table: the colour is the row, 99 is stale",
    marks={"table.flatten()": sorted(set(chain.table_index.tolist()))},
)

# %%
assert table.flatten()[chain.table_index].tolist() == chain.block_id.tolist()
assert chain.table_index.tolist() != chain.block_id.tolist()
assert STALE not in chain.block_id.tolist()
as_if_ids = (chain.table_index * block_size + chain.offset).tolist()
print("slots:                             ", chain.slot.tolist())
print("slots if the indices were block ids:", as_if_ids)
assert all(wrong != right for wrong, right in zip(as_if_ids, chain.slot.tolist(), strict=True))
assert as_if_ids[4] // block_size == 5 == case["block_table"][0][0]
assert as_if_ids[7] // block_size == 8 == case["block_table"][1][0]

# %% [markdown]
# All ten would be wrong. Request 1 would write into block 5, which is request 0's, and request 2 into
# block 8, which is request 1's.
#
# Then the last line of the chain: slot = block id · block size + offset. The unit is one token's place,
# not a byte.
#
# ## All recorded cases
#
# The same functions, on all six. Two of them are not fresh: there `positions` differs from `arange`.

# %%
def every_list(case):
    """All intermediate lists of a case, computed by the engine's functions."""
    counts, size = case["num_scheduled_tokens"], case["block_size"]
    K = -(-case["max_model_len"] // size)
    table = torch.full((len(counts), K), STALE, dtype=torch.int32)
    for row, block_ids in enumerate(case["block_table"]):
        table[row, : len(block_ids)] = torch.tensor(block_ids)
    computed = torch.tensor(case["num_computed_tokens"])
    flat = flatten_batch(torch.tensor(counts), computed, sum(counts))
    chain = slot_chain(table, flat.req_indices, flat.positions, size)
    indices = token_indices(flat.req_indices, flat.positions, case["max_model_len"])
    lists = {
        **flat._asdict(),
        "token_indices": indices, "block_table_indices": chain.table_index,
        "block_numbers": chain.block_id, "block_offsets": chain.offset, "slot_mapping": chain.slot,
        "wrong_if_token_indices_div_block_size": indices // size,
    }
    return {name: values.tolist() for name, values in lists.items()}


for name, each in recorded.items():
    lists = every_list(each)
    assert all(lists[key] == each[key] for key in lists)
    print(f"{name:13} {len(lists)} lists equal to vLLM's, slots {lists['slot_mapping']}")

# %%
started = every_list(recorded["started-M9-K5"])
assert started["positions"] != started["arange"]
shown = ("req_indices", "arange", "positions", "block_table_indices", "block_numbers",
         "block_offsets", "slot_mapping")
IndexTable({name: started[name] for name in shown}, started["req_indices"],
           title="started-M9-K5: 3, 1 and 6 tokens were computed before",
           strong=["positions", "slot_mapping"])

# %% [markdown]
# ## A shortcut that works in tests
#
# The token ids stand in an array of their own, `max_model_len` columns wide. A token's place there is
# row · max_model_len + position, called `token_indices`. It is tempting to divide that by the block
# size and save a line.
#
# > **Predict.** For which values of `max_model_len` does `token_indices // block_size` give the right
# > table index?

# %% tags=["answer"]
for name, each in recorded.items():
    divisible = each["max_model_len"] % each["block_size"] == 0
    shortcut = every_list(each)["wrong_if_token_indices_div_block_size"]
    agrees = shortcut == each["block_table_indices"]
    print(f"{name:13} max_model_len {each['max_model_len']:2}, block size {each['block_size']}: "
          f"{'a multiple' if divisible else 'no multiple':11}, {'right' if agrees else 'wrong'}")
    assert agrees == divisible == each["that_shortcut_agrees"]

# %% [markdown]
# Only for multiples of the block size. That is the trap: 4096 and 2048 are multiples of 16, so the
# mistake stays unseen until somebody sets 4100. vLLM's source says so in a comment, and computes
# row · K + position // block_size.
#
# ## Try it
#
# Move the two sliders. Every table was computed by the engine's functions beforehand, so this works
# without a kernel, too. Framed cells are where the shortcut would look in a wrong cell. Watch what K
# does to the indices, and that it changes no slot.

# %%
BLOCKS = [7, 3, 9, 1, 4, 2, 12, 5, 10, 8, 6, 11]  # handed out in this order


def table_for(max_model_len, block_size):
    free, counts = iter(BLOCKS), [2, 5, 3]
    block_table = [[next(free) for _ in range(-(-count // block_size))] for count in counts]
    made = every_list({
        "num_scheduled_tokens": counts, "num_computed_tokens": [0, 0, 0],
        "block_table": block_table, "block_size": block_size, "max_model_len": max_model_len,
    })
    made["shortcut"] = made["wrong_if_token_indices_div_block_size"]
    pairs = zip(made["shortcut"], made["block_table_indices"], strict=True)
    wrong = [token for token, (shortcut, right) in enumerate(pairs) if shortcut != right]
    K = -(-max_model_len // block_size)
    shown = ("req_indices", "positions", "token_indices", "shortcut", "block_table_indices",
             "block_numbers", "block_offsets", "slot_mapping")
    return IndexTable(
        {name: made[name] for name in shown},
        made["req_indices"],
        title=f"K = {K}, block tables {block_table}",
        notes={"token_indices": f"row · {max_model_len} + position",
               "shortcut": f"token_indices // {block_size}: {len(wrong)} of 10 wrong",
               "block_table_indices": f"row · {K} + position // {block_size}",
               "block_numbers": "the flattened table there",
               "slot_mapping": f"block number · {block_size} + offset"},
        strong=["block_table_indices", "slot_mapping"],
        marks={"shortcut": wrong},
    )


lengths, sizes = list(range(5, 25)), [1, 2, 3, 4]
tables = {(length, size): table_for(length, size) for length in lengths for size in sizes}
Chooser({"max_model_len": lengths, "block_size": sizes}, tables, start=(7, 2))

# %% [markdown]
# ## The live engine
#
# Now the whole engine, on three prompts of 2, 5 and 3 tokens. It was told `max_model_len` 24, so K is
# 12.

# %%
from pagedlab import LLM, SamplingParams, tracing

with tracing("kernels") as trace:
    llm = LLM(block_size=2, num_blocks=16, max_num_seqs=4, max_model_len=24)
    llm.generate(["It was", "Elizabeth was very happy to", "Mr. Darcy"],
                 SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
live = trace.slot_mapping(step=0)
live

# %%
state = trace.at(step=0, after="step_scheduled")
tables = {request_id: request.block_ids[0] for request_id, request in state.requests.items()}
expected = every_list({
    "num_scheduled_tokens": [2, 5, 3], "num_computed_tokens": [0, 0, 0],
    "block_size": 2, "max_model_len": 24, "block_table": list(tables.values()),
})
assert live.lists["table index"] == expected["block_table_indices"]
assert live.lists["block"] == expected["block_numbers"]
assert live.lists["slot"] == expected["slot_mapping"]
print("tables", tables)
print("table index", live.lists["table index"])
print("slot       ", live.lists["slot"])

# %% [markdown]
# A pool that has never been used hands out blocks in order, so here even the block ids look like a
# simple count. In a server that has run for an hour they do not.
#
# > **Predict.** The block table of this engine has 4 rows of K = 12 cells. The pool has 15 usable
# > blocks. How can that be?

# %% tags=["answer"]
cells = llm.config.max_num_seqs * 12
usable = llm.kv_cache_config.num_blocks - 1
held = sum(len(table) for table in tables.values())
print(f"{cells} cells in the table, {usable} usable blocks in the pool, {held} held in step 0")
assert (cells, usable, held) == (48, 15, 6)

# %% [markdown]
# Because a cell is a number, not a block. If all requests became as long as they may, the pool would
# run out, and notebook 6 shows what happens then.
#
# **You saw** every list between [2, 5, 3] and the slots; that the list with the Ks holds indices into
# the flattened block table and not block ids; that K is a row width; and that dividing token indices
# works only by luck. Next: [the newer runner, its state rows and slot 207](04_state_rows.md).
