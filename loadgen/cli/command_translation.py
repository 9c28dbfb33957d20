"""Translates command lines with options of other tools into command lines of this tool.

Other tools are `vllm bench serve`, SGLang's bench_serving, AIPerf, GuideLLM, Locust, k6 and others.
Everything here is pure: it takes and returns arguments of a command line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from loadgen.cli.run_options import COMMAND_OPTIONS, SET_KEYS

_METRICS_OF_OTHER_TOOLS = {
    "e2el": "e2e",
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
}
"""The metrics of an SLO as other tools name them, with their names in this tool."""

_NUMBER = r"-?[0-9]+(\.[0-9]+)?"
_DEFAULT_PORT = "8000"  # of vLLM, whose `--host` and `--port` become `--url`

TranslateValue = Callable[[str], list[str]]
"""Takes the value of an option of another tool and returns the arguments that replace both.

The list is empty if nothing needs to replace the option.
"""


class Replacement(NamedTuple):
    """How an option of another tool is written with the options of this tool.

    Attributes:
        hint: What the user is told to write instead.
        translate: Returns the arguments that replace the option with its value. None if they do not
            follow from the value: the user has to read the hint and decide.
        takes_value: Whether the option has a value; False for a switch.
        options: The options of this tool that the hint names. The replacement applies to a command
            that has one of them. Without any, it applies to every command.
    """

    hint: str
    translate: TranslateValue | None = None
    takes_value: bool = True
    options: tuple[str, ...] = ()


class KnownOption(NamedTuple):
    """An option that the command has, and whether a value follows it."""

    takes_value: bool


class TypedOption(NamedTuple):
    """An option or an argument of the command line, split into its parts.

    Attributes:
        flag: The name of the option; "" for an argument, for example the name of a workload.
        value: The value of the option; "" for a switch. For an argument, the argument itself.
        arguments: The arguments of the command line that form the option: `("--seed", "1")`, or
            `("--seed=1",)`.
    """

    flag: str
    value: str
    arguments: tuple[str, ...]


class Translation(NamedTuple):
    """A translated command line, and what became of the options that this tool does not have.

    Attributes:
        unknown: The options that the command does not have, in the order of the command line.
        hints: For each unknown option, what to write instead; "" if no replacement is known.
        arguments: The whole command line with the replacements. Unknown options without one are
            left out.
        replaced: The unknown options that other arguments replace.
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


def _replace_by_option(flag: str, hint: str = "") -> Replacement:
    """Return the replacement by an option that takes the same value under another name."""

    def translate_value(value: str) -> list[str]:
        return [flag, value]

    return Replacement(hint or flag, translate_value, options=(flag,))


def _replace_by_set_key(key: str) -> Replacement:
    """Return the replacement by `--set KEY=VALUE` with the same value."""

    def translate_value(value: str) -> list[str]:
        return ["--set", f"{key}={value}"]

    hint = f"--set {key}={SET_KEYS[key].set_metavar}"
    return Replacement(hint, translate_value, options=("--set",))


def _leave_out(reason: str, *, takes_value: bool = False) -> Replacement:
    """Return the replacement of an option that is not needed here, for a stated reason."""

    def translate_value(_value: str) -> list[str]:
        return []

    return Replacement(f"not needed: {reason}", translate_value, takes_value)


def _explain(hint: str, *options: str) -> Replacement:
    """Return a hint for an option whose replacement does not follow from its value."""
    return Replacement(hint, None, options=options)


def _replace_by_body_field(name: str) -> Replacement:
    """Return the replacement of a sampling parameter by a field of the request body.

    `--temperature 0` of another tool becomes `--extra-body '{"temperature": 0}'`.
    """

    def translate_value(value: str) -> list[str]:
        is_number = re.fullmatch(_NUMBER, value) is not None
        json_value = value if is_number else json.dumps(value)
        return ["--extra-body", f'{{"{name}": {json_value}}}']

    hint = f"--extra-body '{{\"{name}\": ...}}'"
    return Replacement(hint, translate_value, options=("--extra-body",))


def _replace_by_progress(kind: str) -> Replacement:
    """Return the replacement of a switch like `--quiet` by `--progress KIND`."""

    def translate_value(_value: str) -> list[str]:
        return ["--progress", kind]

    return Replacement(
        f"--progress {kind}", translate_value, takes_value=False, options=("--progress",)
    )


