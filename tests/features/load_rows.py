"""The features of a load: when requests come, what is in them, and through which door they go."""

from __future__ import annotations

import numpy as np
import trace_rows
from feature_bench import PLAIN, ROOT, Bench, Feature
from scripted_server import events, serving

from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.workload import traces

TENANTS = """classes:
  a: {weight: 1, tenant: x, requests: {input_tokens: 9, output_tokens: 3}}
  b: {weight: 1, tenant: y, requests: {input_tokens: 9, output_tokens: 3}}
"""
CLASSES = """classes:
  a: {weight: 1, requests: {input_tokens: 30, output_tokens: 3}, slo: {ttft: 1s}}
  b: {weight: 3, requests: {input_tokens: 60, output_tokens: 3}, priority: 1, model: other}
"""
TASKS = """requests:
  tools:
    search: {schema_tokens: 60, time: 500ms, result_tokens: 100}
  steps:
    plan: {system_tokens: 40, input_tokens: 40, output_tokens: 20}
    look: {after: plan, context: new, parallel: 2, input_tokens: 30, turns: 2, tool: search,
           output_tokens: 20}
    write: {after: [plan, look], output_tokens: 20}
"""


RESPONSE = events(
    {"choices": [{"delta": {"content": "a"}}]},
    {
        "choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3},
    },
)


def asks(input_tokens: object, output_tokens: int = 3, more: str = "") -> str:
    """Return the text of a workload with these lengths."""
    return (
        f"requests: {{input_tokens: {input_tokens}, output_tokens: "
        f"{output_tokens}{more and ', '}{more}}}"
    )


def stages(*stages: str) -> str:
    return f"{PLAIN}\nstages:\n" + "".join(f"  - {stage}\n" for stage in stages)


def gaps(bench: Bench, arrival: str) -> float:
    """Coefficient of variation of the gaps of 200 arrivals."""
    return float(bench.run("", stages(f"{{arrival: {arrival}, count: 200}}"))["load.gap_variation"])


