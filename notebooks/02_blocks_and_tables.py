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
# # 2 · Blocks and block tables
#
# For every token and every layer, attention keeps a key and a value. Together they are the **KV cache**.
# Nobody knows beforehand how long a request will become. So the cache is cut into equal **blocks**, and
# a request gets one more block when a token finds no place in its last one. The **block table** of a
# request lists its blocks in order. The idea is that of pages in an operating system (Kwon et al., *Efficient Memory
# Management for Large Language Model Serving with PagedAttention*, 2023).
#
# Here are two requests and a pool of 12 blocks with 4 places each.

# %%
from pagedlab import LLM, SamplingParams, tracing
from pagedlab.trace.events import BlockAllocated

llm = LLM(block_size=4, num_blocks=12, max_model_len=24)
with tracing("kernels") as trace:
    outputs = llm.generate(
        ["She was very happy to see her", "Mr. Darcy"],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )

for output in outputs:
    print(f"{output.request_id}: {len(output.prompt_token_ids)} prompt tokens, "
          f"{len(output.outputs[0].token_ids)} new: {output.prompt + output.outputs[0].text!r}")
assert [len(output.prompt_token_ids) for output in outputs] == [7, 3]

# %% [markdown]
# ## How many blocks at the start?
#
# > **Predict.** Both requests are admitted in step 0. `r0` has 7 tokens, `r1` has 3. Which blocks do
# > they get? Does either get room for its 6 new tokens already?

# %% tags=["answer"]
state = trace.at(step=0, after="step_scheduled")
for request_id, request in state.requests.items():
    print(request_id, "→", request.block_ids[0])
assert state.requests["r0"].block_ids == [[1, 2]]
assert state.requests["r1"].block_ids == [[3]]

# %% [markdown]
# Just enough for the tokens of this step: ⌈7 / 4⌉ = 2 and ⌈3 / 4⌉ = 1. Nothing is set aside for later.
#
# The first block handed out is block **1**. Block 0 is the **null block**: it is taken out of the pool
# when the engine starts and holds nobody's tokens. A pool of 12 blocks serves 11.

# %%
trace.block_table("r0", step=0)

# %%
trace.block_pool(step=0)

# %% [markdown]
# ## When does the third block come?
#
# `r0` has 8 places and 7 tokens. Step 0 samples the eighth token, step 1 the ninth, step 2 the tenth.
#
# > **Predict.** In which step does `r0` get its third block? Be careful: when `schedule()` looks at a
# > request, the token sampled in the step before is already one of its tokens.

# %% tags=["answer"]
for event in trace:
    if isinstance(event, BlockAllocated):
        print(f"step {event.step}: {event.request_id} gets block {event.block_id} "
              f"as logical block {event.logical_block}")
allocated = [event for event in trace if isinstance(event, BlockAllocated)]
third = next(e for e in allocated if (e.request_id, e.logical_block) == ("r0", 2))
assert third.step == 2

# %% [markdown]
# In step 2. Step 1 computes the eighth token, at position 7: the last place of logical block 1. Step 2
# computes the ninth, at position 8 = 2 · 4 + 0: the first place of logical block 2. A block is taken in
# the step that *writes* to it, not when the block before is full.
#
# ## Neighbours in the table, strangers in memory
#
# > **Predict.** The table of `r0` begins with 1, 2. What is its third entry? And which block does `r1`
# > get when it needs a second one?

# %% tags=["answer"]
last = trace.at(step=5, after="step_scheduled")
tables = {request_id: request.block_ids[0] for request_id, request in last.requests.items()}
print(tables)
assert tables == {"r0": [1, 2, 4], "r1": [3, 5]}

# %% [markdown]
# Both asked in step 2, `r0` first. Each got the block at the front of the **free queue**. So the blocks
# of `r0` are 1, 2, 4: neighbours in the table, not in memory. That is all a block table is for. It
# turns a place in a request (logical block 2) into a place in memory (block 4).

# %%
trace.block_table("r0", step=5)

# %% [markdown]
# From a position to its place in memory it is three short steps. Take position 8 of `r0`.

# %%
block_size, position = 4, 8
logical_block, offset = divmod(position, block_size)
block_id = tables["r0"][logical_block]
slot = block_id * block_size + offset
print(f"position {position} → logical block {logical_block}, offset {offset} "
      f"→ block {block_id} → slot {slot}")

mapped = trace.slot_mapping(step=2)
assert mapped.lists["position"][0] == 8 and mapped.lists["slot"][0] == slot == 16
mapped

# %% [markdown]
# A **slot** is a place for one token. Slots are counted through all blocks: block 4 begins at slot 16.
# The table shows what the worker computed for step 2, both requests side by side.
#
# ## What is lost
#
# Blocks are equal, so any free block will do, and there are no gaps between them that nobody can use.
# What is lost is the unused end of the last block of each table.
#
# > **Predict.** What is the largest number of places one table can waste, with 4 places per block? What
# > share of the places taken was used in this run, over all steps?

# %% tags=["answer"]
used = taken = 0
for step in range(6):
    state = trace.at(step=step, after="step_scheduled")
    for request in state.requests.values():
        places = 4 * len(request.block_ids[0])
        waste = places - request.num_computed_tokens
        assert 0 <= waste <= 3
        used, taken = used + request.num_computed_tokens, taken + places
print(f"{used} of {taken} places in use: {used / taken:.0%}")

# %% [markdown]
# At most block size − 1, here 3. The share depends on how long requests are: with thousands of tokens
# per request, 15 lost places of a 16-place block are nothing. So a single percentage says little. The
# paper's Figure 2 gives 20.4 to 38.2 % used for the engine it compares with and 96.3 % for vLLM, on one
# workload of 2023, as shares of the KV cache and not of the GPU's memory.
#
# ## After the end
#
# Both requests are done. Their blocks went back to the free queue.
#
# > **Predict.** Are they empty now? And which block is handed out next: one that was given back, or one
# > that was never used?

# %% tags=["answer"]
end = trace.at()
print("free queue, front first:", list(end.free_queue))
print("still found by their hash:", sorted(end.cached_blocks))
assert list(end.free_queue)[:6] == [6, 7, 8, 9, 10, 11]
assert sorted(end.cached_blocks) == [1, 2, 3, 4, 5]

# %%
trace.block_pool()

# %% [markdown]
# Nothing was wiped. A freed block keeps its keys and values, and its hash, until it is handed out again.
# It goes to the **back** of the queue, so unused blocks leave first. The blocks of one request go back
# in reverse order, so the end of a text is forgotten before its beginning.
#
# **You saw** that blocks come when they are written to, one at a time; that a table makes scattered
# blocks look like one piece; that the loss is at most one unfinished block per table; and that a free
# block can still hold something useful. Notebook 5 makes use of it. Next: the same indices for three
# requests at once, in [the \[2, 5, 3\] example](03_two_five_three.md).