def _add_unit(objective: str) -> str:
    """Return `ttft:500` as `ttft:500ms`: other tools write limits in ms without a unit."""
    has_no_unit = re.fullmatch(r"\w+:[0-9.]+", objective) is not None
    return f"{objective}ms" if has_no_unit else objective


def _translate_goodput(value: str) -> list[str]:
    """Return `--slo` options for vLLM's `--goodput ttft:500 tpot:50`."""
    arguments: list[str] = []
    for objective in value.split():
        their_metric, _, limit = objective.partition(":")
        metric = _METRICS_OF_OTHER_TOOLS.get(their_metric, their_metric)
        arguments += ["--slo", _add_unit(f"{metric}:{limit}")]
    return arguments


def _replace_by_objective(metric: str) -> Replacement:
    """Return the replacement of an option for one limit, like `--ttft 500`, by `--slo`."""

    def translate_value(value: str) -> list[str]:
        return ["--slo", _add_unit(f"{metric}:{value}")]

    return Replacement(f"--slo {metric}:TIME", translate_value, options=("--slo",))


def _translate_warmup_requests(value: str) -> list[str]:
    return ["--warmup", f"{value}req"]


def _translate_endpoint(value: str) -> list[str]:
    """Return `--api` for the path of an endpoint like `/v1/completions`."""
    # The longer path comes first, because it ends with the shorter one.
    apis = {"chat/completions": "chat", "completions": "completions", "embeddings": "embeddings"}
    for path, api in apis.items():
        if value.endswith(path):
            return ["--api", api]
    return []


def _translate_api_flavor(value: str) -> list[str]:
    """Return `--api` and `--server` for `--backend` or `--endpoint-type` of another tool.

    vLLM, SGLang and AIPerf name the API and sometimes the server by one value. A value that is not
    known is passed to `--api`, whose error message lists what is possible.
    """
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


def _translate_synthetic_data(value: str) -> list[str]:
    """Return the options for GuideLLM's `--data prompt_tokens=256,output_tokens=128`.

    A value without `=` is the path or name of a dataset.
    """
    if "=" not in value:
        return ["--dataset", value]

    lengths: dict[str, str] = {}
    for pair in value.strip("{}").split(","):
        name, _, tokens = pair.partition("=")
        lengths[name] = tokens

    arguments: list[str] = []
    if "prompt_tokens" in lengths:
        arguments += ["--input-tokens", lengths["prompt_tokens"]]

    if "output_tokens" in lengths:
        arguments += ["--output-tokens", lengths["output_tokens"]]

    return arguments


def _translate_arrival(value: str) -> list[str]:
    """Return the option for an arrival process. Poisson, the default, needs none."""
    is_constant = value in ("constant", "uniform", "fixed")
    return ["--set", "burstiness=1000"] if is_constant else []


def _translate_concurrency(value: str) -> list[str]:
    return ["--concurrency", value]


def _translate_request_count(value: str) -> list[str]:
    return ["--num-requests", value]


def _translate_output_folder(value: str) -> list[str]:
    return ["--out", value]


_API_KEY = _explain(
    (
        "the key is read from OPENAI_API_KEY or --api-key-file FILE, because every user "
        "of the host can see a command line"
    ),
    "--api-key-file",
)
_ARRIVAL = Replacement(
    (
        "arrivals are Poisson; --set burstiness=1000 makes them almost constant, and "
        "arrival: {constant: 10/s} in a workload file makes them exactly constant"
    ),
    _translate_arrival,
    options=("--set",),
)
_CONCURRENCY = Replacement(
    "use -c N for N concurrent requests (loadgen size computes the machines for N users)",
    _translate_concurrency,
    options=("--concurrency",),
)
_REPORT_FILE = _explain(
    "a run writes a folder (-o names it), and loadgen export FOLDER converts it to files"
)
_STORED = _leave_out("every run is stored, in the folder given by -o")
_REQUESTS = Replacement(
    "use -n N for N requests, or --repeat N to repeat the whole run",
    _translate_request_count,
    options=("--num-requests",),
)
_WARMUP = Replacement("--warmup Nreq", _translate_warmup_requests, options=("--warmup",))
_STREAMED = _leave_out("responses are streamed by default; --no-stream turns that off")
_OUTPUT_FOLDER = Replacement("-o FOLDER", _translate_output_folder, options=("--out",))
_API_FLAVOR = Replacement(
    "use --api KIND for the API and --server KIND for the server software",
    _translate_api_flavor,
    options=("--api", "--server"),
)

