"""Every kind of page in a real browser on a desktop, a wide screen and a phone.

Nothing is clipped, nothing scrolls sideways and no text leaves its card. Each page shows its most
important part first.
"""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest
from browser import Browser
from command_line import exits

from loadgen.answers import answer_files as answers
from loadgen.answers.comparison import AnswersResult, score_prompts, summarize_scores
from loadgen.answers.questions import AnswerKey
from loadgen.contracts.page_sections import compute_limit_usage_percent
from loadgen.render import glossary

pytestmark = pytest.mark.commands

SIMULATED = ["--url", "sim:gb300-vm", "--seed", "1", "--gpus", "4"]
CONTRACT = """\
name: Answers that people read along
description: A chat service of one virtual machine.
horizon: 12s
slo: {ttft: 1s, tpot: 50ms}
levels:
  - name: an-hour-like-any-other
    workload: qa
    rate: 8/s
    duration: 10m
    repeats: 2
    must: [{ttft: {limit: 1s, at: p50}}, {errors: 1%}, {goodput: 97%}, {tpot: {limit: 10ms, at: p50}}]
    should: [{ttft: {limit: 2s, at: p95}}]
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind, written by the commands of a user, in virtual time."""
    at = tmp_path_factory.mktemp("pages")
    slo = ["--slo", "ttft:2s:p95", "--slo", "tpot:60ms:p95"]
    load = ["--request-rate", "60", "-n", "300", "--warmup", "0"]
    assert exits("run", "qa", *SIMULATED, *slo, *load, "--out", at / "run") == 0
    assert exits("report", at / "run") == 0
    slo += ["--shape", "ND128isr_GB300_v6"]
    assert (
        exits(
            "sweep",
            "qa",
            *SIMULATED,
            *slo,
            "--concurrency",
            "1,4,16",
            "-n",
            "80",
            "--out",
            at / "sweep",
        )
        == 0
    )
    levels = [at / "sweep" / name for name in ("c1", "c4", "c16")]
    assert (
        exits(
            "compare",
            *levels,
            "--anyway",
            "--html",
            at / "compare.html",
            "--fail-on",
            "ttft_ms.p50 > 1s",
        )
        == 0
    )
    prices = Path(__file__).parent.parent / "docs" / "prices.example.yaml"
    assert exits("cost", *levels[1:], "--prices", prices, "--html", at / "cost.html") == 0
    goal = [
        "--slo",
        "tpot:60ms:p95",
        "--slo",
        "ttft:2s:p95",
        "--low",
        "15",
        "--high",
        "45",
        "-d",
        "200s",
    ]
    assert (
        exits("search", "rag", *SIMULATED, *goal, "--precision", "0.1", "--out", at / "search") == 0
    )
    assert exits("report", at / "search") == 0
    assert (
        exits(
            "run",
            "qa",
            *SIMULATED,
            "--request-rate",
            "20",
            "-d",
            "20s",
            "--repeat",
            "3",
            "--out",
            at / "repeats",
        )
        == 0
    )
    assert exits("report", at / "repeats") == 0
    shutil.copytree(at / "search", at / "bought")
    paid = [f"{at / 'search'}=Azure ND128isr_GB300_v6 1 year", f"{at / 'bought'}=own dgx-h200"]
    under = ["--prices", prices, "--price", paid[0], "--price", paid[1], "--gpus-per-machine", "4"]
    assert (
        exits(
            "size",
            "rag",
            at / "search",
            at / "bought",
            "--users",
            "5000",
            *under,
            "--out",
            at / "size",
        )
        == 0
    )
    keys = [AnswerKey(reference=f"the answer is {n}") for n in range(200)]
    answer_sets = [
        [f"the answer is {n}" if n % every else "no idea" for n in range(200)] for every in (10, 12)
    ]
    judged_scored_groups = summarize_scores(score_prompts(keys, *answer_sets), 0.02)
    result = AnswersResult(
        dataset="q.jsonl",
        url="http://a",
        model="fp4",
        other_url="http://b",
        other_model="bf16",
        prompts=200,
        failed=0,
        allowed_loss=0.02,
        groups=judged_scored_groups,
    )
    answers.write_result(at / "answers", result, score_prompts(keys, *answer_sets))
    exits("report", at / "answers")
    (at / "contract.yaml").write_text(CONTRACT)
    parties = ["--metadata", "buyer=Ann <a@example.com>", "--metadata", "vendor=Acme"]
    contract = [at / "contract.yaml", "--url", "sim:gb300-vm", "--seed", "1"]
    assert exits("validate", *contract, *parties, "--out", at / "poc") == 1  # one promise is broken
    (at / "set.jsonl").write_text(
        "".join(f'{{"prompt": "{"word " * (3 + n % 7)}"}}\n' for n in range(50))
    )
    test = [
        "-b",
        "llama2-70b",
        "--dataset",
        at / "set.jsonl",
        "--min-duration",
        "20",
        "--target-qps",
        "50",
    ]
    assert (
        exits(
            "mlperf",
            "server",
            *test,
            "--url",
            "sim:gb300-vm",
            "--gpus",
            "4",
            "--out",
            at / "mlperf",
        )
        == 0
    )
    assert exits("report", at / "mlperf") == 0
    return {
        "mlperf": at / "mlperf" / "report.html",
        "run": at / "run" / "report.html",
        "sweep": at / "sweep" / "report.html",
        "compare": at / "compare.html",
        "cost": at / "cost.html",
        "repeats": at / "repeats" / "report.html",
        "size": at / "size" / "report.html",
        "answers": at / "answers" / "report.html",
        "search": at / "search" / "report.html",
        "validation": at / "poc" / "verdict.html",
    }


