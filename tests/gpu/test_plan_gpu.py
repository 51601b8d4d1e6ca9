"""The predicted speed of small passes against the real loop on a GPU (`make timing`): what plan/roofline.py was
fitted to.

    pytest tests/gpu/test_plan_gpu.py -s -m timing          about two minutes on an H200; prints a line a size
"""

import pytest
from trials import measure

from redline.config.load import load_recipe
from redline.machine.facts import read_facts
from redline.measure.process import Child
from redline.measure.trial import Timing, train_trial
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan

DATA = ['data.source="tinyshakespeare"', 'data.tokenizer="bpe"', "data.valid_fraction=0.05"]


@pytest.mark.timing
@pytest.mark.parametrize("compile_mode", ["default", "off"])
def test_small_passes_are_as_slow_as_predicted(compile_mode: str) -> None:
    from redline.machine.ceilings import load_or_measure

    facts = read_facts()
    hardware = hardware_here(facts, load_or_measure(facts))
    off = []
    with Child("expandable_segments:True") as child:
        for micro_batch in (1, 2, 4, 8, 16, 32, 64):
            pins = (f"plan.micro_batch={micro_batch}", f"plan.compile={compile_mode}", "plan.graph=false")
            recipe = load_recipe("gpt2-124m", [*DATA, "train.batch_size=64", *pins])
            plan = make_plan(recipe, hardware)
            predicted = plan.prediction.attainable_tokens_per_s
            measured = measure(train_trial(recipe, plan, Timing(block_s=0.5)), child)
            assert measured.outcome == "ok", measured.error
            assert predicted
            off.append(predicted / measured.tokens_per_s)
            print(
                f"compile {compile_mode}, micro-batch {micro_batch}: {measured.tokens_per_s:,.0f} tokens/s,"
                f" predicted {predicted:,.0f} ({off[-1]:.2f}x); launch {hardware.launch_latency_s or 0:.2e} s",
                flush=True,
            )
    # An attainable speed may be high, never low by more than what the rates themselves are off (LOG.md: 7%).
    assert min(off) > 0.93
    assert max(off) < 1.4
