"""Runs accuracy mode: sends every sample of the official data set once, scores, writes the logs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
from loadgen.mlperf.result import Reply, Test06, run_test06
from loadgen.mlperf.rules import Benchmark, Test, load_rules

if TYPE_CHECKING:
    from loadgen.answers.completions import Completions

FILE = "mlperf_accuracy.json"


class AccuracyRequest(NamedTuple):
    """What accuracy mode is asked to do.

    Attributes:
        test: The benchmark and round.
        dataset_path: The official data set.
        endpoint: Where the samples are sent.
        output_dir: The directory of the results.
        tokenizer_name: The tokenizer that makes token IDs of the responses; None for no IDs.
        concurrency: The number of concurrent requests.
        simulated: Whether the endpoint is a performance model.
    """

    test: Test
    dataset_path: Path
    endpoint: Settings
    output_dir: Path
    tokenizer_name: str | None
    concurrency: int
    simulated: bool


class _TokenizedResponses(NamedTuple):
    """The responses as token IDs, by a tokenizer, and what TEST06 says about them."""

    tokenizer: Tokenizer
    replies: list[Reply]
    test06: Test06


def run_accuracy_test(
    request: AccuracyRequest, *, on_progress: Callable[[int], None]
) -> tuple[AccuracyResult, list[str]]:
    """Run accuracy mode: send every sample of the data set once, score the responses and write all.

    Returns the result, which is also written as `mlperf_accuracy.json`, and the first few reasons
    why requests failed. With a tokenizer, LoadGen's accuracy log is written as well.

    Args:
        request: The benchmark, the data set, the endpoint and the output directory.
        on_progress: Called with the number of samples that are done.

    Raises:
        UserError: The data set cannot be used, or the benchmark is not scored here.
        CombinedError: The data set has several errors.
        TargetError: The endpoint cannot be reached.
    """
    reference = accuracy.reference_accuracy(request.test.benchmark)
    spec = load_rules().benchmarks[request.test.benchmark]
    dataset_file = _read_dataset(request, spec)
    tokenizer = None
    if request.tokenizer_name is not None:
        tokenizer = load_tokenizer(request.tokenizer_name)
    questions = _create_questions(dataset_file, spec)
    # The prompts contain the chat template of the model, so they are sent to completions.
    endpoint = replace(request.endpoint, api="completions")
    request.output_dir.mkdir(parents=True, exist_ok=True)
    options = SendOptions(request.concurrency, spec.max_output)
    completions = send_questions(endpoint, questions, options, on_progress)

    tokenized = _tokenize_responses(tokenizer, completions)
    if tokenized is not None:
        _write_logs(request.output_dir, tokenized, has_test06="TEST06" in spec.compliance)
    means = [*_rouge_means(questions, completions), *_token_means(completions, tokenized)]
    token_ids_source = ""
    test06 = None
    if tokenized is not None:
        token_ids_source = f"{tokenized.tokenizer.name}, applied to the response texts"
        test06 = tokenized.test06
    result = AccuracyResult(
        benchmark=request.test.benchmark,
        round=request.test.round,
        dataset=dataset_file.name,
        dataset_sha256=hashlib.sha256(request.dataset_path.read_bytes()).hexdigest(),
        url=redacted_url(endpoint),
        model=completions.model,
        version=loadgen_version(),
        samples=len(questions),
        samples_of_rules=spec.samples,
        answered=len(questions) - completions.texts.count(None),
        means=tuple(means),
        targets=accuracy.check_targets(reference, means),
        token_ids=token_ids_source,
        test06=test06,
        compliance=spec.compliance,
        simulated=request.simulated or completions.simulated,
        warnings=tuple(_token_warnings(means, tokenized)),
    )
    files.replace(request.output_dir / FILE, format.document(result))
    return result, completions.failures


def _read_dataset(request: AccuracyRequest, spec: Benchmark) -> dataset.DatasetFile:
    """Return the data set. Raises UserError if a sample has no reference response."""
    path = request.dataset_path
    dataset_file = dataset.read_dataset(path, spec, benchmark=request.test.benchmark)
    if not all(dataset_file.references):
        raise UserError(
            "missing_key",
            "the samples have no reference response",
            f"--dataset {path}",
            f"add a text column with references: {', '.join(dataset.REFERENCE_COLUMNS)}",
        )
    return dataset_file


def _create_questions(dataset_file: dataset.DatasetFile, spec: Benchmark) -> list[Question]:
    """Return the samples as questions whose answers are scored against the reference responses."""
    return [
        Question(row=DatasetRow(prompt=prompt, output_tokens=spec.max_output), reference=reference)
        for prompt, reference in zip(dataset_file.prompts, dataset_file.references, strict=True)
    ]


def _rouge_means(questions: Sequence[Question], completions: Completions) -> list[AccuracyMean]:
    """Return the mean ROUGE scores of all responses, times 100 as in the rules.

    ROUGE measures how many words and phrases a response has in common with the reference response.
    """
    scored_prompts = score_prompts(questions, completions.texts, None)
    all_prompts = summarize_scores(scored_prompts)[0]  # the other groups are classes of prompts
    return [
        AccuracyMean(
            metric=score.metric,
            mean=score.mean * 100,
            low=_to_percent(score.low),
            high=_to_percent(score.high),
        )
        for score in all_prompts.scores
        if score.metric in ROUGE
    ]


def _to_percent(fraction: float | None) -> float | None:
    return None if fraction is None else fraction * 100


def _token_means(
    completions: Completions, tokenized: _TokenizedResponses | None
) -> list[AccuracyMean]:
    """Return the mean number of tokens of a response, or an empty list if it is not known.

    The rules require it to be near that of the reference. The counts are those of the server if it
    reported one for every response, otherwise those of the tokenizer.
    """
    sample_count = len(completions.output_tokens)
    counts = [count for count in completions.output_tokens if count is not None]
    has_all_counts = len(counts) == sample_count
    if not has_all_counts:
        if tokenized is None:
            return []
        counts = [len(reply.output_tokens) for reply in tokenized.replies]
    return [AccuracyMean(metric=accuracy.TOKENS, mean=sum(counts) / sample_count)]


def _tokenize_responses(
    tokenizer: Tokenizer | None, completions: Completions
) -> _TokenizedResponses | None:
    """Return the responses as token IDs with the checks of TEST06, or None without a tokenizer.

    A request that failed counts as an empty response. The server sends texts, so it does not report
    its first token as an ID; that check of TEST06 is left out, as in Offline.
    """
    if tokenizer is None:
        return None
    replies = []
    for text, server_count in zip(completions.texts, completions.output_tokens, strict=True):
        token_ids = tokenizer.encode(text or "")
        reported_count = len(token_ids) if server_count is None else server_count
        reply = Reply(first_tokens=(), output_tokens=token_ids, reported_count=reported_count)
        replies.append(reply)
    return _TokenizedResponses(tokenizer, replies, run_test06(replies, is_offline=True))


def _token_warnings(
    means: Sequence[AccuracyMean], tokenized: _TokenizedResponses | None
) -> list[str]:
    """Return warnings about token counts and token IDs that are missing or differ."""
    warnings = []
    if not any(mean.metric == accuracy.TOKENS for mean in means):
        warnings.append(
            "the server reports no token counts of its responses; --tokenizer NAME counts them"
        )
    if tokenized is None:
        warnings.append(
            "mlperf_log_accuracy.json was not written, because responses are texts; "
            "--tokenizer NAME converts them to token IDs"
        )
    elif tokenized.test06.length:
        warnings.append(
            f"{tokenized.test06.length:,} responses have another number of tokens by "
            f"{tokenized.tokenizer.name} than the server reported. The tokenizer is "
            "not that of the model, or the texts do not convert back to the same "
            "token IDs"
        )
    return warnings


def _write_logs(output_dir: Path, tokenized: _TokenizedResponses, *, has_test06: bool) -> None:
    """Write LoadGen's accuracy log and, if the rules require TEST06, its verification."""
    replies = tokenized.replies
    lines = accuracy.format_accuracy_log(
        responses=[reply.output_tokens for reply in replies],
        token_counts=[reply.reported_count for reply in replies],
    )
    files.replace(output_dir / accuracy.LOG, "".join(lines).encode())
    if has_test06:
        verification = accuracy.format_verification(tokenized.test06)
        files.replace(output_dir / accuracy.VERIFY, verification.encode())