REPLACEMENTS: dict[str, Replacement] = {
    "--api-key": _API_KEY,
    "--apikey": _API_KEY,
    "--model-api-key": _API_KEY,
    "--token": _API_KEY,
    "--arrival": _ARRIVAL,
    "--arrival-smoothness": _replace_by_set_key("burstiness"),
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
        "use --stagger TIME, the time over which the first requests are spread", "--stagger"
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
        "use --input-tokens N --output-tokens N, or --dataset FILE for your own prompts",
        _translate_synthetic_data,
        options=("--input-tokens",),
    ),
    "--dataset-name": _leave_out(
        "prompts are generated from --input-tokens and --output-tokens, or read from --dataset",
        takes_value=True,
    ),
    "--endpoint": Replacement(
        "use --api KIND, or put the path in front of /v1 into --url",
        _translate_endpoint,
        options=("--api",),
    ),
    "--format": _replace_by_option("--as"),
    "--goodput": Replacement(
        "use --slo METRIC:LIMIT with a unit, for example --slo ttft:2s",
        _translate_goodput,
        options=("--slo",),
    ),
    "--host": _explain("--url http://HOST:PORT", "--url"),
    "--port": _explain("--url http://HOST:PORT", "--url"),
    "--ignore-eos": _leave_out("responses have the requested length if the server can force it"),
    "--temperature": _replace_by_body_field("temperature"),
    "--top-p": _replace_by_body_field("top_p"),
    "--iterations": _REQUESTS,
    "--loops": _REQUESTS,
    "--number": _REQUESTS,
    "--max-requests": _REQUESTS,
    "--num-warmups": _WARMUP,
    "--warmup-request-count": _WARMUP,
    "--warmup-requests": _WARMUP,
    "--metric-percentiles": _replace_by_set_key("percentiles"),
    "--percentile-metrics": _leave_out(
        "percentiles of every metric are always reported", takes_value=True
    ),
    "--prefill-concurrency": _replace_by_set_key("max_in_prefill"),
    "--prompt": _explain(
        'use --dataset FILE, a file with {"prompt": "..."} on each line', "--dataset"
    ),
    "--quiet": _replace_by_progress("off"),
    "--verbose": _replace_by_progress("plain"),
    "-r": _replace_by_option("--request-rate"),
    "--rate-type": _explain(
        "use --request-rate for an open loop, or -c for a closed loop", "--request-rate"
    ),
    "--stream": _STREAMED,
    "--streaming": _STREAMED,
    "--think-time": _explain(
        "use think_time: in the workload file, see docs/reference/workload-file.md", "--dataset"
    ),
    "--tpot": _replace_by_objective("tpot"),
    "--ttft": _replace_by_objective("ttft"),
    "--trust-remote-code": _leave_out("not needed: loadgen runs no code of a model"),
}
"""The options of other tools whose value has to be translated, or that need an explanation.

Options that have the same meaning here under another name are in `Option.other_tools` of the table
in `run_options.py`.
"""

_RATE_OPTIONS = ("--request-rate", "--rate", "--rps", "--qps", "-r")
"""The names of the request rate in this tool and in others."""

_MLPERF_RATE_OPTION = "--target-qps"
"""The name of the request rate in `loadgen mlperf`, which has no --request-rate."""


def find_replacement(flag: str, known: Mapping[str, KnownOption]) -> Replacement | None:
    """Return how an option of another tool is written for a command of this tool.

    Args:
        flag: The name of the option in the other tool.
        known: The options of the command, by name.

    Returns:
        The replacement, or None if there is none that the command would accept.
    """
    # Every other replacement of a rate is --request-rate, which the commands of `loadgen mlperf` do
    # not have: they call the rate --target-qps, as MLPerf does.
    is_mlperf_command = _MLPERF_RATE_OPTION in known
    if is_mlperf_command and flag in _RATE_OPTIONS:
        return _replace_by_option(_MLPERF_RATE_OPTION)

    replacements_by_precedence = (
        REPLACEMENTS,
        _replacements_of_renamed_options(),
        _replacements_of_set_keys(),
    )
    for replacements in replacements_by_precedence:
        replacement = replacements.get(flag)
        if replacement is None:
            continue

        # A replacement without options, for example "not needed", applies to every command.
        needs_no_option = not replacement.options
        command_has_option = any(option in known for option in replacement.options)
        if needs_no_option or command_has_option:
            return replacement

    return None


