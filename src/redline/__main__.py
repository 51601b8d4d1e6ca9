"""`python -m redline` is the command `redline`, also where nothing is installed."""

import sys

from redline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
