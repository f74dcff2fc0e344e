"""The command line. One module per command: a frozen dataclass whose fields are its options and whose `run` does the
work.

Mistakes of the user are `SplitjaxError`s; they are printed as they are, value, place and remedy, and exit with 2, as
a wrong option does.
"""

from __future__ import annotations

import atexit
import itertools
import platform
import re
import sys
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.text import Text

import splitjax
from splitjax.cli._interrupt import end_cleanly, ignore_when_done
from splitjax.cli._options import CommandOptions
from splitjax.cli._output import STANDARD_OUTPUT
from splitjax.cli._train_options import expand_config
from splitjax.cli.calibrate import Calibrate
from splitjax.cli.demo import Demo
from splitjax.cli.doctor import Doctor
from splitjax.cli.launch import Launch
from splitjax.cli.line.helping import print_help, print_overview
from splitjax.cli.line.reading import command_named, read
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

DESCRIPTION = (
    "Decorate a JAX training step, and it trains on many devices with the numbers of one. The commands below work on"
    " shipped models, on those of packages, and on your own as module:factory."
)
COMMANDS: dict[str, type[CommandOptions]] = {
    "demo": Demo,
    "train": Train,
    "plan": ShowPlan,
    "report": ShowReport,
    "verify": Verify,
    "profile": ShowProfile,
    "launch": Launch,
    "simulate": Simulate,
    "lint": Lint,
    "doctor": Doctor,
    "calibrate": Calibrate,
}
_HELP = ("--help", "-h")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, those of the process if not given, and returns the exit status: 0, 1
    (findings), 2 (the user's mistake) or 130 (Ctrl-C)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    asks = words[:1] == ["help"] or _asks_for_help(words[:1])
    if not words or (asks and len(words) == 1):
        print_overview(Console(), DESCRIPTION, COMMANDS)
        return 0 if words else USER_ERROR
    if words[0] in ("--version", "-V"):
        print(version_text())
        return 0
    if asks:
        words = [words[1], "--help"]
    traceback = False
    try:
        name = command_named(words, COMMANDS)
        words = words[1:]
        if _asks_for_help(words):
            print_help(Console(), name, COMMANDS[name])
            return 0
        command = read(expand_config(words) if name == "train" else words, COMMANDS[name], name)
        traceback = command.traceback
        return command.run(Console(stderr=command.json == STANDARD_OUTPUT))
    except SplitjaxError as error:
        if traceback:
            raise
        print_error(error, Console(stderr=True))
        return USER_ERROR
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="red")
        return INTERRUPTED


def version_text() -> str:
    """Returns the version of splitjax, and of what it runs on."""
    return f"splitjax {splitjax.__version__} (JAX {jax.__version__}, Python {platform.python_version()})"


def _asks_for_help(words: Sequence[str]) -> bool:
    """Whether help is asked for in front of two dashes: behind them stands another program's line."""
    return any(word in _HELP for word in itertools.takewhile(lambda word: word != "--", words))


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
