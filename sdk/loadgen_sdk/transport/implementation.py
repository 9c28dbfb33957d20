"""Choose between the compiled and the Python implementation of the reading of responses.

The compiled one is used where it was built, unless LOADGEN_PURE=1 is set in the environment.
`reactor.py` chooses the receiver in the same way.
"""

from typing import TYPE_CHECKING

from ..compiled import module

if TYPE_CHECKING or module is None:
    from .plain_events import whole_chunks
    from .response_state import ExchangeState, ResponseState
else:
    ExchangeState = module.ExchangeState
    ResponseState = module.ResponseState
    whole_chunks = module.whole_chunks

__all__ = ["ExchangeState", "ResponseState", "whole_chunks"]