def trace(bench: Bench) -> str:
    rows = [
        trace_rows.mooncake(1000 * n, 40 + n, 4, n // 2) | {"session_id": f"s{n // 2}"}
        for n in range(24)
    ]
    return bench.file("trace.jsonl", *rows).name


def instants_of_a_trace(bench: Bench) -> dict[str, bool]:
    def due(flags: str) -> list[float]:
        instants = np.sort(bench.rows(bench.run(f"--trace {trace(bench)} {flags}"), "due_ns")) / 1e9
        return [round(float(gap), 3) for gap in np.diff(instants)]

    return {
        "replay instants": due("") == [1.0] * 23,
        "faster": due("--set trace_speed=2") == [0.5] * 23,
        "a slice": due("--set trace_slice=2s..5s") == [1.0] * 2,
        "again and again": len(due("--set trace_loop=2")) == 47,
    }


def sessions_of_a_trace(bench: Bench) -> bool:
    rows = [
        trace_rows.mooncake(0, 40, 4) | {"session_id": "a"},
        {"input_length": 50, "output_length": 4, "hash_ids": [], "session_id": "a", "delay": 3000},
    ]
    ran = bench.run(
        f"--trace {bench.file('sessions.jsonl', *rows).name} --set trace_replay=sessions"
    )
    if ran.code == 2:
        return False
    due, done = (np.sort(bench.rows(ran, name)) for name in ("due_ns", "done_ns"))
    return bool(abs(due[1] - done[0] - 3e9) < 1e8)


def recorded_trajectories(bench: Bench) -> dict[str, bool]:
    rows = []
    for name in ("a", "b"):
        for turn in range(1, 7):
            role = "user" if turn % 2 else "assistant"
            row = {"conversation_id": name, "turn": turn, "role": role, "content": "word " * 30}
            rows.append(row | {"delay_seconds": 100})
    file = bench.file("trajectories.jsonl", *rows).name

    def requests(flags: str) -> int:
        ran = bench.run(f"--dataset {file} -c 2 -n 4 --warmup 0 {flags}")
        return 0 if ran.code == 2 else ran["requests.ok"]

    due = np.sort(bench.rows(bench.run(f"--dataset {file} -c 1 -n 1 --warmup 0"), "due_ns"))
    return {
        "every turn": requests("") == 12,
        "a start in the middle": 0 < requests("--set trajectory_start=middle") < 12,
        "an end with the first user": 0 < requests("--set trajectory_end=first") <= 12,
        "salts": requests("--set trajectory_salt=pass") == 12,
        "an idle cap": bool((np.diff(due) < 61e9).all()),
    }


def spike(bench: Bench) -> bool:
    ran = bench.run(
        "",
        stages(
            "{arrival: {constant: 10/s}, duration: 4s}",
            "spike: 3x for 2s",
            "{arrival: {constant: 10/s}, duration: 4s}",
        ),
    )
    due = bench.rows(ran, "due_ns") / 1e9
    return [int(((due >= a) & (due < a + 2)).sum()) for a in (2, 4, 6)] == [20, 60, 20]


def in_prefill(bench: Bench) -> bool:
    """Check that requests without a first token never exceed the cap.

    The cap is below the number of requests in flight.
    """
    ran = bench.run("-n 40 -c 8 --stagger 0 --set max_in_prefill=2", asks(50, 40))
    sent, first = (bench.rows(ran, name) for name in ("sent_ns", "first_token_ns"))
    steps = sorted(
        [(at, 1) for at in sent] + [(at, -1) for at in first], key=lambda step: (step[0], step[1])
    )
    most = int(max(np.cumsum([change for _, change in steps])))
    return ran.code != 2 and most == 2 and ran["load.in_flight_max"] > 4


def same_seed(bench: Bench) -> bool:
    runs = [
        bench.run("--request-rate 10 -n 20 -o again --force"),
        bench.run("--request-rate 10 -n 20"),
        bench.run("--request-rate 10 -n 20 --seed 2"),
    ]
    first, second, third = (
        (ran["fingerprints.prompts"], ran["fingerprints.timetable"]) for ran in runs
    )
    return first == second and first[0] != third[0] and first[1] != third[1]


def lengths(bench: Bench) -> dict[str, bool]:
    laws = {
        "fixed": "30",
        "uniform": "{uniform: {min: 20, max: 40}}",
        "normal": "{normal: {mean: 30, stddev: 4}}",
        "lognormal": "{lognormal: {median: 30, sigma: 0.2}}",
        "empirical": "{empirical: [29, 31]}",
    }
    return {
        law: 600 < bench.run("-c 8 -n 30", asks(text))["tokens.input"] < 1200
        for law, text in laws.items()
    }


def own_prompts(bench: Bench) -> dict[str, bool]:
    question = "How many legs has a spider?"
    conversations = [
        {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": "Eight."},
            ]
        }
    ]
    files = {
        "JSONL": bench.file("rows.jsonl", {"prompt": question}),
        "a list of JSON": bench.file("rows.json", [{"prompt": question}]),
        "CSV": bench.file("rows.csv", "prompt", question),
        "ShareGPT": bench.file("talk.json", conversations),
        "chat messages": bench.file(
            "chat.jsonl", {"messages": [{"role": "user", "content": question}]}
        ),
        "OpenAI's batch files": bench.file(
            "batch.jsonl",
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": question}]},
            },
        ),
        "SPEED-Bench": bench.file(
            "speed.jsonl", {"turns": [question, "And an ant?"], "category": "x"}
        ),
    }
    return {
        name: bench.do(f"run --dataset {file.name} -c 1 --osl 5 --url sim:gb300-vm --dry-run").code
        == 0
        for name, file in files.items()
    }


