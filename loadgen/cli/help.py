"""Plain-text help of the commands, wrapped to the terminal, with the options in panels.

`--help` shows what most people need in at most 40 lines. `--help-all` shows every option, the keys
of `--set` and the exit codes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Any, NamedTuple

from loadgen_sdk.plugins import OpenTable
from loadgen_sdk.wire_formats.server_profiles import SERVERS
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from loadgen.cli.completion import packaged_names
from loadgen.cli.run_options import COMMAND_OPTIONS, PANELS, Option
from loadgen.cli.usage_errors import Context, check_no_url_is_a_path
from loadgen.formats import FORMATS
from loadgen.prices import PRICES

MAX_SHORT_HELP_LINES = 40
TEXT_COLUMN = 26  # where the text beside the name of an option begins
COMMAND_TEXT_COLUMN = 14
DEFAULT_PANEL = "Options"

ESSENTIAL_OPTIONS = ("url", "request_rate", "concurrency", "duration", "num_requests", "slo")
"""Options that nearly every command line has: the target, the load and the SLO."""

FREQUENT_OPTIONS = (
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
"""Options that many command lines have."""


class Importance(IntEnum):
    """How early a short help shows an option. Options that do not fit are left to --help-all."""

    IN_EXAMPLE = auto()
    ESSENTIAL = auto()
    ONLY_HERE = auto()
    """An option that only this command has, which is why people read its help."""
    FREQUENT = auto()
    SHARED = auto()
    """Any other option that several commands share."""


PLUGIN_TABLES: dict[str, OpenTable[Any]] = {
    "server": SERVERS,
    "form": FORMATS,
    "prices": PRICES,
}
"""The table whose rows an option accepts, for options that other packages can extend."""


class HelpEntry(NamedTuple):
    """An option as the help shows it: `-c, --concurrency N`, and its description."""

    name: str
    text: str


FULL_HELP_OPTION = "--help-all"

SHORT_HELP_ENTRY = HelpEntry("-h, --help", "Show this message.")
"""The help option of a group of commands, such as `loadgen` itself, which has no full help."""

HELP_ENTRY = HelpEntry(
    "-h, --help, --help-all",
    "Show this message. --help-all also shows all options and the exit codes.",
)


class Command(TyperCommand):
    """A command with a short help (`--help`) and a full one (`--help-all`)."""

    def __init__(
        self, name: str | None, *, context_settings: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """Let both options of the help be parsed by click."""
        help_names = {"help_option_names": ["-h", "--help", FULL_HELP_OPTION]}
        super().__init__(name, context_settings=help_names | (context_settings or {}), **settings)

    def invoke(self, ctx: Context) -> object:
        """Run the command, unless a URL was given where it takes a file or folder."""
        check_no_url_is_a_path(self.params, ctx.params)
        return super().invoke(ctx)

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """Write the help; the arguments of the whole command line are the `obj` of the context."""
        lines = format_full_help(self, ctx, formatter.width)
        arguments = ctx.find_root().obj or ()
        if FULL_HELP_OPTION not in arguments and len(lines) > MAX_SHORT_HELP_LINES:
            lines = format_short_help(self, ctx, formatter.width)
        formatter.write("\n".join(lines) + "\n")


class Group(TyperGroup):
    """A group of commands whose help lists them in the order of their definition."""

    def format_help(self, ctx: Context, formatter: Any) -> None:
        """Write the usage, the description, the options and the commands."""
        lines = format_full_help(self, ctx, formatter.width)
        lines += self.format_command_list(ctx, formatter.width)
        formatter.write("\n".join(lines) + "\n")

    def format_command_list(self, ctx: Context, width: int) -> list[str]:
        """Return the lines that list the commands, each with the first paragraph of its help."""
        lines = ["", "Commands:"]
        for name in self.list_commands(ctx):
            command = self.commands[name]
            summary = " ".join((command.help or "").split("\n\n")[0].split())
            lines += format_entry(name, summary, width, COMMAND_TEXT_COLUMN)
        return lines


def format_full_help(command: TyperCommand | TyperGroup, ctx: Context, width: int) -> list[str]:
    """Return the lines of `--help-all`: the header, every option by panel, and the keys of `--set`.

    A panel is a heading with the options below it, such as "Load" or "Target".
    """
    paragraphs = (command.help or "").split("\n\n")
    lines = _format_header(command, ctx, paragraphs, width)

    options_by_panel: dict[str, list[TyperOption]] = {
        panel: [] for panel in (DEFAULT_PANEL, *PANELS)
    }
    for option in _visible_options(command, ctx):
        # click's own option for the help has no panel.
        panel = getattr(option, "rich_help_panel", None) or DEFAULT_PANEL
        options_by_panel[panel].append(option)

    for panel, options in options_by_panel.items():
        if options:
            lines += ["", f"{panel}:"]
        for option in options:
            lines += format_entry(*describe_option(option, ctx), width)

    set_keys = getattr(command.callback, "set_keys", {})  # `add_options` stores them there
    return lines + _format_set_keys(set_keys, width)


def format_short_help(command: TyperCommand | TyperGroup, ctx: Context, width: int) -> list[str]:
    """Return the lines of `--help`, at most `MAX_SHORT_HELP_LINES`.

    They are the summary, an example, as many options as fit, the most important ones first, and
    where to find the others.
    """
    summary, *other_paragraphs = (command.help or "").split("\n\n")
    examples = [text for text in other_paragraphs if text.strip().startswith("Example:")]
    first_example = examples[:1]
    lines = _format_header(command, ctx, [summary, *first_example], width)
    lines += ["", f"{DEFAULT_PANEL}:"]

    options = _visible_options(command, ctx)
    footer_text = (
        f"{len(options)} options. {ctx.command_path} --help-all shows "
        "all of them and the exit codes."
    )
    footer = ["", *_wrap(footer_text, width)]

    example_arguments = " ".join(first_example).split()
    for option in _sort_by_importance(options, example_arguments):
        name, text = describe_option(option, ctx, brief=True)
        entry = format_entry(name, text, width)
        if len(lines) + len(entry) + len(footer) > MAX_SHORT_HELP_LINES:
            break
        lines += entry

    return lines + footer


def format_entry(name: str, text: str, width: int, text_column: int = TEXT_COLUMN) -> list[str]:
    """Return the lines of an option or command: its name on the left and the text beside it.

    Below a name that is too long for its column, the text begins on the next line.
    """
    text_lines = _wrap(text, width - text_column) or [""]
    lines = []
    left_column = f"  {name}"

    is_too_long = len(left_column) > text_column - len("  ")
    if is_too_long:
        lines += _wrap(name, width, "  ", "    ")
        left_column = ""

    lines.append(f"{left_column:<{text_column}}{text_lines[0]}".rstrip())
    lines += [" " * text_column + line for line in text_lines[1:]]
    return lines


def describe_option(option: TyperOption, ctx: Context, *, brief: bool = False) -> HelpEntry:
    """Return how an option is typed, such as `-c, --concurrency N`, and what it does.

    The text is the help of the option, its default and its other long names. With `brief`, it is
    only the first sentence of the help.
    """
    if "--help" in option.opts:
        has_full_help = FULL_HELP_OPTION in ctx.help_option_names
        return HELP_ENTRY if has_full_help else SHORT_HELP_ENTRY

    short_names = [name for name in option.opts if not name.startswith("--")]
    first_name, *other_names = [name for name in option.opts if name.startswith("--")]

    name = ", ".join([*short_names, first_name])
    if option.secondary_opts:  # the name that switches it off, like --no-color
        name += f" / {option.secondary_opts[0]}"

    if not option.is_flag:
        name += f" {option.metavar or _value_placeholder(option)}"

    text = (option.help or "") + _describe_plugin_values(option.name or "")
    if brief:
        return HelpEntry(name, _first_sentence(text))

    default = _describe_default(option, ctx)
    if default:
        text += f" [default: {default}]"

    if other_names:
        text += f" [also {', '.join(other_names)}]"

    return HelpEntry(name, text)


def _format_header(
    command: TyperCommand | TyperGroup, ctx: Context, paragraphs: Iterable[str], width: int
) -> list[str]:
    """Return the lines above the options: usage, paragraphs of the help text, and arguments.

    The SLO of a packaged workload on the command line follows: `loadgen run rag --help` shows it.
    """
    usage = " ".join([f"Usage: {ctx.command_path}", *command.collect_usage_pieces(ctx)])
    lines = _wrap(usage, width, "", "  ")
    for paragraph in paragraphs:
        is_example = paragraph.strip().startswith("Example:")
        # A deeper indent shows that the next lines of an example belong to the same command.
        next_line_indent = "      " if is_example else "  "
        text = " ".join(paragraph.split())
        lines += ["", *_wrap(text, width, first_indent="  ", indent=next_line_indent)]

    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    if arguments:
        lines += ["", "Arguments:"]

    for argument in arguments:
        name = argument.metavar or (argument.name or "").upper()
        lines += format_entry(name, argument.help or "", width)

    return lines + _format_slos(ctx, width)


def _format_slos(ctx: Context, width: int) -> list[str]:
    """Return lines with the SLO of each packaged workload that the command line names.

    `loadgen run rag --help` shows the SLO that a run of the workload `rag` would have to meet.
    """
    arguments: Sequence[str] = ctx.find_root().obj or ()
    packaged = packaged_names("workloads")
    workload_names = [argument for argument in arguments if argument in packaged]
    if not workload_names:
        return []

    from loadgen.core.execution.load_description import slo_by_class, slo_lines
    from loadgen.core.workload import load, read_flags

    # A workload can be loaded only with a load. Which one makes no difference to its SLO.
    any_load = read_flags(request_rate=1.0, duration="1s")
    lines = []
    for name in workload_names:
        workload = load(name, any_load)
        lines += ["", f"SLO of the workload {name}, unless --slo replaces it:"]
        for line in slo_lines(workload.slo, slo_by_class(workload)):
            lines += _wrap(line, width, "  ", "    ")

    return lines


def _format_set_keys(options: Mapping[str, Option], width: int) -> list[str]:
    """Return lines that describe the keys of `--set`, or none if the command has no keys."""
    lines = ["", "Keys of --set:"] if options else []
    for name, option in options.items():
        default = option.default or option.default_text
        suffix = f" [default: {default}]" if default else ""
        lines += format_entry(f"{name}={option.set_metavar}", option.help + suffix, width)
    return lines


def _visible_options(command: Any, ctx: Context) -> list[Any]:
    """Return the options of a command that are not hidden, and click's own option for the help."""
    return [
        param
        for param in command.get_params(ctx)
        if param.param_type_name == "option" and not param.hidden
    ]


