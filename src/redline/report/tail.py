"""Following a JSONL file that a living program appends to, and that a resumed run may cut back.

    tail = Tail(path)
    tail.read()            # the whole lines that came since the last call
    tail.generation        # counts up when the file was replaced: what was read before no longer holds

Left out: waiting. Whoever follows decides how often to look.
"""

import json
import os
from pathlib import Path
from typing import Any

from redline.errors import DataError


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New whole lines; half a line waits for its rest. Nothing where there is no file yet."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - only its absence is caught here
        except FileNotFoundError:
            return []
        with file:
            now = os.fstat(file.fileno())
            if self._inode is not None and (now.st_ino != self._inode or now.st_size < self._offset):
                self.generation += 1
                self._offset = 0
            self._inode = now.st_ino
            file.seek(self._offset)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        try:
            found = [json.loads(line) for line in whole.splitlines() if line.strip()]
        except ValueError as error:
            raise DataError(f"{self.path} is damaged: {error}; move it away to go on without it") from error
        return [line for line in found if isinstance(line, dict)]
