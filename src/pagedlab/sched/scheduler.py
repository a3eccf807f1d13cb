"""Who runs in the next step, and with how many tokens (vllm/v1/core/sched/scheduler.py).

There are no prefill and decode phases. Every request has known tokens (prompt plus output so far)
and computed tokens, and each step lets the latter catch up as far as budget and blocks allow. A
prompt is a request that is far behind, a decode one that is a single token behind.

Places where 0.14.1 is at fault are followed and marked "0.14.1 fault".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedlab.config import SchedulerConfig
from pagedlab.errors import UserError
from pagedlab.kv.manager import KVCacheManager
from pagedlab.kv.specs import BlockIds, KVCacheConfig
from pagedlab.request import Request, RequestStatus
from pagedlab.sched.output import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from pagedlab.sched.policy import Policy, resolve_policy
from pagedlab.sched.scan_events import (
    head_refused,
    preempted_itself,
    rest_of_running,
    scheduled,
    skipped,
    whole_waiting,
)
from pagedlab.sched.waiting_queue import WaitingQueue
from pagedlab.trace.events import (
    PrefixCacheReset,
    QueueName,
    RequestAborted,
    RequestAdded,
    RequestFinished,
    RequestOutput,
    RequestPreempted,
    Scalar,
    StepScheduled,
    StepStarted,
)
from pagedlab.trace.tracer import trace


@dataclass(slots=True)
class Step:
    """One step's decisions while they are being made."""

    budget: int                                              # tokens left
    running: list[Request] = field(default_factory=list)     # scheduled of the running list
    new: list[Request] = field(default_factory=list)         # admitted for the first time
    resumed: list[Request] = field(default_factory=list)     # admitted again after preemption
    preempted: list[Request] = field(default_factory=list)
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # in the order of scheduling


