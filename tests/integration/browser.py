"""A Chromium for the tests of pages: the one named by REDLINE_CHROMIUM, one that is installed, or one from
the npm registry.

    find_chromium()                               # a path; Missing, with the reason, where none can be had
    python tests/integration/browser.py           # fetches it beforehand, so that no test waits for 67 MB

@sparticuz/chromium is Chromium's headless shell as one Brotli file, with the few libraries that a bare image
lacks; node unpacks it (its zlib knows Brotli, Python's does not). It is kept in the virtual environment.
Playwright's own download is not used: it does not come from a package registry.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
FOLDER = Path(sys.prefix) / "chromium-153.0.0"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
"""No sandbox: CI runs as root in a container, and the pages are our own."""
UNPACK = """
const fs = require("fs"), zlib = require("zlib"), stream = require("stream/promises");
const [from, to] = process.argv.slice(1);
stream.pipeline(fs.createReadStream(from), zlib.createBrotliDecompress(), fs.createWriteStream(to, { mode: 0o755 }));
"""


class Missing(Exception):
    """No Chromium can be had here; says why."""


def find_chromium() -> Path:
    if named := os.environ.get("REDLINE_CHROMIUM"):
        return Path(named)
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    return _fetched()


def libraries() -> dict[str, str]:
    """The environment under which the fetched one finds its libraries where the system has none; the system's
    come first."""
    before = os.environ.get("LD_LIBRARY_PATH", "")
    system = [before] if before else ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu"]
    return {"LD_LIBRARY_PATH": ":".join([*system, str(FOLDER / "lib")])}


def _fetched() -> Path:
    if not (FOLDER / "chromium").exists():
        if missing := [tool for tool in ("npm", "node") if shutil.which(tool) is None]:
            raise Missing(
                f"no Chromium is installed, and without {' and '.join(missing)} none can be fetched from the"
                " npm registry"
            )
        with tempfile.TemporaryDirectory(dir=sys.prefix) as work:
            _unpack(_download(Path(work)), Path(work))
            Path(work, "out").rename(FOLDER)
    return FOLDER / "chromium"


def _download(work: Path) -> Path:
    done = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0:
        raise Missing(f"npm could not fetch {PACKAGE}: {done.stderr.strip()[-300:]}")
    archive = next(work.glob("*.tgz"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert digest == SHA256, f"{PACKAGE} is not the file that was looked at: {digest}"
    return archive


def _unpack(archive: Path, work: Path) -> None:
    out = work / "out"
    out.mkdir()
    safely: dict[str, Any] = (
        {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    )  # from Python 3.11.4 on
    with tarfile.open(archive) as package:
        package.extractall(work, **safely)
    for name, to in (("chromium.br", out / "chromium"), ("al2023.tar.br", work / "libraries.tar")):
        subprocess.run(
            ["node", "-e", UNPACK, str(work / "package" / "bin" / name), str(to)], check=True, timeout=120
        )
    with tarfile.open(work / "libraries.tar") as libraries_:
        libraries_.extractall(out, **safely)


if __name__ == "__main__":
    print(find_chromium())