def _replacements_of_renamed_options() -> dict[str, Replacement]:
    """Return a replacement for each option that has the same meaning here under another name.

    The result is keyed by the name in the other tool, for example `--target` for `--url`.
    """
    replacements: dict[str, Replacement] = {}
    for option in COMMAND_OPTIONS.values():
        for their_flag in option.other_tools:
            our_flag = option.flags[0]
            replacement = _replace_by_option(our_flag, hint=f"did you mean {our_flag}?")
            replacements[their_flag] = replacement._replace(options=option.flags)
    return replacements


def _replacements_of_set_keys() -> dict[str, Replacement]:
    """Return a replacement for each key of `--set` that a user may type as an option.

    `--max-in-prefill 4`, which is no option, is replaced by `--set max_in_prefill=4`.
    """
    return {f"--{key.replace('_', '-')}": _replace_by_set_key(key) for key in SET_KEYS}


def translate(
    arguments: Sequence[str], depth: int, known: Mapping[str, KnownOption]
) -> Translation:
    """Return a command line whose unknown options are replaced by options of this tool.

    A command with unknown options is not run. The error message shows this translation, so that
    someone who used another tool before can copy the command line.

    Args:
        arguments: The command line without the name of the program.
        depth: The number of arguments that name the command: 2 for `mlperf server`.
        known: The options of the command.
    """
    options = _parse_options(arguments[depth:], known)
    unknown_options = [option for option in options if option.flag and option.flag not in known]
    replaced_flags: set[str] = set()

    command_line = list(arguments[:depth])
    for option in options:
        translated_arguments = _translate_option(option, known)
        command_line += translated_arguments
        is_unknown = option in unknown_options
        if is_unknown and translated_arguments:
            replaced_flags.add(option.flag)

    # `--host` and `--port` make a URL together, so they are replaced after all other options.
    needs_url = "--url" in known and "--url" not in command_line
    if needs_url:
        address_options = [option for option in unknown_options if _is_part_of_address(option)]
        command_line += _join_address(address_options)
        replaced_flags |= {option.flag for option in address_options}

    command_line = _merge_extra_bodies(command_line)
    command_line = _separate_rate_from_concurrency(command_line)
    unknown_flags = tuple(dict.fromkeys(option.flag for option in unknown_options))

    return Translation(
        unknown=unknown_flags,
        hints={flag: _hint_for(flag, known) for flag in unknown_flags},
        arguments=tuple(command_line),
        replaced=frozenset(replaced_flags),
    )


def _translate_option(option: TypedOption, known: Mapping[str, KnownOption]) -> Sequence[str]:
    """Return the arguments that stand for one option or argument in the translated command line.

    The list is empty if nothing replaces an unknown option. `--host` and `--port` are left to
    `_join_address`, because only together they make a URL.
    """
    if not option.flag or option.flag in known:
        return option.arguments
    if _is_part_of_address(option):
        return ()

    replacement = find_replacement(option.flag, known)
    if replacement is None or replacement.translate is None:
        return ()

    return replacement.translate(option.value)


def _hint_for(flag: str, known: Mapping[str, KnownOption]) -> str:
    """Return what to write instead of an unknown option, or "" if no replacement is known."""
    replacement = find_replacement(flag, known)
    return "" if replacement is None else replacement.hint


def _is_part_of_address(option: TypedOption) -> bool:
    return option.flag in ("--host", "--port")


def _join_address(address_options: Sequence[TypedOption]) -> list[str]:
    """Return `--url` for the options --host and --port, or an empty list if there are none."""
    if not address_options:
        return []
    values = {option.flag: option.value for option in address_options}
    host = values.get("--host", "localhost")
    port = values.get("--port", _DEFAULT_PORT)
    return ["--url", f"http://{host}:{port}"]


