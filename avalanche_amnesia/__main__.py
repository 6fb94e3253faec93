"""``python -m avalanche_amnesia``."""

import sys

from avalanche_amnesia.lab.runs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
