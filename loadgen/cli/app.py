"""The entry point of the command line: its lazily loaded commands and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from loadgen import commands
from loadgen.cli import signals, streams
from loadgen.cli.exit_codes import run_to_exit_code
from loadgen.cli.help import COMMAND_TEXT_COLUMN, Command, Group, format_entry
from loadgen.cli.invocation import expand_slo_flag
from loadgen.cli.output import explain_interruption
from loadgen.cli.usage_errors import ClickException, Context, to_user_error
from loadgen.commands import COMMANDS, CommandRow
from loadgen.core.errors import INTERRUPTED, OK, USAGE, UserError
from loadgen.plugins import version_of

DESCRIPTION = (
    "Load generator for LLM inference endpoints: measures TTFT, TPOT, ITL, E2E latency, "
    "throughput and goodput under load."
)
MAX_HELP_WIDTH = 100
NO_COMMAND = "Nothing was sent or stored, because the command had not begun."
"""What an interruption leaves while the module of a command is imported."""


class CommandSummary(NamedTuple):
    """What the help says about a command without importing it."""

    name: str
    group: str
    help: str


class LazyGroup(Group):
    """The group of all commands. A command is imported when it is used.

    This is the pattern of click's documentation ("Lazily Loading Subcommands"): `list_commands` and
    the help read the table of commands, and `get_command` imports one of them.
    """

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all commands, in the order of the table."""
        return [summary.name for summary in summarize_commands()]

    def get_command(self, ctx: Context, cmd_name: str) -> Any:  # noqa: ARG002 - as above
        """Import a command. Returns None if no command has this name."""
        row = COMMANDS.find(cmd_name)
        if row is None:
            return None
        with explain_interruption(lambda: NO_COMMAND):
            return create_command(row)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the command line. Raises Abort on Ctrl-C, as `invoke` does."""
        try:
            return super().make_context(*arguments, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    def invoke(self, ctx: Context) -> object:
        """Run the command. Raises Abort on Ctrl-C, which typer would turn into a silent exit."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None

    def format_command_list(self, ctx: Context, width: int) -> list[str]:  # noqa: ARG002
        """Return the lines that list the commands by group, from the table."""
        lines = []
        for group, summaries in groupby(summarize_commands(), key=lambda summary: summary.group):
            lines += ["", f"{group.capitalize()}:"]
            for summary in summaries:
                lines += format_entry(summary.name, summary.help, width, COMMAND_TEXT_COLUMN)
        return lines

    def shell_complete(self, ctx: Context, incomplete: str) -> Any:
        """Return the names of the commands that complete a word, without importing the commands.

        click would import every command to read its help. This method lets it complete a group of
        commands that have only a name and a help.
        """
        stub_commands = [
            TyperCommand(summary.name, help=summary.help) for summary in summarize_commands()
        ]
        ctx.command = TyperGroup(name=self.name, commands=stub_commands, params=self.params)
        return ctx.command.shell_complete(ctx, incomplete)


def summarize_commands() -> list[CommandSummary]:
    """Return all commands, those of plug-ins too, sorted by group. Imports none of them."""
    summaries = [CommandSummary(row.name, row.group, row.help) for row in COMMANDS.builtin_rows]

    # What plug-ins add is cached, so that their modules need not be imported.
    summaries += [
        CommandSummary(name, group, help_text)
        for name, group, help_text in COMMANDS.cached_fields("name", "group", "help")
    ]
    group_order = list(dict.fromkeys(summary.group for summary in summaries))
    return sorted(summaries, key=lambda summary: group_order.index(summary.group))


def create_command(row: CommandRow) -> object:
    """Import the command of a row of the table, and return it as a command of click.

    A row refers to a function or, for a command with subcommands, to a `typer.Typer`.
    """
    function_or_typer = commands.load_command(row)
    if isinstance(function_or_typer, typer.Typer):
        return typer.main.get_group(function_or_typer)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(row.name, cls=Command)(function_or_typer)
    return typer.main.get_command(app)


def _print_version(requested: bool) -> None:
    """Print the version and exit if `--version` was typed. typer calls this in any case."""
    if requested:
        print(f"loadgen {version_of('loadgen')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Declare the options that stand before the name of a command."""


@cache
def root_command() -> Any:
    """Return the click command of the whole command line."""
    app = typer.Typer(
        name="loadgen",
        help=DESCRIPTION,
        cls=LazyGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": MAX_HELP_WIDTH,
        },
    )
    app.callback()(_global_options)
    return typer.main.get_command(app)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code of its command.

    Raises LoadgenError or CombinedError for wrong usage, and what the command itself raises.
    """
    try:
        exit_code = root_command().main(
            expand_slo_flag(arguments),
            prog_name="loadgen",
            standalone_mode=False,
            obj=list(arguments),
        )
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return USAGE
        raise to_user_error(error) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return exit_code if isinstance(exit_code, int) else OK


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of the process, and exit with its exit code.

    This is the entry point of the `loadgen` command. Tests call it with the arguments of a command.
    """
    streams.protect_standard_streams()
    command_line = sys.argv[1:] if arguments is None else arguments
    try:
        exit_code = run_to_exit_code(partial(_check_and_run, command_line))
        # Output that cannot be written, for example to a full disk, changes the exit code.
        exit_code = run_to_exit_code(partial(_flush_output, exit_code))
    except KeyboardInterrupt:  # a second signal, while the first one was being handled
        exit_code = INTERRUPTED

    if arguments is None:
        signals.ignore_signals()  # the teardown of Python would restore the default handlers

    sys.exit(exit_code)


def _check_and_run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises UserError on an unsupported platform."""
    _check_platform()
    return run_command_line(arguments)


def _flush_output(exit_code: int) -> int:
    """Write the output that is still buffered. Returns `exit_code`, or raises OSError."""
    sys.stdout.flush()
    return exit_code


def _check_platform() -> None:
    """Raise UserError on Windows, which lacks the system calls that loadgen needs."""
    if sys.platform == "win32":
        raise UserError(
            "wrong_platform",
            "loadgen runs on Linux and macOS",
            hint="use a Linux host, WSL2 or a container",
        )
