"""What C needs to go on by itself from the end of a usual answer to the next request of its lane. Pure.

The owner of a load says it once. Whatever it holds is then changed by C as its owner would change it; where anything is
not usual, the owner is called, and finds everything as it was.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Succession(NamedTuple):
    """A closed loop of single requests to one target.

    A request of number `n` in a lane is followed by `n + span.lanes`, due at the end of its answer, if that number is
    below `span.first_chain + span.chains` (None: no end), and the end before that of its stage. `start` makes what the
    owner keeps of it, from number, stage, session, turn, lane and due instant. The callback of an exchange is
    `partial(ended, start, target, built)`, and `take(stage, number)` gives its body and `built`, with `asked_output`.
    It is not asked where `rows` has the number and `blocks` the bytes: then `built` is `known(tokens, asked output)`.
    """

    ended: Callable[..., None]
    partial: type
    start: Callable[..., Any]
    started: dict[int, Any]  # number -> its start
    exchanges: dict[int, tuple[int, Any]]  # number -> its target and exchange
    ends_ns: list[int]  # by stage, from the start of the run
    left: list[int]  # by stage: requests that have not ended, where they are counted
    spans: tuple[Any, ...]
    sent: list[int]  # by stage
    counters: Any  # with `sent`, `ok`
    recent: Callable[[int], None]  # is told the time of each first token
    row: Callable[[bytes], None]  # is given each record
    refusals: list[int]  # by target: while there are some, nothing is usual
    take: Callable[[int, int], tuple[bytes, Any]]
    flows: list[Any]  # by stage
    start_ns: int
    worker: int
    name: bytes  # of a request, before its number
    rows: list[
        Any
    ]  # by stage: an array of five numbers a body, ascending: its request, offset, length, tokens, output
    blocks: dict[int, bytes]  # of the file of bodies, by number, each of `block_bytes` at most
    block_bytes: int
    known: Callable[[int, int], Any]
