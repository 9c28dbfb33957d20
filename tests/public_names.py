"""Collect the public names for `make_oracle.py`.

These are the names in `__all__`, keywords, flags, keys of files and error codes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import reduce
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

import loadgen_sdk
from command_line import all_commands
from repository_paths import ROOT

import loadgen
from loadgen.cli.app import run_command_line
from loadgen.core import errors

NOT_OURS = {*sys.stdlib_module_names, "msgspec"}


def run_in_directory(directory: Path, *call: str) -> tuple[dict[str, Any], str]:
    """Run a command line in the directory `where`.

    Returns its exit code with the codes of its errors, and what it printed on stdout.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            ending: dict[str, Any] = {"exit": run_command_line(call)}
        except errors.CombinedError as faults:
            ending = {"exit": faults.exit_code, "faults": [fault.code for fault in faults.errors]}
        except errors.LoadgenError as fault:
            ending = {"exit": fault.exit_code, "faults": [fault.code]}
    return ending, out.buffer.getvalue().decode()


def public(package: Any) -> dict[str, Any]:
    """Return the parameters of each name in `__all__`, and the public members of each class.

    Members that every Python class has are left out.
    """
    names: dict[str, Any] = {}
    for name in sorted(package.__all__):
        member = getattr(package, name)
        names[name] = keywords(member)
        if isinstance(member, type):
            inherited_names = {
                name
                for base in member.__mro__
                if base.__module__.partition(".")[0] in NOT_OURS
                for name in dir(base)
            }
            public = {name for name in dir(member) if not name.startswith("_")}
            names[name] = {"takes": names[name], "has": sorted(public - inherited_names)}
    return names


def keywords(call: Any) -> list[str]:
    """Return the names of the parameters.

    The list is empty for an object that cannot be called and for an exception without parameters
    of its own.
    """
    if not callable(call) or (isinstance(call, type) and call.__init__ is Exception.__init__):
        return []
    return list(inspect.signature(call).parameters)


def entry_points() -> dict[str, dict[str, str]]:
    """Return the entry points of the distributions and the names that they lead to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    return {
        group: {
            name: type(EntryPoint(name, value, group).load()).__name__
            for name, value in rows.items()
        }
        for group, rows in groups.items()
    }


def commands() -> dict[str, Any]:
    """Each command with its parser; one of a group by both names."""
    return dict(sorted(all_commands().items()))


def flags(command: Any) -> list[str]:
    """Return the arguments of a command and all spellings of its flags."""
    return sorted(name for param in command.params for name in (*param.opts, *param.secondary_opts))


def keys_of_file(kind: str) -> dict[str, list[str]]:
    """Return all keys that a file of this kind may have, such as `stages[].arrival.poisson`."""
    schema = json.loads(run_in_directory(ROOT, "export", "--schema", kind)[1])
    paths: dict[str, list[str]] = {}
    for path in sorted(set(key_paths(schema, schema, ()))):
        paths.setdefault(path.partition(".")[0].removesuffix("[]"), []).append(path)
    return paths


def key_paths(form: Any, schema: Any, inside: tuple[str, ...], path: str = "") -> Iterator[str]:
    named = form.get("$ref")
    if named and named not in inside:
        did_you_mean = reduce(
            lambda node, step: node[step], named.removeprefix("#/").split("/"), schema
        )
        yield from key_paths(did_you_mean, schema, (*inside, named), path)
    for word in ("anyOf", "oneOf", "allOf"):
        for child_form in form.get(word, ()):
            yield from key_paths(child_form, schema, inside, path)
    for key, child_form in form.get("properties", {}).items():
        yield f"{path}.{key}".lstrip(".")
        yield from key_paths(child_form, schema, inside, f"{path}.{key}".lstrip("."))
    for word, sign in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(form.get(word), dict):
            yield from key_paths(form[word], schema, inside, path + sign)


NAMES: dict[str, Callable[[], Any]] = {
    "loadgen": lambda: public(loadgen),
    "loadgen_sdk": lambda: public(loadgen_sdk),
    "entry points": entry_points,
    "codes of faults": lambda: sorted(
        code for group in get_args(errors.Code) for code in get_args(group) or (group,)
    ),
    "flags": lambda: {name: flags(command) for name, command in commands().items()},
    **{
        f"keys of a {kind} file": lambda kind=kind: keys_of_file(kind)
        for kind in ("workload", "contract", "prices", "targets")
    },
}
