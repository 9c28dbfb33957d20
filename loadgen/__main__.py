"""The script `loadgen`, and `python -m loadgen`: a Ctrl-C while modules are read is heard first."""

from loadgen.shell import at_once


def main() -> None:
    at_once.hear()
    from loadgen.shell import app

    app.main()


if __name__ == "__main__":
    main()
