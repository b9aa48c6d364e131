"""``python -m pagemesh.cli`` is ``pagemesh``. Ctrl-C while it is imported ends it quietly."""

import sys

_EXIT_STOPPED = 130
try:
    from pagemesh.cli.interrupts import EndAtOnce
except KeyboardInterrupt:
    sys.exit(_EXIT_STOPPED)


def main() -> None:
    """Run the command and exit with its code."""
    try:
        with EndAtOnce():
            from pagemesh.cli.main import main as run_and_exit
        run_and_exit()
    except KeyboardInterrupt:
        sys.exit(_EXIT_STOPPED)


if __name__ == "__main__":
    main()
