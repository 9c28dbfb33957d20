"""The table of options (`shell/run_options.py`) as flags: which command takes which, and what was typed of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.shell import completion
from loadgen.shell.given import Given, chosen
from loadgen.shell.run_options import COMMAND_OPTIONS, OPTIONS, PANELS, Option

TARGET = (
    "url",
    "model",
    "server",
    "api",
    "tokenizer",
    "extra_body",
    "headers",
    "api_key_file",
    "cacert",
    "cert",
    "key",
    "insecure",
    "stream",
)
KEYWORD = inspect.Parameter.KEYWORD_ONLY
OF_THE_LOAD = {name for name, option in OPTIONS.items() if option.part != "settings"}

PACKAGED = "agentic, coding-agent, mixed, noisy-neighbour, qa, rag, rag-pipeline, research-agent, summarization"
OneWorkload = Annotated[
    str | None,
    typer.Argument(
        metavar="workload",
        help=f"A workload file, or a packaged one: {PACKAGED}.",
        autocompletion=completion.workloads,
    ),
]


AllowInvalid = Annotated[
    bool,
    typer.Option("--allow-invalid", help="Use a result whose measurement is not valid, marked."),
]
AcceptSamplePrices = Annotated[
    bool,
    typer.Option(
        "--accept-sample-prices", help="Use list prices that others have copied, for want of yours."
    ),
]
WithPlugins = Annotated[
    bool,
    typer.Option(
        "--plugins", help="Also use rows of other packages; without it none is loaded here."
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit 3 where a run cannot decide the SLO; without it that exits 0."
    ),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", help="Write verdict and SLO as JUnit XML too.")
]
Github = Annotated[
    bool,
    typer.Option(
        "--github", help="Add a summary to the page of this GitHub step ($GITHUB_STEP_SUMMARY)."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, show the plan, send nothing.")
]


def new_folder(name: str) -> Path:
    """The folder of a command's results, where the user has named none."""
    from loadgen.core.execution.folder_names import run_id

    return Path("results") / run_id(name, datetime.now().astimezone())


def takes(
    *,
    only: Collection[str] = COMMAND_OPTIONS,
    without: Collection[str] = (),
    **changed: str | Mapping[str, Any],
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of the table in the place of its parameter `given`. A parameter whose type is a
    dataclass stands for the fields of it.

    changed: another help for an option, or {"help": ..., "default": ...}.
    """
    table = {name: option for name, option in COMMAND_OPTIONS.items() if name in only}
    for name, change in changed.items():
        table[name] = table[name]._replace(
            **({"help": change} if isinstance(change, str) else change)
        )
    table = {name: option for name, option in table.items() if name not in without}
    by_key = {name: option for name, option in table.items() if option.sets}
    without_flag = {"set"} if not by_key else set()
    table = {
        name: option for name, option in table.items() if option.flags and name not in without_flag
    }

    def with_options(command: Callable[..., int]) -> Callable[..., int]:
        def call(context: typer.Context, **values: Any) -> int:
            typed = chosen({name: values.pop(name) for name in table}, table, by_key)
            for name, group in groups.items():
                values[name] = group(
                    **{field.name: values.pop(field.name) for field in fields(group)}
                )
            if "given" in own:
                root = context.find_root()
                values["given"] = Given(
                    context.info_name or "",
                    typed,
                    root.obj or (),
                    lambda arguments: root.command.main(
                        arguments, standalone_mode=False, obj=arguments
                    ),
                )
            return command(**values)

        own = inspect.signature(command, eval_str=True).parameters
        groups: dict[str, Any] = {
            name: parameter.annotation
            for name, parameter in own.items()
            if is_dataclass(parameter.annotation) and name != "given"
        }
        parameters = [inspect.Parameter("context", KEYWORD, annotation=typer.Context)]
        for name, parameter in own.items():
            if name == "given":
                parameters += [_parameter(flag, option) for flag, option in table.items()]
            elif name in groups:
                parameters += inspect.signature(groups[name], eval_str=True).parameters.values()
            else:
                parameters.append(parameter.replace(kind=KEYWORD))
        call.by_key = by_key  # type: ignore[attr-defined]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {}
        call.__name__, call.__doc__, call.__module__ = (
            command.__name__,
            command.__doc__,
            command.__module__,
        )
        return call

    return with_options


_COMPLETED = {
    "url": completion.targets,
    "server": completion.servers,
    "slo": completion.terms,
    "set": completion.among(
        lambda: (f"{name}=" for name, option in COMMAND_OPTIONS.items() if option.sets)
    ),
}


def _parameter(name: str, option: Option) -> inspect.Parameter:
    flag = typer.Option(
        *option.names,
        help=option.help,
        metavar=option.metavar,
        rich_help_panel=next(
            (panel for panel, names in PANELS.items() if name in names), "Advanced"
        ),
        show_default=option.shown or True,
        autocompletion=_COMPLETED.get(name)
        or ((lambda: list(option.choices)) if option.choices else None),
    )
    kind = bool if option.type is bool else option.type if option.default else option.type | None
    default = False if option.type is bool else option.default
    return inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[kind, flag])
