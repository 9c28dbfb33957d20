"""A command as it was typed: the shared options, and what they specify."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from loadgen.cli.output import print_status
from loadgen.cli.repetition import parse_repetition
from loadgen.cli.run_options import COMMAND_OPTIONS, Option
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting, did_you_mean

if TYPE_CHECKING:
    from loadgen.core.execution.events import EventHandler, RunEvent
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.probing import ProbeCache
    from loadgen.core.execution.run import Execute
    from loadgen.core.workload import Overrides, Workload
    from loadgen.pricing.budget import Budget
    from loadgen.repeated.repeats import Repetition

_SLO_OBJECTIVE = r"\+?[A-Za-z][A-Za-z0-9_]*:\S+$"  # like ttft:2s or +tpot:50ms:p95


def expand_slo_flag(arguments: Sequence[str]) -> list[str]:
    """Return the command line with `--slo` in front of each objective that follows one `--slo`.

    It is called before click parses the command line. Other tools take `--goodput ttft:2s
    tpot:50ms`, so users write `--slo ttft:2s tpot:50ms`. click takes one value per option: `--slo
    ttft:2s --slo tpot:50ms`. Only `--slo` is expanded, because no other option has values that
    cannot be taken for an argument.
    """
    expanded_arguments: list[str] = []
    is_after_slo = False  # whether only objectives stand between the last --slo and the argument
    for argument in arguments:
        if argument == "--slo":
            expanded_arguments.append(argument)
            is_after_slo = True
            continue

        is_objective = re.match(_SLO_OBJECTIVE, argument) is not None
        is_after_slo = is_after_slo and is_objective

        has_flag = bool(expanded_arguments) and expanded_arguments[-1] == "--slo"
        if is_after_slo and not has_flag:
            expanded_arguments.append("--slo")

        expanded_arguments.append(argument)

    return expanded_arguments


@dataclass(frozen=True)
class Invocation:
    """A command with the shared options that were specified.

    Attributes:
        command: The name of the command.
        options: The values of the shared options that were specified or have a default, by keyword.
        arguments: The whole command line, without the name of the program.
        run_command_line: Runs another command line and returns its exit code.
    """

    command: str
    options: Mapping[str, Any]
    arguments: Sequence[str]
    run_command_line: Callable[[list[str]], int]

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option; None if it was not specified."""
        return self.options.get(name)

    def with_options(self, **changes: Any) -> Invocation:
        """Return this invocation with other values of some options."""
        return dataclasses.replace(self, options={**self.options, **changes})

    def settings(self, *, can_use_store: bool = False, needs_text: str = "") -> Settings:
        """Return the settings of a run with these options, which also store the command line.

        The stored command line has no secrets, because it is written into the results folder.

        Args:
            can_use_store: Whether --out may be the URL of an object store.
            needs_text: Why the command needs responses that are texts, as the beginning of an error
                message. "" if an API that returns numbers, such as embeddings, may be used, too.

        Raises:
            CombinedError: With every error that was found.
        """
        from loadgen.cli.settings import build_settings

        errors: list[LoadgenError] = []
        with collecting(errors):
            settings = build_settings(self.options)
            _check_settings(settings, can_use_store=can_use_store, needs_text=needs_text)

        with collecting(errors):
            self.telemetry_listeners()  # raises if --prometheus or --otel cannot be used

        if errors:
            raise CombinedError(errors)

        return replace(
            settings,
            command=tuple(_redact_command_line(self.arguments, settings.api_key)),
            traceparent=self._sends_traces(),
        )

    def _sends_traces(self) -> bool:
        """Return True if --otel exports traces, for which requests carry a `traceparent` header."""
        if self["otel"] is None:
            return False
        from loadgen.telemetry.otel import has_traces

        return has_traces(self["otel"])

    def telemetry_listeners(self) -> list[EventHandler]:
        """Return the listeners of --prometheus and --otel, which export each run while it goes.

        Raises UserError if one of them cannot be started as specified.
        """
        flags = [f"--{name}" for name in ("prometheus", "otel") if self[name] is not None]
        if not flags:
            return []

        from loadgen.telemetry import otel, prometheus
        from loadgen.telemetry.reader_process import SidecarStarter

        listeners: list[EventHandler] = []
        if self["prometheus"] is not None:
            address = prometheus.parse_listen_address(self["prometheus"])
            listeners.append(SidecarStarter(partial(prometheus.Exporter, address=address)))

        if self["otel"] is not None:
            option = otel.check_otel_option(self["otel"])
            listeners.append(SidecarStarter(partial(otel.TelemetrySender, option=option)))

        return [*listeners, VirtualTimeNotice(" and ".join(flags))]

    def move_existing_results(self, out: Path | None) -> None:
        """Rename the folder of --out if it holds results and --force was typed.

        A command refuses to write into a folder with results. With --force, the old results are not
        deleted, but moved to `OUT-before-...` with the date and, if needed, a number.

        Raises UserError while another command works in the folder.
        """
        from loadgen.core.execution.folder_names import (
            check_no_results,
            dated_folders,
            locked_folder,
        )

        if out is None or not self["force"]:
            return

        try:
            check_no_results(out)
        except UserError:  # the folder holds results
            with locked_folder(out):
                backup_name = out.with_name(f"{out.name}-before")
                candidates = dated_folders(backup_name, datetime.now().astimezone())
                out.rename(next(path for path in candidates if not path.exists()))

    def load_workload(self, name: str | None, **changes: Any) -> Workload:
        """Return the workload with the options of the load applied; `changes` replace some of them.

        Raises LoadgenError or CombinedError.
        """
        from loadgen.core.workload.loading import load_from_options

        return load_from_options(name, self["trace"], self.overrides(**changes), self["dataset"])

    def overrides(self, **changes: Any) -> Overrides:
        """Return what the options change in the load; `changes` replace some of them."""
        from loadgen.core.workload import read_flags

        return read_flags(**{**self.options, **changes})

    def budget(self) -> Budget | None:
        """Return the budget of --prices and --max-cost; None without prices.

        Raises LoadgenError or CombinedError.
        """
        max_cost = self["max_cost"]
        if self["prices"] is None:
            if max_cost is not None:
                raise UserError(
                    "missing_option",
                    "--max-cost needs --prices",
                    f"--max-cost {max_cost:g}",
                    "add --prices FILE",
                )
            return None

        from loadgen.pricing.budget import Budget
        from loadgen.pricing.price_file import load_prices

        limit = None if max_cost is None else Decimal(repr(max_cost))
        return Budget(load_prices(self["prices"]), limit)

    def executor(
        self, listeners: Sequence[EventHandler], probe_cache: ProbeCache | None = None
    ) -> Execute:
        """Return the function that executes a run and notifies the listeners of its progress.

        A command with several runs calls it for each of them. The target is probed in the first run
        only, because all of them share a cache of what was found out.

        Args:
            listeners: Receive the events of all runs.
            probe_cache: What was found out about targets before the first run. None for nothing.
        """
        from loadgen.core.execution import run

        shared_cache = {} if probe_cache is None else probe_cache
        return partial(run.execute, listeners=listeners, probe_cache=shared_cache)

    def repetition(
        self, *, default_most: int | None = None, default_precision: float | None = None
    ) -> Repetition | None:
        """Return what --repeat specifies; None without it. Raises CombinedError.

        Args:
            default_most: The largest number of runs of `auto` without `most`. None for that of
                `loadgen run`.
            default_precision: The precision of `auto` without `within`. None for that of
                `loadgen run`.
        """
        return parse_repetition(
            self["repeat"], default_most=default_most, default_precision=default_precision
        )


