"""The terminal tracer: one engine's story, step by step, from events alone.

It is a sink, so it shows an engine at work (``append``), and it replays a saved trace (``show``).
Output is plain lines, one after another: no cursor is moved, so a pipe and a log get the same.

What each ``detail`` shows, every level with the former's:

* ``steps``: what the engine is, a line per step, who came and who finished;
* ``decisions``: each decision with its reason and numbers, prefix hits, preemptions, candidates;
* ``blocks`` (the default): the pool, the block tables with the text in their blocks, and the index
  chain of a few tokens, because that chain is what a block table is for;
* ``tensors``: the flat batch as the worker builds it, whole index chains, where the time went;
* ``kernels``: launches, and what the kernels themselves report.

Up to ``blocks`` a step in which every request just computed its latest token takes one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from pagedlab.errors import UserError
from pagedlab.trace.events import (
    LEVELS,
    EngineSnapshot,
    Event,
    KvAllocated,
    KvConfig,
    KvMemory,
    KvSpec,
    Level,
    PrefixCacheReset,
    RequestAdded,
    RequestFinished,
    RequestRefused,
    RequestState,
    StepFinished,
    StepScheduled,
    StepStarted,
    TextEmitted,
    TraceFinished,
    TraceGap,
    TraceHeader,
)
from pagedlab.trace.state import EngineState, Fold
from pagedlab.viz.blocks import Group
from pagedlab.viz.keys import Pause, Quit
from pagedlab.viz.layout import Limits, Pen
from pagedlab.viz.opening import kind_of, legend, opening
from pagedlab.viz.panel import condensed, idle, panel, step_line
from pagedlab.viz.requests import added, ending, other
from pagedlab.viz.step_view import Pool, StepView
from pagedlab.viz.theme import Theme, make_console
from pagedlab.wording import plural

BRIEF = Limits(requests=6, tables=4, chain=6, first_blocks=1, prompt=30, candidates=3, ids=8, text_lines=3)
MAX_ARRIVALS = 20  # requests told one by one between two steps
MANY = 4           # in a batch of more requests, a block taken by one of them is no panel of its own
FULL = Limits(requests=32, tables=32, chain=64, first_blocks=32, prompt=256, candidates=8, ids=64, text_lines=12)


@dataclass
class Story:
    """What the tracer remembers of one engine."""

    opening: list[Event] = field(default_factory=list)       # kv_* and the first snapshot
    is_open: bool = False
    block_sizes: list[int] = field(default_factory=list)     # per KV-cache group
    prompts: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)      # output so far
    finished: list[RequestFinished] = field(default_factory=list)
    num_arrivals: int = 0                                    # since the last step
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    stuck: object = ((), ())                                 # who was not served in the step before, and why
    has_shown_chain: bool = False
    has_shown_decode: bool = False
    has_shown_growth: bool = False                           # a decoding request that took a block


class TerminalTracer:
    """Shows events on a console as they come.

    Args:
        console: where to; None is stdout, see theme.make_console.
        detail: how much, one of the recording levels.
        pause: wait for a key after each step; raises Quit when that key is q. Where there is no
            terminal to read keys from, a notice says so and everything is shown.
    """

    def __init__(self, console: Console | None = None, detail: Level = "blocks", *, pause: bool = False) -> None:
        if detail not in LEVELS:
            raise UserError(f"detail is {detail!r}: choose one of {', '.join(LEVELS)}.")
        self.console = console if console is not None else make_console()
        self.depth = LEVELS.index(detail)
        self._pause: Pause | None = Pause.on_terminal(self.console) if pause else None
        self._theme = Theme.for_console(self.console)
        self._header: TraceHeader | None = None
        self._fold: Fold | None = Fold()
        self._stories: dict[int, Story] = {}
        self._view: StepView | None = None   # the step that is not printed yet
        self._has_legend = False
        self._is_closed = False
        self._was_step = False               # whether the last thing printed was a step,
        self._was_line = False               # and one in a line

    # ---------------------------------------------------------------- in

    def append(self, event: Event) -> None:
        """Take one event; a step is printed when what follows it shows that it is over."""
        self._follow(event)
        view = self._view
        if view is not None and view.is_over and not isinstance(event, TextEmitted) and self._begins_anew(event, view):
            self._flush()
        if isinstance(event, TraceHeader):
            self._header = event
        elif isinstance(event, KvSpec | KvMemory | KvConfig | KvAllocated | EngineSnapshot):
            story = self._story(event.engine)
            if not story.is_open:
                story.opening.append(event)
            if isinstance(event, EngineSnapshot):
                story.block_sizes = event.block_sizes
        elif isinstance(event, TraceGap):
            self._flush()
            verb = "is" if event.num_lost == 1 else "are"
            self._print(self._pen().paragraph((f"{plural(event.num_lost, 'record')} {verb} missing here: ", "bad"),
                                              self._pen().plain(event.why), hang=2))
        elif isinstance(event, StepStarted):
            self._flush()
            self._open(event.engine)
            self._count_arrivals(self._story(event.engine))
            self._view = StepView(event.engine, event.step)
        elif isinstance(event, RequestAdded | RequestRefused | PrefixCacheReset):
            self._between_steps(event)
        if isinstance(event, TextEmitted):
            texts = self._story(event.engine).texts
            texts[event.request_id] = texts.get(event.request_id, "") + event.text
        elif isinstance(event, RequestFinished):
            self._story(event.engine).finished.append(event)
        if self._view is not None:
            self._view.add(event, self._state(event.engine))
            self._view.is_over |= isinstance(event, StepFinished)

    def show(self, events: Iterable[Event]) -> None:
        """Replay a trace to its end, to where it was cut off, or to where the reader quits."""
        try:
            for event in events:
                self.append(event)
        except Quit:
            return
        self.close()

    def close(self, *, summary: bool = True) -> None:
        """Print the last step and how everything ended; calling it again does nothing."""
        self._flush(pause=False)
        if not summary or self._is_closed:
            return
        self._is_closed = True
        for engine in sorted(self._stories):
            self._open(engine)
        if not self._stories:
            pen = self._pen()
            self._print([*opening(pen, self._header, [], None), pen.line(("no step in this trace", "dim"))])
        pen = self._pen()
        for engine, story in sorted(self._stories.items()):
            self._print(ending(pen, story, self._state(engine), self.depth, engine if len(self._stories) > 1 else None))

    # ---------------------------------------------------------------- what is known

    def _follow(self, event: Event) -> None:
        if self._fold is None:
            return
        try:
            self._fold.apply(event)
        except UserError as error:
            self._fold = None
            self._print(self._pen().paragraph(("from here on without queues and pool: ", "bad"),
                                              self._pen().plain(str(error)), hang=2))

    def _state(self, engine: int) -> EngineState | None:
        return self._fold.states.get(engine) if self._fold is not None else None

    def _story(self, engine: int) -> Story:
        return self._stories.setdefault(engine, Story())

    @staticmethod
    def _groups(story: Story) -> list[Group]:
        config = next((event for event in story.opening if isinstance(event, KvConfig)), None)
        kinds = [kind_of(group) for group in config.groups] if config is not None else []
        return [Group(size, kinds[i] if i < len(kinds) else "") for i, size in enumerate(story.block_sizes)]

    @staticmethod
    def _begins_anew(event: Event, view: StepView) -> bool:
        is_new = isinstance(event, StepStarted | RequestAdded | RequestRefused | PrefixCacheReset | TraceFinished)
        return is_new or event.engine != view.engine

    def _pen(self) -> Pen:
        limits = FULL if self.depth >= LEVELS.index("tensors") else BRIEF
        return Pen(self._theme, max(self.console.width, 20), limits)

    # ---------------------------------------------------------------- out

    def _open(self, engine: int) -> None:
        story = self._story(engine)
        if story.is_open:
            return
        story.is_open = True
        several = engine if len(self._stories) > 1 else None
        self._print(opening(self._pen(), self._header, story.opening, several))
        state = self._state(engine)
        for request in state.requests.values() if state is not None else ():
            self._remember(story, request)
        if not self._has_legend and self.depth >= LEVELS.index("blocks"):
            self._has_legend = True
            self._print(legend(self._pen()))

    @staticmethod
    def _remember(story: Story, request: RequestState) -> None:
        texts = request.token_texts or []
        story.prompts.setdefault(request.request_id, "".join(texts[: request.num_prompt_tokens]))
        story.texts.setdefault(request.request_id, "".join(texts[request.num_prompt_tokens :]))

    def _between_steps(self, event: Event) -> None:
        self._flush()
        self._open(event.engine)
        story = self._story(event.engine)
        if self._was_step:
            self._print([Text(end="")])
            self._was_step = False
        if isinstance(event, RequestAdded):
            story.prompts[event.request_id] = event.prompt or "".join(event.prompt_token_texts or [])
            story.num_arrivals += 1
            if story.num_arrivals <= MAX_ARRIVALS:
                is_first = story.num_arrivals <= self._pen().limits.requests
                longest = self._header.config.get("max_model_len") if self._header is not None else None
                self._print(added(self._pen(), event, max_model_len=longest,
                                  tokens=is_first and self.depth >= LEVELS.index("decisions")))
        else:
            self._print(other(self._pen(), event))

    def _count_arrivals(self, story: Story) -> None:
        if story.num_arrivals > MAX_ARRIVALS:
            pen = self._pen()
            words = f"… and {story.num_arrivals - MAX_ARRIVALS:,} more requests"
            self._print(pen.section("arrives", [pen.inside.line((words, "dim"))]))
        story.num_arrivals = 0

    def _flush(self, *, pause: bool = True) -> None:
        """Print the step that has been gathered, in the form that suits it."""
        view, self._view = self._view, None
        if view is None:
            return
        story, state = self._story(view.engine), self._state(view.engine)
        story.num_steps += 1
        finished = view.first(StepFinished)
        story.num_scheduled_tokens += finished.num_scheduled_tokens if finished is not None else 0
        view.pool_after = Pool.of(state) if state is not None else None
        stuck = (view.refusals(), view.not_reached_key())
        try:
            lines, is_line = self._draw(view, story, self._groups(story))
        except (LookupError, TypeError, ValueError):  # parallel lists of different length, say
            words = f"step {view.step} cannot be shown: its records do not fit together"
            lines, is_line = [self._pen().line((words, "bad"))], True
        if is_line and not (self._was_line and self._was_step):
            lines.insert(0, Text(end=""))
        self._was_line, self._was_step, story.stuck = is_line, True, stuck
        self._print(lines)
        if pause and self._pause is not None:
            self._pause.wait()

    def _draw(self, view: StepView, story: Story, groups: list[Group]) -> tuple[list[Text], bool]:
        """The step's lines, and whether it is told in one line."""
        pen = self._pen()
        focus = view.focus()
        no_news = (view.refusals(), view.not_reached_key()) == story.stuck
        if no_news:
            focus -= {request_id for request_id, _, _ in view.refusals()}
        is_plain = not focus and no_news and bool(view.requests)
        if not view.requests and not focus and view.first(StepScheduled) is not None:
            return idle(pen, view), True
        if self.depth == 0:
            return step_line(pen, view), True
        is_growth = bool(focus) and focus == view.growing() and no_news
        if is_growth and story.has_shown_growth and len(view.requests) > MANY:
            is_plain = True
        if is_plain and story.has_shown_decode and self.depth < LEVELS.index("tensors"):
            return condensed(pen, view, story.prompts, story.texts, self.depth), True
        lines = panel(pen, view, focus, story.prompts, story.texts, groups, self.depth,
                      formula=not story.has_shown_chain)
        story.has_shown_chain = True
        story.has_shown_decode |= is_plain
        story.has_shown_growth |= is_growth
        return lines, False

    def _print(self, lines: list[Text]) -> None:
        for line in lines:
            self.console.print(line, no_wrap=True, overflow="crop", crop=True, end="\n", highlight=False)
