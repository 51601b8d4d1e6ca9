"""What every test needs before torch multiplies its first matrices."""

import os

from redline.machine.cpu import avoid_broken_amx

avoid_broken_amx(os.environ)  # as the command line does