def trace_formats(bench: Bench) -> dict[str, bool]:
    rows = {
        "Mooncake": [trace_rows.mooncake(0, 20, 3, 1)],
        "Bailian": [trace_rows.bailian(1, -1, 0.0, 30, 9, 7, 8)],
        "Weka": [trace_rows.weka("a", trace_rows.call(0, 130, 5, 1, 2))],
        "TraceLab": [trace_rows.tracelab("c:1", 5, 0, 1100, 30)],
        "OpenTelemetry GenAI": [trace_rows.otlp(trace_rows.span(10**18, 40, 4))],
        "SageMaker data capture": [trace_rows.captured(9, 12, 30)],
        "Azure LLM inference": [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.68,374,44",
        ],
        "BurstGPT": [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,x,472,18,490,Log",
        ],
    }
    ends = ("Azure LLM inference", "BurstGPT")
    return {
        name: traces.read_trace(bench.file("t.csv" if name in ends else "t.jsonl", *lines)).format
        == name
        for name, lines in rows.items()
    }


def row_fields(bench: Bench) -> dict[str, bool]:
    """Check that the fields of a trace's row reach the endpoint."""
    fields = {"model": "small", "priority": 3, "min_tokens": 2, "guided_json": {"type": "object"}}
    file = bench.file("fields.jsonl", trace_rows.mooncake(0, 20, 3) | fields)
    with serving(RESPONSE) as server:
        bench.run(
            f"--trace {file.name} --model m --server vllm --server-metrics off --energy off",
            url=server.url,
        )
    bodies = [received_request.body for received_request in server.heard if received_request.body]
    sent = {
        name: any(body.get(name) == value for body in bodies)
        for name, value in fields.items()
        if name != "model"
    }
    prompts = TracePrompts(
        traces.read_trace(file), 1, 2, load_tokenizer(None), PromptTarget(models=("small",))
    )
    return sent | {"model": prompts[0].extra.get("model") == "small"}


def parts_of_messages(bench: Bench) -> dict[str, bool]:
    """Check that recordings in a row's messages reach the endpoint unchanged."""
    parts = {
        "audio": {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        "video": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts.values()]}
    ]
    file = bench.file("parts.jsonl", {"messages": messages, "max_tokens": 3})
    with serving(RESPONSE) as server:
        flags = "-c 1 -n 1 --model m --server vllm --server-metrics off --energy off"
        bench.do(f"run --dataset {file.name} --url {server.url} --seed 1 --json {flags}")
    sent = [
        part
        for received_request in server.heard
        if received_request.body
        for message in received_request.body.get("messages", ())
        for part in message["content"]
    ]
    return {name: part in sent for name, part in parts.items()}


def api(bench: Bench, name: str, workload: str = PLAIN) -> bool:
    return int(bench.http(f"--api {name} -c 2 -n 6 --warmup 0", workload)["requests.ok"]) == 6


def accepted(bench: Bench, flag: str) -> bool:
    return bench.do(f"run qa --url sim:gb300-vm -c 1 -n 1 --dry-run {flag}").code == 0


def server_kind(bench: Bench, *kinds: str) -> dict[str, bool]:
    return {kind: accepted(bench, f"--server {kind}") for kind in kinds}


