"""What the control plane costs: scheduler, KV-cache manager and block pool, without a model.

    python benchmarks/control_plane.py            # everything, about a minute
    python benchmarks/control_plane.py --only steps

All requests decode, block size 16, prefix caching on. Medians in microseconds, of CPU time, so that
a busy machine disturbs little. The column "0.14.1" is the Scheduler of the real vLLM 0.14.1, measured
once in the same process, in turns with ours, in the same way (2 cores, no model, no statistics);
ratios below 1 are in our favour, and mean something on such a machine only: another may be several
times slower for both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from pagedlab.config import SchedulerConfig
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.request import Request, RequestStatus
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.tracer import trace

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
# Requests -> microseconds of the real one: schedule(), update_from_output().
REAL = {1: (13, 4), 16: (71, 27), 64: (248, 96), 256: (1039, 470), 1024: (5796, 3110)}


class EngineOnPaper:
    """What the tracer asks of an engine; there is nothing behind it."""

    engine_id, step_id = 0, -1

    def __init__(self) -> None:
        self.about: dict[str, dict[str, str]] = {"model": {}, "config": {}, "tokenizer": {}}

    def snapshot(self) -> None:
        return None


def make_scheduler(num_blocks: int, max_num_seqs: int = 1024, budget: int = 1 << 20) -> Scheduler:
    group = KVCacheGroupSpec(("layer",), AttentionSpec(BLOCK_SIZE, 8, 128, "bfloat16"))
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=1 << 20)
    return Scheduler(config, KVCacheConfig(num_blocks, (group,)), block_size=BLOCK_SIZE, enable_prefix_caching=True)


def make_request(n: int, num_tokens: int = PROMPT_TOKENS) -> Request:
    prompt = [(n * 7919 + i) % 50_000 for i in range(num_tokens)]
    params = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
    return Request(f"r{n}", prompt, params, block_hasher=request_block_hasher(BLOCK_SIZE))


def answer(output: SchedulerOutput, token: int) -> ModelRunnerOutput:
    return ModelRunnerOutput({request_id: [token] for request_id in output.num_scheduled_tokens})


def decoding(num_requests: int, num_blocks: int) -> Scheduler:
    """A scheduler whose requests have all computed their prompts, at different places within a block."""
    scheduler = make_scheduler(num_blocks)
    for n in range(num_requests):
        scheduler.add_request(make_request(n, PROMPT_TOKENS + n % BLOCK_SIZE))
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, 1))
    assert len(scheduler.running) == num_requests
    return scheduler


def time_steps(num_requests: int, num_blocks: int, record: str | None, num_steps: int) -> tuple[float, float]:
    """Median microseconds of schedule() and of update_from_output()."""
    scheduler = decoding(num_requests, num_blocks)
    schedule_ns, update_ns = [], []
    events: list[object] = []
    if record is not None:
        trace.start(events, record=record)
        trace.enter(EngineOnPaper())
    for token in range(num_steps):
        start = time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        sampled = answer(output, token)
        answered = time.thread_time_ns()
        scheduler.update_from_output(output, sampled)
        update_ns.append(time.thread_time_ns() - answered)
        schedule_ns.append(scheduled - start)
        events.clear()
    trace.stop()
    return statistics.median(schedule_ns) / 1000, statistics.median(update_ns) / 1000


def steps() -> None:
    print("Per step, all requests decoding, pool of 20,000 blocks; microseconds (share of 0.14.1)\n")
    print(f"{'requests':>8}  {'':<12}{'0.14.1':>8}{'tracing off':>20}{'at decisions':>20}")
    for num_requests in (1, 16, 64, 256, 1024):
        num_steps = max(40, 4000 // num_requests)
        off = time_steps(num_requests, 20_000, None, num_steps)
        on = time_steps(num_requests, 20_000, "decisions", num_steps)
        for which, name in enumerate(("schedule", "update")):
            real = REAL.get(num_requests)
            shown = [f"{us[which]:,.0f}" + (f" ({us[which] / real[which]:.2f})" if real else "") for us in (off, on)]
            print(f"{num_requests if which == 0 else '':>8}  {name:<12}{real[which] if real else '':>8}"
                  f"{shown[0]:>20}{shown[1]:>20}")
    print()


def pool_size() -> None:
    print("256 requests decoding, by size of the pool; microseconds\n")
    for num_blocks in (3_000, 10_000, 30_000, 100_000):
        schedule, update = time_steps(256, num_blocks, None, 40)
        print(f"{num_blocks:>10,} blocks  schedule {schedule:8,.0f}  update {update:8,.0f}")
    print()


def hashing() -> None:
    print("Hashing the blocks of one prompt; milliseconds, and microseconds a token\n")
    for num_tokens in (1_000, 10_000, 100_000):
        ms = median_ms(lambda n=num_tokens: make_request(0, n)) - median_ms(lambda n=num_tokens: list(range(n)))
        print(f"{num_tokens:>10,} tokens  {ms:8.2f} ms  {ms * 1000 / num_tokens:6.3f} us")
    print()


def waiting() -> None:
    print("Many waiting requests, 4 seats; microseconds a request to add, a step while they wait, a request to abort\n")
    for num_waiting in (100, 1_000, 10_000):
        scheduler = make_scheduler(1_000, max_num_seqs=4)
        requests = [make_request(n) for n in range(num_waiting + 4)]
        add = once_us(lambda: [scheduler.add_request(r) for r in requests]) / len(requests)  # noqa: B023
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(output, 1))
        step = statistics.median(once_us(lambda: one_step(scheduler)) for _ in range(50))  # noqa: B023
        ids = [r.request_id for r in requests[4:]]
        abort = once_us(lambda: scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)) / len(ids)  # noqa: B023
        print(f"{num_waiting:>10,} waiting  add {add:6.2f}  step {step:6.1f}  abort, all in one call {abort:6.2f}")
    print()


def one_step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, 1))


def once_us(work: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1000


def median_ms(work: Callable[[], object]) -> float:
    return statistics.median(once_us(work) for _ in range(5)) / 1000


PARTS = {"steps": steps, "pool": pool_size, "hashing": hashing, "waiting": waiting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    only = parser.parse_args().only
    gc.collect()
    gc.freeze()
    for name, part in PARTS.items():
        if only in (None, name):
            part()


if __name__ == "__main__":
    main()
