"""Scheduling policies: who waits first, who loses blocks, and where the loser waits again.

A policy is a small object with three methods. Your own takes about fifteen lines; name it with
``--policy package.module:name``. Source of the two built-in ones: vllm/v1/core/sched/request_queue.py
and the preemption branch of Scheduler.schedule.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from pagedlab.errors import UserError
from pagedlab.request import Request
from pagedlab.sched.waiting_queue import WaitingQueue


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    rule: str  # how a victim is chosen, in words, for the trace

    def key(self, request: Request) -> tuple[Any, ...]:
        """Order of waiting, smallest first, ties in order of arrival; read when a request enters the queue."""

    def victim(self, running: Sequence[Request], needing: Request) -> Request:
        """One of ``running`` (``needing`` included) that gives its blocks back so that ``needing`` may have some."""

    def requeue(self, waiting: WaitingQueue, victim: Request) -> None:
        """Put a preempted request back."""


class FirstComeFirstServed:
    """Order of adding; the newest running request is the victim and waits first again."""

    rule = "the last of the running list"

    def key(self, request: Request) -> tuple[Any, ...]:
        return ()

    def victim(self, running: Sequence[Request], needing: Request) -> Request:
        return running[-1]

    def requeue(self, waiting: WaitingQueue, victim: Request) -> None:
        waiting.prepend(victim)


class Priority:
    """Smaller priority first, then earlier arrival, then the id as text (r10 before r2).

    The victim has the largest (priority, arrival_time); with both equal it is the one that stands
    first in the running list, ids are not compared. A waiting request never preempts.
    """

    rule = "the largest priority value, then the latest arrival, then the first in the running list"

    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.priority, request.arrival_time, request.request_id)

    def victim(self, running: Sequence[Request], needing: Request) -> Request:
        return max(running, key=lambda r: (r.priority, r.arrival_time))

    def requeue(self, waiting: WaitingQueue, victim: Request) -> None:
        waiting.add(victim)


def resolve_policy(name: str) -> Policy:
    """``fcfs``, ``priority``, or a class or object at ``package.module:name``, also in the working directory.

    Raises:
        UserError: there is no such policy, it cannot be loaded, or it lacks a method.
    """
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "priority":
        return Priority()
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the installed command does not look there by itself
    try:
        found = getattr(import_module(module_name), attribute)
        policy = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        message = f"policy {name!r} cannot be loaded ({error}): give an importable package.module:name."
        raise UserError(message) from None
    missing = [m for m in ("key", "victim", "requeue") if not callable(getattr(policy, m, None))]
    if missing:
        raise UserError(f"policy {name!r} has no method {missing[0]}: it needs key, victim and requeue.")
    return policy
