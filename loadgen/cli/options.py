"""The options that several commands share, as typer reads them.

`add_options` gives a command the options of the table in `cli/run_options.py`. The annotated
types below are the other arguments and options that more than one command takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.cli import completion
from loadgen.cli.invocation import Invocation, collect_options
from loadgen.cli.run_options import COMMAND_OPTIONS, SET_KEYS, Option

Command = Callable[..., int]

TARGET_OPTIONS = (
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
"""The shared options of a command that sends requests to one endpoint and drives no load."""

PACKAGED_WORKLOADS = (
    "agentic, coding-agent, mixed, noisy-neighbour, qa, rag, rag-pipeline, research-agent, "
    "summarization"
)
WorkloadArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="workload",
        help=f"Workload: a YAML file, or the name of a packaged workload: {PACKAGED_WORKLOADS}.",
        autocompletion=completion.complete_workload,
    ),
]
AllowInvalidOption = Annotated[
    bool,
    typer.Option("--allow-invalid", help="Also use results that are INVALID, and mark them."),
]
AcceptSamplePricesOption = Annotated[
    bool,
    typer.Option("--accept-sample-prices", help="Use the sample list prices instead of your own."),
]
PluginsOption = Annotated[
    bool,
    typer.Option(
        "--plugins",
        help="Also load plug-ins of other packages. This command does not load them by default.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        rich_help_panel="SLO",
        help="Exit with 4 instead of 0 if the SLO could not be decided.",
    ),
]
FullOption = Annotated[
    bool,
    typer.Option("--full", rich_help_panel="Output", help="Print every section."),
]
JunitOption = Annotated[
    Path | None,
    typer.Option(
        "--junit", metavar="FILE", help="Also write the verdict and the SLO as JUnit XML."
    ),
]
GithubOption = Annotated[
    bool,
    typer.Option(
        "--github", help="Add a summary to the GitHub Actions job ($GITHUB_STEP_SUMMARY)."
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and show the plan, but send no load.")
]


def default_output_folder(name: str) -> Path:
    """Return a new folder in results/ for a command without --out."""
    from loadgen.core.execution.folder_names import run_id

    return Path("results") / run_id(name, datetime.now().astimezone())


def add_options(
    *,
    only: Collection[str] = tuple(COMMAND_OPTIONS),
    without: Collection[str] = (),
    help_texts: Mapping[str, str] | None = None,
    default_texts: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Decorate a command function so that typer gives it shared options.

    typer reads the options of a command from the signature of its function, one option from each
    parameter. So that a function need not repeat them, it declares two kinds of parameters that the
    decorator replaces by several parameters, one per option:

    - A parameter of type `Invocation` stands for the options of `COMMAND_OPTIONS`.
    - A parameter whose type is a dataclass stands for the fields of the dataclass, each of which is
      declared like a parameter: `port: Annotated[int, typer.Option("--port")] = 8000`.

    When typer calls the decorated function with the value of each option, the function builds the
    `Invocation` and the dataclasses from them and calls the command.

    Example::

        @add_options(without=("repeat",), help_texts={"out": "Folder of the search."})
        def search(invocation: Invocation, workload: WorkloadArgument = None) -> int: ...

    Args:
        only: The keywords of the options to add.
        without: Those of them to leave out.
        help_texts: What the help of this command says about an option, where it differs.
        default_texts: What it says about the option's default, where it differs.
    """
    options = {
        name: _replace_help_texts(name, option, help_texts or {}, default_texts or {})
        for name, option in COMMAND_OPTIONS.items()
        if name in only and name not in without
    }
    set_keys = {name: option for name, option in options.items() if name in SET_KEYS}
    if not set_keys:
        options.pop("set", None)

    flag_options = {name: option for name, option in options.items() if option.flags}

    def decorate(command: Command) -> Command:
        declared_parameters = inspect.signature(command, eval_str=True).parameters.values()
        takes_invocation = any(
            parameter.annotation is Invocation for parameter in declared_parameters
        )
        dataclass_by_parameter = {
            parameter.name: parameter.annotation
            for parameter in declared_parameters
            if _is_option_group(parameter.annotation)
        }

        typer_parameters = [_create_keyword_parameter("ctx", typer.Context)]
        for parameter in declared_parameters:
            typer_parameters += _expand_parameter(parameter, flag_options)

        @wraps(command)
        def run(ctx: typer.Context, **values: Any) -> int:
            # `values` has one value per option. It becomes one per parameter of the command.
            if takes_invocation:
                flag_values = {name: values.pop(name) for name in flag_options}
                specified_options = collect_options(flag_values, options, set_keys)
                values["invocation"] = _create_invocation(ctx, specified_options)

            for parameter_name, option_dataclass in dataclass_by_parameter.items():
                field_values = {
                    field.name: values.pop(field.name) for field in fields(option_dataclass)
                }
                values[parameter_name] = option_dataclass(**field_values)

            return command(**values)

        run.__signature__ = inspect.Signature(typer_parameters)  # type: ignore[attr-defined]

        # `help.py` reads this attribute, because keys of --set are no parameters of typer.
        run.set_keys = set_keys if takes_invocation else {}  # type: ignore[attr-defined]
        return run

    return decorate


