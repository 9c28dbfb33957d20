"""How often are verdicts of validate, compare and search wrong, on servers of known behaviour?

    python benchmarks/trust.py [--only PARTS] [--kinds rare,cold] [--seeds 200]

PARTS: some of validate,family,extend,compare,search,sustained,short,starved. All of them take
hours. Each part prints a table and marks what is over its limit; the exit code is 1 then.

The servers are simulated by formulas (no sockets, no clock): 5 requests per second, 100 tokens
each, no queue. Each kind changes in its own way:

    independent   only noise of each request
    ar10, ar60    a level that wanders for 10 or 60 s
    stalls        1 s in each 30 s is 3 times as slow
    onoff25       20 s fast, 5 s half as fast again
    onoff300      240 s fast, 60 s half as fast again
    rare          8 s in each 600 s are 3 times as slow
    spells        the same at random times, on average each 600 s
    heavy         the time per token has a heavy tail (log-normal, 0.8)
    level         each start has its own level, 5 % apart
    warm          starts 30 % faster, for about a minute
    cold          starts twice as slow, for about a minute
    bimodal       one request of five is twice as slow
    levels400     0.85, 1 or 1.25, for 400 s on average
    replica90     one of four replicas is 1.8 times as slow above some load that wanders over 90 s

The family of servers is drawn from seeds: each measurement has a server of its own. Its kinds are
levels, replicas, tails, warm-up, diurnal and autoscaling (benchmarks/drawn.py).

validate: limits 10 % below the truth, for TPOT, E2E and TTFT at p50, p95 and p99, in runs of 150,
600 and 2,400 s. Runs of 2,400 s have the default recurrence horizon of 12 minutes, with which
shorter runs decide nothing, so their contracts have the horizon that they can see (40 s, 2 min 42
s). Printed are the wrong PASSes of the worst term (limit 6 of 200). The count is in brackets for a
kind whose changes recur less often than the horizon. Next to it, for limits 10 % above the truth
and 2,400 s: the PASSes of the best term and the wrong FAILs of the worst.

family: as validate, for 600 and 2,400 s, each on a server of its own drawn from a seed: the wrong
PASSes of the worst term; limit 3 % of the family and 6 % of each of its kinds.

extend: validations of 150 and 600 s that are extended three times by as much, as `validate
--extend` judges them: the wrong PASSes of the worst term over all four interim analyses; limit 10
of 200. Next to it, those of a reader who uses the contract's own confidence each time and stops at
the first PASS, and the right PASSes of the best term.

compare: pairs of equal servers, three runs of 300 s a side: pairs with any "better" or "worse";
limit 7 %. Next to it, how many of the pairs 15 % apart are detected (TPOT p50). Then pairs of each
kind of the family, each pair a server of its own; limit 7 % of all of them.

search: a server of which each start sustains another load (0.4, 1 and 2 % apart): the 95 %
intervals that cover the truth; limit 90 of 100. Then searches on servers of the family, whose
capacity is what their slowness leaves of it in each trial of 600 s.

sustained: a rack of 72 replicas whose TTFT and requests in flight wander and do not grow: racks
called growing, limit 3 %. Next to it, how many are detected in which one replica's double. Then
racks of which each replica is drawn from a seed, in the second half of loads of 600 and 2,400 s. A
swing and a slow growth do grow there: their counts are in brackets and have no limit.

short: loads of 15 and 30 s, in which no trend can be seen, on 20 slots of servers of the family:
those that a search calls not sustained although the slots suffice (70 and 90 % of them used on
average within the load); limit 3 % of the family and 6 % of each kind. Next to it, loads of twice
as much as the slots can serve.

starved: a starved load generator against a log of the truth (benchmarks/starved.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import drawn
import rig
import starved
from trust_comparison import print_comparisons
from trust_growth import print_drawn_racks, print_short_loads, print_wandering_racks
from trust_search import print_searches
from trust_servers import FIXED_KINDS
from trust_validation import (
    print_drawn_validations,
    print_extended_validations,
    print_validations,
)

PARTS = ("validate", "family", "extend", "compare", "search", "sustained", "short", "starved")


def print_starved_clients(every: int) -> bool:
    """Print how often a load generator that is starved of CPU time reports wrong latencies.

    `every` runs only every nth case.

    Returns:
        Whether each metric is within its limits.
    """
    print(
        "\nstarved: a load generator that gets too little of its machine, against a log of the "
        "truth"
    )
    results = starved.count_false_answers(every)
    print(starved.format_results(results))
    return all(result.is_met for result in results)


def print_racks(kinds: list[str], rack_count: int) -> bool:
    """Print how often racks are called growing; return whether the false alarms are within limits.

    First come racks whose replicas wander, and then racks of drawn servers of these kinds.
    """
    is_wandering_within_limit = print_wandering_racks(rack_count)
    is_drawn_within_limit = print_drawn_racks(kinds, rack_count)
    return is_wandering_within_limit and is_drawn_within_limit


def main() -> int:
    """Run the selected parts; return 1 if a limit is exceeded, except in a smoke run."""
    args = parse_command_line()
    selected_kinds = args.kinds.split(",")
    fixed_kinds = [kind for kind in selected_kinds if kind in FIXED_KINDS]
    drawn_kinds = [kind for kind in selected_kinds if kind in drawn.FAMILY_MEMBERS]
    if not drawn_kinds:
        drawn_kinds = list(drawn.FAMILY_MEMBERS)

    seeds = range(args.first, args.first + args.seeds)
    drawn_seeds = range(args.first, args.first + args.members)
    search_seeds = range(1, 1 + args.searches)
    loads_per_length = max(args.members // 2, 1)

    # Each part prints its table and returns whether everything in it is within its limit.
    parts: dict[str, Callable[[], bool]] = {
        "validate": partial(print_validations, fixed_kinds, seeds),
        "family": partial(print_drawn_validations, drawn_kinds, drawn_seeds),
        "extend": partial(print_extended_validations, fixed_kinds, seeds),
        "compare": partial(print_comparisons, fixed_kinds, drawn_kinds, args.seeds),
        "search": partial(print_searches, drawn_kinds, search_seeds),
        "sustained": partial(print_racks, drawn_kinds, args.seeds),
        "short": partial(print_short_loads, drawn_kinds, loads_per_length),
        "starved": partial(print_starved_clients, args.every),
    }
    selected_parts = args.only.split(",")
    results = [run_part() for name, run_part in parts.items() if name in selected_parts]

    return 0 if all(results) or args.smoke else 1


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--seeds", type=int, default=200, help="runs, pairs or racks of each kind of server"
    )
    parser.add_argument(
        "--members", type=int, default=100, help="validations of each kind of drawn server"
    )
    parser.add_argument("--searches", type=int, default=100, help="searches of each kind of server")
    parser.add_argument(
        "--every", type=int, default=1, help="every nth case of a starved client only"
    )
    parser.add_argument("--first", type=int, default=1, help="the first seed of the validations")
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run")
    parser.add_argument(
        "--kinds",
        default=",".join(FIXED_KINDS),
        help="kinds of servers; all kinds of drawn servers unless some of them are listed",
    )

    # The starved client needs real time, so it has its own smoke run in benchmarks/starved.py.
    parts_without_starved = ",".join(PARTS[:-1])
    return rig.parse_arguments(
        parser, seeds=2, members=1, searches=2, kinds="cold", only=parts_without_starved
    )


if __name__ == "__main__":
    sys.exit(main())
