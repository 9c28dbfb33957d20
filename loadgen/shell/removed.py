"""Spellings that there were once, and what says the same now. A leaf.

Each row is typed by a test: the old spelling is a usage error whose hint names the new one, and the new one is taken.
"""

from __future__ import annotations

COMMANDS = {
    "baseline": "loadgen compare --save NAME RESULT, and then loadgen compare --against NAME RESULT",
    "capacity": "loadgen size WORKLOAD RESULT --users N; the published table is in docs/published.md",
    "reference": "docs/published.md has the tables; loadgen size WORKLOAD published:SYSTEM takes a row",
    "schema": "loadgen export --schema workload, or contract, prices, targets",
    "selfcheck": "loadgen doctor, without --url",
}
"""A command -> what is typed in its place."""

OPTIONS = {
    "--goodput": "--slo ttft:2s, with its unit",
    "--num-warmups": "--warmup 20req",
    "--warmup-requests": "--warmup 20req",
    "--warmup-request-count": "--warmup 20req",
    "--repeat-most": "--repeat auto,most=10",
    "--repeat-within": "--repeat auto,within=5%",
    "--repeat-pause": "--repeat 3,pause=10m",
    "--plain": "--progress plain",
    "--source": "--set sources=IP",
    "--base-url": "--url",
    "--target": "--url",
    "--backend": "--server",
    "--endpoint-type": "--api",
    "--trace-path": "--trace",
    "--dataset-path": "--dataset",
    "--input-file": "--dataset",
    "--rate": "--request-rate",
    "--max-concurrency": "--concurrency",
    "--parallel": "--concurrency",
    "--num-prompts": "--num-requests",
    "--request-count": "--num-requests",
    "--benchmark-duration": "--duration",
    "--random-seed": "--seed",
    "--random-input-len": "--input-tokens",
    "--random-output-len": "--output-tokens",
    "--extra-request-body": "--extra-body",
    "--output-artifact-dir": "--out",
    "--result-dir": "--out",
    "--arrival-smoothness": "--set burstiness=0.5",
    "--concurrency-ramp-duration": "--set concurrency_ramp=30s",
    "--burstiness": "--set burstiness=0.5",
    "--concurrency-ramp": "--set concurrency_ramp=30s",
    "--trace-speed": "--set trace_speed=2, or trace: {speed: 2} in the workload file",
    "--trace-slice": "--set trace_slice=10m..20m, or trace: {slice: 10m..20m} in the workload file",
    "--trace-loop": "--set trace_loop=3, or trace: {loop: 3} in the workload file",
    "--trace-replay": "--set trace_replay=sessions, or trace: {replay: sessions} in the workload file",
    "--on-bad-row": "--set on_bad_row=skip, or trace: {on_bad_row: skip} in the workload file",
    "--schedule-seed": "--set schedule_seed=7, or schedule_seed: 7 in the workload file",
    "--stall-timeout": "--set stall_timeout=60s, or stall_timeout: 60s in the workload file",
    "--limit": "--set limit=send_lag_share:10%, or limits: {send_lag_share: 10%} in the workload file",
    "--prefill-concurrency": "--set max_in_prefill=4",
    "--max-in-prefill": "--set max_in_prefill=4",
    "--route": "--set route=sticky",
    "--session-header": "--set session_header=X-Session-ID",
    "--on-target-failure": "--set on_target_failure=stop",
    "--client": "--set client=openai",
    "--reset-cache": "--set reset_cache=yes",
    "--region": "--set region=NAME, or region: NAME in the file of --system",
}
"""An option, of a command that has none of this name -> what is typed in its place."""
