"""Token by token back to text (vllm/v1/engine/detokenizer.py).

Two things may hold text back: a character whose bytes are not all there yet, and a tail that may
be the beginning of a stop string. What has been released is never taken back, so the chunks
always add up to the text.
"""

from __future__ import annotations

import codecs

from pagedlab.engine.tokenizer import Tokenizer
from pagedlab.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what bytes that form no character decode to


class Detokenizer:
    """The text of one request, growing.

    Attributes:
        text: what has been released so far; after the last ``update`` the final text.
        stop_reason: the stop string that ended the text, None while there is none.
    """

    def __init__(self, tokenizer: Tokenizer, sampling_params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if sampling_params.skip_special_tokens else frozenset()
        self._stop = tuple(sampling_params.stop)
        self._include_stop = sampling_params.include_stop_str_in_output
        self._min_tokens = sampling_params.min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = ""       # all whole characters, released or not
        self._check_from = 0     # stop strings are looked for from here on in _decoded
        self.text = ""
        self.stop_reason: str | None = None

    def update(self, new_token_ids: list[int], *, finished: bool = False, by_stop_token: bool = False) -> str:
        """Take the tokens of one step and return the text that is released now.

        Example: the bytes F0 9F, then 98 8A, release "" and then "😊".

        Args:
            new_token_ids: what was sampled, in order.
            finished: nothing follows, so nothing is held back any more.
            by_stop_token: the last token ended the request; it is left out of the text unless
                ``include_stop_str_in_output`` is set.
        """
        if self.stop_reason is not None:
            return ""
        for place, token_id in enumerate(new_token_ids, 1):
            is_stop_token = by_stop_token and place == len(new_token_ids)
            if token_id not in self._skipped and not (is_stop_token and not self._include_stop):
                self._decoded += self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                self._check_from = len(self._decoded)  # stop strings do not count that early
            elif self._stop and not is_stop_token and self._ends_at_stop_string():
                return self._release(len(self._decoded))
        if finished:
            self._decoded += self._decoder.decode(b"", final=True)
        return self._release(len(self._decoded) if finished else self._safe_length())

    def _ends_at_stop_string(self) -> bool:
        """Cut the text at a stop string; the first of the list wins, as in vLLM."""
        for stop in self._stop:
            begin = self._decoded.find(stop, self._check_from)
            if begin >= 0:
                self._decoded = self._decoded[: begin + len(stop) if self._include_stop else begin]
                self.stop_reason = stop
                return True
        longest = max(map(len, self._stop))
        self._check_from = max(self._check_from, len(self._decoded) - longest + 1)
        return False

    def _safe_length(self) -> int:
        """Length of the text without the tail that may still change.

        A trailing U+FFFD waits as well: it is shown once a whole character follows it, or at the end.
        """
        held = 0
        if not self._include_stop:
            tail = self._decoded[self._check_from :]
            for stop in self._stop:
                begins = (n for n in range(min(len(stop) - 1, len(tail)), held, -1) if tail.endswith(stop[:n]))
                held = max(held, next(begins, 0))
        return len(self._decoded[: len(self._decoded) - held].rstrip(REPLACEMENT))

    def _release(self, length: int) -> str:
        chunk = self._decoded[len(self.text) : length]
        self.text += chunk
        return chunk
