"""The table of backends: a URL selects a row, and a plugin can add one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_packages import forgetting, install

import loadgen
from loadgen import backends
from loadgen.backends import BACKENDS
from loadgen.cli.settings import build_settings
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.execution import backend
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.results.store import read_run


def test_every_backend_can_be_selected() -> None:
    for row in BACKENDS.builtin_rows:
        assert bool(row.schemes) or row.flag in Settings.__struct_fields__, row.name
        loaded_backend = backends.load_backend(row)
        assert loaded_backend.run is None or (
            loaded_backend.serve is None and loaded_backend.senders is None
        ), row.name
        assert any((loaded_backend.run, loaded_backend.serve, loaded_backend.senders)), row.name
    schemes = [scheme for row in BACKENDS.builtin_rows for scheme in row.schemes]

    assert len(set(schemes)) == len(schemes)


@pytest.mark.parametrize(
    ("url", "name", "expected_name"),
    [
        (None, "embedded", "embedded simulation"),
        ("http://host:8000/v1", "http", "http://host:8000/v1"),
        ("HTTPS://host", "http", "https://host/v1"),
        ("sim:gb300-vm", "sim", "simulated: gb300-vm"),
        ("localhost:8000", "http", "--url"),  # no scheme: the check of http says so
        ("unix:///run/server", "http", "--url"),
    ],
)
def test_the_scheme_of_a_url_selects_its_backend(
    url: str | None, name: str, expected_name: str
) -> None:
    assert Settings(url=url).backend.name == name
    assert Endpoint(url=url or "").display_name == expected_name
    assert (backend.known(Settings(url=url)) is None) == (name == "http")


def test_an_unknown_url_scheme_is_refused_with_the_known_ones() -> None:
    for options in (
        {"url": "grpc://me:secret@host:1"},
        {"url": ["http://host", "grpc://me:secret@host:1"]},
    ):
        with pytest.raises((UserError, CombinedError)) as exc_info:
            build_settings(options)
        text = str(exc_info.value)
        assert "the scheme grpc:\n" in text and "  --> --url" in text and "secret" not in text
        assert "known: http:, https:, sim:" in text


def test_a_backend_describes_a_target_without_a_request() -> None:
    real, virtual = backend.known(Settings()), backend.known(Settings(url="sim:gb300-vm"))

    assert real is not None and virtual is not None
    assert (real.name, virtual.name) == ("embedded simulation: gb300-vm", "simulated: gb300-vm")
    assert real.context == virtual.context is not None and real.description == virtual.description
    assert real.virtual_url == virtual.virtual_url == "sim:gb300-vm"
    plain = backend.known(Settings(embedded={"ttft": "1ms"}))
    assert plain is not None and (plain.name, plain.context, plain.virtual_url) == (
        "embedded simulation",
        None,
        "",
    )


KITCHEN = """
from contextlib import contextmanager
from msgspec.structs import replace
from loadgen.backends import BackendRow, after_scheme
from loadgen.core.execution.backend import Backend
from loadgen.core.execution.context import KnownTarget
from loadgen.sim.server.embedded import start
from loadgen.sim.server.options import Options
def known(settings):
    name = f"kitchen: {after_scheme(settings.url)}"
    return KnownTarget(name=name, notes=("started for this run",))
@contextmanager
def serve(settings):
    with start(Options(ttft="2ms", itl="1ms", model=after_scheme(settings.url))) as server:
        yield replace(settings, url=server.url)
ROW = BackendRow(
    name="kitchen",
    load=lambda: Backend(known=known, serve=serve),
    schemes=("kitchen",),
    name_format="the kitchen's {}",
)
"""


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a plugin with a backend that starts its own target."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    install(
        tmp_path, "kitchen", {"kitchen": KITCHEN}, {"loadgen.backends": {"kitchen": "kitchen:ROW"}}
    )
    with forgetting(BACKENDS, "kitchen"):
        yield


@pytest.mark.processes
@pytest.mark.usefixtures("kitchen")
def test_the_backend_of_a_plugin_starts_the_target(tmp_path: Path) -> None:
    options = {"concurrency": 1, "num_requests": 3, "warmup": 0}
    result = loadgen.run(
        "qa", url="kitchen:soup", input_tokens=8, output_tokens=4, out=tmp_path / "run", **options
    )  # type: ignore[arg-type]
    manifest = read_run(tmp_path / "run").manifest
    target = manifest.targets[0]

    assert (target.name, target.model, target.simulated) == ("kitchen: soup", "soup", True), (
        "it says that it is"
    )
    assert "started for this run" in manifest.warnings
    assert result.summary.requests.ok == 3


@pytest.mark.usefixtures("kitchen")
def test_the_backend_of_a_plugin_is_selected_by_its_scheme() -> None:
    assert backends.find_backend_of_target("http://host") is BACKENDS.builtin_rows[1]
    assert "plugins" not in vars(BACKENDS) and "_plugins" not in vars(BACKENDS), (
        "a scheme of ours looks for none"
    )
    assert Endpoint(url="kitchen:soup").display_name == "the kitchen's soup"
    with pytest.raises((UserError, CombinedError), match="kitchen:"):
        build_settings({"url": "grpc:x"})
    with pytest.raises(
        (UserError, CombinedError), match="a target of kitchen must be the only target"
    ):
        build_settings({"url": ["kitchen:soup", "http://host"]})
