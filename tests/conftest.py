"""What every test needs before torch multiplies its first matrices."""

import os
import tempfile

from redline.machine.cpu import avoid_broken_amx

avoid_broken_amx(os.environ)  # as the command line does

if "ATEN_CPU_CAPABILITY" in os.environ:  # of which torch.compile's cache knows nothing
    instructions = os.environ["ATEN_CPU_CAPABILITY"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{instructions}")
