"""``pagedlab generate``: plain text out."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from pagedlab.commands.knobs import Knobs, takes_knobs
from pagedlab.commands.prompts import for_model, read_prompts
from pagedlab.errors import notice


@takes_knobs
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue; without any, standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, with token ids and reasons.")] = False,
    *,
    knobs: Knobs,
) -> None:
    """Continue prompts and print the text: of one as it grows, of several in order, a blank line between."""
    texts = read_prompts(prompts)
    params, config = knobs.sampling_params(), knobs.engine_config()

    from pagedlab.engine.llm import LLM

    llm = LLM(config=config)
    ready = for_model(llm, texts, chat=chat)
    if as_json:
        print(json.dumps([dataclasses.asdict(output) for output in llm.generate(ready, params)], indent=2))
        return
    if len(ready) == 1 and params.n == 1:
        continuations = []
        for output in llm.stream(ready, params):
            continuations += output.outputs
            print(continuations[-1].text, end="", flush=True)
        print()
    else:
        continuations = [c for output in llm.generate(ready, params) for c in output.outputs]
        print("\n\n".join(c.text for c in continuations))
    for continuation in continuations:
        if continuation.error is not None:
            notice(continuation.error)