KINDS = (
    "run",
    "mlperf",
    "sweep",
    "compare",
    "cost",
    "search",
    "validation",
    "repeats",
    "size",
    "answers",
)


# What lies outside its card or the window, or over other words: letters of charts, and every element but the inside
# of a table that scrolls.
OUTSIDE = """(() => {
  const out = [];
  for (const figure of document.querySelectorAll("figure")) {
    const card = figure.getBoundingClientRect();
    for (const text of figure.querySelectorAll("svg text")) {
      const b = text.getBoundingClientRect();
      if (b.width && (b.left < card.left || b.right > card.right || b.top < card.top || b.bottom > card.bottom))
        out.push(figure.querySelector("figcaption").textContent + ": " + text.textContent);
    }
  }
  for (const figure of document.querySelectorAll("figure")) {
    const boxes = [...figure.querySelectorAll("svg text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    const texts = boxes.filter(([, box]) => box.width);
    texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 2 && down > 4) out.push(figure.querySelector("figcaption").textContent + ": " + a + " over " + b);
    }));
  }
  for (const figure of document.querySelectorAll("figure")) {
    const names = [...figure.querySelectorAll("svg .name")].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const path of figure.querySelectorAll("svg path[fill=none]")) {
      const at = path.getScreenCTM(), seen = new Set();
      for (let s = 0; at && names.length && s < path.getTotalLength(); s += 2) {
        const p = path.getPointAtLength(s).matrixTransform(at);
        for (const [name, b] of names)
          if (p.x > b.left + 1 && p.x < b.right - 1 && p.y > b.top + 4 && p.y < b.bottom - 4) seen.add(name);
      }
      for (const name of seen) out.push(figure.querySelector("figcaption").textContent + ": a line through " + name);
    }
  }
  for (const node of document.querySelectorAll("main *")) {
    if (node.closest(".scroll") || node.closest("svg") || node.closest(".tip")) continue;
    const b = node.getBoundingClientRect();
    if (b.width && (b.right > innerWidth + 0.5 || b.left < 0)) out.push(node.tagName + node.textContent.slice(0, 60));
  }
  for (const row of document.querySelectorAll(".bars > div")) {
    const [name, , figure] = [...row.children].map(child => child.getBoundingClientRect());
    if (name.width && figure.width && name.right > figure.left && name.bottom > figure.top && figure.bottom > name.top)
      out.push("over another: " + row.textContent);
  }
  return out;
})()"""


