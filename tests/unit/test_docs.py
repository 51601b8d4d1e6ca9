"""Documents tell the truth: every command in them parses, every metric is listed, every headline number
stands in a benchmark file."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from statistics import median

import pytest

from redline.cli.main import parser
from redline.config.load import shipped
from redline.record.export import exported_name
from redline.record.metrics import METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("redline ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_parses(command: str) -> None:
    options = parser().parse_args(shlex.split(command)[1:])
    recipe = getattr(options, "recipe", None)
    assert recipe is None or isinstance(recipe, list) or recipe in shipped()


def test_the_readme_has_commands_and_its_make_targets_exist() -> None:
    assert len(COMMANDS) > 10
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"with the extras you need: (.+?)\.\n", README, flags=re.S)
    assert set(re.findall(r"`(\w+)`", named)) == set(extras)


def test_the_metrics_page_is_made_from_the_table() -> None:
    rows = ["| metrics.jsonl | exported as | unit | meaning |", "|---|---|---|---|"]
    for name, (unit, meaning, _) in METRICS.items():
        exported = "the x axis" if name == "step" else f"`{exported_name(name)}`"
        rows.append(f"| `{name}` | {exported} | {unit} | {meaning} |")
    assert (ROOT / "docs" / "metrics.md").read_text().endswith("\n".join(rows) + "\n")


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(page.parent / target), f"{page.name} links to #{anchor}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_the_architecture_names_is_there() -> None:
    text, source = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "redline"
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+)`", text))
    assert len(named) > 20
    assert [name for name in named if not any(source.glob(f"**/{name}.py"))] == []


def test_every_page_that_a_message_names_is_there() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "src" / "redline").rglob("*.py")))
    assert (named := set(re.findall(r"docs/[\w-]+\.md", sources)))
    assert all((ROOT / page).is_file() for page in named), named


def test_measured_speeds_in_the_readme_stand_in_a_benchmark() -> None:
    known = set()
    for path in sorted((ROOT / "benchmarks").glob("train_*.json")):
        for entry in json.loads(path.read_text())["results"]:
            for arm in entry["arms"].values():
                known |= {f"{speed['tokens_per_s']:,.0f}" for speed in arm.get("speeds", {}).values()}
    for path in sorted((ROOT / "benchmarks").glob("*.md")):  # made by `redline bench` like the JSON beside it
        known |= set(re.findall(r"\d{1,3}(?:,\d{3})+", path.read_text()))
    for path in sorted((ROOT / "benchmarks").glob("*/metrics.jsonl")):
        speeds = [json.loads(line)["tokens_per_s"] for line in path.read_text().splitlines()]
        known.add(f"{median(speeds[5:]):,.0f}")  # the first updates compile
    claimed = set(re.findall(r"\b(\d{2,3},\d{3}) tokens/s|\| (\d{2,3},\d{3}) \|", README))
    numbers = {number for pair in claimed for number in pair if number}
    assert numbers, "the README states measured speeds"
    assert numbers <= known
