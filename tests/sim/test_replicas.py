"""Replicas that are removed and added in the middle of a run."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from command_line import exits
from servers import start
from test_sim_server import CHAT, chat, connect, head_of, wire

from loadgen.core.errors import CombinedError, TargetError, UserError
from loadgen.core.results import store
from loadgen.core.results.record import KIND
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.server.options import Options


def preset(folder: Path, changes: str, of: str = "h100x8") -> str:
    file = folder / "mine.yaml"
    file.write_text(f"extends: {of}\nreplicas_at: {{{changes}}}\n")
    return str(file)


@pytest.mark.commands
@pytest.mark.parametrize("arrival", ["poisson: 12/s", "closed: 16"])
def test_a_virtual_run_reports_a_lost_replica_and_its_recovery_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrival: str
) -> None:
    (tmp_path / "w.yaml").write_text(
        "name: w\nrequests: {input_tokens: 2000, output_tokens: 100}\nslo: {ttft: 1s}\nseed: 1\n"
        f"stages: [{{arrival: {{{arrival}}}, duration: 60s}}]\n"
    )
    out = tmp_path / "r"
    url = f"sim:{preset(tmp_path, '20s: 1, 30s: 4')}"
    code = exits("run", str(tmp_path / "w.yaml"), "--url", url, "-o", str(out), "--full")
    stdout = " ".join(capsys.readouterr().out.split())
    rows = store.read_run(out).rows
    lost_records = rows[rows["kind"] == KIND["reset"]]

    assert (
        len(lost_records)
        and (lost_records["done_ns"] == 20 * 10**9).all()
        and (lost_records["replica"] > 0).all()
    )
    between = rows[(rows["due_ns"] > 20 * 10**9) & (rows["due_ns"] < 30 * 10**9)]
    assert len(between) and (between["replica"] == 0).all()
    assert set(np.unique(rows["replica"][rows["due_ns"] > 31 * 10**9])) == {0, 1, 2, 3}
    gone, come = json.loads((out / "summary.json").read_bytes())["recovery"]
    assert [
        (recovery["event"], recovery["spike"], recovery["after"], recovery["at_s"])
        for recovery in (gone, come)
    ] == [
        ("loss", "4 replicas", "1 replica", 20.0),
        ("scale_up", "1 replica", "4 replicas", 30.0),
    ]
    assert "lost server 4 replicas 1 replica 20.0 s" in stdout and "replica was removed" in stdout
    if arrival.startswith("poisson"):
        assert gone["broken"] and come["back_s"] > 0
    assert exits("report", str(out)) == code
    page = (out / "report.html").read_text("utf-8")
    assert ">lost server</td>" in page and '"title":"SLO attainment"' in page


@pytest.mark.processes
def test_a_lost_replica_over_http_resets_its_requests_and_is_counted_on_a_page(
    tmp_path: Path,
) -> None:
    with (
        start(Options(preset=preset(tmp_path, "400ms: 1"))) as server,
        contextlib.ExitStack() as stack,
    ):
        sockets = [stack.enter_context(connect(server)) for _ in range(4)]
        for sock in sockets:
            sock.sendall(wire("POST", CHAT, chat(tokens=100)))
        broken = 0
        for sock in sockets:
            head_of(sock)
            data = b""
            try:
                while b"0\r\n\r\n" not in data[-10:]:
                    data += sock.recv(65536)
            except ConnectionResetError:
                broken += 1

        assert broken == 3

        with urllib.request.urlopen(f"{server.url}/prometheus/metrics") as page:
            assert "inference_pool_ready_pods 1\n" in page.read().decode()


@pytest.mark.processes
def test_invalid_replica_counts_are_refused(tmp_path: Path) -> None:
    for changes, text in (
        ("20s: 5", "5 replicas"),
        ("soon: 2", '"soon"'),
        ("20s: 0", "greater than or equal to 1"),
    ):
        with pytest.raises(CombinedError) as exc_info:
            load_preset(preset(tmp_path, changes))
        assert text in str(exc_info.value), (changes, str(exc_info.value))
    with pytest.raises((UserError, TargetError), match="works with only one"):
        start(Options(preset=preset(tmp_path, "20s: 1"), cores=2))
