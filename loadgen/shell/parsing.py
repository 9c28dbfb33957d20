"""The parser of the command line: a command is imported when its name is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import typer

from loadgen.commands import COMMANDS, CommandRow
from loadgen.core.errors import OK, USAGE
from loadgen.shell.given import spread
from loadgen.shell.help import Command, Group, in_order
from loadgen.shell.overview import VERSION, WHAT, WIDEST, overview, version
from loadgen.shell.wrong_usage import fault_of

WrongUsage: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""What the parser raises: typer's own copy of click or, before it had one, the package's."""


class Commands(Mapping[str, Any]):
    """The parsers of the commands by name. Each is made, and its module imported, when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        row = COMMANDS.find(name)
        if row is None:
            raise KeyError(name)
        return _parser_of(row)

    def __iter__(self) -> Iterator[str]:
        return iter(_said())

    def __len__(self) -> int:
        return len(_said())


def _said() -> dict[str, str]:
    """What the help says of each command. No plug-in is imported for it."""
    told = {name: said for name, said, _ in COMMANDS.told("name", "help", "group")}
    return {row.name: row.help for row in COMMANDS.own} | told


@cache
def _parser_of(row: CommandRow) -> Any:
    command = COMMANDS.function(row, row.function)
    if isinstance(command, typer.Typer):
        return typer.main.get_group(command)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(row.name, cls=Command)(command)
    return typer.main.get_command(alone)


class Root(Group):
    """All commands. What is listed or completed comes from their rows."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        commands: Any = Commands()
        self.commands = commands

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_said())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        options, self.params, self.add_help_option = (
            self.params,
            [],
            False,
        )  # for their values typer imports pydantic
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params, self.add_help_option = options, True

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(overview())

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        named: dict[str, Any] = {name: Command(name, help=said) for name, said in _said().items()}
        ctx.command = in_order(named)(name=self.name, commands=named, params=self.params)
        return ctx.command.shell_complete(ctx, incomplete)


def _version(asked: bool) -> None:
    if asked:
        print(version())
        raise typer.Exit


def _all(
    version: bool = typer.Option(
        False, "--version", help=VERSION, callback=_version, is_eager=True
    ),
) -> None:
    pass


@cache
def parser() -> Any:
    """The parser of all commands. Making it takes as long as many a command, so a process makes it once."""
    app = typer.Typer(
        name="loadgen",
        help=WHAT,
        rich_markup_mode=None,
        cls=Root,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
    )
    app.callback()(_all)
    return typer.main.get_command(app)


def carry_out(typed: Sequence[str]) -> int:
    """Carry out a command line; returns the exit code of its command. Raises Fault or Faults."""
    try:
        code = parser()(spread(typed), standalone_mode=False, obj=list(typed))
    except WrongUsage as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return USAGE
        raise fault_of(error) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else OK
