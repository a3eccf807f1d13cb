"""What stands between a user and the scheduler's faithful faults.

The Scheduler follows vLLM 0.14.1 also where a hopeless request makes it spin or starve others. These
guards live outside it: the door refuses what can never fit, and a watch ends what cannot go on.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple, NoReturn

from pagedlab.config import SchedulerConfig
from pagedlab.errors import UserError
from pagedlab.request import Request
from pagedlab.sched.output import SchedulerOutput
from pagedlab.sched.scheduler import Scheduler
from pagedlab.trace.events import RequestRefused, Scalar
from pagedlab.trace.tracer import trace
from pagedlab.wording import plural

MAX_STEPS_WITHOUT_PROGRESS = 100


class Refusal(NamedTuple):
    reason: str                  # in a word, for the trace
    message: str                 # in a sentence, for the user
    numbers: dict[str, Scalar]


def check_at_the_door(scheduler: Scheduler, request: Request) -> None:
    """Refuse what the scheduler would keep waiting for ever.

    Raises:
        UserError: the id is in use, the prompt is empty, leaves no room for one output token or for
            min_tokens, does not fit the budget in one piece with chunked prefill off, or needs more
            blocks than exist.
    """
    refusal = _find_refusal(scheduler, request)
    if refusal is not None:
        refuse(request.request_id, refusal)


def refuse(request_id: str, refusal: Refusal) -> NoReturn:
    """Tell the trace and the user."""
    if trace.on:
        trace.emit(RequestRefused(request_id=request_id, reason=refusal.reason, message=refusal.message,
                                  numbers=refusal.numbers))
    raise UserError(refusal.message)


def id_in_use(request_id: str) -> Refusal:
    return Refusal("id_in_use", f"request {request_id} is still running: wait for it, abort it, or use another id.", {})


def _find_refusal(scheduler: Scheduler, request: Request) -> Refusal | None:
    config, length = scheduler.config, request.num_prompt_tokens
    if request.request_id in scheduler.requests:
        return id_in_use(request.request_id)
    if length == 0:
        message = f"request {request.request_id} has an empty prompt: give at least one token."
        return Refusal("empty_prompt", message, {})
    prompt = f"request {request.request_id} has a prompt of {plural(length, 'token')}"
    needed = most_blocks_held(scheduler, length)
    usable = scheduler.kv_cache_manager.block_pool.num_blocks - 1
    if needed > usable:
        message = (
            f"{prompt} that needs {plural(needed, 'block')}, but the pool has {plural(usable, 'usable block')}: "
            "shorten the prompt or give the pool more blocks (num_blocks or kv_cache_memory)."
        )
        return Refusal("never_fits", message, {"num_needed_blocks": needed, "num_usable_blocks": usable})
    if length >= config.max_model_len:
        message = (
            f"{prompt}, but max_model_len is {config.max_model_len:,} and one token of output needs room: "
            "shorten the prompt or raise max_model_len."
        )
        return Refusal("prompt_too_long", message, {"num_prompt_tokens": length, "max_model_len": config.max_model_len})
    room, min_tokens = config.max_model_len - length, request.sampling_params.min_tokens
    if min_tokens > room:  # nothing may stop it before, and nothing can be computed after
        message = (
            f"{prompt} and min_tokens {min_tokens:,}, but max_model_len is {config.max_model_len:,}: "
            f"lower min_tokens to {room:,} or less, or raise max_model_len."
        )
        return Refusal("min_tokens_too_large", message, {
            "num_prompt_tokens": length, "min_tokens": min_tokens, "max_model_len": config.max_model_len,
        })
    if larger_than_budget(config, length):
        budget = config.max_num_batched_tokens
        message = (
            f"{prompt}, but the budget is {plural(budget, 'token')} a step and chunked prefill is off: "
            "switch it on or raise max_num_batched_tokens."
        )
        return Refusal("larger_than_budget", message, {"num_prompt_tokens": length, "max_num_batched_tokens": budget})
    return None


def larger_than_budget(config: SchedulerConfig, num_tokens: int) -> bool:
    """Whether a request with so many tokens to compute must be scheduled in one piece and does not fit a step."""
    in_chunks = config.enable_chunked_prefill or config.long_prefill_token_threshold > 0
    return not in_chunks and num_tokens > config.max_num_batched_tokens


def most_blocks_held(scheduler: Scheduler, num_tokens: int) -> int:
    """Blocks that a request alone in the engine holds at its worst while ``num_tokens`` are computed.

    Full attention keeps every block. A sliding window first frees what is out of sight and then
    takes the next chunk's blocks, so with chunks its pool can be smaller than the prompt.
    A request that lacks blocks preempts itself; with caching it comes back with a hit of whole blocks,
    and a window that ends with a block may then need one block less.
    """
    config, manager = scheduler.config, scheduler.kv_cache_manager
    usable = manager.block_pool.num_blocks - 1
    chunk = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or num_tokens)
    alignment = lcm(*(group.block_size for group in manager.groups))
    most, computed, tried = 0, 0, set()
    while computed < num_tokens:
        known = min(computed + chunk, num_tokens)
        held = sum(
            -(-known // group.block_size) - group.num_skipped_blocks(computed) for group in manager.groups
        )
        resumed = computed // alignment * alignment
        if held > usable and manager.enable_caching and resumed < computed and computed not in tried:
            tried.add(computed)
            computed = resumed
            continue
        most = max(most, held)
        computed = known
    return most


class ProgressWatch:
    """Notices when no request gets anywhere any more.

    Progress is a token emitted, or a request that reaches more computed tokens than ever before.
    """

    def __init__(self) -> None:
        self._furthest: dict[str, int] = {}  # request -> most tokens ever computed
        self._steps_without = 0

    def hopeless(self, scheduler: Scheduler, output: SchedulerOutput, num_outputs: int) -> Request | None:
        """To be asked after each step; the request at fault once 100 steps brought nothing.

        That is the running request if there is one (it preempts itself again and again), else the
        head of the waiting queue (it does not fit, and nobody may overtake it).
        """
        for request_id in output.finished_req_ids:
            self._furthest.pop(request_id, None)  # the id may come again
        progress = num_outputs > 0
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            if request is not None and request.num_computed_tokens > self._furthest.get(request_id, 0):
                self._furthest[request_id] = request.num_computed_tokens
                progress = True
        self._steps_without = 0 if progress or not scheduler.requests else self._steps_without + 1
        if self._steps_without < MAX_STEPS_WITHOUT_PROGRESS:
            return None
        self._steps_without = 0
        return scheduler.running[0] if scheduler.running else scheduler.waiting.peek()


def explain_hopeless(scheduler: Scheduler, request: Request) -> tuple[str, dict[str, Scalar]]:
    """The sentence and the numbers for a request that was ended with finish reason ``error``."""
    usable = scheduler.kv_cache_manager.block_pool.num_blocks - 1
    needed = most_blocks_held(scheduler, request.num_tokens)
    if needed <= usable and larger_than_budget(scheduler.config, request.num_tokens):
        budget = scheduler.config.max_num_batched_tokens
        message = (
            f"request {request.request_id} made no progress in {MAX_STEPS_WITHOUT_PROGRESS} steps: it was preempted "
            f"and has {plural(request.num_tokens, 'token')} to compute again, but the budget is "
            f"{plural(budget, 'token')} a step and chunked prefill is off; switch it on or raise "
            "max_num_batched_tokens."
        )
        return message, {
            "num_tokens": request.num_tokens, "max_num_batched_tokens": budget,
            "steps_without_progress": MAX_STEPS_WITHOUT_PROGRESS,
        }
    rivals = sorted(request_id for request_id in scheduler.requests if request_id != request.request_id)
    competing = ""
    if needed <= usable and rivals:  # it fits alone; requests that preempt each other for ever end one by one
        competing = f", for which {rivals[0]}{' and others' if rivals[1:] else ''} competed"
    message = (
        f"request {request.request_id} made no progress in {MAX_STEPS_WITHOUT_PROGRESS} steps: with "
        f"{plural(request.num_tokens, 'token')} it needs {plural(needed, 'block')} and the pool has "
        f"{plural(usable, 'usable block')}{competing} "
        "(num_blocks counts the null block too); give the pool more blocks or ask for fewer tokens."
    )
    return message, {
        "num_tokens": request.num_tokens, "num_needed_blocks": needed, "num_usable_blocks": usable,
        "steps_without_progress": MAX_STEPS_WITHOUT_PROGRESS,
    }
