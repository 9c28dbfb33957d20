"""Parsers of the values of options, for the command line and for the keywords of `loadgen.run`.

A parser takes a text or a Python value and returns a checked value. For a value that it does not
accept, it raises `units.InvalidValueError`, and its caller adds the name of the option. It raises
UserError or CombinedError itself where the error is about a part of the value, like one header.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loadgen.core import units
from loadgen.core.accepted_lengths import AcceptedLengthTarget, parse_target
from loadgen.core.errors import CombinedError, LoadgenError, UserError, of_reading

if TYPE_CHECKING:
    from loadgen.core.execution.system_file import SystemDescription
    from loadgen.core.sidecars.profiler import ProfilerOptions

T = TypeVar("T")

MAX_FILE_NAME_BYTES = 255  # on every file system in use
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEADER_VALUE = r"[\t\x20-\x7e\xa0-\xff]*"
_FRAMING_HEADERS = ("content-length", "transfer-encoding")


def parse_text(value: object) -> str:
    """Return a text or a path as text. Raises units.InvalidValueError for an empty one.

    An empty text comes from an environment variable that is not set, as in `--model "$MODEL"`. It
    must not mean that the default is used.
    """
    if not isinstance(value, str | os.PathLike):
        raise units.InvalidValueError(
            "wrong_type", f"must be a string, not {type(value).__name__}", ""
        )

    text = os.fspath(value)
    if not text.strip():
        reason = "the value is empty; is an environment variable unset?"
        raise units.InvalidValueError(
            "missing_value", reason, "set a value, or leave the option out"
        )

    return text


def parse_mapping(value: object) -> dict[str, object]:
    """Return a copy of a mapping."""
    if not isinstance(value, Mapping):
        raise units.InvalidValueError(
            "wrong_type",
            f"must be a mapping, not {str(value)!r}",
            "use a mapping from option to value",
        )
    return dict(value)


def parse_texts(value: object) -> tuple[str, ...]:
    """Return the texts of a sequence; any other value counts as a sequence of one."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(str, value))
    return (str(value),)


def parse_accepted_length(value: object) -> AcceptedLengthTarget:
    """Return the accepted length of an option, such as `2.49`.

    Raises:
        units.InvalidValueError: The value is no accepted length. The message names the value.
    """
    try:
        return parse_target(value)
    except units.InvalidValueError as error:
        raise units.InvalidValueError(error.code, f'"{value}" {error}', error.hint) from None


def parse_pairs(value: object) -> Mapping[str, object] | tuple[str, ...]:
    """Return a mapping as it is, and anything else as texts like KEY=VALUE."""
    return value if isinstance(value, Mapping) else parse_texts(value)


def parse_switch(value: object) -> bool:
    """Return a bool; nothing else counts as one."""
    if not isinstance(value, bool):
        raise units.InvalidValueError(
            "wrong_type", f"must be True or False, not {value!r}", "use True or False"
        )
    return value


class ChoiceParser:
    """A parser that accepts one of several texts."""

    def __init__(self, *choices: str) -> None:
        """Accept these texts."""
        self.choices = choices

    def __call__(self, value: object) -> str:
        """Return the value. Raises units.InvalidValueError if it is none of the choices."""
        if value not in self.choices:
            raise units.InvalidValueError(
                "unknown_name",
                f"unknown value {str(value)!r}",
                f"known: {', '.join(self.choices)}",
            )
        return str(value)


class CountParser:
    """A parser that accepts an integer >= 1."""

    def __init__(self, hint: str) -> None:
        """Create a parser whose error messages tell the user what to write."""
        self.hint = hint

    def __call__(self, value: Any) -> int:
        """Return the number. Raises units.InvalidValueError for anything else."""
        if not re.fullmatch("[0-9]{1,9}", str(value)) or int(value) < 1:
            raise units.InvalidValueError(
                "invalid_value", f"must be an integer >= 1, not {str(value)!r}", self.hint
            )
        return int(value)


def parse_workers(value: object) -> int:
    """Return a number of worker processes; 0 stands for auto."""
    if value == "auto":
        return 0
    return CountParser("a number from 1, or auto")(value)


