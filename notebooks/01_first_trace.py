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
# # 1 · Your first trace
#
# A language model turns a prompt into one next token. An *engine* does the rest: it decides which
# requests run now, where their keys and values are kept (what attention remembers of each token), and
# when a request is done. pagedlab is such an engine. It makes the decisions of vLLM 0.14.1, and it tells
# every one of them to a **trace**.
#
# In this notebook you run one prompt and read what the engine said about it. Before each answer there
# is a question. Make a guess first: a wrong guess teaches more than a right sentence.
#
# The model is a small one that comes with pagedlab. It learned from novels of Jane Austen, and it runs
# on any laptop.

# %%
from pagedlab import LLM, SamplingParams, tracing

with tracing("kernels") as trace:
    llm = LLM(block_size=4, num_blocks=16, max_model_len=48)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    (output,) = llm.generate("She was very happy to see her", greedy)

print(repr(output.prompt + output.outputs[0].text))
trace

# %% [markdown]
# ## How many steps?
#
# An engine works in **steps**. In each step it runs the model once. The prompt has 7 tokens, and you
# asked for 6 new ones.
#
# > **Predict.** How many steps did the engine run? 13, because there are 13 tokens? 7? 6?

# %% tags=["answer"]
prompt_length = len(output.prompt_token_ids)
steps = [step for step in trace.steps if step >= 0]  # -1 holds what came before the first step
new_tokens = output.outputs[0].token_ids
print(f"{prompt_length} prompt tokens, {len(new_tokens)} new tokens, {len(steps)} steps")
assert (prompt_length, len(steps)) == (7, 6)

# %% [markdown]
# Six. The first step computes the whole prompt at once. From the scores at its last position the first
# new token is chosen already: it is **sampled**. Each later step computes one token and samples one more.
#
# The first step is called **prefill**, the later ones **decode**. The scheduler itself knows no such
# phases: it only asks how many tokens of a request are known and not yet computed (vLLM:
# `Scheduler.schedule`).
#
# > **Predict.** How many tokens does each of the six steps compute? And at the end there are 13 known
# > tokens: of how many were keys and values computed?

# %% tags=["answer"]
from pagedlab.trace.events import StepScheduled

scheduled = [event for event in trace if isinstance(event, StepScheduled)]
per_step = [event.total_num_scheduled_tokens for event in scheduled]
print("tokens per step:", per_step)
print("tokens computed:", sum(per_step))
assert per_step == [7, 1, 1, 1, 1, 1] and sum(per_step) == 12

# %% [markdown]
# Twelve, not thirteen. The last token was sampled, and then the request was finished. Nobody needs its
# key and value, so no step computes them. Remember this: **a new token is computed one step after it
# was sampled.** Most off-by-one questions about block tables end here.
#
# The timeline shows the same: tokens per step as bars, blocks in use as a line, one lane per request.

# %%
trace.timeline()

# %% [markdown]
# ## One step, event by event
#
# A trace is a list of **events**. Each event is written on the line of the engine that knows why. Here
# are those of step 1, without the layers' own reports.

# %%

kinds = [event.kind for event in trace.steps[1]]
print("\n".join(dict.fromkeys(kinds)))

# %% [markdown]
# Read it as three acts.
#
# 1. **Schedule.** `step_started`, `slots_allocated`, `request_considered`, `step_scheduled`: look at
#    each request, find room for its tokens, write the message for the worker.
# 2. **Run the model.** `rows_staged` to `kv_read`: turn the message into arrays, write keys and values
#    into the cache, read them back in attention.
# 3. **Update.** `tokens_sampled`, `request_output`, `step_finished`: take the new token in.
#
# Here is one of them with its fields. It does not say *scheduled* and stop: it says how many tokens the
# request wanted, how many it got, and why.

# %%
from pagedlab.trace.events import CONSIDERED_REASONS, RequestConsidered

considered = next(event for event in trace.steps[1] if isinstance(event, RequestConsidered))
print(f"{considered.request_id} from {considered.queue}: "
      f"wanted {considered.num_tokens_wanted}, granted {considered.num_tokens_granted}, "
      f"budget {considered.budget_before} → {considered.budget_after}")
print(f"{considered.reason}: {CONSIDERED_REASONS[considered.reason]}")

# %% [markdown]
# ## Back in time
#
# `trace.at(…)` rebuilds the engine's state at any moment, from the events alone. No engine is asked.
#
# > **Predict.** Blocks have 4 places. How many blocks does the request hold after step 0, with 7 tokens
# > computed? And after step 2, with 9?

# %% tags=["answer"]
for step in (0, 1, 2):
    state = trace.at(step=step)
    request = state.requests["r0"]
    print(f"after step {step}: {request.num_computed_tokens} tokens computed, "
          f"blocks {request.block_ids[0]}")
assert len(trace.at(step=0).requests["r0"].block_ids[0]) == 2
assert len(trace.at(step=2).requests["r0"].block_ids[0]) == 3

# %% [markdown]
# ## All of it at once
#
# The viewer shows every moment of the run. Use the arrow keys, or drag in the timeline. Click a token
# in a block table, and the *token lens* follows it to its place in memory.

# %%
trace.view()

# %% [markdown]
# ## Keep it, read it elsewhere
#
# A trace is a file of JSON lines. It can be read on a machine that has no torch, and it says the same
# there.

# %%
import tempfile
from pathlib import Path

from pagedlab import Trace
from pagedlab.trace.why import why

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "first.jsonl.zst"
    trace.save(path)
    again = Trace.load(path)
    print(f"{path.stat().st_size:,} bytes for {len(again)} events")

assert list(again) == list(trace)
print("\n".join(why(again, "r0").lines))

# %% [markdown]
# The same from a shell: `pagedlab trace "She was very happy to see her" --out first.jsonl.zst`, then
# `pagedlab why first.jsonl.zst r0`, `pagedlab view first.jsonl.zst`.
#
# **You saw** that a step runs the model once; that the first step computes the prompt and every further
# step one token; that the last token of a request is never computed; and that each decision is an event
# with its reason. Next: [blocks and block tables](02_blocks_and_tables.md).
