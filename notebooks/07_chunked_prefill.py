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
# # 7 · Chunked prefill and mixed batches
#
# A long prompt and a running answer compete for the same step. If the prompt took the whole step, the
# answers of all others would pause. So each step has a **token budget** (`max_num_batched_tokens`), and
# a prompt that does not fit is cut into **chunks**. In vLLM V1 this is always on unless it is switched
# off.

# %%
from pagedlab import LLM, SamplingParams, tracing
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    BatchOrdered,
    InputsPrepared,
    MetadataBuilt,
    RequestConsidered,
    StepScheduled,
    TokensSampled,
)

LONG = ("It was a truth which she could not deny that her sister had been very happy "
        "in the house of Mr")
sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
with tracing("kernels") as alone:
    llm = LLM(block_size=4, num_blocks=24, max_model_len=40, max_num_batched_tokens=8)
    (chunked,) = llm.generate(LONG, sampling)
prompt_length = len(chunked.prompt_token_ids)
print(f"{prompt_length} prompt tokens, budget 8")
assert prompt_length == 22

# %% [markdown]
# ## One long prompt
#
# > **Predict.** How many tokens does each step compute? When does the first new token come? Is a chunk
# > always a whole number of blocks?

# %% tags=["answer"]
for event in alone:
    if isinstance(event, RequestConsidered):
        print(f"step {event.step}: wants {event.num_tokens_wanted:2}, "
              f"gets {event.num_tokens_granted}: {CONSIDERED_REASONS[event.reason]}")
    elif isinstance(event, TokensSampled):
        print(f"        sampled {event.text!r}, {'kept' if event.kept else 'thrown away'}")
granted = [e.num_tokens_granted for e in alone if isinstance(e, RequestConsidered)]
kept = [e.kept for e in alone if isinstance(e, TokensSampled)]
assert granted == [8, 8, 6, 1, 1] and kept == [False, False, True, True, True]

# %% [markdown]
# 8, 8, 6, and then one each. **A chunk is what the budget leaves**, not a fixed size; here it happens to be
# whole blocks twice. Every step samples from the last token it computed. After an unfinished prompt that
# sample means nothing, and it is thrown away.
#
# Look at what the scheduler asks: it wants 22, then 14, then 6, then 1. It does not know two kinds of
# work. It subtracts the computed tokens from the known ones, and cuts (vLLM: `Scheduler.schedule`).

# %%
alone.timeline()

# %% [markdown]
# Step 1's queries begin at position 8. The keys of positions 0 to 7 are in the cache already, so
# attention reads those blocks, too.

# %%
inputs = next(e for e in alone.steps[1] if isinstance(e, InputsPrepared))
print("positions", inputs.positions, "seq_lens", inputs.seq_lens)
assert inputs.positions == list(range(8, 16)) and inputs.seq_lens == [16]
alone.block_table("r0", step=1)

# %% [markdown]
# ## Decodes first, prompt with the rest
#
# Now two short requests are being answered when the long prompt arrives. The budget is 10.
#
# > **Predict.** In the step in which the long prompt comes, how many tokens does each of the three get?

# %% tags=["answer"]
llm = LLM(block_size=4, num_blocks=24, max_model_len=40, max_num_batched_tokens=10)
with tracing("kernels") as mixed:
    llm.add_request("I am", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    llm.add_request("Mr. Darcy", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    finished = llm.step()
    llm.add_request(LONG, sampling)
    while llm.has_unfinished_requests():
        finished += llm.step()

messages = [event for event in mixed if isinstance(event, StepScheduled)]
for event in messages:
    total = event.total_num_scheduled_tokens
    print(f"step {event.step}: {event.num_scheduled_tokens}, {total} of 10")
arrival = next(event for event in messages if "r2" in event.num_scheduled_tokens)
assert arrival.num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 8}

# %% [markdown]
# Running requests come first. r0 and r1 get their one token each, and r2 the 8 that are left. No answer
# waits for the prompt. In the next step r2 is itself running, and again gets what remains.
#
# ## One flat batch
#
# > **Predict.** The model gets the 10 tokens of that step as one flat list. What is `query_start_loc`? How
# > does attention know which tokens are decodes?

# %% tags=["answer"]
events = mixed.steps[arrival.step]
ordered = next(e for e in events if isinstance(e, BatchOrdered))
metadata = next(e for e in events if isinstance(e, MetadataBuilt))
print("rows", ordered.request_ids, "query_start_loc", ordered.query_start_loc)
print(f"longest query {metadata.max_query_len}, longest sequence {metadata.max_seq_len}")
assert ordered.query_start_loc == [0, 1, 2, 10]
mixed.slot_mapping(arrival.step)

# %% [markdown]
# [0, 1, 2, 10]: rows 0 and 1 have one token, row 2 has eight. Attention needs to know no more. For each
# row it takes the queries between two entries, and the keys of that row's blocks up to its `seq_len`. So
# a decode is a row with one query, and a batch may hold any mixture.

# %%
mixed.timeline()

# %%
mixed.view()

# %% [markdown]
# ## Does chunking change the answer?
#
# > **Predict.** The same prompt with a budget that takes it in one piece: the same tokens? And how many
# > steps until the first one?

# %% tags=["answer"]
with tracing("decisions") as whole:
    llm = LLM(block_size=4, num_blocks=24, max_model_len=40, max_num_batched_tokens=64)
    (at_once,) = llm.generate(LONG, sampling)


def steps_to_first_token(trace):
    return 1 + next(e.step for e in trace if isinstance(e, TokensSampled) and e.kept)


print(f"budget 8: first token after {steps_to_first_token(alone)} steps; "
      f"budget 64: after {steps_to_first_token(whole)}")
assert at_once.outputs[0].token_ids == chunked.outputs[0].token_ids
assert (steps_to_first_token(alone), steps_to_first_token(whole)) == (3, 1)

# %% [markdown]
# The same tokens. A small budget makes each step short, which is good for those who are being answered,
# and makes a newcomer wait longer for its first token. That is the whole trade.
#
# There are two more knobs. `long_prefill_token_threshold` caps what *one* request may take in a step, so
# that a long prompt leaves room for others. `enable_chunked_prefill=False` makes a prompt wait until it
# fits in one piece.

# %%
with tracing("decisions") as capped:
    llm = LLM(block_size=4, num_blocks=24, max_model_len=40, max_num_batched_tokens=64,
              long_prefill_token_threshold=5)
    llm.generate(LONG, sampling)
granted = [e.num_tokens_granted for e in capped if isinstance(e, RequestConsidered)]
print(granted)
assert granted == [5, 5, 5, 5, 2, 1, 1]

# %% [markdown]
# 5 at a time, although the budget was 64, and although 5 is no multiple of the block size. It is a cap,
# not the switch that turns chunking on.
#
# **You saw** that a chunk is what the budget leaves; that a sample from an unfinished prompt is thrown
# away; that running requests go first; and that one flat batch holds prompts and answers side by side.
# Next: [inside the Triton write](08_triton_write.md).
