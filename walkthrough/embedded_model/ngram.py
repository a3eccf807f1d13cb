"""An n-gram model with interpolated Kneser-Ney smoothing, counted with numpy.

A gram (a_1 .. a_k) is one integer, its symbols the digits in base ``alphabet``: a gram's
context is ``gram // alphabet``, its suffix ``gram % alphabet ** (k - 1)``.
"""

from dataclasses import dataclass

import numpy
from numpy import ndarray


@dataclass
class Level:
    """Counts of one order k. Lower orders count in how many contexts a gram was seen."""

    grams: ndarray  # [G] sorted
    counts: ndarray  # [G]
    contexts: ndarray  # [C] sorted
    totals: ndarray  # [C] sum of the counts after a context
    kinds: ndarray  # [C] number of different symbols after a context
    discount: float  # taken from every count, given to the shorter context


def lookup(keys: ndarray, values: ndarray, wanted: ndarray) -> ndarray:
    """``values`` at ``wanted`` in the sorted ``keys``; 0 where there is none."""
    at = numpy.minimum(numpy.searchsorted(keys, wanted), len(keys) - 1)
    return numpy.where(keys[at] == wanted, values[at], 0)


class KneserNey:
    """P_k(w | h) = max(c(hw) - D, 0) / c(h) + D * kinds(h) / c(h) * P_(k-1)(w | h')."""

    def __init__(self, sequences: list[ndarray], order: int, alphabet: int, pad: int) -> None:
        self.order, self.alphabet, self.pad = order, alphabet, pad
        grams = numpy.concatenate([self._grams(s, order) for s in sequences])
        grams, counts = numpy.unique(grams, return_counts=True)
        self.levels: list[Level] = []  # orders 1 .. n
        for k in range(order, 0, -1):
            contexts, first = numpy.unique(grams // alphabet, return_index=True)
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            self.levels.insert(
                0,
                Level(
                    grams,
                    counts,
                    contexts,
                    totals=numpy.add.reduceat(counts, first),
                    kinds=numpy.diff(numpy.append(first, len(grams))),
                    # something must be left for symbols never seen, however small the text
                    discount=max(float(once / max(once + 2 * twice, 1)), 0.1),
                ),
            )
            grams, counts = numpy.unique(grams % alphabet ** (k - 1), return_counts=True)

    def _grams(self, sequence: ndarray, k: int) -> ndarray:
        """[N] the gram of length ``k`` that ends at each symbol, padded at the start."""
        padded = numpy.concatenate([numpy.full(k - 1, self.pad), sequence])
        gram = numpy.zeros(len(sequence), numpy.int64)
        for i in range(k):
            gram = gram * self.alphabet + padded[i : i + len(sequence)]
        return gram

    def bits(self, sequence: ndarray) -> float:
        """-log2 of the probability of ``sequence``, which starts after the padding."""
        probability = numpy.full(len(sequence), 1 / self.alphabet)
        for k, level in enumerate(self.levels, start=1):
            grams = self._grams(sequence, k)
            total = lookup(level.contexts, level.totals, grams // self.alphabet)
            kinds = lookup(level.contexts, level.kinds, grams // self.alphabet)
            count = lookup(level.grams, level.counts, grams)
            seen = total > 0  # an unseen context says nothing: keep the shorter one's word
            kept = numpy.maximum(count - level.discount, 0)
            mixed = (kept + level.discount * kinds * probability) / numpy.maximum(total, 1)
            probability = numpy.where(seen, mixed, probability)
        return float(-numpy.log2(probability).sum())