def _separate_rate_from_concurrency(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --request-rate and --concurrency in one command line.

    Other tools combine them. `--request-rate inf --max-concurrency 64` is a closed loop with 64
    requests in flight, which --concurrency alone means here. `--request-rate 10 --max-concurrency
    64` is an open loop with at most 64 requests in flight, which --max-in-flight limits here.
    """
    if "--request-rate" not in arguments or "--concurrency" not in arguments:
        return list(arguments)

    rate_flag_index = arguments.index("--request-rate")
    rate_value_index = rate_flag_index + 1
    has_rate_value = rate_value_index < len(arguments)
    is_rate_unlimited = has_rate_value and arguments[rate_value_index] == "inf"
    if is_rate_unlimited:
        return [*arguments[:rate_flag_index], *arguments[rate_value_index + 1 :]]

    return [
        "--max-in-flight" if argument == "--concurrency" else argument for argument in arguments
    ]


def _merge_extra_bodies(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with all values of `--extra-body` merged into one at the end.

    Several options of another tool, like `--temperature` and `--top-p`, each become `--extra-body`,
    which can be specified only once. If a field occurs twice, the last value wins. The arguments
    are returned unchanged if a value that the user typed is not a JSON object.
    """
    body: dict[str, object] = {}
    other_arguments: list[str] = []

    index = 0
    while index < len(arguments):
        if arguments[index] != "--extra-body":
            other_arguments.append(arguments[index])
            index += 1
            continue

        value_index = index + 1
        json_text = arguments[value_index] if value_index < len(arguments) else "{}"
        try:
            body |= json.loads(json_text)
        except (ValueError, TypeError):  # no JSON, or JSON that is not an object
            return list(arguments)

        index = value_index + 1

    if not body:
        return other_arguments

    return [*other_arguments, "--extra-body", json.dumps(body)]


def _parse_options(arguments: Sequence[str], known: Mapping[str, KnownOption]) -> list[TypedOption]:
    """Return the options and arguments of a command line, in their order.

    Unlike click, this function accepts options that the command does not have. The argument after
    such an option counts as its value, unless it begins with a dash.
    """
    options: list[TypedOption] = []
    remaining = arguments
    while remaining:
        option = _parse_first_option(remaining, known)
        options.append(option)
        remaining = remaining[len(option.arguments) :]
    return options


def _parse_first_option(arguments: Sequence[str], known: Mapping[str, KnownOption]) -> TypedOption:
    """Return the option, with its value, or the argument at the beginning of some arguments.

    Args:
        arguments: A part of a command line, with at least one argument.
        known: The options of the command, by name.
    """
    first_argument = arguments[0]
    is_option = re.match(r"--?[A-Za-z]", first_argument) is not None
    if not is_option:
        return TypedOption("", first_argument, (first_argument,))

    if first_argument.startswith("--"):  # --seed=1
        flag, _, attached_value = first_argument.partition("=")
    else:  # -c8, where the value follows a single letter
        flag = first_argument[:2]
        attached_value = first_argument[2:]

    has_attached_value = flag != first_argument
    if has_attached_value:
        return TypedOption(flag, attached_value, (first_argument,))

    values = _find_values(flag, arguments[1:], known)
    return TypedOption(flag, " ".join(values), (first_argument, *values))


def _find_values(
    flag: str, next_arguments: Sequence[str], known: Mapping[str, KnownOption]
) -> Sequence[str]:
    """Return the arguments after an option that are its values: none, one, or several.

    An option of the command or of `REPLACEMENTS` states whether it takes a value. Of any other
    option, the next argument counts as the value, unless it is an option itself. Only vLLM's
    `--goodput ttft:500 tpot:50` takes several values.

    Args:
        flag: The name of the option.
        next_arguments: The arguments after the option, the first of which may be its values.
        known: The options of the command.
    """
    if flag in known:
        return next_arguments[:1] if known[flag].takes_value else ()

    replacement = find_replacement(flag, known)
    if replacement is not None and not replacement.takes_value:
        return ()
    if flag == "--goodput":
        return tuple(takewhile(_is_objective, next_arguments))

    is_followed_by_option = (
        bool(next_arguments) and re.match(r"-[A-Za-z-]", next_arguments[0]) is not None
    )
    return () if is_followed_by_option else next_arguments[:1]


def _is_objective(argument: str) -> bool:
    """Return True for an objective of an SLO, like `ttft:500`."""
    return re.fullmatch(r"\w+:\S+", argument) is not None
