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
# # 8 · Inside the Triton write
#
# `slot_mapping` says where keys and values go. The kernel that puts them there is
# `reshape_and_cache`; vLLM has it in CUDA (`reshape_and_cache_flash`), pagedlab in Triton, Python that
# is compiled for a GPU. Triton also has an **interpreter**, which runs the same source on a CPU, one
# program after the other. So you can watch it.

# %%
import inspect

import torch

from pagedlab.display.tables import IndexTable
from pagedlab.kernels.reshape_and_cache import (
    new_write_log,
    reshape_and_cache,
    reshape_and_cache_kernel,
    reshape_and_cache_reference,
    write_log_columns,
)

source = inspect.getsource(reshape_and_cache_kernel)
body = source[source.index('    """One program') :]
print(body[: body.index("            if LOG:\n                if k.dtype")])

# %% [markdown]
# It is short. **One program copies one token's key and value.** `tl.program_id(0)` says which token. The
# slot is split into block and offset, these give the address, and a loop copies the numbers. `mask` keeps
# the last piece from running over the end. With `LOG`, a flag fixed when the kernel is compiled, it also
# writes down what it did.
#
# ## A small case
#
# Four tokens, 1 KV head, head size 2, so that all numbers can be seen. The cache has 4 blocks of 2 places:
# 8 slots.

# %%
T, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 4, 4, 2, 1, 2
key = torch.tensor([[10.0, 11], [20, 21], [30, 31], [40, 41]]).view(T, HEADS, HEAD_SIZE)
value = -key
slot_mapping = torch.tensor([6, 7, -1, 2])
shape = (2, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)  # keys, then values


