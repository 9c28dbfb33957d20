"""The help of commands: options in panels, each with its first name, what it takes, its default and its other names.

Plain text, wrapped to the width of the terminal from 60 columns on. Values in, text out.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer import Abort
from typer.core import TyperCommand, TyperGroup

from loadgen.core.errors import UserError, meant
from loadgen.plugins import resolve
from loadgen.shell import removed
from loadgen.shell.overview import row
from loadgen.shell.run_options import PANELS, Option

_OF_NAMES = {
    "as_json": "Output",
    "as_markdown": "Output",
    "as_csv": "Output",
    "strict": "SLO",
    "percentile": "SLO",
}
_METAVARS = {
    "FOLDER": ("resume", "results", "extend"),
    "FILE": (
        "html",
        "junit",
        "out",
        "prices",
        "dataset",
        "log",
        "cert",
        "key",
        "api_key_file",
        "faults_file",
    ),
    "TIME": ("think", "max_time", "min_duration", "ttft", "itl", "per_input_token"),
    "SECONDS": ("seconds",),
    "LOAD": ("low", "high", "start"),
    "RATE": ("target_qps",),
    "TOKENS": ("mean_input", "mean_output", "max_seq_len", "max_num_tokens"),
    "SHARE": ("precision", "run_spread", "utilization", "confidence"),
    "P": ("percentile",),
    "NAME:SHARE": ("faults",),
    "CONDITION": ("fail_on",),
    "NAME": ("benchmark", "profile", "preset", "model"),
}
"""What a command's own options take, by their names; a number is N or NUMBER, all others are a WORD."""


_TABLES = {
    "server": "loadgen_sdk.dialects.quirks:SERVERS",
    "form": "loadgen.formats:FORMATS",
    "prices": "loadgen.prices:PRICES",
}
"""Of an option, the table whose rows it takes: packages may add some."""


MOST_LINES = 40  # of a help at 80 columns
FIRST = ("url", "request_rate", "concurrency", "duration", "num_requests", "slo")
THEN = (
    "model",
    "input_tokens",
    "output_tokens",
    "dataset",
    "trace",
    "warmup",
    "seed",
    "repeat",
    "out",
    "api_key_file",
    "prices",
    "set",
)
"""What most people need of the options of a load: before and after those that are a command's own."""


class Command(TyperCommand):
    """A command with its help: `--help` is what most people need, `--help-all` everything."""

    _everything: Any = (
        None  # the option --help-all: one object, since the parser knows an option by its identity
    )

    def get_params(self, ctx: Any) -> list[Any]:
        params = _quick(super().get_params(ctx))
        asks = self.get_help_option(ctx)
        if asks is None:
            return params
        if self._everything is None:
            self._everything = copy(asks)
            del self._everything.process_value  # is that of the option --help
            self._everything.name, self._everything.opts = "help_all", ["--help-all"]
            self._everything.help, self._everything.callback = (
                "Show all options and the exit codes.",
                _say_all,
            )
        return [*params, *_quick([self._everything])]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        lines = list(_lines(self, ctx, formatter.width))
        if len(lines) > MOST_LINES:
            lines = list(_short(self, ctx, formatter.width))
        formatter.write("\n".join(lines) + "\n")


def _quick(params: list[Any]) -> list[Any]:
    """What is plainly right is taken, and an option that is not given has no value to convert. Typer judges the rest:
    it builds a converter for each option, a schema of pydantic, whose import is a sixth of a start.
    """
    for param in params:
        if "process_value" not in vars(param):
            param.process_value = partial(_processed, param, param.process_value)
    return params


