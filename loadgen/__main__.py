"""`python -m loadgen`: the command line where its script is not on the path."""

from loadgen.shell.app import main

if __name__ == "__main__":
    main()
