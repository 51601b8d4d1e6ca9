"""Generation in watched loops: a missing cache is seen in the model's calls, what it costs is read off them,
and a cache is left alone."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import redline
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError
from redline.observe import facts
from redline.observe.generation import LEAST_CALLS, Call, Calls, CallTimes, hookable, repeats
from redline.plan.hardware import hardware_as
from redline.record.metrics import METRICS
from redline.train.clock import Clock

pytestmark = pytest.mark.usefixtures("clock")

ONCE_S, POSITION_S = 0.5e-3, 0.05e-3


class Speaker(nn.Module):
    """Says one token after the other; a call takes some time, and more with each position."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        time.sleep(ONCE_S + POSITION_S * input_ids.shape[1])
        return self.body(input_ids[:, -1:].float()).long()

    def generate(self, ids: torch.Tensor, new_tokens: int, *, use_cache: bool) -> torch.Tensor:
        seen = ids
        for _ in range(new_tokens):
            token = self(seen)
            ids = torch.cat([ids, token], dim=1)
            seen = token if use_cache else ids
        return ids


class Wrapper(nn.Module):
    """As DDP: calls go through it, `generate` does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)


def loop(folder: Path, *, use_cache: bool, updates: int = 18, start_step: int = 0) -> list[Finding]:
    model, prompts = Speaker(), torch.ones(3, 5, dtype=torch.long)
    with redline.watch(folder, model=model, start_step=start_step, quiet=True) as run:
        for _ in range(updates):
            with run.phase("generate"):
                model.generate(prompts, 20, use_cache=use_cache)
            time.sleep(0.005)
            run.step(tokens=60)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    return run.findings()


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "generation"]


# ---- in a loop ----


def test_a_missing_cache_is_found_and_its_gain_is_predicted(tmp_path: Path) -> None:
    """20 tokens at 5 to 24 positions take 24.5 ms and 5 ms stand beside them. With a cache: the prompt 0.75
    ms, then 19 of 0.55 ms."""
    (found,) = [
        finding
        for finding in loop(tmp_path / "run", use_cache=False)
        if finding.cause == "uncached-generation"
    ]
    assert found.gain is not None
    expected = (24.5 + 5) / (0.75 + 19 * 0.55 + 5)
    assert found.gain.low < expected < found.gain.high * 1.01
    assert found.gain.middle == pytest.approx(expected, rel=0.25)
    assert found.optimisation == "kv-cache"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["generate_s"] >= 0.0245 for line in lines)
    assert "generate_s" in METRICS
    noted = events_of(tmp_path / "run")
    assert [event["step"] for event in noted] == [2, 3, 4, 5, 6, 7, 8, 16]
    assert (noted[0]["calls"], noted[0]["tokens"], noted[0]["repeated_calls"]) == (20, 60, 19)
    assert noted[0]["positions"] == 3 * sum(range(5, 25))
    assert noted[0]["first_call_s"] == pytest.approx(0.8e-3, rel=0.01), "of those that repeat: six positions"
    assert noted[0]["cached_call_s"] == pytest.approx(0.55e-3, rel=0.01)


def test_a_cache_is_left_alone_and_a_resumed_loop_that_has_one_too(tmp_path: Path) -> None:
    assert "uncached-generation" not in [
        finding.cause for finding in loop(tmp_path / "cached", use_cache=True, updates=8)
    ]
    assert {event["repeated_calls"] for event in events_of(tmp_path / "cached")} == {0}
    loop(tmp_path / "mended", use_cache=False, updates=4)
    assert "uncached-generation" not in [
        finding.cause for finding in loop(tmp_path / "mended", use_cache=True, updates=4, start_step=4)
    ]


def test_generation_in_a_pause_is_no_part_of_an_update(tmp_path: Path) -> None:
    model, prompts = Speaker(), torch.ones(1, 5, dtype=torch.long)
    with redline.watch(tmp_path / "run", model=model, quiet=True) as run:
        for _ in range(3):
            run.step()
            with run.pause("validation"), run.phase("generate"):
                model.generate(prompts, 10, use_cache=False)
    assert events_of(tmp_path / "run") == []
    assert "generate_s" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_loop_in_a_generator_that_is_closed_was_stopped_and_did_not_fail(tmp_path: Path) -> None:
    def updates() -> Any:
        with redline.watch(tmp_path / "run", model=Speaker(), quiet=True) as run:
            while True:
                time.sleep(0.002)
                run.step()
                yield run

    turning = updates()
    run = next(turning)
    time.sleep(0.1)
    run.restart()
    next(turning)
    turning.close()
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["why"]) == ("end", "stopped by GeneratorExit")
    second = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert second["step_s"] == pytest.approx(0.002, rel=0.01), (
        "what happened between the two updates is part of none"
    )


# ---- which calls are counted ----


def noted(model: nn.Module, generate: Any) -> list[tuple[int, int]]:
    calls = Calls(model, Clock(torch.device("cpu")))
    with calls:
        generate()
    return [(call.rows, call.positions) for call in calls.made]


def test_a_wrapped_model_is_counted_once_wherever_it_is_called() -> None:
    speaker = Speaker()
    wrapped, prompts = Wrapper(Wrapper(speaker)), torch.ones(2, 3, dtype=torch.long)
    assert noted(wrapped, lambda: wrapped(prompts)) == [(2, 3)]
    assert noted(wrapped, lambda: wrapped(input_ids=prompts)) == [(2, 3)]
    assert noted(wrapped, lambda: speaker.generate(prompts, 3, use_cache=False)) == [(2, 3), (2, 4), (2, 5)]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in wrapped.modules())


def test_an_error_in_a_call_leaves_nothing_behind() -> None:
    speaker = Speaker()
    calls = Calls(speaker, Clock(torch.device("cpu")))
    with pytest.raises(TypeError), calls:
        speaker(torch.ones(2, 3), nothing_of_the_kind=1)
    with calls:
        speaker(torch.ones(2, 4))
    assert [call.positions for call in calls.made][-1] == 4
    assert not speaker._forward_hooks


def test_transformers_with_and_without_adapters() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    prompts = torch.ones(2, 4, dtype=torch.long)
    plain = LlamaForCausalLM(config)
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    for model in (plain, adapted):
        for use_cache, positions in ((False, [4, 5, 6]), (True, [4, 1, 1])):
            given = {
                "attention_mask": torch.ones_like(prompts),
                "max_new_tokens": 3,
                "do_sample": False,
                "use_cache": use_cache,
            }
            made = noted(model, lambda model=model, given=given: model.generate(input_ids=prompts, **given))
            assert made == [(2, count) for count in positions]


def test_compiled_models_are_not_touched() -> None:
    speaker = Speaker()
    wrapper = torch.compile(speaker)
    assert hookable(wrapper) == [wrapper]
    outer = Wrapper(speaker)
    assert hookable(outer) == [outer, speaker]
    speaker.compile()
    assert hookable(outer) == [outer]
    assert hookable(speaker) == []


GROWING = list(range(9, 9 + LEAST_CALLS))


@pytest.mark.parametrize(
    ("positions", "repeated"),
    [
        ([8, *GROWING], GROWING),
        ([8, *GROWING[:-1]], []),  # too few to be no chance
        ([9] + [1] * 30, []),
        ([1] * 30, []),
        ([8, *GROWING, *GROWING[-1:] * 20], [*GROWING, *GROWING[-1:] * 20]),  # a window that is full moves on
        ([7, 8] + [8] * 30, []),  # texts sorted by length and cut at the longest allowed
        ([64] * 30, []),  # passes over rows of one length, or decoding that is padded to it
        ([8, *GROWING, 8, *GROWING], GROWING * 2),  # two texts
        ([8, 8, *GROWING], GROWING),  # scored, and then gone on with
        # texts sorted by length, two passes of each
        ([n for length in range(8, 30) for n in (length, length)], []),
        # the same, most lengths once
        ([n for length in range(8, 60, 8) for n in (*range(length, length + 8), length + 7)], []),
        (list(range(8, 60, 2)), []),
    ],
)
def test_which_calls_compute_the_prefix_again(positions: list[int], repeated: list[int]) -> None:
    assert [
        call.positions for call in repeats([Call(2, count, 0.0, 0.0, 0.0) for count in positions])
    ] == repeated


def test_a_text_may_end_and_none_may_come_to_it() -> None:
    """Rows that are done are taken out of a batch; passes over other texts have as many rows as they have."""
    for rows, wanted in (([4] * 6 + [3] * 7, LEAST_CALLS), ([3] * 6 + [4] * 7, 0), ([2, 3] * 6 + [2], 0)):
        calls = [
            Call(count, positions, 0.0, 0.0, 0.0)
            for count, positions in zip(rows, range(8, 9 + LEAST_CALLS), strict=True)
        ]
        assert len(repeats(calls)) == wanted


def test_passes_that_score_texts_sorted_by_length_are_left_alone(tmp_path: Path) -> None:
    """In the phase, because they belong to the drawing of texts; some are one position longer than the one
    before."""
    lengths = [5, 6, 7, 7, 8, 9, 9, 10, 10, 11, 12, 13, 13, 14, 15, 15, 16, 17, 18, 18, 19, 20, 20, 21]
    with redline.watch(tmp_path / "run", model=(model := Speaker()), quiet=True) as run:
        for _ in range(8):
            with run.phase("generate"):
                for length in lengths:
                    model(torch.ones(3, length, dtype=torch.long))
            run.step(tokens=60)
    assert {event["repeated_calls"] for event in events_of(tmp_path / "run")} == {0}
    assert "uncached-generation" not in [finding.cause for finding in run.findings()]


# ---- what a cached call would take ----


def times_of(seconds: dict[tuple[int, int], float]) -> CallTimes:
    times = CallTimes(Clock(torch.device("cpu")))
    times.add([Call(rows, positions, 0.0, 0.0, host_s) for (rows, positions), host_s in seconds.items()])
    return times


def test_the_fit_gives_back_what_calls_are_made_of() -> None:
    """a + b R T + c R T² in, a + b R + c R T out; three times as slow where the last calls were."""
    once_s, each_s, pair_s = 2e-3, 3e-6, 1e-8
    fastest = {(8, t): once_s + each_s * 8 * t + pair_s * 8 * t * t for t in range(10, 110)}
    expected_s = once_s + each_s * 8 + pair_s * 8 * 59.5
    times = times_of(fastest)
    assert times.cached_call_s() == pytest.approx(expected_s, rel=0.01)
    slowed = [Call(rows, t, 0.0, 0.0, 3 * seconds) for (rows, t), seconds in fastest.items()]
    times.add(slowed)
    assert times.cached_call_s() == pytest.approx(3 * expected_s, rel=0.01)
    times._clock.is_gpu = True  # there the host has waited for a place in the queue
    assert times.cached_call_s() == pytest.approx(expected_s, rel=0.01)


def test_rows_that_differ_do_not_spoil_the_fit() -> None:
    """Neighbours in the table may be 24 positions of 3 rows and 10 of 8: a point is one call, and no mean of
    two."""
    calls = {(rows, t): 1e-3 + 2e-6 * rows * t for rows in (3, 8) for t in range(10, 25)}
    mean_rows = 5.5
    assert times_of(calls).cached_call_s() == pytest.approx(1e-3 + 2e-6 * mean_rows, rel=0.001)


def test_launches_that_take_as_long_whatever_they_compute() -> None:
    assert times_of({(128, t): 4e-3 for t in range(256, 300)}).cached_call_s() == pytest.approx(4e-3)


# ---- on paper: a GPU that is not here ----


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: float) -> list[Finding]:
    """A folder of a loop on an H200 with a model of 1e9 parameters: updates of 2 s, of which generation takes
    1.6."""
    monkeypatch.setattr(facts, "hardware_of", lambda device: hardware_as("h200-141g", 16))
    with redline.watch(folder, model=nn.Linear(8, 8), tokens_per_step=1e5, quiet=True) as run:
        for _ in range(8):
            run.step()
        recorded = {
            "calls": 51, "tokens": 51 * 64, "positions": 51 * 64 * 125, "generate_s": 1.6,
            "repeated_calls": 50,
            "repeated_s": 1.5, "first_call_s": 0.02, "last_call_s": 0.04, "cached_call_s": 0.01,
        }  # fmt: skip
        run.event("generation", **recorded | changed)
    lines = [
        {"step": i, "step_s": 2.0, "generate_s": 1.6, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.1}
        for i in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = json.loads((folder / "plan.json").read_text())
    plan["hardware"]["title"], plan["prediction"]["parameters"] = "NVIDIA H200", 1e9
    (folder / "plan.json").write_text(json.dumps(plan))
    return diagnose(read(folder))


def test_recorded_numbers_give_the_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 s go 1.5 s of calls, and 50 come back at 10 to 16 ms each."""
    found = watched(tmp_path / "run", monkeypatch)[0]
    assert found.cause == "uncached-generation"
    assert found.gain is not None
    assert (found.gain.low, found.gain.high) == pytest.approx(
        (2 / (2 - 1.5 + 50 * 0.016), 2 / (2 - 1.5 + 50 * 0.010))
    )
    assert [item.value for item in found.evidence] == pytest.approx([0.8, 125, 20, 10])
    assert "use_cache=True" in found.fix


