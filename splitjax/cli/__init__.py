"""The command line. One module per command: a frozen dataclass whose fields are its options and whose `run` does the
work.

Mistakes of the user are `SplitjaxError`s; they are printed as they are, value, place and remedy, and exit with 2, as
a wrong option does.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from splitjax.cli._interrupt import end_cleanly, ignore_when_done
from splitjax.cli._train_options import expand_config
from splitjax.cli.demo import Demo
from splitjax.cli.doctor import Doctor
from splitjax.cli.launch import Launch
from splitjax.cli.lint import Lint
from splitjax.cli.plan import ShowPlan
from splitjax.cli.profile import ShowProfile
from splitjax.cli.report import ShowReport
from splitjax.cli.simulate import Simulate
from splitjax.cli.train import Train
from splitjax.cli.verify import Verify
from splitjax.display.text_layout import wrap
from splitjax.errors import SplitjaxError

_TITLE = re.compile(r"\s*\w+:\s+")
_LEAST_COLUMNS = 20

USER_ERROR = 2
INTERRUPTED = 130

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[ShowPlan, tyro.conf.subcommand("plan")]
    | Annotated[ShowReport, tyro.conf.subcommand("report")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[ShowProfile, tyro.conf.subcommand("profile")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Lint, tyro.conf.subcommand("lint")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, those of the process if not given, and returns the exit status: 0, 1
    (findings), 2 (the user's mistake) or 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["train"]:
        try:
            arguments = ["train", *expand_config(arguments[1:])]
        except SplitjaxError as error:
            print_error(error, Console(stderr=True))
            return USER_ERROR
    command = tyro.cli(
        Command,  # type: ignore[arg-type]  # a union of commands, which tyro takes and its types do not say
        prog="splitjax",
        description="Train a JAX step on many devices with the same numbers.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )
    try:
        return command.run(Console())
    except SplitjaxError as error:
        if command.traceback:
            raise
        print_error(error, Console(stderr=True))
        return USER_ERROR
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="red")
        return INTERRUPTED


def print_error(error: SplitjaxError, console: Console) -> None:
    """Prints the message of an `error` in red on a `console`, then what it knows about value, place and remedy. On a
    terminal lines are broken between words; elsewhere they stay whole, for whoever searches a log."""
    message, *details = _fitted(f"error: {error}", console).split("\n")
    console.print(Text.assemble(("error: ", "bold red"), (message.removeprefix("error: "), "red")), soft_wrap=True)
    for line in details:
        console.print(Text(line), soft_wrap=True)


def _fitted(text: str, console: Console) -> str:
    """Breaks the lines of a text at the width of a terminal, and indents what goes on as far as what stands behind a
    title (`remedy: `)."""
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        title = _TITLE.match(line)
        indent = title.end() if title else 0
        first, *rest = wrap(line[indent:], max(console.width - indent, _LEAST_COLUMNS))
        lines += [line[:indent] + first, *(" " * indent + part for part in rest)]
    return "\n".join(lines)


def script() -> None:
    """Runs the console script `splitjax`, and exits with its status; on a signal at once, unless the command saves
    first."""
    # A second Ctrl-C to the launcher is its own: it kills the workers.
    end_cleanly(second_ends=sys.argv[1:2] != ["launch"])
    atexit.register(ignore_when_done)  # behind what commands register, which may wait for others
    sys.exit(main())
