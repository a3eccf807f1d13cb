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
# # 6 · Running out of blocks: preemption
#
# Blocks are handed out as they are needed, so the engine may admit more than the pool can hold to the
# end. Sooner or later a running request needs a block and none is free. Then somebody must give blocks
# back. That is **preemption**. Here is a pool made to run out: 4 usable blocks of 4 places.

# %%
from pagedlab import LLM, SamplingParams, tracing
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    NOT_REACHED_REASONS,
    PrefixMatched,
    QueueNotReached,
    RequestConsidered,
    RequestPreempted,
    SlotsRefused,
    StepScheduled,
)

prompts = ["She was very happy to see her", "It is a truth which she could"]
lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 6)]
with tracing("kernels") as trace:
    llm = LLM(block_size=4, num_blocks=5, max_model_len=16)
    tight = llm.generate(prompts, lengths)
for output in tight:
    print(f"{output.request_id}: {len(output.prompt_token_ids)} tokens in, "
          f"{len(output.outputs[0].token_ids)} out: {output.outputs[0].text!r}")
assert [len(output.prompt_token_ids) for output in tight] == [7, 7]


def of(step, kind):
    """The events of one kind in one step."""
    return [event for event in trace.steps[step] if isinstance(event, kind)]


# %% [markdown]
# Both were answered in full. What happened on the way?
#
# ## Steps 0 and 1: all is well
#
# Each prompt takes ⌈7 / 4⌉ = 2 blocks, so the pool is full at once. Step 1 computes the eighth tokens,
# for which there is just room.

# %%
trace.block_pool(step=1)

# %% [markdown]
# ## Step 2: nothing is left
#
# r0 is looked at first. Its ninth token needs a third block, and 0 are free.
#
# > **Predict.** Who loses its blocks: r0, which asked, or r1? How many blocks are free right after that,
# > and does r1, which is now waiting, come back in the same step?

# %% tags=["answer"]
(refused,) = of(2, SlotsRefused)
print(f"{refused.request_id} needs {refused.num_needed}, {refused.num_free} free: refused")
(preempted,) = of(2, RequestPreempted)
print(f"{preempted.request_id} is preempted for {preempted.on_behalf_of}: {preempted.rule}")
print(f"    it gives back blocks {preempted.block_ids[0]}, "
      f"loses {preempted.num_tokens_lost} computed tokens; "
      f"free: {preempted.num_free_before} → {preempted.num_free_after}")
(not_reached,) = of(2, QueueNotReached)
print(f"{not_reached.first_request_id} in {not_reached.queue}: "
      f"{NOT_REACHED_REASONS[not_reached.reason]}")
assert (preempted.request_id, preempted.on_behalf_of) == ("r1", "r0")
assert (preempted.num_free_before, preempted.num_free_after) == (0, 2)
assert not_reached.reason == "preemption_this_step"

# %% [markdown]
# The **last of the running list** goes, not the one that asks (vLLM: `Scheduler.schedule`,
# `_preempt_request`). Only if the asking request is itself the last does it preempt itself. The victim
# goes to the front of the waiting queue. In a step with a preemption nobody is admitted.
#
# Two things do *not* happen. Its blocks are not copied to the CPU: in vLLM V1 a preemption swaps nothing
# out. And it keeps none of its computed tokens.

# %%
after = trace.at(step=2)
r1 = after.requests["r1"]
print(f"r1: {r1.status}, {r1.num_computed_tokens} of {len(r1.token_ids)} tokens computed, "
      f"blocks {r1.block_ids[0]}")
assert (r1.status, r1.num_computed_tokens, r1.block_ids) == ("preempted", 0, [[]])
assert after.waiting == ["r1"]
trace.block_pool(step=2)

# %% [markdown]
# What r1 still has are its 9 *known* tokens: 7 of the prompt and 2 that were sampled. The text is safe.
# Only keys and values are lost.
#
# ## Step 3: one block free, and still no
#
# Block 3 was r1's first block. It is free, and still cached: r1 would find its first 4 tokens there.
#
# > **Predict.** r1 has 9 known tokens, so it needs 3 blocks in all. One of them, block 3, would be a
# > hit. 1 block is free. How many blocks does the scheduler count as needed? 2, because one is a hit?