def parse_percentiles(value: object) -> tuple[float, ...]:
    """Return percentiles such as "25,99.5" or "p25,p99.5" as ascending quantiles: 0.25, 0.995.

    Raises units.InvalidValueError unless all of them are numbers between 0 and 100.
    """
    parts = value.split(",") if isinstance(value, str) else parse_texts(value)
    try:
        numbers = [float(str(part).strip().removeprefix("p")) for part in parts]
    except ValueError:
        numbers = []  # is refused below, like numbers out of range

    quantiles = {round(number / 100, 9) for number in numbers}
    if not quantiles or not all(0 < quantile < 1 for quantile in quantiles):
        raise units.InvalidValueError(
            "invalid_value",
            f"must be percentiles, not {value!r}",
            "numbers between 0 and 100, like 25,99.5",
        )

    return tuple(sorted(quantiles))


def parse_server(value: object) -> str:
    """Return the name of a kind of server: auto, or one of this package or of a plug-in."""
    from loadgen_sdk.wire_formats.server_profiles import SERVERS, server_names

    if isinstance(value, str) and (value == "auto" or SERVERS.find(value) is not None):
        return value
    return ChoiceParser(*server_names())(value)


def parse_system_file(value: object) -> SystemDescription:
    """Read the description of the system under test."""
    from loadgen.core.execution import system_file

    return system_file.read_system_file(Path(parse_text(value)))


def parse_pem_file(value: object) -> str:
    """Return the path of a PEM file that exists."""
    path = parse_text(value)
    if not Path(path).is_file():
        raise units.InvalidValueError("missing_file", "no such file", "give a file in PEM format")
    return path


def read_key_file(value: object) -> str:
    """Return the API key that a file contains, without white space around it.

    Raises units.InvalidValueError if the file is missing, cannot be read or is not UTF-8 text.
    """
    key_file = Path(parse_text(value))
    try:
        return key_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        error_code = of_reading(error)  # "missing_file", "unreadable_file" or "wrong_encoding"
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise units.InvalidValueError(
            error_code,
            f"cannot read the key: {reason}",
            "the file must contain only the key",
        ) from None


def parse_output_folder(value: object) -> str:
    """Return the path of a folder that can be created and written into, or an object store's URL.

    Nothing is created, so the check covers permissions and names, but not a full disk.
    """
    text = parse_text(value)
    if "://" in text:
        return text

    path = Path(text).absolute()
    if any(len(os.fsencode(part)) > MAX_FILE_NAME_BYTES for part in path.parts):
        problem = f"name too long (over {MAX_FILE_NAME_BYTES} bytes)"
        raise units.InvalidValueError(
            "unwritable_file", f"cannot be created: {problem}", "use a shorter name"
        )

    problem = _find_write_problem(path)
    if problem:
        raise units.InvalidValueError(
            "unwritable_file", f"cannot be created: {problem}", "use a path that can be written"
        )

    return text


def _find_write_problem(path: Path) -> str:
    """Return why a folder cannot be created or written into, or "" if it can be.

    Only the nearest folder that exists is checked, because the folders below it would be created.
    """
    nearest_existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest_existing.is_dir():
        return f"{nearest_existing} is not a directory"
    if not os.access(nearest_existing, os.W_OK | os.X_OK):
        return f"{nearest_existing} is not writable"
    return ""


def parse_extra_body(value: Any) -> dict[str, Any]:
    """Return a JSON object that is merged into every request body.

    Raises UserError if the value is not a JSON object, and CombinedError with every field that must
    not be in it because an option of loadgen sets it.
    """
    from loadgen.core.workload.extra_body import find_refused_fields  # imports numpy

    try:
        body = dict(value) if isinstance(value, Mapping) else json.loads(parse_text(value))
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(
            "invalid_value",
            f"not a JSON object: {error}",
            "--extra-body",
            "write --extra-body '{\"temperature\": 0}'",
        ) from None

    errors = [
        UserError("unsupported", field.problem, f"--extra-body {field.name}", field.hint)
        for field in find_refused_fields(body)
    ]
    if errors:
        raise CombinedError(errors)

    return body


def parse_header_name(value: object) -> str:
    """Return the name of a header, like X-Session-ID."""
    if not isinstance(value, str) or not re.fullmatch(_HEADER_NAME, value):
        raise units.InvalidValueError(
            "invalid_value", "must be the name of a header", "for example X-Session-ID"
        )
    return value


