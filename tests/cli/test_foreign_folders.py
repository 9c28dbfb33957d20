"""Every command that reads a results folder gets hostile ones (SECURITY.md)."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import repository_paths
from expected_errors import refused
from scripted_server import answering

from loadgen.cli.app import run_command_line
from loadgen.cli.resume import arguments_to_type_again, resume_arguments
from loadgen.cli.run_options import COMMAND_OPTIONS
from loadgen.commands import COMMANDS
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.results import checksums, files
from loadgen.render import page
from loadgen.ui.server import ResultsServer

STEERS = "\x1b[2J\x1b[1;1H\x1b[32mVALID: a forged verdict\x1b[0m\r\nVALID: a forged verdict"
SECRET = "what only the user may read"

TAKERS = {
    "report": ("report", "{its}"),
    "report --json": ("report", "{its}", "--json", "--html", "{out}/page.html"),
    "compare": ("compare", "{good}", "{its}", "--anyway"),
    "compare --save": ("compare", "--save", "theirs", "{its}", "--in", "{out}"),
    "explain": ("explain", "{its}", "{good}"),
    "bundle": ("bundle", "{its}", "-o", "{out}/b.zip"),
    "cost": ("cost", "{its}", "--prices", "docs/prices.example.yaml", "--accept-sample-prices"),
    "export": ("export", "{its}", "--as", "vllm", "-o", "{out}/vllm.json"),
    "search": ("search", "--resume", "{its}"),
    "sweep": ("sweep", "qa", "--url", "sim:gb300-vm", "-o", "{its}"),
    "validate": ("validate", "{its}"),
    "validate --extend": ("validate", "--extend", "{its}"),
    "mlperf": ("mlperf", "server", "--find-peak", "--resume", "{its}"),
    "size": ("size", "rag", "{its}", "--users", "10", "-o", "{out}/size"),
    "size -o": ("size", "rag", "{good}", "--users", "10", "-o", "{its}"),
    "merge": ("merge", "{its}", "-o", "{out}/merged"),
    "run -o": ("run", "qa", "--url", "sim:gb300-vm", "-n", "5", "-o", "{its}"),
    "run --force": ("run", "qa", "--url", "sim:gb300-vm", "-n", "5", "--force", "-o", "{its}"),
}
"""Every command that takes a folder of results, and how it is called."""
NONE = {"doctor", "answers", "verify", "fit", "sim"}
"""Those that take none; `ui` is a server, and below."""


def _edited(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    for name in ("run.json", "summary.json"):
        content = json.loads((folder / name).read_bytes())
        change(content)
        (folder / name).write_text(json.dumps(content))


def _names_steer(folder: Path) -> None:
    def change(content: dict[str, object]) -> None:
        run = (
            content["run"] if isinstance(content["run"], dict) else content
        )  # of summary.json, of run.json
        assert isinstance(run, dict)
        run |= {"name": STEERS, "version": STEERS, "workload": STEERS, "metadata": {STEERS: STEERS}}
        content["targets"] = [
            dict.fromkeys(("model", "version", "engine", "precision", "name"), STEERS)
        ]
        if isinstance(target := content.get("target"), dict):
            target |= {name: STEERS for name in ("model", "server", "region") if name in target}

    _edited(folder, change)


def _linked(name: str) -> Callable[[Path], None]:
    def lay(folder: Path) -> None:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(folder.parent / "secret")

    return lay


def _linked_folder(folder: Path) -> None:
    shutil.move(folder / "requests", folder.parent / "elsewhere")
    (folder / "requests").symlink_to(folder.parent / "elsewhere")


def _pipe(folder: Path) -> None:
    (folder / "seconds.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "seconds.jsonl")


def _sums_of_devices(folder: Path) -> None:
    (folder / checksums.FILE).write_text(f"{'0' * 64}  /dev/zero\n{'0' * 64}  ../secret\n")


def _cut(folder: Path) -> None:
    file = folder / "run.json"
    file.write_bytes(file.read_bytes()[:200])


ZOO: dict[str, Callable[[Path], None]] = {
    "names that steer": _names_steer,
    "report.html elsewhere": _linked("report.html"),
    "report.html.new elsewhere": _linked("report.html.new"),
    "run.json elsewhere": _linked("run.json"),
    "summary.json elsewhere": _linked("summary.json"),
    "SHA256SUMS elsewhere": _linked(checksums.FILE),
    "requests elsewhere": _linked_folder,
    "a pipe": _pipe,
    "sums of devices": _sums_of_devices,
    "run.json cut": _cut,
    "run.json deep": lambda folder: _wrote(folder / "run.json", b"[" * 100_000),
    "run.json no text": lambda folder: _wrote(folder / "run.json", b"\xff\xfe\x00"),
    "a schema of its own": lambda folder: _edited(
        folder, lambda content: content.update(schema=10**9)
    ),
    "numbers of its own": lambda folder: _edited(
        folder, lambda content: content.update(turns=-(10**15), workers=10**9)
    ),
    "parquet of noise": lambda folder: _wrote(
        next(folder.rglob("*.parquet")), b"PAR1" + bytes(range(256)) * 9
    ),
}


def _wrote(file: Path, data: bytes) -> None:
    file.write_bytes(data)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    for name in ("raw", "contract"):
        repository_paths.unpack(name, directory)
    return directory


@pytest.fixture
def foreign_dir(sound: Path, tmp_path: Path) -> Path:
    """Return a results folder that has a user's file named `secret` as its neighbour."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "out").mkdir()
    return Path(shutil.copytree(sound / "raw", tmp_path / "theirs"))


