"""Entry point of the commands ``amnesia`` and ``python -m avalanche_amnesia``; needs the extra ``lab``."""

import sys


def main() -> int:
    """Run the command line and return its exit status; if packages are missing, print which ones and return 2."""
    try:
        import avalanche_amnesia.lab  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    from avalanche_amnesia.lab.command_line import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