class Scheduler:
    """Owns the two queues and writes every field of a Request."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        block_size: int,                  # tokens per hashed block
        enable_prefix_caching: bool,
        policy: Policy | None = None,     # None: the one config names
    ) -> None:
        self.config = config
        self.policy = policy or resolve_policy(config.policy)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            block_size=block_size,
            max_model_len=config.max_model_len,
            enable_caching=enable_prefix_caching,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(self.policy.key)  # no blocks held: new ones and preempted ones
        self.running: list[Request] = []              # blocks held
        self.finished_req_ids: set[str] = set()       # since the last schedule(), for the worker
        self.step_id = -1                             # of the last schedule()

    # ---------------------------------------------------------------- requests come and go

    def add_request(self, request: Request) -> None:
        self.waiting.add(request)
        self.requests[request.request_id] = request
        if trace.on:
            trace.emit(RequestAdded.from_request(request, self.waiting.latest_key))

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, numbers: dict[str, Scalar] | None = None
    ) -> None:
        """End requests from outside, in the order given; unknown and finished ids are ignored.

        ``numbers`` say why, for the trace of a request that is ended with an error.
        """
        ending = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        was_running = {r.request_id for r in ending if r.status is RequestStatus.RUNNING}
        self.running = [r for r in self.running if r.request_id not in was_running]
        if len(was_running) < len(ending):
            self.waiting.remove(ending)
        for request in ending:
            request.status = status
            if trace.on and status is RequestStatus.FINISHED_ABORTED:
                queue: QueueName = "running" if request.request_id in was_running else "waiting"
                trace.emit(RequestAborted(request_id=request.request_id, queue=queue))
            self._free_request(request, numbers)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use."""
        num_used = self.kv_cache_manager.block_pool.num_used_blocks
        done = self.kv_cache_manager.block_pool.reset_prefix_cache()
        if trace.on:
            trace.emit(PrefixCacheReset(done=done, num_used_blocks=num_used))
        return done

    # ---------------------------------------------------------------- one step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then, if nobody was preempted, waiting ones."""
        self.step_id += 1
        step = Step(budget=self.config.max_num_batched_tokens)
        if trace.on:
            self.kv_cache_manager.block_pool.history.step_id = self.step_id
            trace.begin_step(self.step_id)
            trace.emit(
                StepStarted(num_waiting=len(self.waiting), num_running=len(self.running), token_budget=step.budget,
                            num_free_blocks=self.kv_cache_manager.block_pool.num_free_blocks)
            )
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        elif trace.decisions:
            for event in whole_waiting(self.waiting, "preemption_this_step"):
                trace.emit(event)
        output = self._make_output(step)
        requests = self.requests
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            requests[request_id].num_computed_tokens += num_tokens
        self.finished_req_ids = set()
        if trace.on:
            trace.emit(StepScheduled.from_output(output))
        return output

    def _schedule_running(self, step: Step) -> None:
        """Walk the running list; who lacks blocks makes the policy choose victims until they suffice."""
        index = 0
        running, allocate_slots = self.running, self.kv_cache_manager.allocate_slots
        threshold, last_position = self.config.long_prefill_token_threshold, self.config.max_model_len - 1
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            # 0.14.1 fault: a chunked prompt of max_model_len tokens is never completed, its last token has no turn.
            wanted = len(request.all_token_ids) - num_computed
            granted = min(wanted, step.budget, last_position - num_computed)
            if 0 < threshold < granted:
                granted = threshold
            if granted == 0:
                if trace.decisions:
                    trace.emit(skipped(request, wanted, step.budget))
                index += 1
                continue
            # 0.14.1 fault: ``granted`` stays as it was cut, also when a victim below returns its budget.
            while (new_block_ids := allocate_slots(request, granted)) is None:
                victim = self.policy.victim(running, request)
                index -= self._preempt(step, victim, request)
                if victim is request:
                    # 0.14.1 fault: the scan ends here, although requests behind may need no block at all.
                    if trace.decisions:
                        refused = self.kv_cache_manager.refused
                        for event in preempted_itself(request, wanted, step.budget, refused, running, index):
                            trace.emit(event)
                    return
            step.running.append(request)
            step.new_block_ids[request.request_id] = new_block_ids
            step.num_scheduled_tokens[request.request_id] = granted
            step.budget -= granted
            index += 1
            if trace.decisions:
                trace.emit(scheduled(request, "running", wanted, granted, step.budget, self.config))
        if trace.decisions:
            for event in rest_of_running(running, index, "token_budget_exhausted"):
                trace.emit(event)

    def _preempt(self, step: Step, victim: Request, needing: Request) -> int:
        """Take everything from the victim; returns 1 if it stood before ``needing``, already scheduled.

        0.14.1 fault: a victim before ``needing`` that had no tokens left to compute returns 0, so the scan
        passes over one request. Only a prompt of ``max_model_len`` tokens, or ``min_tokens`` beyond that length,
        gets there, and the door refuses both.
        """
        if victim not in self.running:
            chosen = getattr(victim, "request_id", victim)
            raise UserError(f"the policy chose {chosen} as victim, which does not run: choose one of the running list.")
        pool = self.kv_cache_manager.block_pool
        num_free_before, num_tokens_lost = pool.num_free_blocks, victim.num_computed_tokens
        block_ids = self.kv_cache_manager.get_block_ids(victim.request_id) if trace.decisions else ()
        self.running.remove(victim)
        taken_back = step.num_scheduled_tokens.pop(victim.request_id, 0)
        if taken_back:
            step.running.remove(victim)
            del step.new_block_ids[victim.request_id]
            step.budget += taken_back
        self.kv_cache_manager.free(victim, "preempted")
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        num_waiting = len(self.waiting)
        self.policy.requeue(self.waiting, victim)
        if len(self.waiting) != num_waiting + 1:
            raise UserError(f"the policy's requeue did not put {victim.request_id} back: call waiting.add or prepend.")
        step.preempted.append(victim)
        if trace.decisions:
            trace.emit(
                RequestPreempted(request_id=victim.request_id, on_behalf_of=needing.request_id,
                                 rule=getattr(self.policy, "rule", type(self.policy).__name__),
                                 num_tokens_lost=num_tokens_lost, num_tokens_taken_back=taken_back,
                                 budget_after=step.budget, block_ids=list(block_ids),
                                 num_free_before=num_free_before, num_free_after=pool.num_free_blocks,
                                 queue_key=list(self.waiting.latest_key))
            )
        return 1 if taken_back else 0

    def _schedule_waiting(self, step: Step) -> None:
        """Admit from the head while seats, budget and blocks last; nobody overtakes a head that does not fit."""
        manager, threshold = self.kv_cache_manager, self.config.long_prefill_token_threshold
        while self.waiting and step.budget > 0:
            if len(self.running) == self.config.max_num_seqs:
                if trace.decisions:
                    for event in whole_waiting(self.waiting, "max_num_seqs_reached", self.config.max_num_seqs):
                        trace.emit(event)
                return
            request = self.waiting.peek()
            hit = manager.get_computed_blocks(request)
            wanted = request.num_tokens - hit.num_tokens
            in_one_piece = threshold if 0 < threshold < wanted else wanted
            granted, refusal = min(in_one_piece, step.budget), None
            if granted < in_one_piece and not self.config.enable_chunked_prefill:
                refusal = "chunked_prefill_off"
            elif manager.allocate_slots(request, granted, hit) is None:
                # 0.14.1 fault: a head that can never fit stays here for ever; the engine's guards end it.
                refusal = "not_enough_free_blocks"
            if refusal is not None:
                if trace.decisions:
                    for event in head_refused(self.waiting, refusal, wanted, in_one_piece, step.budget,
                                              manager.refused):
                        trace.emit(event)
                return
            self.waiting.pop()
            self._admit(step, request, granted, hit.num_tokens)
            if trace.decisions:
                trace.emit(scheduled(request, "waiting", wanted, granted, step.budget, self.config))
        if trace.decisions:
            for event in whole_waiting(self.waiting, "token_budget_exhausted"):
                trace.emit(event)

    def _admit(self, step: Step, request: Request, num_tokens: int, num_hit_tokens: int) -> None:
        self.running.append(request)
        (step.resumed if request.status is RequestStatus.PREEMPTED else step.new).append(request)
        step.new_block_ids[request.request_id] = self.kv_cache_manager.get_block_ids(request.request_id)
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.budget -= num_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens

    def _make_output(self, step: Step) -> SchedulerOutput:
        """The message to the worker: new requests in full, known ones as differences."""
        manager, known = self.kv_cache_manager, step.running + step.resumed
        blocks = [step.new_block_ids[r.request_id] for r in known]
        num_common = [0] * len(manager.groups)
        if self.running:
            num_common = manager.get_num_common_prefix_blocks(self.running[0].request_id)
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(r.request_id, r.prompt_token_ids, r.sampling_params, step.new_block_ids[r.request_id],
                               r.num_computed_tokens)
                for r in step.new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[r.request_id for r in known],
                resumed_req_ids={r.request_id for r in step.resumed},
                new_block_ids=[None if b is manager.no_blocks else b for b in blocks],
                num_computed_tokens=[r.num_computed_tokens for r in known],
                num_output_tokens=[len(r.all_token_ids) - r.num_prompt_tokens for r in known],
                all_token_ids={r.request_id: list(r.all_token_ids) for r in step.resumed},
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.budget,
            num_common_prefix_blocks=num_common,
            preempted_req_ids=[r.request_id for r in step.preempted],
            finished_req_ids=sorted(self.finished_req_ids),
        )

    # ---------------------------------------------------------------- the model has answered

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append sampled tokens, end what is complete, give its blocks back; outputs in schedule order."""
        outputs = []
        finished = False
        sampled = model_runner_output.sampled_token_ids
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the step was running: its token is dropped
            prompt_logprobs = model_runner_output.prompt_logprobs.get(request_id)
            token_ids = sampled.get(request_id)
            if not token_ids:
                if prompt_logprobs is not None:
                    outputs.append(EngineCoreOutput(request_id, [], prompt_logprobs=prompt_logprobs))
                continue  # in the middle of its prompt
            request.append_output_token(token_ids[0])
            status = self._stop_status(request, token_ids[0])
            finish_reason, num_cached_tokens = status and status.value, request.num_cached_tokens
            outputs.append(
                EngineCoreOutput(request_id, token_ids, finish_reason, request.stop_reason, num_cached_tokens,
                                 model_runner_output.logprobs.get(request_id), prompt_logprobs)
            )
            if trace.on:
                trace.emit(RequestOutput(request_id=request_id, new_token_ids=token_ids, finish_reason=finish_reason,
                                         num_cached_tokens=num_cached_tokens))
            if status is not None:
                request.status = status
                finished = True
                self._free_request(request)
        if finished:
            self.running = [r for r in self.running if not r.status.is_finished]
        return outputs

    def _stop_status(self, request: Request, token_id: int) -> RequestStatus | None:
        """Stop tokens win over length; before min_tokens nothing stops (check_stop in vllm/v1/core/sched/utils.py)."""
        params = request.sampling_params
        num_output = len(request.all_token_ids) - request.num_prompt_tokens
        # 0.14.1 fault: also a request that has reached max_model_len goes on, and has no turn any more.
        if num_output < params.min_tokens:
            return None
        if token_id == request.eos_token_id and not params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        if token_id in params.stop_token_ids:
            request.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        if num_output == request.max_tokens or len(request.all_token_ids) >= self.config.max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None

    def _free_request(self, request: Request, numbers: dict[str, Scalar] | None = None) -> None:
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        self.kv_cache_manager.free(request, "aborted" if aborted else "finished")
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]
        if trace.on:
            trace.emit(
                RequestFinished(request_id=request.request_id, finish_reason=request.status.value,
                                stop_reason=request.stop_reason, num_prompt_tokens=request.num_prompt_tokens,
                                num_output_tokens=request.num_output_tokens,
                                num_cached_tokens=max(request.num_cached_tokens, 0),
                                num_preemptions=request.num_preemptions, numbers=numbers or {})
            )