def _sort_by_importance(options: Sequence[Any], example: Sequence[str]) -> list[Any]:
    """Return the options in the order in which `--help` shows them, the most important first.

    Essential and frequent options follow the order of their tables. Other options of equal
    importance keep their order.

    Args:
        options: The options of a command.
        example: The arguments of the example in its help.
    """

    def sort_key(option: Any) -> tuple[Importance, int]:
        importance = _rate_importance(option, example)
        rank_in_table = 0
        if importance == Importance.ESSENTIAL:
            rank_in_table = ESSENTIAL_OPTIONS.index(option.name)
        elif importance == Importance.FREQUENT:
            rank_in_table = FREQUENT_OPTIONS.index(option.name)
        return importance, rank_in_table

    return sorted(options, key=sort_key)


def _rate_importance(option: Any, example: Sequence[str]) -> Importance:
    """Return how early the help of a command shows an option.

    `example` has the arguments of the example in the help, whose options come first.
    """
    if any(flag in example for flag in option.opts):
        return Importance.IN_EXAMPLE
    if option.name in ESSENTIAL_OPTIONS:
        return Importance.ESSENTIAL
    if option.name in FREQUENT_OPTIONS:
        return Importance.FREQUENT
    if option.name in COMMAND_OPTIONS or "--help" in option.opts:
        return Importance.SHARED

    return Importance.ONLY_HERE


def _describe_default(option: TyperOption, ctx: Context) -> str:
    """Return what happens without the option: its default, or a sentence that stands for it."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = None if option.is_flag else option.get_default(ctx)
    return "" if default is None else str(default)


def _describe_plugin_values(option_name: str) -> str:
    """Return a sentence that names what installed plug-ins add to the values of an option."""
    if option_name not in PLUGIN_TABLES:
        return ""
    names = [name for (name,) in PLUGIN_TABLES[option_name].cached_fields("name")]
    return f" Of packages: {', '.join(names)}." if names else ""


def _value_placeholder(option: TyperOption) -> str:
    """Return what the help shows for the value of an option that defines no metavar."""
    placeholders = {int: "N", float: "NUMBER"}
    return placeholders.get(type(option.default), "VALUE")


def _first_sentence(text: str) -> str:
    """Return the text up to its first full stop; the dots of an ellipsis do not count."""
    return re.split(r"(?<!\.)\.(?:\s|$)", text, maxsplit=1)[0] + "."


def _wrap(text: str, width: int, first_indent: str = "", indent: str = "") -> list[str]:
    """Wrap a text without breaking `--long-option` at its hyphens."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
