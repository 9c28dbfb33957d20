"""What of a command line goes to the pods: its arguments, with the files that it names; keys apart. Reads files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import yaml

from loadgen.core.errors import UserError
from loadgen.core.workload import Replay, parts
from loadgen.kube import manifests
from loadgen.kube.manifests import FILES, KEYS, JobAsked
from loadgen.shell.run_options import COMMAND_OPTIONS

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.kube.options import PodOptions
    from loadgen.shell.given import Given

MOST_BYTES = 700_000  # of all files: a ConfigMap has a megabyte, and they go as base64
SECRET_FLAGS = {
    flag for name in ("api_key_file", "key", "cert") for flag in COMMAND_OPTIONS[name].names
}
OF_HERE = ("out", "force", "progress")  # options that say what happens on this machine


class Package(NamedTuple):
    """arguments: of `loadgen run` in a pod. files, keys: what they name there, by the name below FILES and KEYS."""

    arguments: tuple[str, ...]
    files: dict[str, bytes]
    keys: dict[str, bytes]


def flags_of(*groups: type) -> dict[str, int]:
    """The flags of groups of options -> 1, as each takes a value."""
    found: dict[str, int] = {}
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            (option,) = hints[field.name].__metadata__
            found |= dict.fromkeys([option.default, *option.param_decls], 1)
    return found


def check(given: Given, settings: Settings, workload: Workload) -> None:
    """Raises UserError for what the pods would not find."""
    if settings.url is None and not settings.targets:
        raise UserError(
            "missing_option",
            "no target",
            "--url",
            "a URL as the pods see it: http://NAME.NAMESPACE:8000",
        )
    values: list[Any] = [
        getattr(each, name, None)
        for each in parts(workload.requests).values()
        for name in ("path", "trace")
    ]
    values += [stage.arrival.file for stage in workload.stages if isinstance(stage.arrival, Replay)]
    typed = {given[name] and os.path.abspath(given[name]) for name in ("dataset", "trace")}
    package = os.fspath(Path(__file__).parent.parent)
    for path in (
        os.path.abspath(value) for value in values if isinstance(value, str | os.PathLike)
    ):
        if os.path.exists(path) and path not in typed and not path.startswith(package):
            what = "a file that the workload names does not go along"
            raise UserError(
                "unsupported",
                what,
                path,
                "name it by --dataset or --trace, or build it into the image",
            )


def package(
    given: Given, shown: Sequence[str], workload: str | None, own: Mapping[str, int]
) -> Package:
    """What goes to the pods. shown: the words of the command line as they may be seen; what is hidden in them goes as a
    key. own: flags that say what happens here -> how many values they take. Raises UserError.
    """
    takes = {
        flag: int(option.type is not bool)
        for option in COMMAND_OPTIONS.values()
        for flag in option.names
    }
    own = {**own, **{flag: takes[flag] for name in OF_HERE for flag in COMMAND_OPTIONS[name].names}}
    arguments, files, keys = ["run"], dict[str, bytes](), dict[str, bytes]()
    words = iter(
        [
            _hidden(word, keys) if "***" in seen and "***" not in word else word
            for word, seen in zip(given.arguments[2:], shown[2:], strict=True)
        ]
    )
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in own:
            if own[flag] and not equals:
                next(words, "")
            continue
        if not word.startswith("-"):
            arguments.append(
                _along(word, files, FILES, "" if word != workload else "workload.yaml")
            )
        elif takes.get(flag):
            value = value if equals else next(words, "")
            into, there = (keys, KEYS) if flag in SECRET_FLAGS else (files, FILES)
            arguments += [flag, _along(value, into, there)]
        else:
            arguments.append(word)
    if sum(map(len, files.values())) > MOST_BYTES or sum(map(len, keys.values())) > MOST_BYTES:
        hint = "build it into the image, or give ORG/NAME or hf:ORG/NAME, which the pods fetch"
        raise UserError(
            "too_large", f"files of more than {MOST_BYTES:,} bytes", ", ".join(files), hint
        )
    hidden = {_variable(name) for name in keys}
    return Package(
        tuple(word if word in hidden else word.replace("$", "$$") for word in arguments),
        files,
        keys,
    )


def _hidden(word: str, keys: dict[str, bytes]) -> str:
    """A word that holds a secret: Kubernetes puts it in the place of the variable when it starts the pod."""
    name = f"{manifests.ARGUMENT}{len(keys)}"
    keys[name] = word.encode()
    return _variable(name)


def _variable(name: str) -> str:
    return f"$({name})"  # in an argument; $$ is a dollar there


def _along(word: str, into: dict[str, bytes], there: str, named: str = "") -> str:
    """A word as it reads in a pod: of a file, its path there, and the file goes along."""
    path = Path(word)
    try:
        if not word or not path.is_file():
            return word
        data = path.read_bytes()
    except OSError:
        return word
    name = named or f"{len(into)}-" + re.sub(r"[^A-Za-z0-9._-]", "-", path.name)
    into[name] = data
    return f"{there}/{name}"


def asked(pods: PodOptions, name: str, package: Package, *, typed_workers: bool) -> JobAsked:
    """The run that is asked for: a worker in each pod, if nothing else was typed."""
    hidden = tuple(key for key in package.keys if key.startswith(manifests.ARGUMENT))
    workers = () if typed_workers else ("--workers", str(pods.pods))
    return JobAsked(
        name=name,
        image=pods.image,
        pods=pods.pods,
        arguments=(*package.arguments, *workers),
        secret=pods.secret or name,
        cpus=pods.cpus,
        memory=pods.memory,
        hold_s=pods.hold,
        hidden=hidden,
    )


def shown(asked: JobAsked, package: Package) -> str:
    """The manifests as YAML, the values of secrets left out."""
    hidden = dict.fromkeys([manifests.TOKEN_KEY, *package.keys], b"")
    made: Sequence[Any] = [
        manifests.job(asked),
        *manifests.beside(asked.name, package.files, hidden),
    ]
    plain = json.loads(json.dumps(made))  # without YAML's references between what is the same twice
    text: str = yaml.safe_dump_all(plain, sort_keys=False)
    return text