LOAD = (
    Feature(
        "Closed loop: a fixed number of virtual users", lambda b: b.run()["load.in_flight_max"] == 4
    ),
    Feature(
        "Virtual users that start staggered",
        lambda b: bool(np.unique(b.rows(b.run("-c 4 -n 24 --stagger 8s"), "due_ns")[:4]).size == 4),
    ),
    Feature("Open loop: Poisson arrivals", lambda b: 0.8 < gaps(b, "{poisson: 20/s}") < 1.2),
    Feature("Open loop: evenly spaced", lambda b: gaps(b, "{constant: 20/s}") < 0.001),
    Feature(
        "Open loop: bursts (gamma)",
        lambda b: gaps(b, "{gamma: {rate: 20/s, burstiness: 0.25}}") > 1.5,
    ),
    Feature(
        "A rate that changes linearly",
        lambda b: bool(
            np.median(
                b.rows(
                    b.run("", stages("{arrival: {ramp: {from: 1/s, to: 20/s}}, duration: 10s}")),
                    "due_ns",
                )
            )
            > 6e9
        ),
    ),
    Feature(
        "All requests at once",
        lambda b: not b.rows(b.run("--request-rate inf -n 20"), "due_ns").any(),
    ),
    Feature(
        "Stages, with a warm-up that is not measured",
        lambda b: (
            b.run(
                "",
                stages(
                    "{arrival: {poisson: 9/s}, count: 5, warmup: true}",
                    "{arrival: {poisson: 9/s}, count: 7}",
                    "{arrival: {constant: 5/s}, count: 6}",
                ),
            )["requests.ok"]
            == 13
        ),
    ),
    Feature("A spike as a stage", spike),
    Feature(
        "Poisson arrivals as MLPerf LoadGen draws them",
        lambda b: (
            len(
                {
                    b.run(
                        f"--request-rate 10 -n 20 --set schedule_seed=16159082839903944936 --seed "
                        f"{seed}"
                    )["fingerprints.timetable"]
                    for seed in (1, 2)
                }
            )
            == 1
        ),
    ),
    Feature(
        "A limit on requests in flight",
        lambda b: b.run("--request-rate 50 -n 50 --max-in-flight 1")["requests.dropped"] > 0,
    ),
    Feature("A limit on requests in prefill", in_prefill),
    Feature(
        "Runs that stop if there are too many errors or slow responses",
        lambda b: any(
            "stop" in code["code"]
            for code in b.run("--request-rate 20 -n 900 --stop-when ttft:p50:1ms")["verdict.codes"]
        ),
    ),
    Feature(
        "Users who leave during a response",
        lambda b: b.run("-c 4 -n 40", TASKS + "  abandoned: 50%")["requests.cancelled"] > 0,
    ),
    Feature("Replay of a trace", instants_of_a_trace),
    Feature("Replay of a trace by sessions", sessions_of_a_trace),
    Feature("The same seed sends the same requests", same_seed),
    Feature(
        "The option that reproduces a run is printed",
        lambda b: "--seed 1" in b.do("run qa --url sim:gb300-vm -c 2 -n 4 --seed 1").out,
    ),
    Feature("Several worker processes", lambda b: accepted(b, "--workers 2")),
)

CONTENT = (
    Feature("Exact lengths from distributions", lengths),
    Feature(
        "Prefixes that prompts share",
        lambda b: (
            b.run("-c 2 -n 20", asks(400, 3, "shared_prefix_tokens: 320"))["tokens.cached_share"]
            > 0.5
        ),
    ),
    Feature(
        "A requested prefix cache hit rate",
        lambda b: (
            abs(
                b.run("-c 2 -n 60", asks(1000, 3, "cache: {hit_rate: 60%}"))["tokens.cached_share"]
                - 0.6
            )
            < 0.1
        ),
    ),
    Feature(
        "Retrieved chunks with a Zipf distribution",
        lambda b: (
            b.run("-c 2 -n 20", asks(500, 3, "chunks: {count: 3, tokens: 100, corpus: 50}"))[
                "chunks.reused_share"
            ]
            > 0
        ),
    ),
    Feature(
        "Conversations of several turns",
        lambda b: (
            b.run("-c 2 -n 4", asks(40, 5, "turns: {count: 3, tool_result_tokens: 20}"))[
                "requests.ok"
            ]
            == 12
        ),
    ),
    Feature(
        "Recorded trajectories of agents, by the rules of MLPerf Endpoints and AgentX",
        recorded_trajectories,
    ),
    Feature(
        "Agent tasks: steps, tools and sub-agents",
        lambda b: b.run("-c 2 -n 3", TASKS)["sessions.ok"] == 3,
    ),
    Feature(
        "Pipelines over several endpoints",
        lambda b: (
            b.do("run rag-pipeline --url sim:gb300-vm -n 4 -c 2 --json --seed 1")["requests.ok"]
            == 16
        ),
    ),
    Feature(
        "Request classes with SLOs and priorities",
        lambda b: len(b.run("-c 4 -n 40", CLASSES)["classes"]) == 2,
    ),
    Feature(
        "Text of a book instead of random words",
        lambda b: b.run("-c 2 -n 4", asks(80, 3, "prompts: natural"))["requests.ok"] == 4,
    ),
    Feature(
        "Images",
        lambda b: b.run("-c 2 -n 4", asks(80, 3, "images: {count: 1}"))["requests.ok"] == 4,
    ),
    Feature("Audio and video in prompts, from a file", parts_of_messages),
    Feature(
        "Generated audio or video in prompts",
        lambda b: b.run("-c 1 -n 1", asks(50, 5, "audio: {seconds: 2}")).code != 2,
        "The number of tokens depends on the model. Send recordings from a file instead.",
    ),
    Feature("Prompts from a file", own_prompts),
    Feature("Trace formats", trace_formats),
    Feature("Request fields from the rows of a trace", row_fields),
    Feature("A workload from a trace", lambda b: "Arrivals" in b.do(f"fit {trace(b)}").out),
    Feature(
        "Packaged workloads",
        lambda b: {
            path.stem: b.do(f"run {path.stem} --url sim:gb300-vm-128k --dry-run").code == 0
            for path in (ROOT / "workloads").glob("*.yaml")
        },
    ),
)

