"""Prompts as the command line gives them: arguments, or standard input."""

from __future__ import annotations

import os
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
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        try:
            piped = sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError:
            raise UserError("the prompt is not valid UTF-8 text.") from None
        prompts = [piped] if piped else []
    if not prompts:
        raise UserError(f"no prompt: give one or more in quotes{or_else}.")
    for place, prompt in enumerate(prompts):
        which = f"prompt {place + 1}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} is empty: give at least one character.")
        try:
            prompts[place] = os.fsencode(prompt).decode("utf-8")  # also where the locale knows no more than ASCII
        except UnicodeError:
            raise UserError(f"{which} is not valid UTF-8 text.") from None
    return prompts


def for_model(llm: LLM, prompts: Sequence[str], *, chat: bool) -> list[Prompt]:
    """As raw text, or each as the one message of a conversation."""
    if not chat:
        return list(prompts)
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
