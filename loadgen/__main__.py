"""The script `loadgen`, and `python -m loadgen`."""

import os

from loadgen.cli import signals


def main() -> None:
    """Run the command line of the process and exit with its exit code.

    A signal that arrives while the modules are still imported ends the process at once.
    """
    signals.exit_on_signal()

    # numpy would start a thread per core for linear algebra that no command uses.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    # Plug-ins of pydantic could change how a workload file is read.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from loadgen.cli import app

    app.main()


if __name__ == "__main__":
    main()