DOORS = (
    Feature("Chat completions, streamed", lambda b: api(b, "chat")),
    Feature("Completions", lambda b: api(b, "completions")),
    Feature("Responses", lambda b: api(b, "responses")),
    Feature("Anthropic messages", lambda b: api(b, "messages")),
    Feature(
        "Embeddings",
        lambda b: api(b, "embeddings", "requests: {input_tokens: 50, output_tokens: 1}"),
    ),
    Feature("Rerank", lambda b: api(b, "rerank", asks(350, 1, "chunks: {count: 3, tokens: 100}"))),
    Feature(
        "Responses that are not streamed",
        lambda b: b.http("-c 2 -n 6 --warmup 0 --no-stream")["requests.ok"] == 6,
    ),
    Feature(
        "Images, audio, video or realtime sessions as responses",
        lambda b: {kind: accepted(b, f"--api {kind}") for kind in ("images", "audio", "realtime")},
        "They are no stream of tokens, so TTFT and TPOT have no meaning.",
    ),
    Feature(
        "gRPC (KServe, Triton)",
        lambda b: accepted(b, "--api kserve"),
        "Every server that loadgen knows has an OpenAI-compatible API.",
    ),
    Feature(
        "Servers known by name",
        lambda b: server_kind(
            b,
            "trtllm",
            "vllm",
            "sglang",
            "dynamo",
            "llamacpp",
            "transformers",
            "openai",
            "azure",
            "anthropic",
        ),
    ),
    Feature(
        "The native protocols of Bedrock and Vertex AI",
        lambda b: server_kind(b, "bedrock", "vertex"),
        "Their OpenAI-compatible APIs can be measured: `/openai/v1` and `/endpoints/openapi`.",
    ),
    Feature(
        "Several endpoints, with routing",
        lambda b: {
            way: way in b.help("run") for way in ("round-robin", "least-in-flight", "sticky")
        },
    ),
    Feature(
        "TLS with your own certificate authority and client certificates",
        lambda b: all(flag in b.help("run") for flag in ("--cacert", "--cert", "--insecure")),
    ),
    Feature(
        "Headers for gateways: session, SLO, fairness",
        lambda b: {
            "session": accepted(b, "--set session_header=X-Session-ID"),
            "SLO": accepted(b, "--set slo_headers=yes"),
            "fairness": b.run("-c 2 -n 8", TENANTS)["fairness.tenants"] != [],
        },
    ),
    Feature(
        "A simulated server, in virtual time or over HTTP",
        lambda b: b.run()["target.simulated"] and api(b, "chat"),
    ),
)
