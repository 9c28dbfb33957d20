"""Translates command lines with options of other tools into command lines of this tool.

Other tools are `vllm bench serve`, SGLang's bench_serving, AIPerf, GuideLLM, Locust, k6 and others.
Everything here is pure: it takes and returns arguments of a command line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loadgen.cli.run_options import COMMAND_OPTIONS, SET_KEYS

_METRICS = {
    "e2el": "e2e",
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
}
"""Metrics of an SLO as other tools name them."""

Translate = Callable[[str], list[str]]
"""Returns the arguments that replace an option with this value, or none if none are needed."""


class Replacement(NamedTuple):
    """What stands for an option of another tool.

    Attributes:
        hint: What replaces the option, in a few arguments.
        translate: Returns the arguments that replace the option with its value. None if none can:
            the user has to decide.
        takes_value: Whether the option has a value; False for a switch.
        options: The options of this tool that the hint names. It applies to a command that has one
            of them, and to every command if it names none.
    """

    hint: str
    translate: Translate | None = None
    takes_value: bool = True
    options: tuple[str, ...] = ()


class KnownOption(NamedTuple):
    """An option that the command has: whether a value follows it."""

    takes_value: bool


class TypedOption(NamedTuple):
    """An option that was typed: its name, its value, and the arguments of both.

    An argument of the command has no name, and a switch has no value.
    """

    flag: str
    value: str
    arguments: tuple[str, ...]


class Translation(NamedTuple):
    """A command line with what has become of its unknown options.

    Attributes:
        unknown: The options that the command does not have, in their order.
        hints: What replaces each of them, by its name; "" if nothing is known to.
        arguments: The whole command line with the replacements. Options without one are left out.
        replaced: Those of the unknown options that other arguments replace.
    """

    unknown: tuple[str, ...]
    hints: Mapping[str, str]
    arguments: tuple[str, ...]
    replaced: frozenset[str]

    @property
    def is_changed(self) -> bool:
        """Whether other arguments replace an option."""
        return bool(self.replaced)

    @property
    def command(self) -> str:
        """The translated command line as it is typed in a shell."""
        return shlex.join(("loadgen", *self.arguments))


def _rename(flag: str) -> Replacement:
    return Replacement(flag, lambda value: [flag, value], options=(flag,))


def _set_key(key: str) -> Replacement:
    hint = f"--set {key}={SET_KEYS[key].set_metavar}"
    return Replacement(hint, lambda value: ["--set", f"{key}={value}"], options=("--set",))


def _leave_out(reason: str, *, takes_value: bool = False) -> Replacement:
    return Replacement(f"not needed: {reason}", lambda _: [], takes_value)


def _explain(hint: str, *options: str) -> Replacement:
    return Replacement(hint, None, options=options)


def _body_field(name: str) -> Replacement:
    def translate(value: str) -> list[str]:
        number = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value)
        return ["--extra-body", f'{{"{name}": {value if number else json.dumps(value)}}}']

    hint = f"--extra-body '{{\"{name}\": ...}}'"
    return Replacement(hint, translate, options=("--extra-body",))


def _progress(kind: str) -> Replacement:
    return Replacement(
        f"--progress {kind}", lambda _: ["--progress", kind], False, options=("--progress",)
    )


def _milliseconds(term: str) -> str:
    """Return a term of an SLO with a unit: other tools write milliseconds without one."""
    return f"{term}ms" if re.fullmatch(r"\w+:[0-9.]+", term) else term


def _goodput(value: str) -> list[str]:
    arguments: list[str] = []
    for term in value.split():
        metric, _, limit = term.partition(":")
        arguments += ["--slo", _milliseconds(f"{_METRICS.get(metric, metric)}:{limit}")]
    return arguments


def _single_term(metric: str) -> Replacement:
    def translate(value: str) -> list[str]:
        return ["--slo", _milliseconds(f"{metric}:{value}")]

    return Replacement(f"--slo {metric}:TIME", translate, options=("--slo",))


def _seconds(key: str) -> Replacement:
    def translate(value: str) -> list[str]:
        unit = "s" if re.fullmatch("[0-9.]+", value) else ""
        return ["--set", f"{key}={value}{unit}"]

    return Replacement(f"--set {key}=TIME", translate, options=("--set",))


def _warmup_requests(value: str) -> list[str]:
    return ["--warmup", f"{value}req"]


def _endpoint(value: str) -> list[str]:
    kinds = {"chat/completions": "chat", "completions": "completions", "embeddings": "embeddings"}
    for ending, kind in kinds.items():
        if value.endswith(ending):
            return ["--api", kind]
    return []


def _api_flavor(value: str) -> list[str]:
    """Return the options for `--backend` and `--endpoint-type` of vLLM, SGLang and AIPerf."""
    flavors = {
        "openai": ["--api", "completions"],
        "openai-chat": ["--api", "chat"],
        "openai-embeddings": ["--api", "embeddings"],
        "vllm": ["--server", "vllm", "--api", "completions"],
        "sglang-oai": ["--server", "sglang", "--api", "completions"],
        "sglang-oai-chat": ["--server", "sglang", "--api", "chat"],
        "tensorrt-llm": ["--server", "trtllm", "--api", "completions"],
    }
    return flavors.get(value, ["--api", value])


def _synthetic_data(value: str) -> list[str]:
    """Return the options for GuideLLM's `--data prompt_tokens=256,output_tokens=128`."""
    if "=" not in value:
        return ["--dataset", value]
    pairs = dict(pair.partition("=")[::2] for pair in value.strip("{}").split(","))
    arguments: list[str] = []
    for key, flag in (("prompt_tokens", "--input-tokens"), ("output_tokens", "--output-tokens")):
        if key in pairs:
            arguments += [flag, pairs[key]]
    return arguments