def show(kv_cache, title, marks=()):
    """The cache, one column per slot."""
    slots = list(range(NUM_BLOCKS * BLOCK_SIZE))
    keys, values = kv_cache.view(2, len(slots), HEAD_SIZE).tolist()
    text = {"block": [slot // BLOCK_SIZE for slot in slots], "slot": slots,
            "key": [" ".join(f"{x:g}" for x in numbers) for numbers in keys],
            "value": [" ".join(f"{x:g}" for x in numbers) for numbers in values]}
    return IndexTable(text, [slot // BLOCK_SIZE for slot in slots], title=title,
                      marks={"key": marks, "value": marks})


# %% [markdown]
# > **Predict.** The slots are 6, 7, −1, 2. Where does each of the four keys end up? Which slots stay empty?
# > What does −1 mean?
#
# One program at a time: the whole grid is launched, but all slots except one are −1, so only that one
# program writes.

# %% tags=["answer"]
from IPython.display import display

kv_cache = torch.zeros(shape)
for token in range(T):
    only = torch.full_like(slot_mapping, -1)
    only[token] = slot_mapping[token]
    log = new_write_log(T, kv_cache.device)
    grid = reshape_and_cache(key, value, kv_cache, only, "interpreted", log)
    slot = int(slot_mapping[token])
    wrote = write_log_columns(log)
    assert grid == (T,) and wrote["slot"] == ([] if slot < 0 else [slot])
    said = f"slot {slot}" if slot >= 0 else "slot −1: it writes nothing"
    display(show(kv_cache, f"after program {token}, {said}", marks=[slot] if slot >= 0 else []))

# %% [markdown]
# −1 is padding: the program sees it and returns. Block 0 stays empty as well; in the engine it is the null
# block. Tokens 0 and 1 are neighbours because their slots are. Token 3 is in block 1, far from them. The
# kernel does not know requests, or block tables. **It is handed one slot per token, and that is all.**
#
# ## All at once
#
# > **Predict.** The four programs run in one launch, on a GPU in any order or at the same moment. Can the
# > result differ?

# %% tags=["answer"]
at_once, log = torch.zeros(shape), new_write_log(T, kv_cache.device)
reshape_and_cache(key, value, at_once, slot_mapping, "interpreted", log)
assert torch.equal(at_once, kv_cache)

twin = torch.zeros(shape)
reshape_and_cache_reference(key, value, twin, slot_mapping)
assert torch.equal(twin, at_once)
print("the same, and the same as the plain torch version")

# %% [markdown]
# It cannot, as long as no slot occurs twice: each program writes to a place of its own. The scheduler
# guarantees that: only one request writes to a block. Others may share it, but they only read it.
#
# ## The write log
#
# The kernel reports each write itself. So a trace does not say what *should* have been written, but what
# the writer did.

# %%
columns = write_log_columns(log)
IndexTable(columns, [slot // BLOCK_SIZE for slot in columns["slot"]],
           title="the log of one launch")

# %% [markdown]
# The **checksum** is the sum of the raw bits of key and value, read as whole numbers, modulo 2³². You can
# compute it yourself.
#
# > **Predict.** Token 2 has no row in the log. Why?

# %% tags=["answer"]
def bits(numbers):
    return int((numbers.reshape(-1).view(torch.int32).to(torch.int64) & 0xFFFF_FFFF).sum())


for token, checksum in zip(columns["token"], columns["checksum"], strict=True):
    mine = (bits(key[token]) + bits(value[token])) % 2**32
    print(f"token {token}: the kernel says {checksum:#010x}, computed here {mine:#010x}")
    assert checksum == mine
assert columns["token"] == [0, 1, 3]

# %% [markdown]
# ## Writing needs slots, reading needs tables
#
# It is often said that `reshape_and_cache` uses the block table and the slot mapping. Here are the
# arguments of the two kernels of one attention layer.
#
# > **Predict.** Which of the two is given `slot_mapping`, which `block_table`?

# %% tags=["answer"]
from pagedlab.kernels.paged_attention import paged_attention

for function in (reshape_and_cache, paged_attention):
    print(f"{function.__name__}: {', '.join(inspect.signature(function).parameters)}")
writes = inspect.signature(reshape_and_cache).parameters
reads = inspect.signature(paged_attention).parameters
assert "slot_mapping" in writes and "block_table" not in writes
assert "block_table" in reads and "slot_mapping" not in reads

# %% [markdown]
# Writing needs a place for each *new* token: `slot_mapping`. Reading needs all tokens of a request, old
# ones too: its row of blocks and its length. In vLLM it is the same: `slot_mapping` goes to
# `reshape_and_cache_flash`, `block_table` to `flash_attn_varlen_func`
# (`vllm/v1/attention/backends/flash_attn.py`).
#
# ## Reading where it lies
#
# A decode has one query. Attention multiplies it with the request's keys, turns the products into weights
# that sum to 1, and adds up the values with these weights. Think of the cache as one long table with a
# row per slot. A request with the blocks 3 and 1 has its three tokens in rows 6, 7 and 2. A weighted sum
# over rows that are found by their number is known from elsewhere: it is an **embedding bag**.
#
# > **Predict.** Here is attention by an embedding bag. Must the three values first be copied side by side?

# %% tags=["answer"]
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

keys, values = at_once.view(2, NUM_BLOCKS * BLOCK_SIZE, HEAD_SIZE)
slots, query = torch.tensor([6, 7, 2]), torch.tensor([0.05, 0.02])
weights = (keys[slots] @ query).softmax(0)
read = embedding_bag(slots, values, torch.tensor([0]), mode="sum", per_sample_weights=weights)
print("weights", weights.numpy().round(2), "answer", read[0].numpy().round(2))
copied = scaled_dot_product_attention(query[None], keys[slots], values[slots], scale=1.0)
assert torch.allclose(read, copied)

# %% [markdown]
# No: the bag takes each row from where it lies. The products need no copy either, when one asks only for
# those of a query with its own slots (`torch.sparse.sampled_addmm`; the line above still copied the keys).
# This is how pagedlab reads in float32 on a CPU (`ReadInPlace` in `attention/torch_backend.py`), for many
# decodes in one call. On a GPU the kernel walks through the same places, block by block.
#
# ## In the engine
#
# The same kernels in a run of the whole engine, under the interpreter. It is slow, so the prompts are
# short.

# %%
from pagedlab import LLM, SamplingParams, tracing
from pagedlab.trace.events import KvRead, KvWritten, SlotsMapped

prompts = ["She was very", "Mr. Darcy"]
greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
knobs = {"block_size": 4, "num_blocks": 8, "max_model_len": 16}
with tracing("kernels") as trace:
    llm = LLM(attention_backend="triton", **knobs)
    outputs = llm.generate(prompts, greedy)

written = [event for event in trace if isinstance(event, KvWritten)]
mapped = {event.step: event for event in trace if isinstance(event, SlotsMapped)}
for event in written:
    assert event.source == "triton-interpreted"
    assert event.slot == mapped[event.step].slot
print(f"{len(written)} launches of the write, in {llm.model_config.num_hidden_layers} layers and "
      f"{len(mapped)} steps, each wrote exactly the slots of its step:")
for step, event in mapped.items():
    print(f"  step {step}: {event.slot}")

# %%
state = trace.at(step=1, after="step_scheduled")
for event in [event for event in trace.steps[1] if isinstance(event, KvRead)][:2]:
    print(f"step 1, {event.layer}: {event.request_id} read blocks {event.block_ids}")
    assert event.block_ids == state.requests[event.request_id].block_ids[0]

# %% [markdown]
# And the answers are those of the torch kernels:

# %%
plain = LLM(attention_backend="torch", **knobs).generate(prompts, greedy)
assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in outputs]
print([o.outputs[0].text for o in outputs])

# %%
trace.view()

# %% [markdown]
# **You saw** that one program writes one token; that −1 means *write nothing*; that the kernel reports what
# it did, with a checksum; that writing takes slots while reading takes tables; and that reading need not
# copy. That was the last notebook. From here, run `pagedlab trace` with your own prompts, or `pagedlab
# scenarios` for thirty small stories.
