"""Writes `docs/reference/cli.md`, the reference of the command line, from the commands themselves.

`python tests/make_cli_reference.py` writes the page again. `test_cli_reference.py` checks that the
page is what this script would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from command_line import all_commands
from typer import Context
from typer.core import TyperArgument, TyperOption

from loadgen.cli.help import DEFAULT_PANEL, describe_option
from loadgen.cli.run_options import PANELS, Option
from loadgen.commands import COMMANDS

PAGE = Path(__file__).parent.parent / "docs/reference/cli.md"
INTRODUCTION = """# Command line

This page lists every command of loadgen with all of its options. Use it to look up an option; the
[guides](../index.md) show which command solves which task. The page is generated from the commands,
so it says the same as `loadgen COMMAND --help-all`.

Four rules hold for all commands:

- `loadgen COMMAND --help` prints the options that most people need, and `--help-all` prints all of
  them.
- A time is a number with a unit, for example `250ms`, `30s`, `5m` or `2h`. A bare number is in
  seconds. A rate is a number of requests per second, for example `10` or `10/s`, or `600/min`.
- Some options can be given several times. Their description says "Repeatable".
- Results are printed on stdout; progress, warnings and errors are printed on stderr.
  [Errors and exit codes](errors.md) explains what the exit code of a command means.
"""
OUTRO = """## What to read next

- [Workload file](workload-file.md): describe your own requests, load and SLO.
- [Errors and exit codes](errors.md): use the commands in a script.
- [Troubleshooting](troubleshooting.md): what to do if a command fails or a run is INVALID.
"""


def render_page() -> str:
    """Return the text of the page."""
    groups: dict[str, list[str]] = {}
    for row in COMMANDS.builtin_rows:
        groups.setdefault(row.group, []).append(row.name)
    commands = all_commands()
    parts = [INTRODUCTION, _render_index(groups, commands)]
    for names in groups.values():
        for name in names:
            parts += [
                _render_command(full_name, command)
                for full_name, command in commands.items()
                if full_name.split()[0] == name
            ]
    return "\n".join([*parts, OUTRO])


def _render_index(groups: Mapping[str, list[str]], commands: Mapping[str, Any]) -> str:
    """Return a list of all commands by group, each a link to its section."""
    lines = ["## Commands", ""]
    for group, names in groups.items():
        links = [
            f"[{full_name}](#loadgen-{full_name.replace(' ', '-')})"
            for full_name in commands
            if full_name.split()[0] in names
        ]
        lines.append(f"- {group.capitalize()}: {', '.join(links)}")
    return "\n".join([*lines, ""])


def _render_command(name: str, command: Any) -> str:
    """Return the section of one command: what it does, an example, arguments and options."""
    context = Context(command, info_name=f"loadgen {name}")
    lines = [f"## loadgen {name}", ""]
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        if text.startswith("Example:"):
            lines += ["For example:", "", f"    {text.removeprefix('Example:').strip()}", ""]
        elif text.startswith(("Exit:", "Exit codes:")):
            lines += [*_render_exit_codes(text.partition(":")[2].strip()), ""]
        elif text:
            lines += [_escape(text), ""]
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    if arguments:
        lines += ["**Arguments**", ""]
        lines += [
            f"- `{argument.metavar or (argument.name or '').upper()}`: "
            f"{_escape(argument.help or '')}"
            for argument in arguments
        ]
        lines.append("")
    for panel, entries in _options_by_panel(command, context):
        lines += [f"**{panel}**", "", *entries, ""]
    set_keys: Mapping[str, Option] = getattr(command.callback, "set_keys", {})
    if set_keys:
        lines += ["**Keys of `--set`**", ""]
        lines += [_render_set_key(key, option) for key, option in set_keys.items()]
        lines.append("")
    return "\n".join(lines)


def _render_exit_codes(text: str) -> list[str]:
    """Return the exit codes of a command as lines of a list.

    A docstring lists them as "0 done, 2 wrong usage." Other texts become a sentence.
    """
    codes, _, remark = text.partition(". ")
    entries = re.split(r"[,;] (?=\d+ )", codes.rstrip("."))
    matches = [re.fullmatch(r"(\d+)\s*(.*)", entry) for entry in entries]
    if not all(matches):
        return [f"Exit codes: {_escape(text)}"]
    lines = ["The exit code says how the command ended:", ""]
    for match in matches:
        if match:
            meaning = match[2] or "success"
            lines.append(f"- `{match[1]}`: {_escape(meaning)}")
    return [*lines, "", _escape(remark)] if remark else lines


def _options_by_panel(command: Any, context: Context) -> Iterator[tuple[str, list[str]]]:
    """Yield each panel of the help that has options, with one line per option."""
    panels: dict[str, list[str]] = {panel: [] for panel in (DEFAULT_PANEL, *PANELS)}
    for option in command.params:
        if isinstance(option, TyperOption) and not option.hidden:
            panel = getattr(option, "rich_help_panel", None) or DEFAULT_PANEL
            entry = describe_option(option, context)
            panels[panel].append(f"- `{entry.name}`: {_render_text(entry.text)}")
    return ((panel, entries) for panel, entries in panels.items() if entries)


def _render_set_key(key: str, option: Option) -> str:
    """Return the line of a key of `--set`."""
    default = option.default or option.default_text
    suffix = f" [default: {default}]" if default else ""
    return f"- `{key}={option.set_metavar}`: {_render_text(option.help + suffix)}"


def _render_text(text: str) -> str:
    """Return the text of the help as Markdown, with the default as a sentence of its own."""
    text = re.sub(r" \[default: (.*?)\](?= \[also|$)", r" Default: \1.", text)
    text = re.sub(r" \[also (.*?)\]$", r" Other names: `\1`.", text)
    return _escape(text)


def _escape(text: str) -> str:
    """Return a text whose asterisks and angle brackets Markdown shows, except within backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<>])", r"\\\1", part) for part in parts
    )


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
