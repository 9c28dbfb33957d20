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

    key_differences = _list_differences(
        _read_workload_keys(first.source_text), _read_workload_keys(other.source_text)
    )
    option_differences = _list_differences(
        _read_load_options(first.command), _read_load_options(other.command)
    )
    differences = [*key_differences, *option_differences]

    hidden_count = len(differences) - MAX_DIFFERENCES
    if hidden_count > 0:
        return [*differences[:MAX_DIFFERENCES], f"and {hidden_count} more"]
    return differences


def _list_differences(first: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """Yield each name whose values differ, with both values: `requests.turns.count: 3 vs. 4`."""
    names = {**first, **other}  # in the order of the first mapping
    for name in names:
        first_value = first.get(name, ABSENT)
        other_value = other.get(name, ABSENT)
        if first_value != other_value:
            yield f"{name}: {first_value} vs. {other_value}"


def _read_workload_keys(source_text: str) -> dict[str, str]:
    """Return the values of a workload file, by paths such as `requests.turns.count`.

    Keys that do not change the work of a run are left out. The result is empty for a text that is
    no YAML mapping, such as that of a trace.
    """
    try:
        content = yaml.safe_load(source_text)
    except yaml.YAMLError:
        return {}
    if not isinstance(content, Mapping):
        return {}

    values_by_path: dict[str, str] = {}
    for key, value in content.items():
        if key not in KEYS_OUTSIDE_FINGERPRINT:
            values_by_path.update(_iterate_scalars(value, str(key)))
    return values_by_path


def _iterate_scalars(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each scalar in a value of a YAML file.

    For example, the value {"turns": [3, 4]} at the path "requests" yields ("requests.turns[0]",
    "3") and ("requests.turns[1]", "4").
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_scalars(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _iterate_scalars(item, f"{path}[{index}]")
    else:
        yield path, str(value)


def _read_load_options(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line that change the load, with their values as text.

    The values of an option that is repeated are joined by spaces.
    """
    values_by_option = _group_values_by_option(command)
    return {
        option: " ".join(values)
        for option, values in values_by_option.items()
        if option in COMPARED_FLAGS
    }


def _group_values_by_option(command: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option of a command line, by its long flag.

    For example, `run file.yaml -c 8 --set a=1 --set b=2` gives {"--concurrency": ["8"], "--set":
    ["a=1", "b=2"]}. The words before the first option belong to no option.
    """
    values_by_option: dict[str, list[str]] = {}
    current_option = None
    for word in command:
        is_flag = word.startswith("-")
        if is_flag:
            flag, _, value = word.partition("=")
            current_option = SHORT_FLAGS.get(flag, flag)
            values = values_by_option.setdefault(current_option, [])
            if value:
                values.append(value)
        elif current_option is not None:
            values_by_option[current_option].append(word)

    return values_by_option
