"""A Markdown page with numbers in it -> Observed: what it claims, and the settings it shows.

Reads tables with a before and an after column, lists of `Before:` and `After:`, headings and lines that promise a factor,
and in code every `name=value`, `name: type = value` and `--name value`. It reads sentences only for a few quantities (MFU,
tokens a second, memory); what it does not understand it leaves out, so a claim that is not found is not thereby true.
Every pattern is bounded: a line of 100,000 dashes takes no longer than one of letters.
"""

import re
from dataclasses import dataclass, field

from redline.diagnose.data import patterns
from redline.diagnose.observed import Claim, Facts, Observed, Range, Setting
from redline.diagnose.trainers import FAMILIES

LONGEST_LINE = 20_000
PAGE = patterns("page")
WHEN = ("before", "after")
_SCALE = {"K": 1e3, "M": 1e6, "B": 1e9}
_BOARDS = ("H200", "H100", "A100", "V100")


@dataclass
class _Page:
    """What has been read so far, and where in the page the reader stands."""

    claims: list[Claim] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    heading: str = ""
    code: bool = False
    when: str = ""
    within: str = ""
    header: list[str] = field(default_factory=list)
    promised: bool = False
    """Whether this section has already promised a factor."""
    before: Range | None = None


def read_document(text: str, source: str) -> Observed | None:
    """None where the text has neither a heading nor a table."""
    if re.search(r"^#{1,4} \S|^\|.{1,400}\|\s*$", text, re.MULTILINE) is None:
        return None
    page = _Page()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line[:LONGEST_LINE]
        if line.lstrip().startswith("```"):
            page.code, page.when = not page.code, ""
            page.within = page.within if page.code else ""
        elif page.code:
            _read_code(page, line, number)
        else:
            _read_prose(page, line, number)
    return Observed(
        source=source,
        format="document",
        facts=_facts(text, page),
        claims=tuple(page.claims),
        settings=tuple(page.settings),
        text=text,
    )


def _read_code(page: _Page, line: str, number: int) -> None:
    code, _, comment = line.partition("#")
    if not code.strip():
        page.when = next((when for when in WHEN if PAGE[when].search(comment)), page.when)
        return
    if found := PAGE["call"].search(code):
        page.within = found[1]
    for name, value in settings_in(code):
        was = re.search(r"(?:increased?|reduced?|changed?) from (\w{1,40})", comment, re.IGNORECASE)
        page.settings.append(Setting(name, value, number, "after" if was else page.when, page.within))
        if was:
            page.settings.append(Setting(name, was[1], number, "before", page.within))
    if code.strip() == ")":
        page.within = ""


def _read_prose(page: _Page, line: str, number: int) -> None:
    if line.startswith("#"):
        page.heading, page.promised, page.when, page.before = line.lstrip("# ").strip(), False, "", None
    if line.lstrip().startswith("|"):
        _read_row(page, line, number)
        return
    page.header = []
    if re.search(r"\bto TrainingArguments\b", line):
        page.within = "TrainingArguments"
    if bullet := PAGE["bullet"].match(line):
        _read_bullet(page, bullet[1], bullet[2], number)
    elif factor := _promise(line):
        whole = re.search(r"\b(overall|total|all optimi[sz]ations)\b", line, re.IGNORECASE)
        name = "total" if whole else "speedup"
        if name == "total" or not page.promised:
            page.claims.append(Claim(name=name, line=number, text=line.strip(), factor=factor))
            page.promised = page.promised or name == "speedup"
    _read_quantities(page, line, number)


def _promise(line: str) -> Range | None:
    """A factor that a heading or a line promises: `2-3x speedup`, `20-30% faster`."""
    if not re.search(r"speed-?up|faster", line, re.IGNORECASE) or re.search(r"slows", line, re.IGNORECASE):
        return None
    for value, unit in quantities(line):
        if unit == "x":
            return value
        if unit == "%":
            return Range(1 + value.low / 100, 1 + value.high / 100)
    return None


def _read_row(page: _Page, line: str, number: int) -> None:
    cells = [re.sub(r"[*`]", "", cell).strip() for cell in line.strip().strip("|").split("|")]
    if not page.header:
        page.header = cells
        return
    heads = list(enumerate(page.header))[1:]
    columns = {when: index for index, head in heads for when in WHEN if PAGE[when].search(head)}
    if set("".join(cells)) <= set("-: ") or len(columns) != 2 or len(cells) != len(page.header):
        return
    before, after = (quantities(cells[columns[when]]) for when in WHEN)
    if before and after:
        values = {"before": before[0][0], "after": after[0][0]}
        page.claims.append(Claim(name=canonical(cells[0]), line=number, text=line.strip(), **values))