@pytest.mark.processes
@pytest.mark.parametrize("width", [1400, 1920, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_each_page_fits_the_screen(
    browser: Browser, pages: dict[str, Path], kind: str, width: int
) -> None:
    browser.set_view(width=width, height=900)
    browser.open(pages[kind])
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")

    assert browser.complaints == [] and browser.requests == []
    assert (
        browser.evaluate("document.documentElement.scrollWidth") <= width
    )  # a phone's window grows with what is wide
    assert browser.evaluate(OUTSIDE) == []

    hidden = """[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth)
      .map(s => s.textContent.slice(0, 60))"""
    assert browser.evaluate(hidden) == []  # every column of every table is in sight


# Words whose colour is too near to what is behind them: WCAG's contrast of 4.5.
FAINT = """(() => {
  const light = color => {
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[0-9.]+/g).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color.startsWith("rgb(")) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("h1,h2,h3,p,li,td,th,dt,dd,.mark,.bars span")].filter(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => x - y);
    return node.offsetParent && node.textContent.trim() && (b + 0.05) / (a + 0.05) < 4.5;
  }).map(node => node.textContent.slice(0, 60));
})()"""


@pytest.mark.processes
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["repeats", "size", "cost", "answers", "mlperf"])
def test_every_text_has_contrast_in_light_and_dark_mode(
    browser: Browser, pages: dict[str, Path], kind: str, dark: bool
) -> None:
    browser.set_view(width=1400, height=900, dark=dark)
    browser.open(pages[kind])
    assert browser.evaluate(FAINT) == []
    browser.set_view(width=1400)


def test_the_glossary_of_the_docs_equals_that_of_the_pages() -> None:
    docs = Path(__file__).parent.parent / "docs/reference/glossary.md"
    assert docs.read_text("utf-8") == glossary.render_markdown()


@pytest.mark.processes
def test_the_glossary_unfolds_from_the_top_of_every_page(
    browser: Browser, pages: dict[str, Path]
) -> None:
    for page in pages.values():
        browser.open(page)
        browser.evaluate(
            "document.querySelector('.top a').click(); new Promise(done => setTimeout(done, 50))"
        )
        assert browser.evaluate("document.querySelector('#glossary').open")


def test_pages_of_size_and_cost_state_money_hours_and_assumptions(pages: dict[str, Path]) -> None:
    size, cost = text_of_page(pages["size"]), text_of_page(pages["cost"])
    order = (
        "USD 122,640 per month",
        "Comparison of the sources",
        "GPU-hours per month",
        "spreads the purchase over the depreciation period",
        "Assumptions",
        "Evidence",
    )
    places = [size.index(part) for part in order]

    assert places == sorted(places)
    assert re.search(r"USD [0-9.]+ per 1,000 good .*? 56.00 per hour", cost)
    assert (
        cost.index("per 1,000 good requests")
        < cost.index("Cost by unit")
        < cost.index("Assumptions Amounts")
    )
    assert "spreads the purchase" not in cost  # both are rented


@pytest.mark.processes
def test_the_pages_of_other_results_have_their_charts(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """A bar for each score and its line, one for each limit, one tick for each run."""
    browser.set_view(width=1400)
    browser.open(pages["answers"])

    assert browser.evaluate("document.querySelectorAll('.bars u').length") == 4
    browser.open(pages["mlperf"])
    assert browser.evaluate("document.querySelectorAll('#mlperf ~ .bars u').length") == 2
    browser.open(pages["repeats"])
    assert browser.evaluate("document.querySelector('.badge').textContent").startswith("VALID")
    ticks = browser.evaluate("[...document.querySelectorAll('figure svg')][0].textContent")
    assert "1.5" not in ticks and "r3" in ticks

    links = browser.evaluate(
        "[...document.querySelectorAll('svg a, p a')].map(a => a.getAttribute('href'))"
    )

    assert links and all((pages["repeats"].parent / link).is_file() for link in links)


@pytest.mark.processes
def test_the_points_of_the_slowest_requests_lead_to_their_rows(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.set_view(width=1400, height=900)
    browser.open(pages["run"])
    links = browser.evaluate(
        "[...document.querySelectorAll('svg a')].map(a => a.getAttribute('href'))"
    )
    titles = browser.evaluate(
        "[...document.querySelectorAll('figure:has(svg a) figcaption')].map(f => f.firstChild.textContent)"
    )

    assert titles == [  # all prompts of this load are equally long
        "TTFT by concurrency",
        "TTFT by queue time",
        "TTFT over time",
    ]
    assert len(set(links)) == 5 and len(links) == 15
    assert browser.evaluate(
        f"{json.dumps(links)}.every(link => document.querySelector(link).tagName === 'TR')"
    )

    browser.evaluate(
        "document.querySelector('svg a').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )

    assert browser.evaluate("document.querySelector('tr:target').id") == links[0].removeprefix("#")


@pytest.mark.processes
def test_the_page_of_a_run_begins_with_its_verdict_and_folds_long_sections(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """A page begins with its verdict, cards, charts, table and reasons; the rest is folded."""
    browser.set_view(width=1400, height=900)
    browser.open(pages["run"])

    assert browser.evaluate("document.querySelector('.badge').textContent").startswith("VALID")

    tops = browser.evaluate(
        "[...document.querySelectorAll('.badge,.five,figure,#latency,#slow-requests,#slowest')].filter(n => n.offsetParent)"
        ".map(n => [n.id || n.className || n.dataset.chart, n.getBoundingClientRect().top])"
    )
    tops.sort(key=lambda item: item[1])
    order = [name for name, _ in tops]

    assert order[0] == "badge" and order.index("five") < order.index("0") < order.index("latency")
    assert order.index("latency") < order.index("slow-requests") < order.index("slowest")
    assert dict(tops)["slowest"] < 2500

    titles = browser.evaluate(
        "[...document.querySelectorAll('figure')].slice(0, 2).map(f => f.textContent)"
    )

    assert titles[0].startswith("TTFT") and titles[1].startswith("TPOT")

    links = browser.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))"
    )

    assert len(links) >= 6 and browser.evaluate(
        f"{json.dumps(links)}.every(a => document.querySelector(a))"
    )
    assert not browser.evaluate("document.querySelector('#curves').open")
    browser.evaluate("location.hash = 'curves'; new Promise(done => setTimeout(done, 50))")
    assert browser.evaluate("document.querySelector('#curves').open")


def text_of_page(page: Path) -> str:
    """Return the text of a page without its style and script."""
    body = page.read_text("utf-8").split("<main>")[1].split("<script")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).replace("\u00a0", " ").split())


