"""Request bodies from the builder process equal those built in place, in bounded memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loadgen_sdk.hashing import sum_of_hashes
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat, encode_body
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from run_fixtures import NO_PAGES, frozen_at_birth, says, when_started
from servers import log, shared

from loadgen.core.errors import UserError
from loadgen.core.execution import bodies, run
from loadgen.core.execution.bodies import body_encoder
from loadgen.core.execution.body_prefetch import BodyPrefetch
from loadgen.core.execution.events import RunEvent, RunPlanned
from loadgen.core.execution.plan import Plan, Settings, Tuning
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.digest import Digest
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import store
from loadgen.core.schedule.schedule import shard
from loadgen.core.workload import Workload, load, read_flags
from loadgen.sim.server.options import Options


def workload(folder: Path, turns: str = "", **flags: str) -> Workload:
    folder.mkdir(exist_ok=True)
    file = folder / "w.yaml"
    length = "{uniform: {min: 16, max: 48}}"  # 8 of them are the template of the simulated server
    requests = (
        turns if turns.startswith("{") else f"{{input_tokens: {length}, output_tokens: 4{turns}}}"
    )
    file.write_text(f"name: many\nrequests: {requests}\n")
    return load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))


def go(
    folder: Path, tuning: Tuning, turns: str = "", begun: Any = None, **flags: str
) -> tuple[Any, Counter[str], store.Stored]:
    requested_workload = workload(folder, turns, **flags)
    server = shared(Options(ttft="8ms", itl="0.2ms", log_bodies=True))
    settings = Settings(
        url=server.url, model="sim", server="trtllm", out=folder / "out", tuning=tuning, **NO_PAGES
    )
    summary, out = run.execute(
        requested_workload, settings, when_started(begun or (lambda _: None))
    )
    return (
        summary,
        Counter(
            logged_request.body_sha256
            for logged_request in log(server).requests
            if logged_request.id
        ),
        store.read_run(out),
    )


def test_bodies_are_read_back_in_any_order() -> None:
    """Short bodies share blocks, some cross from one block to the next, and some are long."""
    requested_workload = load("qa", read_flags(num_requests="400", request_rate="inf"))
    prompts = build_prompts(requested_workload, 7, 1, load_tokenizer(None))
    draw = random.Random(1)
    written = [
        draw.randbytes(draw.choice([0, 1, 300, 3000, 4096, 4097, 40_000])) for _ in range(400)
    ]
    texts = iter(written)
    prefetched = bodies.Bodies(prompts, lambda *_: next(texts), 1, max_blocks=2)
    numbers = iter(range(400))
    for part in (
        1,
        150,
        249,
    ):  # what is built while a load goes lies in a block that was read before
        prefetched.build(0, numbers, max_bodies=part)
        order = list(range(prefetched.built_count(0)))
        draw.shuffle(order)
        assert all(prefetched.take_body(0, number)[0] == written[number] for number in order)

    assert prefetched.late_bodies == 0
    prefetched.close()


PLAIN = (
    "requests: {input_tokens: {uniform: {min: 1, max: 40}}, "
    "output_tokens: {uniform: {min: 1, max: 9}}}"
)
CHUNKS = "requests: {input_tokens: 60, output_tokens: 4, chunks: {count: 2, tokens: 20, corpus: 9}}"
LONG = "requests: {input_tokens: 4000, output_tokens: 4}"  # more than a block of the file together
PARTS = (
    "requests: {input_tokens: 30, output_tokens: 4, system_tokens: 9, "
    "turns: {count: 3, tool_result_tokens: 5}}"
)
CLASSES = (
    "classes: {a: {weight: 2, requests: &a {input_tokens: 9, output_tokens: 4}}, "
    "b: {weight: 1, requests: *a}}"
)


@pytest.mark.parametrize("requests_text", [PLAIN, CHUNKS, LONG, PARTS, CLASSES])
@pytest.mark.parametrize("targets", [1, 3])
def test_bodies_built_together_equal_bodies_built_singly(
    tmp_path: Path, requests_text: str, targets: int
) -> None:
    """Bytes, metadata and both digests do not depend on how many are built at a time."""
    (tmp_path / "w.yaml").write_text(f"name: w\n{requests_text}\n")
    prompts = build_prompts(
        load(str(tmp_path / "w.yaml"), read_flags(num_requests="500", concurrency="1")),
        7,
        1,
        load_tokenizer(None),
    )
    makes = [
        BodyEncoder(BodyFormat(SERVER_PROFILES["vllm"], "chat", f"model {target}", True)).encode
        for target in range(targets)
    ]

    def prepare(number: int, request: Request) -> bytes:
        return makes[number % targets](request)

    numbers = random.Random(3).sample(range(0, 500, 2), 90)
    together = bodies.Bodies(prompts, prepare, 1)
    asked_for = iter(sorted(numbers))
    parts = [
        together.build(0, asked_for, max_bodies=most, max_cpu_s=100.0)
        for most in (1, 3, 8, 0, 20, None)
    ]
    assert (
        parts == [1, 3, 8, 0, 20, 58]
        and together.built_count(0) == 90
        and together.build(0, asked_for) == 0
    )
    alone, sent = Digest(), []
    for number in numbers:
        request = prompts[number]
        alone.add([(number, request)])
        sent.append(
            (
                number,
                encode_body(
                    request,
                    BodyFormat(SERVER_PROFILES["vllm"], "chat", f"model {number % targets}", True),
                ),
            )
        )
        assert together.take_body(0, number) == (sent[-1][1], bodies.facts_of_request(request))
    assert together.late_bodies == 0
    assert together.digest.hexdigest() == alone.hexdigest()
    assert together.body_digest.total == int.from_bytes(sum_of_hashes(sent), "little")
    assert together.build(0, iter(numbers), max_cpu_s=0.0) == 0
    together.close()


TURNS = ", turns: {count: 3, tool_result_tokens: 5}"
STEPS = """{tools: {look: {time: 3ms, result_tokens: 9}}, steps: {
  a: {input_tokens: 30, output_tokens: 4},
  b: {after: a, context: new, input_tokens: 20, output_tokens: 4, tool: look,
    turns: {empirical: [1, 2]}, parallel: 2},
  c: {after: [a, b], output_tokens: 4}}}"""
REAL = ", turns: {count: 3, tool_result_tokens: 5, history: server}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("turns", "flags"),
    [
        (TURNS, {"concurrency": "7", "num_requests": "50"}),
        (REAL, {"concurrency": "7", "num_requests": "50"}),
        (STEPS, {"request_rate": "100", "num_requests": "30"}),
        ("", {"request_rate": "300", "num_requests": "120", "warmup": "40req"}),
        ("", {"request_rate": "inf", "num_requests": "120", "max_in_flight": "30"}),
    ],
)
def test_bodies_are_the_same_with_and_without_prefetching(
    tmp_path: Path, turns: str, flags: dict[str, str]
) -> None:
    prefetched_bodies, wanted, before = go(tmp_path / "ahead", Tuning(), turns, **flags)
    rolling = Tuning(most_ahead=10, window=150 if "max_in_flight" in flags else 20)
    summary, received, after = go(tmp_path / "rolling", rolling, turns, **flags)

    assert received == wanted or "max_in_flight" in flags
    assert sum(received.values()) > 20
    assert summary.requests.scheduled == prefetched_bodies.requests.scheduled
    assert summary.requests.ok > 20

    for name in ("built_tokens", "asked_output", "input_source", "slot"):
        if (
            name == "input_source" and "max_in_flight" in flags
        ):  # by the server, so of those that were not dropped
            continue
        assert sorted(after.rows[name].tolist()) == sorted(before.rows[name].tolist()), name
    if turns != REAL and "max_in_flight" not in flags:
        built_late = sum(
            code.values["bodies"]
            for code in summary.verdict.warning_codes
            if code.code == "bodies_late"
        )
        assert (
            built_late < summary.requests.scheduled
        )  # the first ones are waited for; this machine does other things


@pytest.mark.processes
def test_a_closed_loop_with_a_duration_uses_prefetched_bodies(tmp_path: Path) -> None:
    summary, received, _ = go(tmp_path, Tuning(long_ns=0), concurrency="20", duration="1.5s")
    assert summary.requests.ok > 200
    assert (
        len(received) == summary.requests.ok + summary.warmup.ok
    )  # the first round of the lanes is not measured
    assert summary.fingerprints.prompts.startswith("first")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("concurrency", "turns", "body_count"), [("3", "", 12), ("20", TURNS, 80), ("300", "", 300)]
)
def test_an_endless_load_builds_a_few_bodies_per_user_in_advance(
    tmp_path: Path, concurrency: str, turns: str, body_count: int
) -> None:
    """However long they are; the next ones are made as these are sent."""
    planned_plans: list[Plan] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, RunPlanned):
            planned_plans.append(event.plan)
            raise UserError("unsupported", "enough was seen", "")

    settings = Settings(
        url=shared(Options()).url, model="sim", server="trtllm", out=tmp_path / "out", **NO_PAGES
    )
    with pytest.raises(UserError):
        run.execute(
            workload(tmp_path, turns, concurrency=concurrency, duration="9s", warmup="0"),
            settings,
            (hear,),
        )
    (plan,) = planned_plans

    async def count_prefetched() -> int:
        prefetch = BodyPrefetch(plan.job, shard(plan.schedule, 0, 1), plan.requests)
        try:
            await prefetch.receive_first_bodies()
            return len(prefetch._arrived) + len(prefetch._awaited_ids)
        finally:
            prefetch.close()

    assert asyncio.run(count_prefetched()) == body_count * len(plan.schedule.stages)


@pytest.mark.processes
def test_prefetched_bodies_are_limited(tmp_path: Path) -> None:
    planned_plans: list[Plan] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, RunPlanned):
            planned_plans.append(event.plan)

    settings = Settings(url="sim:gb300-vm", out=tmp_path / "out", tuning=Tuning(window=30))
    run.execute(workload(tmp_path, request_rate="500", num_requests="300"), settings, (hear,))
    (plan,) = planned_plans

    async def most_held() -> int:
        prefetch = BodyPrefetch(plan.job, shard(plan.schedule, 0, 1), plan.requests)
        make, most = body_encoder(plan.job, plan.requests), 0
        try:
            for number in plan.schedule.slot_ids_of(plan.schedule.stages[0]):
                await prefetch.receive_first_bodies()
                most = max(most, len(prefetch._arrived) + len(prefetch._awaited_ids))
                assert prefetch.take_body(0, number)[0] == make(number, plan.requests[number])
            assert (prefetch.late_bodies, prefetch._arrived) == (0, {})
        finally:
            prefetch.close()
        return most

    assert asyncio.run(most_held()) == 30


@pytest.mark.processes
def test_bodies_are_built_in_place_if_the_builder_dies(tmp_path: Path) -> None:
    def kill(_: Any) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        (builder,) = [
            pid
            for pid in children
            if "body_builder"
            in Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text()
        ]
        os.kill(int(builder), signal.SIGKILL)

    summary, received, _ = go(
        tmp_path,
        Tuning(most_ahead=10, window=30),
        begun=kill,
        request_rate="500",
        num_requests="300",
    )
    assert summary.requests.ok == 300
    assert len(received) == 300
    assert says(summary.verdict.warning_codes, "bodies_late")


@pytest.mark.processes
def test_a_builder_that_freezes_before_the_first_body_is_ended(tmp_path: Path) -> None:
    tuning = Tuning(most_ahead=10, helper_frozen_s=0.3)
    with frozen_at_birth("loadgen.core.execution.body_builder", 1) as pids:
        summary, received, _ = go(tmp_path, tuning, request_rate="500", num_requests="60")
    assert len(pids) == 1
    assert (summary.requests.ok, len(received)) == (60, 60)
    assert says(summary.verdict.warning_codes, "bodies_late", bodies=60)
