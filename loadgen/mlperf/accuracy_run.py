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
from loadgen.mlperf.result import Reply, Test06, count_test06_failures
from loadgen.mlperf.rules import Benchmark, Test, load_rules

if TYPE_CHECKING:
    from loadgen.answers.completions import Completions

RESULT_FILE = "mlperf_accuracy.json"


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
    """The responses as token IDs.

    Attributes:
        tokenizer: The tokenizer that made token IDs of the response texts.
        replies: The responses.
        test06: What MLPerf's compliance test of token counts says about them.
    """

    tokenizer: Tokenizer
    replies: list[Reply]
    test06: Test06

    @property
    def source(self) -> str:
        """Where the token IDs come from, as the result says it."""
        return f"{self.tokenizer.name}, applied to the response texts"


def run_accuracy_test(
    request: AccuracyRequest, *, on_progress: Callable[[int], None]
) -> tuple[AccuracyResult, list[str]]:
    """Send every sample of the data set once, score the responses and write the result.

    This is MLPerf's accuracy mode. Returns the result, which is also written as
    `mlperf_accuracy.json`, and the first few reasons why requests failed. With a tokenizer,
    LoadGen's accuracy log is written as well.

    Args:
        request: The benchmark, the data set, the endpoint and the output directory.
        on_progress: Called with the number of samples that are done.

    Raises:
        UserError: The data set cannot be used, or the benchmark is not scored here.
        CombinedError: The data set has several errors.
        TargetError: The endpoint cannot be reached.
    """
    accuracy.reference_accuracy(request.test.benchmark)  # raises UserError if it is not scored
    benchmark = load_rules().benchmarks[request.test.benchmark]
    dataset_file = _read_dataset(request, benchmark)
    tokenizer = None if request.tokenizer_name is None else load_tokenizer(request.tokenizer_name)
    request.output_dir.mkdir(parents=True, exist_ok=True)

    responses = _send_samples(request, benchmark, dataset_file, tokenizer, on_progress)
    if responses.tokenized is not None:
        has_test06 = "TEST06" in benchmark.compliance
        _write_logs(request.output_dir, responses.tokenized, has_test06=has_test06)

    result = _create_result(request, benchmark, responses)
    files.replace(request.output_dir / RESULT_FILE, format.document(result))
    return result, responses.completions.failures


class _Responses(NamedTuple):
    """The responses to the samples of the data set.

    Attributes:
        dataset_name: The name of the data set.
        url: The endpoint, without secrets.
        questions: The samples, with their reference responses.
        completions: The responses as texts, and the token counts that the server reported.
        tokenized: The responses as token IDs, or None without a tokenizer.
    """

    dataset_name: str
    url: str
    questions: Sequence[Question]
    completions: Completions
    tokenized: _TokenizedResponses | None


def _send_samples(
    request: AccuracyRequest,
    benchmark: Benchmark,
    dataset_file: dataset.DatasetFile,
    tokenizer: Tokenizer | None,
    on_progress: Callable[[int], None],
) -> _Responses:
    """Send every sample of the data set once, and return the responses.

    Args:
        request: The endpoint and the number of concurrent requests.
        benchmark: The maximum length of a response.
        dataset_file: The samples.
        tokenizer: Converts responses to token IDs; None to leave them as texts.
        on_progress: Called with the number of samples that are done.
    """
    # The prompts contain the chat template of the model, so they are sent to completions.
    endpoint = replace(request.endpoint, api="completions")
    questions = _create_questions(dataset_file, benchmark)
    options = SendOptions(request.concurrency, benchmark.max_output)
    completions = send_questions(endpoint, questions, options, on_progress)

    return _Responses(
        dataset_name=dataset_file.name,
        url=redacted_url(endpoint),
        questions=questions,
        completions=completions,
        tokenized=None if tokenizer is None else _tokenize_responses(tokenizer, completions),
    )


def _create_result(
    request: AccuracyRequest, benchmark: Benchmark, responses: _Responses
) -> AccuracyResult:
    """Return the result: the mean scores of the responses, and whether they meet the targets.

    Args:
        request: The benchmark, the data set and the endpoint.
        benchmark: The requirements of the rules.
        responses: The responses to the samples.
    """
    completions = responses.completions
    tokenized = responses.tokenized
    means = _mean_scores(responses)
    reference = accuracy.reference_accuracy(request.test.benchmark)
    failed_requests = completions.texts.count(None)

    return AccuracyResult(
        # the test
        benchmark=request.test.benchmark,
        round=request.test.round,
        samples_of_rules=benchmark.samples,  # how many samples the rules require
        compliance=benchmark.compliance,
        # the data set and the endpoint
        dataset=responses.dataset_name,
        dataset_sha256=hashlib.sha256(request.dataset_path.read_bytes()).hexdigest(),
        url=responses.url,
        model=completions.model,
        version=loadgen_version(),
        # the responses
        samples=len(responses.questions),
        answered=len(responses.questions) - failed_requests,
        means=tuple(means),
        targets=accuracy.check_targets(reference, means),
        # where token IDs come from, and TEST06, MLPerf's compliance test of token counts
        token_ids="" if tokenized is None else tokenized.source,
        test06=None if tokenized is None else tokenized.test06,
        simulated=request.simulated or completions.simulated,
        warnings=tuple(_token_warnings(means, tokenized)),
    )