def _check_settings(settings: Settings, *, can_use_store: bool, needs_text: str) -> None:
    """Raise UserError for an object store or an API that the command cannot use.

    The arguments are those of `Invocation.settings`.
    """
    if settings.store and not can_use_store:
        raise UserError(
            "unsupported",
            "only `loadgen run` copies its results to an object store",
            f"--out {settings.store}",
            "give a folder",
        )

    returns_numbers = settings.returns_numbers
    if returns_numbers and needs_text:
        raise UserError(
            "unsupported",
            f"{needs_text}, but responses of the {settings.api} API are numbers",
            f"--api {settings.api}",
            "use --api chat, completions, responses or messages",
        )


class VirtualTimeNotice:
    """A listener that says once that a run in virtual time exports no telemetry."""

    def __init__(self, flags: str) -> None:
        """Create a listener whose notice names these options, for example "--otel"."""
        self._flags = flags
        self._is_printed = False

    def __call__(self, event: RunEvent) -> None:
        """Print the notice when the first run in virtual time is planned."""
        from loadgen.core.execution.events import RunPlanned

        if self._is_printed or not isinstance(event, RunPlanned):
            return

        if event.manifest.client == "virtual":
            self._is_printed = True
            print_status(
                f"note: {self._flags} has no effect, because a simulated run ends "
                "before anyone could watch it"
            )


