"""What was typed of a command: its options from the table, and what they ask for. Without the parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import Fault, Faults, UserError, collecting, meant
from loadgen.shell import run_options
from loadgen.shell.repetition import repetition
from loadgen.shell.run_options import COMMAND_OPTIONS, Option

if TYPE_CHECKING:
    from loadgen.core.execution.events import Hearer
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.run import Execute
    from loadgen.core.workload import Overrides, Workload
    from loadgen.pricing.budget import Budget
    from loadgen.repeated.repeats import Repetition


_PAIR = r"[a-z][a-z0-9_]*:\S+$"
_MANY = ("--slo",)


def spread(arguments: Sequence[str]) -> list[str]:
    """`--slo ttft:2s tpot:50ms`, as other tools write it, is `--slo ttft:2s --slo tpot:50ms`."""
    out: list[str] = []
    many = ""
    values = 0
    for argument in arguments:
        if argument in _MANY:
            many, values = argument, 0
        elif many and re.match(_PAIR, argument):
            if values:
                out.append(many)
            values += 1
        else:
            many = ""
        out.append(argument)
    return out


class Given(Struct, frozen=True):
    """What was typed: the command, the options that it takes from the table, and the whole command line.

    `call` carries out another command line.
    """

    command: str
    options: Mapping[str, Any]
    arguments: Sequence[str]
    call: Callable[[list[str]], int]

    def __getitem__(self, name: str) -> Any:
        return self.options.get(name)

    def settings(self, *, to_store: bool = False, needs_text: str = "") -> Settings:
        """`run_options.settings`, with the command line without its secrets. Raises Faults.

        to_store: --out may be an object store. needs_text: for what the answers have to be texts; "": they need not.
        """
        faults: list[Fault] = []
        with collecting(faults):
            made = run_options.settings(self.options)
            if made.store and not to_store:
                what = "only loadgen run copies its results to a store"
                raise UserError("unsupported", what, f"--out {made.store}", "give a folder")
            if made.values and needs_text:
                what = f"{needs_text}, and an answer of {made.api} is numbers"
                raise UserError(
                    "unsupported",
                    what,
                    f"--api {made.api}",
                    "--api chat, completions, responses or messages",
                )
        with collecting(faults):
            self.followers()
        if faults:
            raise Faults(faults)
        traced = False
        if self["otel"] is not None:
            from loadgen.telemetry.otel import has_traces

            traced = has_traces(self["otel"])
        command = tuple(_without_secrets(self.arguments, made.api_key))
        return replace(made, command=command, traceparent=traced)

    def followers(self) -> list[Hearer]:
        """What --prometheus and --otel start beside each run, which reads its folder as it grows. Raises UserError."""
        flags = " and ".join(
            f"--{name}" for name in ("prometheus", "otel") if self[name] is not None
        )
        if not flags:
            return []
        from loadgen.telemetry import otel, prometheus
        from loadgen.telemetry.reader_process import Beside

        found: list[Hearer] = []
        if self["prometheus"] is not None:
            found.append(
                Beside(partial(prometheus.Exporter, at=prometheus.listens_on(self["prometheus"])))
            )
        if self["otel"] is not None:
            found.append(Beside(partial(otel.TelemetrySender, what=otel.asked(self["otel"]))))
        return [*found, not_in_virtual_time(flags)]

    def make_room(self, out: Path | None) -> None:
        """With --force: where the folder holds results, it is kept under a dated name beside it. Raises UserError while
        a command works in it.
        """
        from loadgen.core.execution.folder_names import alone, check_empty, dated

        if out is None or not self["force"]:
            return
        try:
            check_empty(out)
        except UserError:
            with alone(out):
                names = dated(out.with_name(f"{out.name}-before"), datetime.now().astimezone())
                out.rename(next(name for name in names if not name.exists()))

    def workload(self, name: str | None, **changed: Any) -> Workload:
        """The workload that is asked for, as the options change it. Raises Fault or Faults."""
        from loadgen.core.workload.loading import given

        return given(name, self["trace"], self.overrides(**changed), self["dataset"])

    def overrides(self, **changed: Any) -> Overrides:
        """What the options say of the load, with other values for some."""
        from loadgen.core.workload import read_flags

        return read_flags(**{**self.options, **changed})

    def budget(self) -> Budget | None:
        """What --prices and --max-cost say; None without them. Raises Fault or Faults."""
        if self["prices"] is None:
            if self["max_cost"] is not None:
                where = f"--max-cost {self['max_cost']:g}"
                raise UserError(
                    "missing_option", "a limit of money, and no prices", where, "add --prices FILE"
                )
            return None

        from loadgen.pricing.budget import Budget
        from loadgen.pricing.price_file import load_prices

        limit = None if self["max_cost"] is None else Decimal(repr(self["max_cost"]))
        return Budget(load_prices(self["prices"]), limit)

    def execute(self, hearers: Sequence[Hearer]) -> Execute:
        """Carries out the runs of this command, which these hear, and asks every target once."""
        from loadgen.core.execution import run

        return partial(run.execute, hearers=hearers, known={})

    def repetition(self) -> Repetition | None:
        """What --repeat asks for; None without it. Raises Faults."""
        return repetition(self["repeat"])


def chosen(
    values: Mapping[str, Any], table: Mapping[str, Option], by_key: Mapping[str, Option]
) -> dict[str, Any]:
    """The options that were given or have a default, from the value of each flag. Raises UserError for --set."""
    typed: dict[str, Any] = {
        name: not value if table[name].flags.startswith("--no-") else value
        for name, value in values.items()
        if value is not None and value is not False
    }
    return typed | _by_key(typed.pop("set", ()), by_key)


def _by_key(typed: Sequence[str], known: Mapping[str, Option]) -> dict[str, Any]:
    """What `--set KEY=VALUE` says, each as its flag would have, of the keys that a command knows. Raises UserError."""
    found: dict[str, Any] = {}
    for text in typed:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        where = f"--set {text}"
        if name not in known:
            hint = (
                f"did you mean --{name.replace('_', '-')}?"
                if name in COMMAND_OPTIONS
                else meant(name, [*known])
            )
            raise UserError("unknown_name", f"no key is called {name}", where, hint)
        if not equals:
            raise UserError(
                "missing_value", f"{name} needs a value", where, f"--set {name}={known[name].sets}"
            )
        if known[name].type == list[str]:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise UserError("duplicate", "the key is given twice", where, "give each key once")
        else:
            found[name] = _yes_or_no(value, where) if known[name].type is bool else value
    return found


def _yes_or_no(value: str, where: str) -> bool:
    if value not in ("yes", "true", "no", "false"):
        raise UserError("invalid_value", f"neither yes nor no: {value!r}", where, "known: yes, no")
    return value in ("yes", "true")


def _without_secrets(arguments: Sequence[str], key: str | None) -> list[str]:
    from loadgen_sdk.redaction import redact

    safe: list[str] = ["loadgen", *arguments]
    for i, argument in enumerate(safe):
        if safe[i - 1] in ("--header", "-H"):
            name = argument.partition("=" if "=" in argument and ":" not in argument else ":")[0]
            safe[i] = f"{name}: ***"
        elif argument.startswith(("--header=", "-H=")):
            safe[i] = f"{argument.partition('=')[0]}=***"
        elif "://" in argument:
            safe[i] = _redacted_url(argument)
    return [redact(argument, [key] if key else []) for argument in safe]


def not_in_virtual_time(flags: str) -> Hearer:
    """Says once, of the first run in virtual time, that what `flags` name has nothing of it."""
    from loadgen.core.execution.events import RunEvent, RunPlanned
    from loadgen.shell.output import say

    told: list[str] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, RunPlanned) and event.header.client == "virtual" and not told:
            told.append(flags)
            say(
                f"note: {flags} sends nothing of a run in virtual time, which ends before anybody could watch it"
            )

    return hear


def _redacted_url(argument: str) -> str:
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.transport.target import Target

    flag, equals, url = (
        argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    )
    try:
        return flag + equals + Target.parse(url).redacted
    except TargetUnusable:
        return flag + equals + "***"