def _mean_scores(responses: _Responses) -> list[AccuracyMean]:
    """Return the mean ROUGE scores of the responses, and their mean number of tokens if known."""
    means = _rouge_means(responses.questions, responses.completions)
    token_mean = _mean_output_tokens(responses.completions, responses.tokenized)
    if token_mean is not None:
        means.append(token_mean)
    return means


def _read_dataset(request: AccuracyRequest, benchmark: Benchmark) -> dataset.DatasetFile:
    """Return the samples of the data set, each of which needs a reference response.

    The scores compare responses with these references.

    Args:
        request: The path of the data set, and the name of the benchmark.
        benchmark: The requirements of the benchmark.

    Raises:
        UserError: The file cannot be used, or a sample has no reference response.
    """
    path = request.dataset_path
    dataset_file = dataset.read_dataset(path, benchmark, benchmark_name=request.test.benchmark)
    if not all(dataset_file.references):
        raise UserError(
            "missing_key",
            "the samples have no reference response",
            f"--dataset {path}",
            f"add a text column with references: {', '.join(dataset.REFERENCE_COLUMNS)}",
        )

    return dataset_file


def _create_questions(dataset_file: dataset.DatasetFile, benchmark: Benchmark) -> list[Question]:
    """Return the samples as questions whose answers are scored against the reference responses."""
    max_tokens = benchmark.max_output
    return [
        Question(row=DatasetRow(prompt=prompt, output_tokens=max_tokens), reference=reference)
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


def _mean_output_tokens(
    completions: Completions, tokenized: _TokenizedResponses | None
) -> AccuracyMean | None:
    """Return the mean number of tokens of a response, or None if it is not known.

    The rules require it to be near that of MLPerf's reference implementation. The counts are those
    of the server if it reported one for every response, otherwise those of the tokenizer.
    """
    server_counts = [count for count in completions.output_tokens if count is not None]
    sample_count = len(completions.output_tokens)
    if len(server_counts) == sample_count:
        total_tokens = sum(server_counts)
    elif tokenized is not None:
        total_tokens = sum(len(reply.output_tokens) for reply in tokenized.replies)
    else:
        return None

    return AccuracyMean(metric=accuracy.TOKENS, mean=total_tokens / sample_count)


def _tokenize_responses(tokenizer: Tokenizer, completions: Completions) -> _TokenizedResponses:
    """Return the responses as token IDs, with the checks of TEST06.

    TEST06 is MLPerf's compliance test of token counts. It compares the number of token IDs with the
    number that the server reported. If the server reported none, they count as equal. A request
    that failed counts as an empty response.
    """
    replies = []
    for text, server_count in zip(completions.texts, completions.output_tokens, strict=True):
        token_ids = tokenizer.encode(text or "")
        reported_count = len(token_ids) if server_count is None else server_count
        reply = Reply(first_tokens=(), output_tokens=token_ids, reported_count=reported_count)
        replies.append(reply)

    # The server sends texts, so it reports no ID of its first token that could be checked.
    test06 = count_test06_failures(replies, reports_first_tokens=False)
    return _TokenizedResponses(tokenizer, replies, test06)


def _token_warnings(
    means: Sequence[AccuracyMean], tokenized: _TokenizedResponses | None
) -> list[str]:
    """Return warnings about the tokens of the responses.

    There is one if the mean number of tokens is not known, one if the responses have no token IDs,
    and one if a tokenizer counts other numbers of tokens than the server reported.

    Args:
        means: The means that are known.
        tokenized: The responses as token IDs, or None without a tokenizer.
    """
    warnings = []
    has_token_mean = any(mean.metric == accuracy.TOKENS for mean in means)
    if not has_token_mean:
        warnings.append(
            "the server reports no token counts of its responses; --tokenizer NAME counts them"
        )

    if tokenized is None:
        warnings.append(
            "mlperf_log_accuracy.json was not written, because responses are texts; "
            "--tokenizer NAME converts them to token IDs"
        )
        return warnings

    # TEST06 is MLPerf's compliance test of token counts.
    differing_counts = tokenized.test06.wrong_lengths
    if differing_counts:
        warnings.append(
            f"{differing_counts:,} responses have another number of tokens by "
            f"{tokenized.tokenizer.name} than the server reported. The tokenizer is "
            "not that of the model, or the texts do not convert back to the same "
            "token IDs"
        )

    return warnings


def _write_logs(output_dir: Path, tokenized: _TokenizedResponses, *, has_test06: bool) -> None:
    """Write LoadGen's accuracy log, `mlperf_log_accuracy.json`, with the token IDs of responses.

    If the rules require TEST06, MLPerf's compliance test of token counts, its outcome is written as
    `verify_accuracy.txt`, like that of the official script.

    Args:
        output_dir: The directory of the results.
        tokenized: The responses as token IDs.
        has_test06: Whether the rules require TEST06.
    """
    lines = accuracy.format_accuracy_log(
        responses=[reply.output_tokens for reply in tokenized.replies],
        token_counts=[reply.reported_count for reply in tokenized.replies],
    )
    files.replace(output_dir / accuracy.LOG_FILE, "".join(lines).encode())

    if has_test06:
        verification = accuracy.format_verification(tokenized.test06)
        files.replace(output_dir / accuracy.VERIFICATION_FILE, verification.encode())
