"""Settings and fixtures of all tests.

A test that starts a process is marked `processes`, so that the inner loop described in
CONTRIBUTING.md can leave it out. Property tests have no deadline, because the speed of the machine
is no property of the code.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import locale
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import certifi
import golden
import pytest
from hypothesis import HealthCheck, settings
from loadgen_sdk.transport.connection import SO_TIMESTAMPNS

if TYPE_CHECKING:
    from browser import Browser

ROOT = Path(__file__).parent.parent

# The speed of this machine is no property of the code. CI draws more examples than the inner loop.
settings.register_profile(
    "any speed",
    deadline=None,
    max_examples=100 if "CI" in os.environ else 40,
    suppress_health_check=[HealthCheck.too_slow],
    **(
        {} if os.access(ROOT, os.W_OK) else {"database": None}
    ),  # a read-only checkout stores no examples
)
settings.load_profile("any speed")

# An application that uses loadgen may set the locale. It must not change any file or message.
with suppress(locale.Error):  # LC_ALL names one that is not installed
    if (
        locale.getencoding().lower() == "utf-8"
    ):  # Python takes the messages of the system for UTF-8 anyway
        locale.setlocale(locale.LC_ALL, "")

# The shell of a user may name proxies, which would come between tests and servers, and API keys.
for _name in list(os.environ):
    if _name.lower().endswith("_proxy") or _name.startswith(("OPENAI_", "ANTHROPIC_")):
        del os.environ[_name]

# The cache of installed plug-ins (loadgen_sdk/plugins.py) is in a directory of the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="loadgen-tests-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

_unmarked = ""  # the test that runs, unless it has the mark


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _unmarked and event in (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
    ):
        test, program = _unmarked, arguments[0] if arguments else ""
        raise RuntimeError(f"{test} starts a process ({program}): put @pytest.mark.processes on it")


sys.addaudithook(_watch)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--renew-golden",
        action="store_true",
        help="write the golden files in tests/data/golden in place of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    golden.set_renewal(config.getoption("--renew-golden"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return two workers per core and two more, because many tests wait for processes.

    `os.cpu_count()` is no substitute for the affinity: PYTHON_CPU_COUNT overrides it.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return 2 * cores + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and compile each test file only once.

    In a new checkout every worker would compile all test files, which takes ten CPU-seconds each.
    The collected tests live until the end, so collecting garbage among them only costs time.
    """
    gc.disable()
    with open(__file__, encoding="utf-8") as lock_file:
        if _must_compile_tests():
            _compile_or_wait(lock_file)
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


def _must_compile_tests() -> bool:
    """Return whether this is one of several workers, and compiled test files are missing."""
    if "PYTEST_XDIST_WORKER" not in os.environ or sys.dont_write_bytecode:
        return False
    tests = ROOT / "tests"
    if not os.access(tests, os.W_OK):
        return False
    return len(list(tests.rglob("*-pytest-*.pyc"))) < len(list(tests.rglob("test_*.py")))


def _compile_or_wait(lock_file: TextIO) -> None:
    """Let the first worker go on with the lock, and let the others wait until it has collected.

    The lock ends when the file is closed. On a file system without locks nobody waits.
    """
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock_file, fcntl.LOCK_SH)
        fcntl.flock(lock_file, fcntl.LOCK_UN)
    except OSError:
        pass


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Skip three further garbage collections at exit: pytest has looked for warnings already."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first and mix waiting tests with computing ones.

    Files with tests that start processes are spread evenly among the others, so that every worker
    gets some of both.
    """
    if not items or items[0].config.pluginmanager.hasplugin("randomly"):
        return
    starting = Counter(item.path for item in items if item.get_closest_marker("processes"))
    computing = Counter(item.path for item in items if item.path not in starting)
    place: dict[Path, float] = {}
    for files in (starting, computing):
        before = 0
        for path, count in files.items():
            place[path] = before / files.total()
            before += count
    items.sort(key=lambda item: (not item.get_closest_marker("early"), place[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _unmarked  # noqa: PLW0603 - an audit hook has no other way to know the test
    _unmarked = "" if item.get_closest_marker("processes") else item.nodeid


def pytest_runtest_teardown() -> None:
    global _unmarked  # noqa: PLW0603
    _unmarked = ""


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """Restore SIGINT: a shell starts background jobs with it ignored, and a run respects that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def shared_servers_stop() -> Iterator[None]:
    yield
    if "servers" in sys.modules:
        sys.modules["servers"].stop_all()


@pytest.fixture(scope="session", autouse=True)
def one_root_certificate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Replace the 140 root certificates by one, because loading them takes longer than most tests.

    No test connects to the internet.
    """
    first = re.search(
        r"-----BEGIN.*?END CERTIFICATE-----\n", Path(certifi.where()).read_text("utf-8"), re.DOTALL
    )
    assert first is not None
    file = tmp_path_factory.mktemp("tls") / "root.pem"
    file.write_text(first[0])
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from browser import Browser, find

    if find() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser() as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def kernel_stamps() -> Iterator[None]:
    """Let the kernel timestamp packets as long as the tests run.

    On a busy machine the kernel begins to do so some time after the first socket has asked for it,
    and continues while one such socket is open. Not every system has the option: qemu has not.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        receiver, _ = server.accept()
        with receiver:
            with contextlib.suppress(OSError):
                receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                wait_for_timestamp(sender, receiver)
            yield


def wait_for_timestamp(sender: socket.socket, receiver: socket.socket) -> None:
    """Send single bytes until one arrives with a timestamp of the kernel."""
    for _ in range(100_000):
        sender.send(b"x")
        _, ancillary, _, _ = receiver.recvmsg(1, socket.CMSG_SPACE(16))
        if not ancillary:
            continue
        seconds = ancillary[0][2][:8]
        if any(seconds):  # 0 in a packet without a timestamp
            return