def _ends(*command_line: str) -> None:
    """Accept the end of a command and its own errors; any other exception is a bug."""
    try:
        run_command_line(command_line)
    except (LoadgenError, CombinedError) as fault:
        print(fault)


def test_every_command_is_tested_with_foreign_folders() -> None:
    assert {row.name for row in COMMANDS.builtin_rows} == {
        arguments[0] for arguments in TAKERS.values()
    } | NONE | {"ui"}


@pytest.mark.parametrize("animal", ZOO)
def test_no_command_reads_or_writes_outside_a_foreign_folder(
    animal: str,
    foreign_dir: Path,
    sound: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(repository_paths.ROOT)
    ZOO[animal](foreign_dir)
    for arguments in TAKERS.values():
        _ends(
            *(
                word.format(its=foreign_dir, good=sound / "raw", out=foreign_dir.parent / "out")
                for word in arguments
            )
        )
    output = "".join(capsys.readouterr())

    assert (foreign_dir.parent / "secret").read_text() == SECRET
    assert SECRET not in output
    assert "\x1b" not in output and "\r" not in output
    assert not any(
        line.lstrip().startswith("VALID: a forged verdict") for line in output.splitlines()
    )
    written = [path for path in (foreign_dir.parent / "out").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in written)


def test_a_page_is_rendered_from_the_result_and_never_served_as_stored(
    sound: Path, tmp_path: Path
) -> None:
    from loadgen import result_kinds

    folder = Path(shutil.copytree(sound / "contract", tmp_path / "contract"))
    (folder / "verdict.html").write_bytes(b"\xff<script>steal()</script>")
    checksums.write(folder)
    page_text = result_kinds.opened(folder).page
    assert page_text is not None and "steal()" not in page_text


def test_a_page_replaces_a_symbolic_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for name in ("page", "page.new"):
        (tmp_path / name).symlink_to(tmp_path / "file")
    files.replace(tmp_path / "page", b"new")
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "page").read_bytes() == b"new" and not (tmp_path / "page").is_symlink()


def test_links_inside_a_folder_and_on_the_path_to_it_are_followed(
    foreign_dir: Path, tmp_path: Path
) -> None:
    (foreign_dir / "notes").symlink_to("run.json")
    (tmp_path / "disk").symlink_to(foreign_dir)
    files.refuse_links(tmp_path / "disk")
    (foreign_dir / "out").symlink_to("..")
    with refused(UserError, "unsafe_file", where="disk"):
        files.refuse_links(tmp_path / "disk")