def parse_headers(value: object) -> tuple[tuple[str, str], ...]:
    """Return header names and values, of a mapping, of pairs, or of texts like NAME: VALUE.

    Raises CombinedError with every header that cannot be sent; no error message contains a value.
    """
    headers: list[tuple[str, str]] = []
    errors: list[LoadgenError] = []
    for name, header_value in _split_headers(value):
        error = _check_header(name, header_value)
        if error is None:
            headers.append((name, header_value))
        else:
            errors.append(error)

    if errors:
        raise CombinedError(errors)

    return tuple(headers)


def _split_headers(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a mapping, of one text, or of a sequence of pairs or texts."""
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.items()
    elif isinstance(value, str):
        items = (value,)
    else:
        items = value
    for item in items:
        if isinstance(item, str):
            yield _split_header(item)
        else:
            name, header_value = item
            yield str(name), str(header_value)


def _split_header(text: str) -> tuple[str, str]:
    """Return the name and value of NAME: VALUE or NAME=VALUE, split at the first separator.

    The name is "" if the text has no separator, or begins with its only one.
    """
    positions = (text.find(":"), text.find("="))  # -1 for a separator that does not occur
    first_separator = min((index for index in positions if index > 0), default=0)
    return text[:first_separator].strip(), text[first_separator + 1 :].strip()


def _check_header(name: str, value: str) -> UserError | None:
    """Return why a header cannot be sent, or None if it can. The error hides the value."""
    if not name:
        return UserError(
            "invalid_value", "the header has no value", "--header", "write NAME: VALUE"
        )

    is_valid_name = re.fullmatch(_HEADER_NAME, name) is not None
    if not is_valid_name or not re.fullmatch(_HEADER_VALUE, value):
        return UserError(
            "invalid_value",
            "the header has a character that HTTP does not allow",
            f"--header {name}: ***" if is_valid_name else "--header",
            "use printable Latin-1 characters",
        )

    if name.lower() in _FRAMING_HEADERS:
        return UserError(
            "unsupported",
            "the client sets this header itself",
            f"--header {name}",
            "leave it out",
        )

    return None


def parse_metrics_pages(value: object) -> tuple[str, ...]:
    """Return where the metrics of the servers are read: auto, off, drain, or URLs."""
    from loadgen.core.sidecars import page_addresses

    pages = parse_texts(value)
    error = page_addresses.check_page_options(pages)
    if error is not None:
        raise error
    return pages


def parse_energy_pages(value: object) -> tuple[str, ...]:
    """Return where the energy of the GPUs is read: auto, off, nvidia-smi, or URLs."""
    from loadgen.core.sidecars import page_addresses

    pages = parse_texts(value)
    error = page_addresses.check_page_options(
        pages, "--energy", page_addresses.ENERGY_KEYWORDS, ("auto", "off")
    )
    if error is not None:
        raise error

    return pages


def parse_profile(value: object) -> ProfilerOptions:
    """Return which stage the server's profiler records, and for how long."""
    from loadgen.core.sidecars import profiler

    return profiler.parse_profile_option(parse_text(value))


def parse_option(flag: str, text: str | None, parser: Callable[[str], T]) -> T | None:
    """Return the value of an option, read by a parser of `units`; None if it was not specified.

    Raises UserError that names the flag and the text if the parser does not accept the text.
    """
    if text is None:
        return None
    try:
        return parser(text)
    except units.InvalidValueError as error:
        raise UserError(error.code, f'"{text}" {error}', f"{flag} {text}", error.hint) from None


def parse_share_option(flag: str, text: str) -> float:
    """Return a fraction that is written as 5% or as 0.05. Raises UserError if it is neither."""
    parser = units.share if text.strip().endswith("%") else _parse_number
    return parse_option(flag, text, parser) or 0.0


def _parse_number(text: str) -> float:
    """Return a number like 0.05. Raises units.InvalidValueError for another text."""
    try:
        return float(text)
    except ValueError:
        raise units.InvalidValueError(
            "invalid_value", "must be a fraction", "for example 5% or 0.05"
        ) from None