def test_a_cached_call_is_not_faster_than_reading_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e9 parameters are 2 GB, at half of 4.8 TB/s 0.83 ms."""
    found = watched(tmp_path / "run", monkeypatch, cached_call_s=1e-5)[0]
    assert found.evidence[-1].value == pytest.approx(0.83, rel=0.01)


def test_calls_that_take_no_longer_than_cached_ones_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound by launches: with a cache they would be as many."""
    assert "uncached-generation" not in [
        finding.cause for finding in watched(tmp_path / "run", monkeypatch, cached_call_s=0.03)
    ]


def test_time_in_which_text_is_generated_is_no_sign_of_small_passes() -> None:
    """10% of the peak over the whole step; half of it over the fifth in which anything was trained."""
    given: dict[str, Any] = {"step_s": 2.0, "mfu": 0.1, "memory_bytes": 10e9}
    for more, wanted in (({}, ["small-passes"]), ({"generate_s": 1.6}, [])):
        steps = tuple(Step(step=i, **given, **more) for i in range(1, 9))
        assert [
            f.cause
            for f in diagnose(Observed(source="", format="run", steps=steps, facts=Facts(memory_bytes=140e9)))
            if f.cause != "low-mfu"
        ] == wanted


@pytest.mark.parametrize("every", [1, 2, 4])
def test_generation_in_some_updates_counts_with_its_share_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """1.6 s in every Nth update, 0.4 s in each: of N x 0.4 + 1.6 s go 1.5 s of calls, and 50 come back at 10
    to 16 ms each."""
    watched(tmp_path / "run", monkeypatch)
    trained = {"step_s": 0.4, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.1}
    drawn = trained | {"step_s": 2.0, "generate_s": 1.6}
    # the first five are not looked at
    lines = [{"step": i, **(drawn if i % every == 0 else trained)} for i in range(1, 26)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings = {finding.cause: finding for finding in diagnose(read(tmp_path / "run"))}
    found, total_s = findings["uncached-generation"], every * 0.4 + 1.6
    assert found.gain is not None
    assert found.gain.low == pytest.approx(total_s / (total_s - 1.5 + 50 * 0.016))
    assert found.gain.high == pytest.approx(total_s / (total_s - 1.5 + 50 * 0.010))
    assert found.evidence[0].value == pytest.approx(1.6 / total_s)
    assert "stall" not in findings, "texts drawn every N updates are no stall"


def test_generation_in_every_tenth_update_is_looked_at(tmp_path: Path) -> None:
    model, prompts = Speaker(), torch.ones(1, 5, dtype=torch.long)
    with redline.watch(tmp_path / "run", model=model, quiet=True) as run:
        for step in range(1, 41):
            if step % 10 == 0:
                with run.phase("generate"):
                    model.generate(prompts, 15, use_cache=False)
            run.step()
    assert [event["step"] for event in events_of(tmp_path / "run")] == [20, 30, 40]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_an_mfu_is_that_of_the_time_in_which_something_was_trained(every: int) -> None:
    """At 50% while training, 10% of an update of which four fifths draw texts; at 20% and 4% the passes
    are small."""
    for mfu, wanted in ((0.5, []), (0.2, ["small-passes"])):
        steps = []
        for i in range(1, 26):
            drawn: dict[str, Any] = (
                {"step_s": 2.0, "generate_s": 1.6, "mfu": mfu / 5}
                if i % every == 0
                else {"step_s": 0.4, "mfu": mfu}
            )
            steps.append(Step(step=i, memory_bytes=10e9, **drawn))
        found = diagnose(
            Observed(source="", format="run", steps=tuple(steps), facts=Facts(memory_bytes=140e9))
        )
        assert [finding.cause for finding in found if finding.cause != "low-mfu"] == wanted
        assert not found or "MFU of 20%" in found[0].title


# ---- where a phase may be ----


def test_an_update_does_not_end_while_texts_are_drawn(tmp_path: Path) -> None:
    model, prompts = Speaker(), torch.ones(1, 5, dtype=torch.long)
    with redline.watch(tmp_path / "run", model=model, quiet=True) as run:
        for _ in range(3):
            with run.phase("generate"):
                model.generate(prompts, 2, use_cache=True)
                with pytest.raises(ConfigError, match=r"step\(\) inside phase\('generate'\): end the block"):
                    run.step()
            for what in (lambda: run.phase("generate"), lambda: run.pause("validation")):
                with (
                    pytest.raises(ConfigError, match=r"inside phase\('generate'\)"),
                    run.phase("generate"),
                    what(),
                ):
                    pass
            with pytest.raises(ConfigError, match=r"restart\(\) inside"), run.phase("generate"):
                run.restart()
            with (
                pytest.raises(ConfigError, match=r"step\(\) inside pause\('checkpoint'\)"),
                run.pause("checkpoint"),
            ):
                run.step()
            run.step()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["generate_s"] <= line["step_s"] for line in lines)


