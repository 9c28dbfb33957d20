"""The script `loadgen`, and `python -m loadgen`."""

import os

from loadgen.cli import signals


def main() -> None:
    """Run the command line; a signal that arrives while modules are imported ends the process."""
    signals.exit_on_signal()
    # numpy would start a thread per core for linear algebra that no command uses
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # plug-ins of pydantic could change how a workload file is read
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from loadgen.cli import app

    app.main()


if __name__ == "__main__":
    main()
