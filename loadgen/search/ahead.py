"""What is left of a search: how many trials, and of how much load, by what is known at that point. Pure.

Of searches of made-up servers, with bounds and without, some of which varied from run to run, trials and lengths were
within a factor of two of this before the first trial of each, and before 85 of 100 of the others (the test's limit).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loadgen.search.load_search import ENOUGH, NEAR, SIGMA_OF_NOISE, STEP, LoadSearch

BRACKET = {
    STEP: 6.0,
    NEAR: 2.0,
}  # trials until a load held and one missed, by the factor between them
HALVINGS = 2.0  # trials beyond those that halve the interval to the precision: outcomes near the end are less clear
SPREAD = 4.0  # more of them for outcomes that vary as much as the precision, by the square of their ratio
CONFIRMED = 1.0  # trials, of which a few have to be made again at a lower load
SUSTAINED = (
    1.9  # longer trials: of nine packaged workloads six took one, two took two, one took five
)
LOWERED = 2.5  # of them while each lower load fails: the next holds half of the time, later ones are halved back
PROBE = {False: 0.7, True: 1.0}  # of its full length that a trial lasts: most are decided before


class TrialsLeft(NamedTuple):
    """Trials that are left and the full lengths of load that they take together."""

    trials: float
    lengths: float


def ahead(search: LoadSearch, *, whole: bool = False, trial_s: float = math.inf) -> TrialsLeft:
    """What is left of a search that has not ended. `whole`: its trials go on to their end, whatever they show.
    `trial_s`: full length of a trial: what few requests show varies by chance.
    """
    ask = search.ask()
    kind = "" if ask is None else ask.kind
    probes = 0.0 if kind in ("confirm", "sustain") else _probes(search, trial_s)
    confirming = 0.0 if kind == "sustain" else CONFIRMED
    sustaining = _sustaining(search) if search.longer > 1 or kind == "sustain" else 0.0
    trials = probes + confirming + sustaining
    lengths = probes * PROBE[whole] + confirming + sustaining * search.longer
    most = max(search.most_probes - len(search.told), 1)
    return TrialsLeft(min(trials, most), lengths * min(most / trials, 1.0))


def _probes(search: LoadSearch, trial_s: float) -> float:
    """Trials until a load can be confirmed."""
    if (
        search.run_spread is None
    ):  # it has to be learned: most such searches end by their number of trials
        return max(ENOUGH - len(search.told) - CONFIRMED, 1.0)
    width = search.width
    bracket = 0.0
    if width is None:
        width = math.log(search.step) / 2 / search.precision
        bracket = BRACKET.get(search.step, BRACKET[STEP]) / (2 if search.told else 1)
    halvings = math.log2(max(width, 1e-9))
    varies = math.hypot(search.run_spread, SIGMA_OF_NOISE * _noise(search, trial_s))
    noisy = SPREAD * (varies / search.precision) ** 2 * min(max(halvings, 0.0), 1.0)
    return min(bracket + max(halvings + HALVINGS, 1.0) + noisy, max(ENOUGH - len(search.told), 1.0))


def _sustaining(search: LoadSearch) -> float:
    """Longer trials: of none so far, while loads are lowered, or between one that held and one that did not."""
    answer = search.answer
    if answer.not_steady is None:
        return SUSTAINED
    if answer.steady is None or answer.steady >= answer.not_steady:
        return LOWERED
    width = math.log(answer.not_steady / answer.steady) / math.log1p(1.1 * search.precision)
    return float(max(math.ceil(math.log2(max(width, 1.0))), 1))


def _noise(search: LoadSearch, trial_s: float) -> float:
    """The share by which the outcome of a trial varies by chance: 1 / sqrt(n) of its n requests or tasks."""
    known = [result.noise for result in search.told if result.noise > 0]
    ask = search.ask()
    starts = math.inf if ask is None or search.whole else ask.load * trial_s
    return known[-1] if known else 1 / math.sqrt(max(starts, 1.0))
