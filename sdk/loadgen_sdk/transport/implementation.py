"""Choose between the compiled and the Python implementation of the reading of responses.

The compiled one is used where it was built, unless LOADGEN_PURE=1 is set in the environment.
`connection.py` chooses the receiver in the same way.
"""

from typing import TYPE_CHECKING

from ..compiled import module

if TYPE_CHECKING or module is None:
    from .plain_events import parse_whole_chunks
    from .response_state import ExchangeState, ResponseState
else:
    ExchangeState = module.ExchangeState
    ResponseState = module.ResponseState
    parse_whole_chunks = module.parse_whole_chunks

__all__ = ["ExchangeState", "ResponseState", "parse_whole_chunks"]