def test_two_generations_in_one_update_add_up(tmp_path: Path) -> None:
    model, prompts = Speaker(), torch.ones(3, 5, dtype=torch.long)
    with redline.watch(tmp_path / "run", model=model, quiet=True) as run:
        for _ in range(4):
            for _ in range(2):
                with run.phase("generate"):
                    model.generate(prompts, 20, use_cache=False)
            run.step()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["generate_s"] >= 2 * 0.0245 for line in lines)
    noted = events_of(tmp_path / "run")
    assert [event["step"] for event in noted] == [2, 3, 4]
    assert {(event["calls"], event["repeated_calls"]) for event in noted} == {(40, 38)}
    assert noted[0]["generate_s"] == lines[1]["generate_s"]


def test_waits_in_generation_and_in_pauses_are_not_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On paper: what waits for the GPU warns where torch's detector is on."""
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)

    def wait() -> None:
        if mode[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)

    with redline.watch(tmp_path / "run", model=Speaker(), quiet=True) as run:
        monkeypatch.setattr(run, "_device", torch.device("cuda"))
        for _ in range(6):
            wait()
            with run.phase("generate"):
                wait()
            with run.pause("validation"):
                with run.phase("generate"):
                    wait()
                wait()
            wait()
            run.step()
    (found,) = [
        json.loads(line)
        for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
        if "waits_for_gpu" in line
    ]
    assert found["times"] == 2, found
    assert mode[-1] == "default"
