"""Help of the command line comes without the host, which takes seconds to import."""

import subprocess
import sys

HELP = """
import sys
from avalanche_amnesia.lab.command_line import main

try:
    main(["run", "--help"])
except SystemExit:
    print("imported:", {"torch", "avalanche", "numpy", "wandb", "yaml"} & set(sys.modules))
"""


def test_help_imports_nothing_slow():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "--training.batch_size" in done.stdout
    assert done.stdout.endswith("imported: set()\n")