def _processed(param: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    described, is_missing = getattr(param, "type_descriptor", None), value in (None, (), [])
    if param.name == "workload" or (described is not None and described.annotation is Path):
        _refuse_url(value, param)
    if value is None and param.nargs == 1 and not param.required:
        found = () if param.multiple else None
    elif described is None or (is_missing and param.required):
        return convert(ctx, value)
    elif (found := _plainly(described.annotation, described.parameter_info, value)) is None:
        return convert(ctx, value)
    return found if param.callback is None else param.callback(ctx, param, found)


def _refuse_url(value: Any, param: Any) -> None:
    """Raises UserError for a URL where a path is meant. Where a result is meant, the command knows more to say."""
    is_option = param.param_type_name == "option"
    of_result = param.name in _METAVARS["FOLDER"] if is_option else param.name not in _READ
    if isinstance(value, str) and _URL.match(value) and not of_result and not os.path.exists(value):
        what = "this is a URL, and a file or folder of this machine is meant"
        where = f"{max(param.opts, key=len)} {value}" if is_option else value
        raise UserError(
            "invalid_value", what, where, "a server stands behind --url; a file is fetched first"
        )


_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_READ = (
    "contract",
    "dataset",
    "trace",
    "workload",
)  # arguments that are files of which no result is made
_NUMBERS = {int: re.compile("[0-9]{1,15}"), float: re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")}
_OF_PATHS = ("exists", "resolve_path", "allow_dash", "path_type", "writable")


def _plainly(kind: Any, asked: Any, value: Any) -> Any:
    """The value of an option, where it is plainly one of this kind; else None."""
    if asked.parser is not None:
        return None
    if isinstance(kind, type) and isinstance(value, kind):  # a text, or the default
        return value
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if get_origin(kind) is list and isinstance(value, list | tuple):
        found = [_plainly(get_args(kind)[0], asked, one) for one in value]
        return None if None in found else found
    if not isinstance(value, str):
        return None
    if kind in _NUMBERS and _NUMBERS[kind].fullmatch(value):
        number = kind(value)
        is_low, is_high = (
            asked.min is not None and number < asked.min,
            asked.max is not None and number > asked.max,
        )
        return None if is_low or is_high else number
    if (
        kind is Path
        and asked.file_okay
        and asked.dir_okay
        and not any(getattr(asked, name) for name in _OF_PATHS)
    ):
        return Path(value) if os.access(value, os.R_OK) or not os.path.exists(value) else None
    return None


def _say_all(ctx: Any, param: Any, asked: bool) -> None:
    if asked:
        print("\n".join(_lines(ctx.command, ctx, ctx.make_formatter().width)))
        ctx.exit()


class Group(TyperGroup):
    """Commands in the order in which they are given to `in_order`, not in that of their making."""

    order: tuple[str, ...] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except KeyboardInterrupt:
            raise Abort from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            raise Abort from None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            gone = removed.COMMANDS.get(cmd_name) if ctx.parent is None else None
            hint = gone or meant(cmd_name, self.list_commands(ctx))
            raise UserError(
                "unknown_name", f"no command is called {cmd_name}", ctx.command_path, hint
            )
        return found

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=self.order.index)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(_lines(self, ctx, formatter.width)) + "\n")


def in_order(names: Iterable[str]) -> type[Group]:
    """A group whose help lists the commands so."""
    return type("Ordered", (Group,), {"order": tuple(names)})


def _short(command: Any, ctx: Any, width: int) -> Iterator[str]:
    """The help in MOST_LINES: what the command does, its example, and of its options as many as there is room for."""
    paragraphs = (command.help or "").split("\n\n")
    example = next((one for one in paragraphs if one.strip().startswith("Example:")), "")
    head = [*_head(command, ctx, [paragraphs[0], example], width), "", "Options:"]
    options = [
        param
        for param in command.get_params(ctx)
        if param.param_type_name == "option" and not param.hidden
    ]

    def rank(param: Any) -> tuple[int, int]:
        if any(name in example.split() for name in param.opts):
            return 0, 0
        for place, names in ((1, FIRST), (3, THEN)):
            if param.name in names:
                return place, names.index(param.name)
        is_own = getattr(param, "rich_help_panel", None) is None and param.name not in (
            "help",
            "help_all",
        )
        return (2 if is_own else 4), 0

    tail = textwrap.wrap(
        f"{len(options)} options in all, exit codes: {ctx.command_path} --help-all", width
    )
    room = MOST_LINES - len(head) - 1 - len(tail)
    yield from head
    for param in sorted(options, key=rank):
        name, text = _said(param, ctx, brief=True)
        rows = list(row(name, text, width))
        room -= len(rows)
        if room < 0:
            break
        yield from rows
    yield from ("", *tail)


