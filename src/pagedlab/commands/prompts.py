"""Prompts as the command line gives them: arguments, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedlab.errors import UserError

if TYPE_CHECKING:
    from pagedlab.engine.input_processor import Prompt
    from pagedlab.engine.llm import LLM


def read_prompts(arguments: Sequence[str] | None, *, or_else: str = "") -> list[str]:
    """The prompts to run; checked here already, before an engine is built.

    Raises:
        UserError: there is none, or one is empty or no valid text.
    """
    prompts = list(arguments or [])
    if not prompts and not sys.stdin.isatty():
        piped = sys.stdin.read().rstrip("\n")
        prompts = [piped] if piped else []
    if not prompts:
        raise UserError(f"no prompt: give one or more in quotes{or_else}.")
    for place, prompt in enumerate(prompts, 1):
        which = f"prompt {place}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} is empty: give at least one character.")
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise UserError(f"{which} is not valid UTF-8 text.")
    return prompts


def for_model(llm: LLM, prompts: Sequence[str], *, chat: bool) -> list[Prompt]:
    """As raw text, or each as the one message of a conversation."""
    if not chat:
        return list(prompts)
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