# %% tags=["answer"]
(match,) = of(3, PrefixMatched)
(refused,) = of(3, SlotsRefused)
print(f"r1 hits {match.num_computed_tokens} tokens in block {match.block_ids[0]}")
print(f"needed: {refused.needed_from_free_hits[0]} free hit + {refused.needed_new[0]} new "
      f"= {refused.num_needed}, free: {refused.num_free}")
assert match.block_ids == [[3]] and list(trace.at(step=2).free_queue) == [3]
assert (refused.needed_from_free_hits, refused.needed_new, refused.num_free) == ([1], [2], 1)

# %% [markdown]
# Three. A hit block that is *free* must be taken out of the free queue, so it uses up one of the free
# blocks like any other. The condition is (new + free hits) ≤ free. Neither fragmentation nor the order of block
# numbers plays a part: all blocks are equal.
#
# ## Until r0 is done
#
# > **Predict.** In which step does r1 come back? And does it still find block 3?

# %% tags=["answer"]
for step in range(3, 9):
    for event in of(step, RequestConsidered):
        if event.request_id == "r1":
            hit = of(step, PrefixMatched)[0].num_computed_tokens
            print(f"step {step}: {hit} tokens cached, {event.outcome}: {CONSIDERED_REASONS[event.reason]}")
            if event.outcome == "refused":
                print(f"        needs {event.num_needed_blocks}, {event.num_free_blocks} free")
back = next(e for e in of(8, RequestConsidered) if e.request_id == "r1")
assert (back.outcome, back.num_tokens_granted) == ("scheduled", 9)
assert of(6, PrefixMatched)[0].num_computed_tokens == 0

# %% [markdown]
# In step 8, when r0 has finished. In step 6 r0 needed a fourth block and got block 3, so that hit was
# gone as well. r1 must compute all its 9 known tokens again: 8 that it had computed before, and the one
# it had just sampled.

# %%
trace.timeline()

# %% [markdown]
# ## What it costs, and what it does not
#
# > **Predict.** Are the answers the same as with a pool that never runs out? How many tokens were computed
# > more?

# %% tags=["answer"]
with tracing("blocks") as roomy:
    llm = LLM(block_size=4, num_blocks=32, max_model_len=16)
    relaxed = llm.generate(prompts, lengths)


def tokens_computed(trace):
    return sum(e.total_num_scheduled_tokens for e in trace if isinstance(e, StepScheduled))


def steps(trace):
    return len({e.step for e in trace if isinstance(e, StepScheduled)})


for tight_output, relaxed_output in zip(tight, relaxed, strict=True):
    assert tight_output.outputs[0].token_ids == relaxed_output.outputs[0].token_ids
print(f"tight pool: {tokens_computed(trace)} tokens in {steps(trace)} steps")
print(f"large pool: {tokens_computed(roomy)} tokens in {steps(roomy)} steps")
assert tokens_computed(trace) - tokens_computed(roomy) == preempted.num_tokens_lost == 8

# %% [markdown]
# Token for token the same answers. Preemption costs time, never correctness: 8 tokens were computed
# twice, and in 6 steps nothing of r1 was computed.
#
# With **priorities** (`policy="priority"`) another request may be the victim: the one with the least
# urgent priority, and among equals the one that came last. But the rule works only when a running request
# lacks blocks. A waiting request never pushes anybody out, however urgent it is.

# %%
from pagedlab.trace.why import why

print("\n".join(why(trace, "r1").lines))

# %%
trace.view()

# %% [markdown]
# **You saw** that the last of the running list gives way, loses all computed tokens and keeps its text;
# that a step that preempts admits nobody; that free hits count as needed; and that the answers stay the
# same. Next: [chunked prefill](07_chunked_prefill.md).