def collect_options(
    values: Mapping[str, object], options: Mapping[str, Option], set_keys: Mapping[str, Option]
) -> dict[str, object]:
    """Return the options that were specified or have a default, by keyword.

    The values of `--set KEY=VALUE` are added under their keys.

    Args:
        values: What typer read for each option. An option that was not specified is None or False.
        options: The shared options of the command, by keyword.
        set_keys: The options of the command that are keys of --set.

    Raises:
        UserError: For a key or value of --set that the command does not take.
    """
    collected: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or value is False:
            continue
        # The switch --no-stream sets the option `stream` to False.
        is_negative_switch = options[name].flags[0].startswith("--no-")
        collected[name] = False if is_negative_switch else value

    set_pairs = collected.pop("set", ())
    return collected | _parse_set_pairs(set_pairs, set_keys)


def _parse_set_pairs(pairs: Sequence[str], set_keys: Mapping[str, Option]) -> dict[str, object]:
    """Return the values of `--set KEY=VALUE`, by keyword.

    A key may be written with dashes. The value stays a text, which the parser of the option reads
    later, unless the option is a switch or may be repeated.

    Args:
        pairs: The values of --set, such as "burstiness=0.5".
        set_keys: The options of the command that are keys of --set.

    Raises:
        UserError: For an unknown or repeated key, a missing value, and a switch without yes or no.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        option = set_keys.get(name)
        if option is None:
            raise _unknown_set_key(name, pair, set_keys)

        if not equals:
            raise UserError(
                "missing_value",
                f"{name} needs a value",
                f"--set {pair}",
                f"--set {name}={option.set_metavar}",
            )

        can_be_repeated = option.cli_type == list[str]
        if can_be_repeated:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise UserError(
                "duplicate", "the key is specified twice", f"--set {pair}", "specify each key once"
            )
        else:
            values[name] = _parse_bool(text, pair) if option.cli_type is bool else text

    return values


_SYNONYMS_OF_SET_KEYS = {
    "start": "trajectory_start",
    "end": "trajectory_end",
    "history": "trajectory_history",
}
"""Maps keys of trajectories in a workload file to the keys of `--set` with the same effect."""


def _unknown_set_key(name: str, pair: str, set_keys: Mapping[str, Option]) -> UserError:
    """Return the error for a key of `--set`, which may be an option with a flag of its own."""
    if name in COMMAND_OPTIONS:
        hint = f"did you mean --{name.replace('_', '-')}?"
    else:
        synonyms = {
            other_name: key for other_name, key in _SYNONYMS_OF_SET_KEYS.items() if key in set_keys
        }
        hint = did_you_mean(name, list(set_keys), synonyms)
    return UserError("unknown_name", f"unknown key: {name}", f"--set {pair}", hint)


def _parse_bool(text: str, pair: str) -> bool:
    """Return the value of a switch in `--set KEY=yes`. Raises UserError for other texts."""
    if text not in ("yes", "true", "no", "false"):
        raise UserError(
            "invalid_value", f"must be yes or no, not {text!r}", f"--set {pair}", "use yes or no"
        )
    return text in ("yes", "true")


def _redact_command_line(arguments: Sequence[str], api_key: str | None) -> list[str]:
    """Return the command line to store with a result, with its secrets replaced by ***.

    Secrets are the values of HTTP headers, passwords in URLs, and the API key wherever it occurs.
    """
    from loadgen_sdk.redaction import redact

    secrets = [api_key] if api_key else []
    safe_arguments = ["loadgen"]

    previous = ""
    for argument in arguments:
        if previous in ("--header", "-H"):
            safe_argument = f"{_header_name(argument)}: ***"
        elif argument.startswith(("--header=", "-H=")):
            flag = argument.partition("=")[0]
            safe_argument = f"{flag}=***"
        elif "://" in argument:
            safe_argument = _redact_url(argument)
        else:
            safe_argument = argument

        safe_arguments.append(redact(safe_argument, secrets))
        previous = argument

    return safe_arguments


def _header_name(header: str) -> str:
    """Return the name of a header that is written as NAME: VALUE or NAME=VALUE."""
    separator = ":" if ":" in header else "="
    return header.partition(separator)[0]


def _redact_url(argument: str) -> str:
    """Return a URL, or an option like `--url=URL`, with the password in the URL hidden.

    A URL that cannot be parsed is hidden altogether, because it may contain a password.
    """
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.transport.target import Target

    prefix = ""
    url = argument
    if argument.startswith("--"):
        flag, equals, url = argument.rpartition("=")
        prefix = flag + equals

    try:
        return prefix + Target.parse(url).redacted
    except TargetUnusable:
        return f"{prefix}***"