def _is_option_group(annotation: object) -> bool:
    """Return True for a dataclass whose fields are options.

    `Invocation` is a dataclass, too, but its fields are no options. `_expand_parameter` replaces a
    parameter of its type by the shared options.
    """
    return is_dataclass(annotation) and annotation is not Invocation


def _expand_parameter(
    parameter: inspect.Parameter, flag_options: Mapping[str, Option]
) -> list[inspect.Parameter]:
    """Return the parameters that typer reads in place of one parameter of a command function.

    A parameter of type `Invocation` stands for the shared options, and a dataclass for its fields.
    Any other parameter is an option or argument itself.

    Args:
        parameter: The parameter of the function.
        flag_options: The shared options of the command that have a flag, by keyword.
    """
    annotation = parameter.annotation
    if annotation is Invocation:
        return [_create_parameter(name, option) for name, option in flag_options.items()]
    if _is_option_group(annotation):
        return list(inspect.signature(annotation, eval_str=True).parameters.values())
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]


def _replace_help_texts(
    name: str, option: Option, help_texts: Mapping[str, str], default_texts: Mapping[str, str]
) -> Option:
    """Return an option with the help and the default text that one command states differently.

    A command may explain a shared option in its own way, for example `--out`.

    Args:
        name: The keyword of the option.
        option: The shared option.
        help_texts: The help texts of this command, by the keyword of their option.
        default_texts: What this command says about defaults, by the keyword of their option.
    """
    return replace(
        option,
        help=help_texts.get(name, option.help),
        default_text=default_texts.get(name, option.default_text),
    )


def _create_parameter(name: str, option: Option) -> inspect.Parameter:
    """Return the keyword parameter from which typer creates an option.

    A switch is False unless it is typed. Any other option without a default may be None.
    """
    complete = option.complete
    if complete is None and option.choices:
        complete = completion.complete_choice(lambda: option.choices)

    declaration = typer.Option(
        *option.flags,
        help=option.help,
        metavar=option.metavar,
        rich_help_panel=option.panel,
        show_default=option.default_text or True,
        autocompletion=complete,
    )
    if option.cli_type is bool:
        return _create_keyword_parameter(name, Annotated[bool, declaration], default=False)

    annotation = option.cli_type if option.default else option.cli_type | None
    return _create_keyword_parameter(
        name, Annotated[annotation, declaration], default=option.default
    )


def _create_keyword_parameter(name: str, annotation: object, **default: Any) -> inspect.Parameter:
    """Return a keyword-only parameter. Without `default=`, typer requires it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, **default)


def _create_invocation(ctx: typer.Context, options: Mapping[str, object]) -> Invocation:
    """Return the invocation of a command: its name, its options and the whole command line.

    `run_command_line` of `app.py` stores the command line as the `obj` of click's root context. The
    invocation can run another command line in the same way, for example to resume a search.
    """
    root = ctx.find_root()

    def run_command_line(arguments: list[str]) -> int:
        exit_code: int = root.command.main(
            arguments, prog_name=root.info_name, standalone_mode=False, obj=arguments
        )
        return exit_code

    return Invocation(
        command=ctx.info_name or "",
        options=options,
        arguments=root.obj or (),
        run_command_line=run_command_line,
    )