def test_the_report_command_writes_no_page_into_a_folder_that_is_no_result(
    foreign_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "clone"
    shutil.copytree(foreign_dir, root / "results" / "a")
    shutil.copytree(foreign_dir, root / "results" / "b")
    _ends("report", str(root))
    assert not (root / "report.html").exists()
    _ends("report", str(root / "results"))
    assert (root / "results" / "report.html").is_file()


@pytest.fixture
def server(foreign_dir: Path, sound: Path) -> Iterator[ResultsServer]:
    shutil.copytree(sound / "raw", foreign_dir.parent / "good")
    with answering(ResultsServer(foreign_dir.parent, 0, None)) as running:
        yield running


@pytest.mark.parametrize("animal", ZOO)
def test_the_ui_serves_every_foreign_folder_without_its_scripts(
    animal: str, foreign_dir: Path, server: ResultsServer
) -> None:
    ZOO[animal](foreign_dir)
    for path in (
        "",
        "result?r=theirs",
        "compare?r=good&r=theirs",
        "live?r=theirs",
        f"result?r={quote('../secret')}",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", f"/{server.token}/{path}")
        answer = connection.getresponse()
        assert answer.status == 200, path
        assert "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "")
        text = answer.read().decode()
        assert SECRET not in text and "\x1b" not in text
        connection.close()


THEIR_SERVER = "http://127.0.0.1:{port}"


def _plan(folder: Path, *command: str) -> None:
    """Write the plan of a search whose stored command the folder chooses."""
    from loadgen.core import format
    from loadgen.search import experiment

    folder.mkdir()
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload="qa",
        source_text="",
        target="",
        options={},
        command=command,
    )
    (folder / experiment.PLAN_FILE).write_bytes(format.document(plan))


@pytest.mark.parametrize(
    ("begun", "arguments"),
    [
        (("search", "qa", "--slo", "ttft:2s"), ("search", "--resume", "{its}")),
        (
            ("mlperf", "server", "-b", "llama2-70b", "--find-peak"),
            ("mlperf", "server", "--resume", "{its}"),
        ),
        (("validate", "qa"), ("validate", "--extend", "{its}")),
    ],
)
@pytest.mark.parametrize(
    "where",
    [
        ("--url", THEIR_SERVER),
        (f"-u{THEIR_SERVER}",),
        (f"-ku{THEIR_SERVER}",),
        (f"--url={THEIR_SERVER}", "--model"),
    ],
)
def test_no_key_is_sent_to_a_host_that_only_a_folder_names(
    begun: tuple[str, ...],
    arguments: tuple[str, ...],
    where: tuple[str, ...],
    sound: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as their_server:
        port = their_server.getsockname()[1]
        command = ("loadgen", *begun, *(word.format(port=port) for word in where))
        its = tmp_path / "its"
        if begun[0] == "validate":
            shutil.copytree(sound / "contract", its)
            for file in its.glob("*/r*/run.json"):
                file.write_text(json.dumps(json.loads(file.read_bytes()) | {"command": command}))
        else:
            _plan(its, *command)

        with refused(UserError, "missing_option", where=arguments[-2]) as fault:
            run_command_line([word.format(its=its) for word in arguments])
        assert f"127.0.0.1:{port}" in fault.value.hint
        their_server.setblocking(False)
        with pytest.raises(BlockingIOError):
            their_server.accept()


@pytest.mark.parametrize(
    "flag",
    [name for option in COMMAND_OPTIONS.values() if option.must_be_typed for name in option.flags],
)
def test_options_that_name_a_host_are_never_read_from_a_folder(flag: str) -> None:
    before = ["search", "qa", flag, "theirs"]

    with refused(UserError, "missing_option", where="--resume"):
        resume_arguments(before, ["search", "--resume", "f"], "--resume", Path("f"))

    switch = COMMAND_OPTIONS["insecure"].flags
    flag_arguments = [flag] if flag in switch else [flag, "mine"]
    before = before[:-1] if flag in switch else before
    resumed_arguments = resume_arguments(
        before, ["search", "--resume", "f", *flag_arguments], "--resume", Path("f")
    )

    assert resumed_arguments == ["search", "qa", "--resume=f", "--resume", "f", *flag_arguments]


def test_load_options_are_read_from_a_folder_but_no_other_command() -> None:
    before = [
        "search",
        "qa",
        "--url",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s",
        "--max-probes",
        "3",
        "--model",
    ]
    resumed_arguments = resume_arguments(before, ["search", "--resume", "f"], "--resume", Path("f"))

    assert resumed_arguments == [*before, "--resume=f", "--resume", "f"], (
        "the option without its value takes none of the user's"
    )
    with refused(UserError, "mismatch", where="--resume"):
        resume_arguments(
            ["bundle", "x", "-o", "y"], ["search", "--resume", "f"], "--resume", Path("f")
        )
    assert arguments_to_type_again(
        ["search", "qa", "-u", "http://h", "--api-key-file=k", "-n", "5"]
    ) == [
        "-u",
        "http://h",
        "--api-key-file=k",
    ]


def test_every_option_with_an_address_or_a_key_file_must_be_typed() -> None:
    """A new option that names a host or a file must be listed before a folder may set it."""
    data = {"trace", "dataset", "tokenizer", "system", "out", "prices", "check_answers"}
    places_named = {
        name
        for name, option in COMMAND_OPTIONS.items()
        if (option.metavar or "").split(":")[-1]
        in ("URL", "FILE", "ADDRESS", "WHERE", "PORT", "FOLDER")
    }

    assert places_named - data == {
        name for name in places_named if COMMAND_OPTIONS[name].must_be_typed
    }


def test_a_page_that_loadgen_did_not_write_causes_a_warning(
    foreign_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign_dir / "report.html").write_text("<script>steal()</script>")
    (foreign_dir / "more").mkdir()
    (foreign_dir / "more" / "notes.HTM").write_text("<script>steal()</script>")
    _ends("report", str(foreign_dir))
    stderr = capsys.readouterr().err

    assert "more/notes.HTM in" in stderr and "report.html in" not in stderr, "that one is made anew"

    (foreign_dir / "more" / "notes.HTM").write_text(
        page.build_page_head() + "<script>steal()</script>"
    )
    _ends("report", str(foreign_dir))
    assert "notes.HTM" not in capsys.readouterr().err, (
        "the browser runs no script in it but that of our pages"
    )


def test_the_security_policy_of_a_page_allows_only_its_script() -> None:
    text = page.Page("title", "made by").render()

    assert (
        text.startswith(page.build_page_head())
        and "script-src 'sha256-" in page.build_page_head()
        and "unsafe-inline'; s" in page.build_page_head()
    )

    (script,) = re.findall("<script>(.*)</script>", text, re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{hashed}';" in page.build_security_policy()
    assert not re.search(r"<[^>]+ on[a-z]+=", text), "a handler in an attribute would not run"


def test_no_key_is_sent_to_an_endpoint_that_only_a_contract_names(tmp_path: Path) -> None:
    from loadgen.contracts import command
    from loadgen.contracts.loading import load_contract
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Overrides

    (tmp_path / "q.jsonl").write_text('{"prompt": "why?", "reference": "so"}\n' * 40)
    (tmp_path / "c.yaml").write_text(
        "name: c\n"
        "levels: [{name: a, workload: qa, rate: 10/s, duration: 1m, must: [{errors: 1%}]}]\n"
        "answers: {dataset: q.jsonl, against: 'http://theirs:1', must: [{agreement_share: 5%}]}\n"
    )
    checked = load_contract(
        tmp_path / "c.yaml", gpus=None, repeats=None, max_duration_ns=None, has_other_endpoint=False
    )
    mine = Settings(url="http://mine:1", api_key=SECRET, headers=(("X-Api-Key", SECRET),))
    request = command.ValidateRequest(checked, mine, Overrides(), None)
    options = command.OtherEndpointOptions(url=None, model=None, key_file=None)
    their_settings = command._create_other_endpoint_settings(request, options, dry_run=False)
    assert their_settings is not None
    assert (their_settings.url, their_settings.api_key, their_settings.headers) == (
        "http://theirs:1",
        None,
        (),
    )
    named_by_user = command._create_other_endpoint_settings(
        request, options._replace(url="http://theirs:1"), dry_run=False
    )
    assert named_by_user is not None and named_by_user.api_key == SECRET, "the user names it"
