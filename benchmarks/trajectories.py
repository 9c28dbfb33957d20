"""What do the rules for the replay of agent trajectories change?

    python benchmarks/trajectories.py

The script writes a data set in the format of MLPerf Endpoints with the lengths of coding agents,
and replays it on a simulated server with one replica. It prints two tables. The first one shows the
share of prompt tokens that come from the prefix cache, with each rule for salts and each start of
the sessions. The second one shows how the end of the load changes the throughput.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rig

from loadgen.sim import presets

VOCABULARY = (
    *("parse", "token", "file", "branch", "merge", "cache", "queue", "thread", "buffer", "socket"),
    *("test", "stack", "index", "value", "return", "update", "search", "commit", "build", "error"),
)
"""Short words, most of which are one token."""
SYSTEM_WORDS = 1_500
RESULT_WORDS = (100, 1_200)
"""The shortest and the longest message of a user or a tool."""
RESPONSE_WORDS = (30, 200)
DELAYS_S = (0.1, 5.0)
"""The range of tool times in AA-AgentPerf (artificialanalysis.ai/methodology/agentperf)."""
LONG_DELAY_S = 300.0
LONG_DELAY_SHARE = 0.02
"""A user who goes for a coffee, as in real recordings."""


def write_sessions(path: Path, session_count: int, max_turns: int) -> None:
    """Write a data set with one message per row. Equal arguments give equal files."""
    generator = random.Random(1)
    system = _text(generator, SYSTEM_WORDS)
    with path.open("w", encoding="utf-8") as file:
        for number in range(session_count):
            turn_count = generator.randint(2, max_turns)
            for row in _session_rows(generator, f"s{number}", turn_count):
                if row["turn"] == 1:
                    row["system"] = system
                file.write(json.dumps(row) + "\n")


def _session_rows(generator: random.Random, name: str, turn_count: int) -> list[dict[str, Any]]:
    """Return the rows of one session: a message of the user and a response for each turn."""
    rows: list[dict[str, Any]] = []
    for turn in range(turn_count):
        is_long = generator.random() < LONG_DELAY_SHARE
        question: dict[str, Any] = {
            "role": "user",
            "content": _text(generator, generator.randint(*RESULT_WORDS)),
            "delay_seconds": LONG_DELAY_S if is_long else generator.uniform(*DELAYS_S),
        }
        response: dict[str, Any] = {
            "role": "assistant",
            "content": _text(generator, generator.randint(*RESPONSE_WORDS)),
        }
        for offset, message in enumerate((question, response), start=1):
            rows.append({"conversation_id": name, "turn": 2 * turn + offset, **message})
    return rows


def _text(generator: random.Random, word_count: int) -> str:
    """Return random words."""
    return " ".join(generator.choices(VOCABULARY, k=word_count))


def write_preset(path: Path) -> None:
    """Write a simulated server with one replica, so that every request finds the same cache."""
    preset = (Path(presets.__file__).parent / "gb300-vm-128k.yaml").read_text("utf-8")
    path.write_text(preset.replace("gpus_per_vm: 4", "gpus_per_vm: 1"), "utf-8")


def replay(folder: Path, users: int, *options: str) -> dict[str, Any]:
    """Replay the data set of a folder, and return the summary of the run."""
    command = [sys.executable, "-P", "-m", "loadgen", "run", "qa", "--warmup", "0", "--seed", "1"]
    command += ["--url", f"sim:{folder / 'one.yaml'}", "--dataset", str(folder / "sessions.jsonl")]
    command += ["-c", str(users), "--json", "-o", str(folder / "run"), "--force", *options]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if not completed.stdout:
        raise SystemExit(completed.stderr)
    summary: dict[str, Any] = json.loads(completed.stdout)
    return summary


def print_cache_shares(folder: Path, users: int, duration: str) -> None:
    """Print how much of the prompts is in the cache under each rule."""
    print("| first sessions begin | salt | cached prompt tokens | TTFT p95 |\n|---|---|---:|---:|")
    for start in ("beginning", "middle"):
        for salt in ("session", "pass", "user", "none"):
            rules = [f"trajectory_start={start}", f"trajectory_salt={salt}", "idle_cap=10s"]
            options = [part for rule in rules for part in ("--set", rule)]
            summary = replay(folder, users, "-d", duration, *options)
            share = summary["tokens"]["cached_share"]
            ttft = summary["ttft_ms"]["p95"]
            print(f"| {start} | {salt} | {share:.1%} | {ttft:,.0f} ms |", flush=True)


def print_ends(folder: Path, users: int, sessions: int) -> None:
    """Print the throughput with each end of a load of a number of sessions."""
    print("\n| trajectory_end | output tokens/s | requests in flight | duration |")
    print("|---|---:|---:|---:|")
    for end in ("all", "first"):
        summary = replay(folder, users, "-n", str(sessions), "--set", f"trajectory_end={end}")
        tokens_per_s = summary["tokens"]["whole_output_per_s"]
        in_flight = summary["load"]["in_flight_mean"]
        duration_s = summary["window"]["whole"]["duration_s"]
        print(
            f"| {end} | {tokens_per_s:,.0f} | {in_flight:.1f} | {duration_s:,.0f} s |", flush=True
        )


def main() -> None:
    """Write the data set and the preset, and print both tables."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=100, help="recorded sessions")
    parser.add_argument("--max-turns", type=int, default=40, help="turns of the longest session")
    parser.add_argument("--users", type=int, default=24, help="virtual users")
    parser.add_argument("--duration", default="10m", help="length of the runs of the first table")
    args = rig.parse_arguments(parser, sessions=4, max_turns=4, users=2, duration="20s")

    with tempfile.TemporaryDirectory(prefix="loadgen-trajectories-") as scratch:
        folder = Path(scratch)
        write_sessions(folder / "sessions.jsonl", args.sessions, args.max_turns)
        write_preset(folder / "one.yaml")
        print_cache_shares(folder, args.users, args.duration)
        print_ends(folder, args.users, args.sessions)


if __name__ == "__main__":
    main()
