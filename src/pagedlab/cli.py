"""The command line: ``pagedlab COMMAND``.

Results go to stdout; notices, progress and errors to stderr. An error is one line that starts with
``pagedlab: ``. Exit status: 0 done, 1 a difference or violation was found, 2 bad input, 130 after
Ctrl-C. Nothing here imports torch; a command does when it needs an engine.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from pagedlab.commands.bench import bench
from pagedlab.commands.conformance import conformance
from pagedlab.commands.doctor import doctor
from pagedlab.commands.figures import figures
from pagedlab.commands.generate import generate
from pagedlab.commands.inspect import check, diff, replay, why
from pagedlab.commands.scenario_from import scenario_from
from pagedlab.commands.scenarios import scenarios
from pagedlab.commands.trace import trace
from pagedlab.commands.view import view
from pagedlab.errors import UserError
from pagedlab.simulate.cli import simulate_command
from pagedlab.version import __version__
from pagedlab.viz.text import safe

# typer brings click's exceptions along under changing names; these are theirs in every version.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="pagedlab",
    help="See how a paged-attention LLM engine works, on a real one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (trace, replay, view, why, check, diff, conformance, scenarios, figures, generate, bench, doctor):
    app.command()(command)
app.command("simulate")(simulate_command)
app.command("scenario-from")(scenario_from)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedlab {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command; turn every foreseen failure into one line and a status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks never ends a command
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # nobody knows, say some terminals; rich would believe it and show nothing
        del os.environ["COLUMNS"]
    try:
        status = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except _UsageError as error:
        what = error.format_message().rstrip(".") or "no command given"
        _fail(f"{what}{'' if what.endswith('?') else '.'} See pagedlab {_command_of(error)}--help.")
    except _ClickException as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except BrokenPipeError:
        _end_quietly()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _silence_stdout()
            _fail("the disk that takes the output is full.")
        if error.filename is None:
            raise
        _fail(f"cannot use {safe(os.fsdecode(error.filename), width=200)}: {error.strerror}.")
    except SystemExit as end:
        # typer and rich turn a broken pipe into status 1
        if isinstance(end.__context__, BrokenPipeError):
            _end_quietly()
        raise
    raise SystemExit(status or 0)


def _end_quietly() -> NoReturn:
    """The reader (head, less) has seen enough; keep the interpreter from flushing into nothing."""
    _silence_stdout()
    raise SystemExit(0) from None


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command_of(error: Any) -> str:
    return f"{error.ctx.info_name} " if error.ctx and error.ctx.parent else ""


def _fail(message: str) -> NoReturn:
    print(f"pagedlab: {safe(' '.join(message.split()))}", file=sys.stderr)  # it may quote a stranger's text
    raise SystemExit(2)
