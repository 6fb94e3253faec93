"""The program ``amnesia``, or ``python -m avalanche_amnesia``: the lab's commands, where the lab is installed."""

import sys


def main() -> int:
    """Run a command, or say what it needs."""
    try:
        import avalanche_amnesia.lab  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    from avalanche_amnesia.lab.command_line import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