def test_the_page_of_an_mlperf_run_has_its_disclosure_and_verdict(pages: dict[str, Path]) -> None:
    text = text_of_page(pages["mlperf"])
    assert "MLPerf-style, unofficial" in text[:2000]
    assert "VALID" in text[:2000]


def test_runs_of_a_simulated_validation_are_placed_by_virtual_time(
    pages: dict[str, Path],
) -> None:
    """Ten minutes of load and its last answers, though two seconds of a processor made them."""
    assert re.search(
        r"an-hour-like-any-other/r2 .{0,40}10 min [0-9]+ s of virtual time",
        text_of_page(pages["validation"]),
    )


def test_the_page_of_a_search_begins_with_its_result(pages: dict[str, Path]) -> None:
    text = text_of_page(pages["search"])
    order = [
        "Maximum load meeting the SLO",
        "Limited by: at ",
        "Latency against load",
        "Trials over time",
        "Confirmation",
    ]
    places = [text.index(part) for part in [*order, "TPOT p95 at most 60 ms"]]

    assert places[0] < 250
    assert places[1:5] == sorted(places[1:5])
    assert re.search(r"requests exceeded (TTFT|TPOT) ", text)
    assert "Confirmed " in text or "Passed once " in text


def test_the_slo_outcome_of_a_load_point_is_its_second_column(pages: dict[str, Path]) -> None:
    html = pages["sweep"].read_text("utf-8")
    assert "<th>load</th><th>SLO</th>" in html
    assert html.index("<h2>Load points") < html.index("<h2>Throughput and latency")
    assert re.search(r'>4 in flight</td><td data-head="SLO" class="good"><b>met</b></td>', html)


def test_the_page_of_a_comparison_has_every_change(pages: dict[str, Path]) -> None:
    html = pages["compare"].read_text("utf-8")
    text = text_of_page(pages["compare"])
    assert text.index("c4 vs. c1: ") < text.index("Workload DIFFERENT") < text.index("TTFT p50, ms")
    assert "<b>passed</b>" in html and "ttft_ms.p50 > 1s" in text and "95%" in text
    assert html.count('<div class="bars">') >= 2


