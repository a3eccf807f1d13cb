"""Where the KV memory went, step by step.

Counted when a step has been scheduled, in slots (a slot holds keys and values of one token):

    token states    slots of tokens that have been computed, this step's included; shared ones once
    reserved        allotted to a request that will use them later
    internal waste  allotted to a request that never will: end of its last block or of its reservation
    external waste  free, enough for the head of the queue in all, but too scattered for it
    free            the rest: nobody needs it now, or it is too little for the head of the queue

The five add up to the pool. Paged allocation has no external waste, as any block serves anyone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

CATEGORIES = ("token_states", "reserved", "internal_waste", "external_waste", "free")


def _series() -> array[float]:
    return array("d")


@dataclass
class MemoryBySteps:
    """Parallel series, one entry per step; slots."""

    num_slots: int                     # usable ones: the null block is left out
    token_states: array[float] = field(default_factory=_series)
    reserved: array[float] = field(default_factory=_series)
    internal_waste: array[float] = field(default_factory=_series)
    external_waste: array[float] = field(default_factory=_series)
    free: array[float] = field(default_factory=_series)
    num_running: array[int] = field(default_factory=lambda: array("q"))
    num_waiting: array[int] = field(default_factory=lambda: array("q"))

    def add(
        self, *, used: float, token_states: float, reserved: float, scattered: bool, num_running: int, num_waiting: int
    ) -> None:
        """``used`` slots are allotted; ``scattered`` says that what is free would do and does not fit."""
        free = self.num_slots - used
        self.token_states.append(token_states)
        self.reserved.append(reserved)
        self.internal_waste.append(used - token_states - reserved)
        self.external_waste.append(free if scattered else 0)
        self.free.append(0 if scattered else free)
        self.num_running.append(num_running)
        self.num_waiting.append(num_waiting)

    @property
    def num_steps(self) -> int:
        return len(self.free)

    def pressed_steps(self) -> list[int]:
        """Steps in which requests waited: those in which memory (or seats, or budget) is short."""
        return [step for step, waiting in enumerate(self.num_waiting) if waiting]

    def shares(self, steps: Sequence[int]) -> dict[str, float]:
        """Percent of the pool, averaged over these steps."""
        scale = 100 / (self.num_slots * len(steps)) if steps else 0.0
        return {name: sum(getattr(self, name)[step] for step in steps) * scale for name in CATEGORIES}

    def mean_running(self, steps: Sequence[int]) -> float:
        return sum(self.num_running[step] for step in steps) / len(steps) if steps else 0.0
