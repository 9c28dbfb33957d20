"""Names the keys and options by which the workloads of two runs differ. Pure.

Two runs with unequal fingerprints did different work. Their manifests have the text of the workload
file and the command line, which show where the difference comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import yaml

from loadgen.core.results.manifest import RunManifest
from loadgen.core.workload.flags import LOAD_OPTIONS

MAX_DIFFERENCES = 5
"""So many keys and options are named. The number of the others follows."""

KEYS_OUTSIDE_FINGERPRINT = frozenset(
    {"name", "description", "seed", "schedule_seed", "salt", "stop_when", "accepted_length"}
)
"""Keys of a workload file that do not make it other work."""

SHORT_FLAGS = {"-c": "--concurrency", "-d": "--duration", "-n": "--num-requests"}
"""The short flags of options that change a load."""

OPTIONS_OUTSIDE_FINGERPRINT = frozenset({"seed", "schedule_seed", "salt", "slo", "stop_when"})
"""Options of a load that do not make it other work."""

COMPARED_FLAGS = frozenset(
    f"--{name.replace('_', '-')}"
    for name in LOAD_OPTIONS
    if name not in OPTIONS_OUTSIDE_FINGERPRINT
) | {"--set"}

ABSENT = "not set"


def list_field_differences(first: RunManifest | None, other: RunManifest | None) -> list[str]:
    """Return the keys of the workload files and the options by which two runs differ.

    For example: `["requests.turns.count: 3 vs. 4", "--input-tokens: 500 vs. not set"]`. The list is
    empty if a manifest is missing, or if both runs have the same file and options.
    """
    if first is None or other is None:
        return []

    differences = [
        *_list_differences(_read_keys(first.source_text), _read_keys(other.source_text)),
        *_list_differences(_read_options(first.command), _read_options(other.command)),
    ]
    hidden_count = len(differences) - MAX_DIFFERENCES
    if hidden_count > 0:
        return [*differences[:MAX_DIFFERENCES], f"and {hidden_count} more"]
    return differences


def _list_differences(first: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """Yield each name with different values in two mappings, in the order of the first one."""
    for name in {**first, **other}:
        first_value = first.get(name, ABSENT)
        other_value = other.get(name, ABSENT)
        if first_value != other_value:
            yield f"{name}: {first_value} vs. {other_value}"


def _read_keys(source_text: str) -> dict[str, str]:
    """Return the keys of a workload file with their values, by paths such as `requests.turns`.

    Return an empty mapping for a text that is no YAML mapping, such as that of a trace.
    """
    try:
        content = yaml.safe_load(source_text)
    except yaml.YAMLError:
        return {}
    if not isinstance(content, Mapping):
        return {}

    counted = {key: value for key, value in content.items() if key not in KEYS_OUTSIDE_FINGERPRINT}
    return dict(_flatten(counted, ""))


def _flatten(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the scalar values below a value of a YAML file, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    else:
        yield path, str(value)


def _read_options(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line that change the load, with their values as texts.

    An option that is repeated has all of its values.
    """
    values_by_option: dict[str, list[str]] = {}
    option = ""
    for word in command:
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            option = SHORT_FLAGS.get(flag, flag)
            values_by_option.setdefault(option, [])
            if value:
                values_by_option[option].append(value)
        elif option:
            values_by_option[option].append(word)

    return {
        option: " ".join(values)
        for option, values in values_by_option.items()
        if option in COMPARED_FLAGS
    }