def _read_bullet(page: _Page, word: str, text: str, number: int) -> None:
    """`- **Before**: 45-60 minutes`, then `- **After**: 5-10 minutes`; settings in them count as such."""
    when = "before" if word.lower() in ("before", "original") else "after"
    page.settings += [Setting(name, value, number, when) for name, value in settings_in(text)]
    found = quantities(text)
    if when == "before":
        page.before = found[0][0] if found else None
    elif page.before and found:
        values = {"before": page.before, "after": found[0][0]}
        page.claims.append(Claim(name=canonical(page.heading), line=number, text=text, **values))
        page.before = None
    if (tokens := re.search(r"(?<![\d.])(\d{1,9}(?:\.\d{1,3})?)K\+? tokens/step", text)) is not None:
        page.settings.append(Setting("tokens_per_step", f"{float(tokens[1]) * 1e3:.0f}", number, when))


def _read_quantities(page: _Page, line: str, number: int) -> None:
    """The few quantities that are read in sentences: the state that a document starts from."""
    plain = re.sub(r"[*`]", "", line)
    for name, pattern in patterns("sentences").items():
        if (found := pattern.search(plain)) and (values := quantities(found[1])):
            page.claims.append(Claim(name=name, line=number, text=plain.strip(), before=values[0][0]))
    if found := re.search(r"(?<!\d)(\d{1,6})GB/(\d{1,6})GB", plain):
        span = Range(float(found[1]), float(found[2]))
        page.claims.append(Claim(name="memory_gb", line=number, text=plain.strip(), before=span))


def settings_in(text: str) -> list[tuple[str, str]]:
    """Every `--name value`, `name = value` and environment variable with its default."""
    found = []
    for flag, given, name, value, variable, default in PAGE["setting"].findall(text):
        if flag or name:
            found.append((flag or name, (given or value).strip("\"'")))
        if variable:
            found.append((variable, default))
    return found


def quantities(text: str) -> list[tuple[Range, str]]:
    """Every number or range in a text (`50-60K` is 50,000 to 60,000) and its unit, or none."""
    found = []
    for low, low_scale, high, scale, unit in PAGE["quantity"].findall(text):
        last = _SCALE.get((scale or low_scale).upper(), 1.0)
        first = _SCALE.get((low_scale or scale).upper(), 1.0)
        bottom = float(low.replace(",", "")) * first
        top = float(high.replace(",", "")) * last if high else bottom
        found.append((Range(bottom, top), "tok/s" if unit.startswith(("tok", "tps")) else unit.lower()))
    return found


def canonical(name: str) -> str:
    """Our word for a row or heading that means one of the quantities rules compare."""
    return next((ours for ours, words in patterns("rows").items() if words.search(name)), name.lower())


def _facts(text: str, page: _Page) -> Facts:
    counts = {name: len(re.findall(rf"\b{name}", text)) for name in _BOARDS}
    named = max(counts, key=lambda name: counts[name])
    boards = rf"\b(\d{{1,6}})\s?(?:x ?)?(?:{'|'.join(_BOARDS)})s?\b(?! ?\d)"
    many = re.search(boards, text) or re.search(r"--num-gpus[= ](\d{1,6})\b", text)
    sizes = set(re.findall(r"(?<![\w.])(\d{1,6}(?:\.\d{1,3})?[MB]) param", text))
    setting = {s.name.split(".")[-1]: s.value for s in page.settings if s.when != "after"}
    recompute = re.search(r"gradient.checkpointing\W{0,8}(?:enabled|=\s{0,3}True)", text, re.IGNORECASE)

    def value(name: str) -> float | None:
        return float(setting[name]) if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", setting.get(name, "")) else None

    return Facts(
        gpu=FAMILIES[named.lower()] if counts[named] else None,
        gpus=float(many[1]) if many else None,
        parameters=quantities(sizes.pop())[0][0].low if len(sizes) == 1 else None,
        batch_size=value("train_batch_size"),
        prompt_length=value("max_prompt_length"),
        response_length=value("max_response_length"),
        samples=value("n"),
        recompute="on" if recompute else None,
        mfu_scope="the actor's update" if "perf/mfu/actor" in text else "the step",
    )