def _arrival(value: str) -> list[str]:
    """Return the options for a law of arrivals: Poisson is the default."""
    return ["--set", "burstiness=1000"] if value in ("constant", "uniform", "fixed") else []


_API_KEY = _explain(
    "the key is read from OPENAI_API_KEY or --api-key-file FILE, since a command line is visible "
    "to every user of the host",
    "--api-key-file",
)
_ARRIVAL = Replacement(
    "arrivals are Poisson; --set burstiness=1000 makes them almost constant, and arrival: "
    "{constant: 10/s} in a workload file exactly",
    _arrival,
    options=("--set",),
)
_CONCURRENCY = Replacement(
    "-c N, the number of requests in flight (loadgen size counts the machines for N users)",
    lambda value: ["--concurrency", value],
    options=("--concurrency",),
)
_REPORT_FILE = _explain(
    "a run leaves a folder (-o names it), and loadgen export FOLDER writes files"
)
_STORED = _leave_out("every run is stored, in the folder of -o")
_REQUESTS = Replacement(
    "-n N; --repeat N repeats whole runs",
    lambda value: ["--num-requests", value],
    options=("--num-requests",),
)
_WARMUP = Replacement("--warmup Nreq", _warmup_requests, options=("--warmup",))
_STREAMED = _leave_out("responses are streamed, unless --no-stream is given")
_OUTPUT_FOLDER = Replacement("-o FOLDER", lambda value: ["--out", value], options=("--out",))
_API_FLAVOR = Replacement("--api KIND, --server KIND", _api_flavor, options=("--api", "--server"))

