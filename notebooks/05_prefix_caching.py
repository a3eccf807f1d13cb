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
# # 5 · Prefix caching
#
# Many prompts begin alike: the same instructions, the same document, the same chat so far. Their keys
# and values are the same, too, since a key depends only on the tokens up to its position. So a block
# that was computed once may serve other requests. How does the engine find it, and when does it not?

# %%
from pagedlab import LLM, SamplingParams, tracing
from pagedlab.kv.hashing import hash_block_tokens, short_hash
from pagedlab.trace.events import PREFIX_STOPS, PrefixMatched

SIZE = 4
llm = LLM(block_size=SIZE, num_blocks=24, max_model_len=40)
greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def matches(trace):
    """What the prefix cache said to each request."""
    return [event for event in trace if isinstance(event, PrefixMatched)]


def ask(*prompts):
    """Run the prompts together and tell what the prefix cache gave to each."""
    with tracing("kernels") as trace:
        llm.generate(list(prompts), greedy)
    for match in matches(trace):
        print(f"{match.request_id}: {match.num_computed_tokens} of {match.num_tokens} tokens "
              f"from the cache, blocks {match.block_ids[0]}")
        print(f"    stopped at block {match.stopped_at_block}: {PREFIX_STOPS[match.why]}")
    return trace


first = ask("She was very happy to see her sister at the door")

# %% [markdown]
# Nothing was cached yet, so nothing was found. All 11 tokens were computed.
#
# ## A key for each full block
#
# A block can be found again under its **hash**. The hash covers the block's tokens *and the hash of the
# block before it*. So it stands for the whole text up to the block's end (vLLM: `hash_block_tokens` in
# `vllm/v1/core/kv_cache_utils.py`).

# %%
tokens = llm.tokenizer.encode("She was very happy to see her sister at the door")
parent, chain = None, []
for start in range(0, len(tokens) - SIZE + 1, SIZE):
    parent = hash_block_tokens(parent, tokens[start : start + SIZE])
    chain.append(short_hash(parent))
    words = "".join(llm.tokenizer.token_text(token) for token in tokens[start : start + SIZE])
    print(f"block {start // SIZE}: {words!r:28} hash {chain[-1]}")
print(f"left over: {len(tokens) % SIZE} tokens that fill no block, so they have no hash")
assert list(first.at().cached_blocks.values())[:2] == chain

# %% [markdown]
# Only keys are compared, never tokens. And only **full** blocks have a key.
#
# ## A prompt that begins alike
#
# > **Predict.** The next prompt is *She was very happy to see her sister in the garden*. Its first 8 of
# > 11 tokens are the same. How many come from the cache? What if 7 were the same?

# %% tags=["answer"]
garden = ask("She was very happy to see her sister in the garden")
seven = ask("She was very happy to see her brother in the garden")
assert [match.num_computed_tokens for match in matches(garden) + matches(seven)] == [8, 4]

# %% [markdown]
# With 8 equal tokens, 8. With 7 equal tokens, 4: reuse goes in whole blocks. A shared prefix that is
# shorter than one block gives nothing at all, and a hit rate of 0 % can be right.

# %%
garden.block_table("r1", step=matches(garden)[0].step)

# %% [markdown]
# ## One other word at the start
#
# > **Predict.** Now *She was so happy to see her sister at the door*. One word differs, in the first
# > block. The second block, *to see her sister*, is word for word the same. How much is reused?

# %% tags=["answer"]
so_happy = ask("She was so happy to see her sister at the door")
(match,) = matches(so_happy)
print(f"the key that was looked for: {match.hash}; "
      f"cached block {match.similar_block_id} has the same parent and other {match.key_differs}")
assert match.num_computed_tokens == 0 and match.key_differs == "tokens"

# %% [markdown]
# Nothing. The second block's key contains the first block's key, and that differs. This must be so: the
# keys and values of *to see her sister* depend on the words before them.
#
# ## The whole prompt is cached. How much is computed?
#
# > **Predict.** A prompt of exactly 8 tokens, all in the cache: *She was very happy to see her sister*.
# > How many tokens does the step compute? 0? 1? And for the first prompt of 11 tokens, once more?

# %% tags=["answer"]
whole = ask("She was very happy to see her sister")
again = ask("She was very happy to see her sister at the door")
both = matches(whole) + matches(again)
left = [match.num_tokens - match.num_computed_tokens for match in both]
print("tokens to compute:", left)
assert left == [4, 3]

# %% [markdown]
# For 8 tokens, 4: **a whole block**. The last token must be computed, because its result is what the
# next token is sampled from. So at most 7 of 8 may come from the cache; rounded down to whole blocks,
# 4. With 11 tokens the remainder of 3 is computed anyway, and nothing is lost.
#
# ## Two twins in one step
#
# > **Predict.** Two equal prompts arrive together. The first one is not computed yet when the second
# > is looked at. Is there a hit?

# %% tags=["answer"]
twins = ask("It is a truth which she could not deny", "It is a truth which she could not deny")
assert [match.num_computed_tokens for match in matches(twins)] == [0, 8]
assert len({match.step for match in matches(twins)}) == 1
twins.block_pool(step=matches(twins)[0].step)

# %% [markdown]
# Yes. A block counts as cached once it is *scheduled*: within a step all writes of a layer come before
# any read. Two blocks now have two owners each (×2). A shared block counts once in the pool.
#
# ## When a hit is lost
#
# Blocks that nobody holds stay in the free queue with their hash. When they reach its front and are
# handed out, the hash goes: the block is **evicted**. Here is a pool so small that it happens.
#
# > **Predict.** The pool has 8 usable blocks. A prompt of 9 tokens runs and ends, then one of 10, then
# > one of 14 tokens. Then the first one comes again. Which of its two full blocks is lost, the first or
# > the second?

# %% tags=["answer"]
llm = LLM(block_size=SIZE, num_blocks=9, max_model_len=24)
ask("She was very happy to see her sister at")
ask("It is a truth which she could not deny")
big = ask("The house was not so very far from the village of their own family")
back = ask("She was very happy to see her sister at")
(match,) = matches(back)
print(f"\nblock {match.stopped_at_block} of the prompt: {match.why}, for {match.evicted_for}")
assert (match.num_computed_tokens, match.stopped_at_block, match.why) == (4, 1, "evicted")

# %% [markdown]
# The second. A request gives its blocks back in reverse order, so the end of a text stands nearer to the
# front of the queue than its beginning. The beginning is what others are most likely to share.

# %%
from pagedlab.trace.why import why

print("\n".join(why(back, match.request_id).lines))

# %% [markdown]
# ## What else belongs to the key
#
# A **cache salt** is hashed into the first block, and so into all. Users with different salts never share
# blocks, and cannot learn from the response time what others have asked.

# %%
question = "She was very happy to see her sister"
with tracing("decisions") as trace:
    for salt in ("ann", "ann", "ben"):
        llm.generate({"prompt": question + " at", "cache_salt": salt}, greedy)
for match in matches(trace):
    print(f"{match.request_id}: {match.num_computed_tokens} tokens from the cache, {match.why}")
assert [match.num_computed_tokens for match in matches(trace)] == [0, 8, 0]

# %% [markdown]
# **You saw** that full blocks have keys that stand for all the text before them; that reuse goes in whole
# blocks and never takes the last token; that a miss has a reason that can be looked up; and that a free
# block serves hits until it is handed out. Next: [running out of blocks](06_preemption.md).
