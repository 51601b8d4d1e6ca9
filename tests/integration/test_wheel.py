"""The wheel works where there is no clone: it holds every file of the package, and the command answers from it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel. Built from a copy, because setuptools leaves what it built beside the sources and
    would take it up the next time; without isolation, because that asks an index for setuptools."""
    source, out, site = (tmp_path_factory.mktemp(name) for name in ("source", "out", "site"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", out, source], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("redline-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_it_holds_every_file_of_the_package(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    assert files(installed / "redline") == files(ROOT / "src" / "redline")
    (entry,) = installed.glob("redline-*.dist-info/entry_points.txt")
    assert "redline = redline.cli.main:main" in entry.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--help"], "COMMAND"), (["recipes"], "gpt2-124m"), (["plan", "nano"], "micro")]
)
def test_the_command_answers_from_it(
    installed: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    program = (
        "import redline, sys; from redline.cli.main import main; assert sys.argv[1] in redline.__file__;"
        " sys.exit(main(sys.argv[2:]))"
    )
    environment = os.environ | {"PYTHONPATH": str(installed), "REDLINE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(installed), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
