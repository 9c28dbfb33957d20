"""Choose between the compiled and the Python implementation of the decoding of events.

The compiled one is used where it was built, unless LOADGEN_PURE=1 is set in the environment.
"""

from typing import TYPE_CHECKING

from ..compiled import module

if TYPE_CHECKING or module is None:
    from .reference import (
        DecoderState,
        ResponseReaderState,
        count_leading_plain_events,
        token_count,
    )
else:
    DecoderState = module.DecoderState
    ResponseReaderState = module.ResponseReaderState
    count_leading_plain_events = module.count_leading_plain_events
    token_count = module.token_count

__all__ = ["DecoderState", "ResponseReaderState", "count_leading_plain_events", "token_count"]