def _head(command: Any, ctx: Any, paragraphs: Iterable[str], width: int) -> Iterator[str]:
    """How it is typed, what it does, its arguments."""
    usage = " ".join([f"Usage: {ctx.command_path}", *command.collect_usage_pieces(ctx)])
    yield from textwrap.wrap(usage, width, subsequent_indent="  ", break_on_hyphens=False)
    for paragraph in paragraphs:
        yield ""
        more = "      " if paragraph.strip().startswith("Example:") else "  "
        yield from textwrap.wrap(
            " ".join(paragraph.split()),
            width,
            initial_indent="  ",
            subsequent_indent=more,
            break_on_hyphens=False,
        )
    if arguments := [param for param in command.params if param.param_type_name == "argument"]:
        yield from ("", "Arguments:")
        for param in arguments:
            yield from row(param.metavar or param.name.upper(), param.help or "", width)


def _lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    yield from _head(command, ctx, (command.help or "").split("\n\n"), width)
    panels: dict[str, list[Any]] = {"Options": []} | {panel: [] for panel in (*PANELS, "Advanced")}
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and not param.hidden:
            panels[
                getattr(param, "rich_help_panel", None) or _OF_NAMES.get(param.name, "Options")
            ].append(param)
    for panel, options in panels.items():
        if options:
            yield from ("", f"{panel}:")
            for param in options:
                yield from row(*_said(param, ctx), width)
    by_key: dict[str, Option] = getattr(command.callback, "by_key", {})
    if by_key:
        yield from ("", "Keys of --set:")
        for name, option in by_key.items():
            default = option.default or option.shown
            yield from row(
                f"{name}={option.sets}",
                f"{option.help}{f' [default: {default}]' if default else ''}",
                width,
            )
    if isinstance(command, TyperGroup):
        yield from ("", "Commands:")
        for name in command.list_commands(ctx):
            sub = command.commands[name]
            yield from row(
                name, " ".join((sub.help or "").split("\n\n")[0].split()), width, indent=14
            )


_SENTENCE = r"(?<!\.)\.(?:\s|$)"  # its end; not that of "..."


def _said(param: Any, ctx: Any, *, brief: bool = False) -> tuple[str, str]:
    """An option in the margin, and what is said of it; in brief the first sentence."""
    short = [name for name in param.opts if not name.startswith("--")]
    first, *others = [name for name in param.opts if name.startswith("--")]
    off = f" / {param.secondary_opts[0]}" if param.secondary_opts else ""
    takes = "" if param.is_flag else f" {_takes(param, ctx)}"
    text = (param.help or "") + _added(param.name)
    if brief:
        return f"{', '.join([*short, first])}{off}{takes}", re.split(_SENTENCE, text, maxsplit=1)[
            0
        ] + "."
    default = param.get_default(ctx) if not param.is_flag else None
    if isinstance(param.show_default, str):
        default = param.show_default
    if default is not None and default != "":
        text += f" [default: {default}]"
    if others:
        text += f" [also {', '.join(others)}]"
    return f"{', '.join([*short, first])}{off}{takes}", text


def _added(name: str) -> str:
    """What packages add to what an option takes."""
    names = [name for (name,) in resolve(_TABLES[name]).told("name")] if name in _TABLES else []
    return f" Of packages: {', '.join(names)}." if names else ""


def _takes(param: Any, ctx: Any) -> str:
    """What an option takes, in one word."""
    if param.metavar:
        return str(param.metavar)
    for word, names in _METAVARS.items():
        if param.name in names:
            return word
    kind = re.split(r"[< \[]", param.get_help_record(ctx)[0].partition(" ")[2].strip("<>"))[
        0
    ].lower()
    return {"int": "N", "integer": "N", "float": "NUMBER"}.get(kind, "WORD")
