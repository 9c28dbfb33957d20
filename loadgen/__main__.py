"""The script `loadgen`, and `python -m loadgen`: a Ctrl-C while modules are read is heard first."""

import os

from loadgen.shell import at_once


def main() -> None:
    at_once.hear()
    # numpy starts a thread per core for algebra that nobody asks for
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # pydantic looks through all packages for plug-ins that would have a say in what a workload means
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from loadgen.shell import app

    app.main()


# Python maps the frames of calls in pieces of 16 KiB, and gives one back when a call at its edge returns, which it did
# 3,700 times in a start. The piece that holds a frame of 256 KiB, untouched, is 512: the calls of a command fit in it.
main.__code__ = main.__code__.replace(co_stacksize=1 << 15)


if __name__ == "__main__":
    main()