def test_the_page_of_a_validation_has_fields_for_signatures(pages: dict[str, Path]) -> None:
    html = pages["validation"].read_text("utf-8")
    text = text_of_page(pages["validation"])
    parts = [
        "FAIL: ",
        "Use of each limit",
        "an-hour-like-any-other: FAIL",
        "Target and client",
    ]
    annex = ["Signatures", "Annex", "Definitions", "Runs", "Contract file"]
    places = [text.index(part) for part in [*parts, *annex]]

    assert places == sorted(places)
    assert "Buyer Ann <a@example.com> name, date, signature Vendor Acme" in text
    for run in ("r1", "r2"):
        assert f'href="an-hour-like-any-other/{run}/summary.json"' in html
        assert (
            pages["validation"].parent / "an-hour-like-any-other" / run / "summary.json"
        ).is_file()
    assert "rate: 8/s" in text  # the contract itself


def test_the_bar_of_a_passed_term_ends_before_its_limit(pages: dict[str, Path]) -> None:
    """A bar of a met term ends left of the limit line, and that of a missed term right of it."""
    html = pages["validation"].read_text("utf-8").split('<div class="bars">')[1]
    line = float(re.search(r'<u style="left:([0-9.]+)%', html)[1])  # type: ignore[index]
    bars = re.findall(
        r'<i style="left:([0-9.]+)%;width:([0-9.]+)%;background:var\(--(\w+)\)',
        html.split("Signatures")[0],
    )

    assert {float(left) for left, _, _ in bars} == {0.0}

    ends = {
        color: [float(width) for _, width, bar_color in bars if bar_color == color]
        for color in ("good", "bad")
    }

    assert 0 <= max(ends["good"]) < line < min(ends["bad"])


@pytest.mark.parametrize(
    ("value", "limit", "unit", "at_most", "used"),
    [
        (250.0, 1000.0, "ms", True, 25.0),
        (1500.0, 1000.0, "ms", True, 150.0),
        (0.0, 1.0, "%", True, 0.0),
        (98.5, 97.0, "%", False, 50.0),
        (100.0, 97.0, "%", False, 0.0),
        (91.0, 97.0, "%", False, 300.0),
        (20.0, 10.0, "/s", False, 50.0),
        (5.0, 10.0, "/s", False, 200.0),
        (1.0, 0.0, "%", True, None),
        (99.0, 100.0, "%", False, None),
        (0.0, 10.0, "/s", False, None),
    ],
)
def test_the_used_share_of_a_term_is_value_over_limit(
    value: float, limit: float, unit: str, at_most: bool, used: float | None
) -> None:
    assert compute_limit_usage_percent(value, limit, unit, is_upper_bound=at_most) == (
        None if used is None else pytest.approx(used)
    )


@pytest.mark.processes
def test_the_signed_summary_fits_one_printed_page(browser: Browser, pages: dict[str, Path]) -> None:
    """The first section fits on A4 with 12 mm margins: 186 by 273 mm at 96 pixels per inch."""
    browser.set_view(width=703, height=1032, media="print")
    browser.open(pages["validation"])
    bottom = "document.querySelector('.signed + p').getBoundingClientRect().bottom + scrollY"

    assert browser.evaluate(bottom) <= 1032
    assert browser.evaluate("document.querySelector('.bars').offsetHeight") > 0

    more = """for (const rows of document.querySelectorAll('#used + .bars, h2:not([id]) ~ .scroll .prose tbody'))
      while (rows.children.length < 12 && !rows.closest('#annex ~ *'))
        rows.append(rows.firstElementChild.cloneNode(true));"""
    browser.evaluate(
        more
    )  # a dozen promises: their bars, which the table repeats, stay on the screen

    assert browser.evaluate(bottom) <= 1032
    assert browser.evaluate("document.querySelector('.bars').offsetHeight") == 0
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('h2#annex')).breakBefore")
        == "page"
    )
    browser.set_view(width=1400)


@pytest.mark.processes
def test_the_full_text_of_every_term_is_visible_on_a_phone(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.set_view(width=390)
    browser.open(pages["validation"])
    hidden = "[...document.querySelectorAll('.prose')].map(t => t.parentNode.scrollWidth - t.parentNode.clientWidth)"
    assert max(browser.evaluate(hidden)) <= 0
