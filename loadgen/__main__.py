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


if __name__ == "__main__":
    main()
