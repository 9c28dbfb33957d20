"""Carries out accuracy mode: asks every sample of the official data set once, scores, writes the logs. IO."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from loadgen.answers.comparison import score_prompts, summarize_scores
from loadgen.answers.completions import SendOptions, redacted_url, send_questions
from loadgen.answers.questions import Question
from loadgen.answers.scores import ROUGE
from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.execution.plan import Settings
from loadgen.core.requests.tokenizer import Tokenizer, load_tokenizer
from loadgen.core.results import files
from loadgen.core.workload.dataset_rows import DatasetRow
from loadgen.mlperf import accuracy, dataset
from loadgen.mlperf.accuracy import AccuracyMean, AccuracyResult
from loadgen.mlperf.result import Reply, Test06, test06
from loadgen.mlperf.rules import Test, rules

FILE = "mlperf_accuracy.json"


def run(
    test: Test,
    path: Path,
    endpoint: Settings,
    out: Path,
    *,
    tokenizer: str | None,
    lanes: int,
    tell: Callable[[int], None],
    simulated: bool,
) -> tuple[AccuracyResult, list[str]]:
    """The result, and why answers did not come. Raises UserError, Faults, TargetError."""
    of_reference = accuracy.reference(test.benchmark)
    spec = rules().benchmarks[test.benchmark]
    file = dataset.read_dataset(path, spec, benchmark=test.benchmark)
    if not all(file.references):
        known = ", ".join(dataset.REFERENCES)
        raise UserError(
            "missing_key",
            "samples without a reference answer",
            f"--dataset {path}",
            f"a column of texts: {known}",
        )
    ids = None if tokenizer is None else load_tokenizer(tokenizer)
    questions = [
        Question(row=DatasetRow(prompt=prompt, output_tokens=spec.max_output), reference=reference)
        for prompt, reference in zip(file.prompts, file.references, strict=True)
    ]
    endpoint = replace(
        endpoint, api="completions"
    )  # the prompts of the set have the model's template in them
    out.mkdir(parents=True, exist_ok=True)
    completions = send_questions(endpoint, questions, SendOptions(lanes, spec.max_output), tell)
    prompts = score_prompts(questions, completions.texts, None)
    means = [
        AccuracyMean(
            metric=one.metric, mean=one.mean * 100, low=_percent(one.low), high=_percent(one.high)
        )
        for one in summarize_scores(prompts)[0].scores
        if one.metric in ROUGE
    ]
    replies = [] if ids is None else _replies(ids, completions.texts, completions.output_tokens)
    counts = [count for count in completions.output_tokens if count is not None]
    counts = counts if len(counts) == len(questions) else [len(reply.output) for reply in replies]
    warnings = []
    if len(counts) == len(questions):
        means.append(AccuracyMean(metric=accuracy.TOKENS, mean=sum(counts) / len(counts)))
    else:
        warnings.append(
            "the server does not count the tokens of its answers: --tokenizer NAME counts them"
        )
    if ids is None:
        warnings.append(
            "no mlperf_log_accuracy.json: answers come as texts, --tokenizer NAME makes token ids"
        )
    checked: Test06 | None = None
    if replies:
        checked = test06(replies, offline=True)
        if checked.length:
            warnings.append(
                f"{checked.length:,} answers are another number of tokens by {ids.name if ids else ''} than the server "
                "reported: another tokenizer, or ids that their text does not give back"
            )
        reported = [reply.reported for reply in replies]
        files.replace(
            out / accuracy.LOG,
            "".join(accuracy.log([r.output for r in replies], reported)).encode(),
        )
        if "TEST06" in spec.compliance:
            files.replace(out / accuracy.VERIFY, accuracy.verification(checked).encode())
    result = AccuracyResult(
        benchmark=test.benchmark,
        round=test.round,
        dataset=file.name,
        dataset_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        url=redacted_url(endpoint),
        model=completions.model,
        version=loadgen_version(),
        samples=len(questions),
        samples_of_rules=spec.samples,
        answered=len(questions) - completions.texts.count(None),
        means=tuple(means),
        targets=accuracy.targets(of_reference, means),
        token_ids="" if ids is None else f"{ids.name}, of the texts",
        test06=checked,
        compliance=spec.compliance,
        simulated=simulated or completions.simulated,
        warnings=tuple(warnings),
    )
    files.replace(out / FILE, format.document(result))
    return result, completions.failures


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _replies(ids: Tokenizer, answers: list[str | None], reported: list[int | None]) -> list[Reply]:
    """The answers as token ids, each with the number of tokens that the server has reported (or that of the ids)."""
    made = []
    for answer, count in zip(answers, reported, strict=True):
        tokens = ids.encode(answer or "")
        made.append(Reply((), tokens, len(tokens) if count is None else count))
    return made
