"""The five documents that Redline grew out of: from the numbers in them the real cause is found, and what
cannot hold is called so.

The pages in tests/data/seeds give their figures in our words, because two of the originals have no licence;
where the originals lie beside the checkout (../shared/seeds) the same must hold for them.
"""

import dataclasses
from pathlib import Path

import pytest

from redline.diagnose.answer import verdict
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Range
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.diagnose.trainers import named

OURS = Path(__file__).parents[1] / "data" / "seeds"
ORIGINALS = Path(__file__).parents[3] / "shared" / "seeds"


@pytest.fixture(params=["ours", "original"], autouse=True)
def _pages(request: pytest.FixtureRequest) -> None:
    global pages
    pages = OURS if request.param == "ours" else ORIGINALS
    if not pages.is_dir():
        pytest.skip("the originals are not here")


pages = OURS


def found(number: str, **facts: str) -> dict[str, Finding]:
    (path,) = pages.glob(f"{number}*")
    observed = read(path, facts=facts)
    assert observed.format == "document"
    return {finding.cause: finding for finding in diagnose(observed)}


def values(finding: Finding) -> dict[str, float | str]:
    return {item.name: item.value for item in finding.evidence}


def test_000_the_real_batch_is_ten() -> None:
    findings = found("000")
    top = next(iter(findings.values()))
    assert top.cause == "real-batch"
    assert "10 sequences, not 256" in top.title
    assert values(top)["samples a question"] == 30
    assert "oversample" in findings["other-work"].title, "15 samples before, 30 after: not the same work"
    assert "16x" in findings["contradiction"].title
    assert "2x" in findings["contradiction"].title


def test_001_generation_is_uncached_and_the_throughput_is_per_gpu() -> None:
    findings = found("001")
    top = next(iter(findings.values()))
    assert top.cause == "uncached-generation"
    assert top.optimisation == "kv-cache"
    # sqrt(67 x 83) tokens/s, sqrt(1.7 x 4.3) % of 312 TFLOP/s, 6 x 1.5B FLOPs a token.
    assert values(top)["update"] == pytest.approx(74.57 * 9e9 / (0.02704 * 312e12), rel=0.01)
    assert values(findings["per-gpu-throughput"])["all GPUs"] == "536–664"
    assert "94 GB" in findings["no-such-memory"].title
    assert "max_response_length" in findings["other-work"].title


def test_001_a_stated_size_is_used() -> None:
    update = values(found("001", parameters="7B")["uncached-generation"])["update"]
    assert update == pytest.approx(74.57 * 42e9 / (0.02704 * 312e12), rel=0.01)


def test_002_the_pair_of_claims_is_impossible() -> None:
    findings = found("002")
    assert "7.1" in findings["impossible-pair"].title
    assert "2.8" in findings["impossible-pair"].title
    assert "convert_to_float8_training" in findings["inference-api"].fix
    assert list(findings)[:2] == ["impossible-pair", "inference-api"]
    assert "only 11% of the memory was in use" in findings["needless-recomputation"].title, (
        "checkpointing is one of the changes"
    )
    assert findings["needless-recomputation"].gain is None, "what memory the other changes need is not known"
    assert "1.21 times" in findings["inference-api"].fix
    implied = values(findings["over-peak"])
    assert implied["parameters"] == pytest.approx(775e6, rel=0.01)
    assert implied["needed"] == pytest.approx(2.32, rel=0.01)


def test_002_500k_tokens_per_s_at_454m_parameters() -> None:
    finding = found("002", parameters="454M")["over-peak"]
    assert values(finding)["needed"] == pytest.approx(1.362, rel=0.001)
    assert "1.36 PFLOP/s" in finding.title


def test_003_gains_multiply_to_more_than_the_total_and_arguments_do_not_exist() -> None:
    findings = found("003")
    # 2 x 1.2 x 1.5 x 1.2 x 1.02 x 1.2 to 3 x 1.3 x 2 x 1.5 x 1.05 x 1.5
    assert "5.3–18.4x" in findings["gains-multiply"].title
    assert "3–5x" in findings["gains-multiply"].title
    unknown = values(findings["unknown-argument"])
    assert {"fp16_opt_level", "gradient_clip_norm"} <= set(unknown)
    assert not {"fp16", "optim", "dataloader_num_workers", "training_args"} & set(unknown)
    assert "max_grad_norm" in findings["unknown-argument"].fix
    assert "accumulation-as-speed" in findings


def test_004_parameter_counts_and_accumulation() -> None:
    findings = found("004")
    counts = values(findings["parameter-counts"])
    # 12 x 12 x 768^2 = 84.9M, with 50,257 x 768 123.5M; 12 x 24 x 1024^2 + 50,257 x 1024 = 353.5M
    assert str(counts["85M stated"]).startswith("85M in the blocks, 124M with")
    assert "353M with" in str(counts["355M stated"])
    text = " ".join(item.unit for item in findings["parameter-counts"].evidence)
    assert "GPT-2 Large has 774M" in text
    assert "GPT-2 Medium has 355M" in text
    assert "accumulation-as-speed" in findings


def test_an_honest_page_is_left_alone(tmp_path: Path) -> None:
    page = """# A run
| Metric | Before | After |
|---|---|---|
| Tokens/sec | 100K | 200K |
| MFU | 20% | 40% |

On an H100.
"""
    (tmp_path / "page.md").write_text(page)
    assert diagnose(read(tmp_path / "page.md")) == []


def test_a_page_that_no_claim_was_understood_on_is_not_endorsed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Notes\n\nIt is much better now.\n")
    observed = read(tmp_path / "page.md")
    said = verdict(observed, diagnose(observed))
    assert said.word == "not judged"
    assert "no endorsement" in said.text


def test_what_only_looks_like_a_number_is_no_claim(tmp_path: Path) -> None:
    """`1.2.3` is a version, and `²` a digit that no number is written with."""
    code = "# after\nCHUNK_SIZE = ²\noversample = 3\nd_model = ²\nnum_layers = 3\nif num_return_sequences >= 2:\n"
    lines = "- **Before**: 1.2.3K tokens/step\n- **After**: 50K tokens/step\nParameters: 124M\n"
    (tmp_path / "page.md").write_text(f"# A run\n```python\n{code}```\n{lines}")
    observed = read(tmp_path / "page.md")
    assert diagnose(observed) == []
    assert [s.value for s in observed.settings if s.name == "tokens_per_step"] == ["50000"]


@pytest.mark.parametrize("unit", ["tokens/s", "tok/s", "Tokens/sec", "tokens per second"])
@pytest.mark.parametrize(("before", "after"), [("50k", "350k"), ("50K", "350K"), ("50,000", "350,000")])
def test_speeds_are_read_as_people_write_them(tmp_path: Path, unit: str, before: str, after: str) -> None:
    """Seven times the tokens and twice the MFU cannot both hold."""
    rows = f"| Throughput ({unit}) | {before} | {after} |\n| MFU | 20% | 40% |\n"
    (tmp_path / "page.md").write_text(f"# A run\n| Metric | Before | After |\n|---|---|---|\n{rows}")
    (claim,) = [c for c in read(tmp_path / "page.md").claims if c.name == "tokens_per_s"]
    assert (claim.before, claim.after) == (Range(50e3, 50e3), Range(350e3, 350e3))
    assert [f.cause for f in diagnose(read(tmp_path / "page.md"))] == ["impossible-pair"]


def test_the_arguments_of_the_trainer_are_those_of_transformers() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    known = set(named("huggingface").entry["arguments"].split())
    assert {field.name for field in dataclasses.fields(arguments)} == known
