"""What do users of this endpoint feel under this load? `loadgen run`, repeats, live view, text, page and exports.

Every wing may use its text and page; it imports no other wing. It is not called `run`: `loadgen.run` is a function.
"""