REPLACEMENTS: dict[str, Replacement] = {
    "--api-key": _API_KEY,
    "--apikey": _API_KEY,
    "--model-api-key": _API_KEY,
    "--token": _API_KEY,
    "--arrival": _ARRIVAL,
    "--arrival-smoothness": _set_key("burstiness"),
    "--arrival-pattern": _ARRIVAL,
    "--backend": _API_FLAVOR,
    "--endpoint-type": _API_FLAVOR,
    "--connections": _CONCURRENCY,
    "--num-concurrency": _CONCURRENCY,
    "--max-vus": _CONCURRENCY,
    "--threads": _CONCURRENCY,
    "--users": _CONCURRENCY,
    "--vus": _CONCURRENCY,
    "--spawn-rate": _explain(
        "--stagger TIME, the time until all requests are in flight", "--stagger"
    ),
    "--csv": _REPORT_FILE,
    "--export": _REPORT_FILE,
    "--html": _REPORT_FILE,
    "--report": _REPORT_FILE,
    "--output-file": _REPORT_FILE,
    "--result-filename": _REPORT_FILE,
    "--output": _OUTPUT_FOLDER,
    "--output-dir": _OUTPUT_FOLDER,
    "--artifact-dir": _OUTPUT_FOLDER,
    "--save-result": _STORED,
    "--save-detailed": _STORED,
    "--append-result": _STORED,
    "--data": Replacement(
        "--input-tokens N --output-tokens N, or --dataset FILE for prompts of your own",
        _synthetic_data,
        options=("--input-tokens",),
    ),
    "--dataset-name": _leave_out(
        "prompts are generated from --input-tokens and --output-tokens, or read from --dataset",
        takes_value=True,
    ),
    "--endpoint": Replacement(
        "--api KIND, or a path in front of /v1 in --url", _endpoint, options=("--api",)
    ),
    "--format": _rename("--as"),
    "--goodput": Replacement(
        "--slo METRIC:LIMIT, with a unit: --slo ttft:2s", _goodput, options=("--slo",)
    ),
    "--host": _explain("--url http://HOST:PORT", "--url"),
    "--port": _explain("--url http://HOST:PORT", "--url"),
    "--ignore-eos": _leave_out("responses get the requested length where the server can do that"),
    "--temperature": _body_field("temperature"),
    "--top-p": _body_field("top_p"),
    "--iterations": _REQUESTS,
    "--loops": _REQUESTS,
    "--number": _REQUESTS,
    "--max-requests": _REQUESTS,
    "--num-warmups": _WARMUP,
    "--warmup-request-count": _WARMUP,
    "--warmup-requests": _WARMUP,
    "--metric-percentiles": _set_key("percentiles"),
    "--percentile-metrics": _leave_out("every metric has its percentiles", takes_value=True),
    "--prefill-concurrency": _set_key("max_in_prefill"),
    "--prompt": _explain('--dataset FILE, with {"prompt": "..."} on each line', "--dataset"),
    "--quiet": _progress("off"),
    "--verbose": _progress("plain"),
    "-r": _rename("--request-rate"),
    "--rate-type": _explain(
        "--request-rate for an open loop, -c for a closed one", "--request-rate"
    ),
    "--stream": _STREAMED,
    "--streaming": _STREAMED,
    "--think-time": _explain(
        "think_time: in the workload file, docs/reference/workload-file.md", "--dataset"
    ),
    "--tpot": _single_term("tpot"),
    "--ttft": _single_term("ttft"),
    "--trust-remote-code": _leave_out("no code of a model is executed"),
}
"""Options of other tools that no option of this one replaces under the same meaning of its value.

`Option.other_tools` in the table of options has those that one option replaces as they are.
"""

_RATES = ("--request-rate", "--rate", "--rps", "--qps", "-r")
_MLPERF_RATE = "--target-qps"


def find_replacement(flag: str, known: Mapping[str, KnownOption]) -> Replacement | None:
    """Return what replaces an option of another tool in a command with these options."""
    if flag in _RATES and _MLPERF_RATE in known:
        return _rename(_MLPERF_RATE)
    for table in (REPLACEMENTS, _renamed_options(), _set_keys_as_options()):
        replacement = table.get(flag)
        if replacement is None:
            continue
        if not replacement.options or not known.keys().isdisjoint(replacement.options):
            return replacement
    return None


def _renamed_options() -> dict[str, Replacement]:
    """Return flags of other tools with the option of this one that has the same meaning."""
    return {
        flag: Replacement(
            f"did you mean {option.flags[0]}?",
            _rename(option.flags[0]).translate,
            options=option.flags,
        )
        for option in COMMAND_OPTIONS.values()
        for flag in option.other_tools
    }


def _set_keys_as_options() -> dict[str, Replacement]:
    """Return the keys of `--set`, as other tools spell them: as options of their own."""
    return {f"--{key.replace('_', '-')}": _set_key(key) for key in SET_KEYS}


def translate(
    arguments: Sequence[str], depth: int, known: Mapping[str, KnownOption]
) -> Translation:
    """Return a command line with its unknown options replaced.

    Args:
        arguments: The command line without the name of the program.
        depth: The number of arguments that name the command: 2 for `mlperf server`.
        known: The options of the command.
    """
    translated = list(arguments[:depth])
    unknown: list[str] = []
    hints: dict[str, str] = {}
    replaced: set[str] = set()
    address: dict[str, str] = {}
    for option in _parse(arguments[depth:], known):
        if not option.flag or option.flag in known:
            translated += option.arguments
            continue
        unknown.append(option.flag)
        replacement = find_replacement(option.flag, known)
        hints[option.flag] = "" if replacement is None else replacement.hint
        if option.flag in ("--host", "--port"):
            address[option.flag] = option.value
        elif replacement is not None and replacement.translate is not None:
            new_words = replacement.translate(option.value)
            translated += new_words
            if new_words:
                replaced.add(option.flag)
    if address and "--url" in known and "--url" not in translated:
        port = address.get("--port", "8000")
        translated += ["--url", f"http://{address.get('--host', 'localhost')}:{port}"]
        replaced |= address.keys()
    translated = _limit_concurrency(_merge_bodies(translated))
    return Translation(tuple(dict.fromkeys(unknown)), hints, tuple(translated), frozenset(replaced))


def _limit_concurrency(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with one of a rate and a concurrency, which other tools combine.

    There a concurrency beside a rate limits the requests in flight, and beside an infinite rate it
    is a closed loop.
    """
    if "--request-rate" not in arguments or "--concurrency" not in arguments:
        return list(arguments)
    rate_place = arguments.index("--request-rate")
    if arguments[rate_place + 1 : rate_place + 2] == ["inf"]:
        return [*arguments[:rate_place], *arguments[rate_place + 2 :]]
    return ["--max-in-flight" if word == "--concurrency" else word for word in arguments]


def _merge_bodies(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with several values of `--extra-body` merged. The last one wins."""
    merged: dict[str, object] = {}
    rest: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        if word != "--extra-body":
            rest.append(word)
            continue
        value = next(remaining, "{}")
        try:
            merged |= json.loads(value)
        except (ValueError, TypeError):
            return list(arguments)
    return [*rest, "--extra-body", json.dumps(merged)] if merged else rest


def _parse(arguments: Sequence[str], known: Mapping[str, KnownOption]) -> list[TypedOption]:
    """Return the options and arguments of a command line, its unknown options too.

    The word after an unknown option counts as its value, unless it begins with a dash.
    """
    options: list[TypedOption] = []
    place = 0
    while place < len(arguments):
        option = _parse_one(arguments, place, known)
        options.append(option)
        place += len(option.arguments)
    return options


def _parse_one(
    arguments: Sequence[str], place: int, known: Mapping[str, KnownOption]
) -> TypedOption:
    word = arguments[place]
    is_option = re.match(r"--?[A-Za-z]", word) is not None
    if not is_option:
        return TypedOption("", word, (word,))
    flag, equals, value = _split_option(word)
    if equals:
        return TypedOption(flag, value, (word,))
    following = _values_after(flag, arguments[place + 1 :], known)
    return TypedOption(flag, " ".join(following), (word, *following))


def _split_option(word: str) -> tuple[str, bool, str]:
    """Return the name of an option, whether its value is in the same word, and the value."""
    if word.startswith("--"):
        flag, equals, value = word.partition("=")
        return flag, bool(equals), value
    return word[:2], len(word) > 2, word[2:]


def _values_after(
    flag: str, arguments: Sequence[str], known: Mapping[str, KnownOption]
) -> tuple[str, ...]:
    """Return the arguments after an option that are its values."""
    if flag in known:
        return tuple(arguments[:1]) if known[flag].takes_value else ()
    replacement = find_replacement(flag, known)
    if replacement is not None and not replacement.takes_value:
        return ()
    if flag == "--goodput":
        values = []
        for word in arguments:
            if re.fullmatch(r"\w+:\S+", word) is None:
                break
            values.append(word)
        return tuple(values)
    is_value = bool(arguments) and re.match(r"-[A-Za-z-]", arguments[0]) is None
    return tuple(arguments[:1]) if is_value else ()
