"""Workers on a real Ray on this machine: killed, stopped, late and given new weights while they generate. What they
write is what the local engine writes, sample by sample. A fault comes when the driver has received so many samples,
never after some time."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pipeline import RECIPE

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from rft_model import letters_recipe, tiny_model
from test_rft_sample import stored

from redline.cli.main import main
from redline.config.recipe import LoraConfig
from redline.data.tokenizer import Tokenizer
from redline.engine.local import LocalEngine
from redline.engine.ray import OnRay, RayEngine, _Owed
from redline.engine.request import Completion, Request, Sampling
from redline.errors import ConfigError, MachineError, MissingExtra
from redline.model.lora import adapters, add_lora, merged
from redline.model.transformer import Transformer
from redline.record.run import read_lines
from redline.train.restore import open_weights

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster")
ROOM: dict[str, Any] = {"slots": 4, "max_prompt_tokens": 8, "max_new_tokens": 24}


@dataclass
class Lab:
    model: Transformer
    tokenizer: Tokenizer
    told: list[dict[str, Any]] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)

    def engine(self, workers: int, **how: Any) -> RayEngine:
        self.told.clear()
        place = OnRay(workers=workers)
        return RayEngine(self.model, self.tokenizer, place=place, event=self.event, **ROOM, **how)

    def event(self, kind: str, **facts: Any) -> None:
        {"worker": self.told, "workers": self.minutes}[kind].append(facts)

    def local(self, requests: list[Request]) -> dict[tuple[int, int], Any]:
        with LocalEngine(self.model, self.tokenizer, reproducible=True, **ROOM) as engine:
            return named(engine.run(requests))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    opened = open_weights(tiny_model(tmp_path / "model"))
    return Lab(opened.build("cpu"), opened.tokenizer)


def requests(count: int, samples: int = 3) -> list[Request]:
    warm = Sampling(max_new_tokens=24, temperature=1.0)
    return [
        Request(prompt=(5 + n, 6, 7), sampling=warm, samples=samples, seed=n, tag=n) for n in range(count)
    ]


def named(completions: Iterator[Completion]) -> dict[tuple[int, int], Any]:
    """Every sample by its name; none may come twice."""
    found: dict[tuple[int, int], Any] = {}
    for one in completions:
        name = (one.request.tag, one.sample)
        assert name not in found
        found[name] = one.text, one.tokens, one.logprobs, one.finish
    return found


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def after(completions: Iterator[Completion], faults: dict[int, Callable[[], None]]) -> Iterator[Completion]:
    """The completions, with a fault once so many of them have come."""
    for count, completion in enumerate(completions, start=1):
        yield completion
        if count in faults:
            faults[count]()


def test_workers_that_come_late_or_are_killed_at_random_lose_nothing_and_change_nothing(lab):
    """One of two workers has to wait until somebody else's actor is gone; then both work, and are killed."""
    other = ray.remote(num_cpus=1)(dict).remote()
    ray.get(other.__ray_ready__.remote())
    chance, asked, killed = random.Random(7), requests(16), list[Any]()

    def feed() -> Iterator[Request | None]:
        yield from asked[:2]
        while len(engine.rates()) < 2:
            yield None
        yield from asked[2:]

    def kill() -> None:
        there = [m.actor for m in engine._members if m.joined and m.actor not in killed]
        if there:  # the driver may not have noticed yet that all of them are dead
            killed.append(chance.choice(there))
            os.kill(pid_of(killed[-1]), signal.SIGKILL)

    # 48 samples, of which at most 12 are with the workers: none of them is killed when all work is done
    faults = {5: lambda: ray.kill(other), **dict.fromkeys(chance.sample(range(7, 30), 3), kill)}
    with lab.engine(2) as engine:
        found = named(after(engine.run(feed()), faults))
        there = next(m.actor for m in engine._members if m.joined)
        modules = ray.get(there.__ray_call__.remote(lambda _: list(sys.modules)))
    assert "torch.distributed.tensor" not in modules, "it takes seconds at the start of every worker"
    assert found == lab.local(asked)
    joined = [facts["name"] for facts in lab.told if facts["state"] == "joined"]
    assert sorted(joined[:2]) == ["worker-1", "worker-2"]
    assert sum(facts["state"] == "died" for facts in lab.told) == len(killed) > 0
    assert sum(facts["samples"] for facts in lab.told if facts["state"] != "joined") == 48


def test_a_silent_worker_is_killed_and_its_samples_come_from_another(lab):
    """First nothing in the process runs any more; then the engine makes no progress while the process answers. Time
    stands still, except from a fault until the driver notices it."""
    asked, now_s, faults = requests(10), [0.0], list[str]()

    def clock() -> float:
        hung = sum(facts["state"] == "hung" for facts in lab.told)
        now_s[0] += 1000.0 if len(faults) > hung else 0.0
        return now_s[0]

    def for_ever(*_: Any) -> None:
        __import__("threading").Event().wait()

    def stop_process() -> None:
        os.kill(pid_of(engine._members[0].actor), signal.SIGSTOP)
        faults.append("process")

    def stop_engine() -> None:
        actor = engine._members[0].actor
        ray.get(actor.__ray_call__.remote(lambda own: setattr(own._engine, "_take_out", for_ever)))
        faults.append("engine")

    # at most 6 samples are with the worker, so there is work left for it at either fault
    with lab.engine(1, timeout_s=600.0, clock=clock) as engine:
        found = named(after(engine.run(asked), {5: stop_process, 15: stop_engine}))
    assert found == lab.local(asked)
    assert [facts["state"] for facts in lab.told] == ["joined", "hung", "joined", "hung", "joined", "ended"]
    assert [set(facts["delivered"]) for facts in lab.minutes] == [{"worker-1"}, {"worker-1"}]


def test_new_weights_in_the_middle_and_every_sample_names_its_own(lab):
    """A request is drawn whole from the weights that were newest when it was taken, whichever worker dies."""
    asked, versions = requests(12), dict[int, set[int]]()
    add_lora(lab.model, LoraConfig(rank=2, alpha=8), seed=0)

    def learn() -> None:
        for adapter in adapters(lab.model).values():
            adapter.data += 0.05

    def local() -> dict[tuple[int, int], Any]:
        with merged(lab.model):
            return lab.local(asked)

    def publish_and_kill() -> None:
        learn()
        assert engine.publish(lab.model) == 1
        os.kill(pid_of(next(m for m in engine._members if m.joined).actor), signal.SIGKILL)

    def noted(completions: Iterator[Completion]) -> Iterator[Completion]:
        for one in completions:
            versions.setdefault(one.request.tag, set()).add(one.version)
            yield one

    expected = [local()]
    with lab.engine(2) as engine:
        found = named(noted(after(engine.run(asked), {4: publish_and_kill})))
        expected.append(local())
        later = named(noted(engine.run(asked[:1])))
        assert set(engine._weights) == {1}, "nothing asks for the first weights any more"
        assert list(engine.run([])) == []
        with pytest.raises(ConfigError, match="weights 0 are not there"):
            next(engine.run(asked, version=0))
        with pytest.raises(ConfigError, match="a prompt has 9 tokens, but the engine was made for 8"):
            list(engine.run([Request(prompt=(5,) * 9, sampling=Sampling())]))
    assert expected[0] != expected[1]
    assert all(len(own) == 1 for tag, own in versions.items() if tag), "one request, two versions"
    assert {version for own in versions.values() for version in own} == {0, 1}
    for (tag, sample), one in found.items():
        assert one == expected[min(versions[tag])][tag, sample]
    assert later == {(0, sample): expected[1][0, sample] for sample in range(3)}


def test_workers_that_die_again_and_again_end_the_run(lab):
    with lab.engine(1) as engine:
        member = engine._members[0]
        for _ in range(3):
            engine._lose(member, "died", "no disk")
        with pytest.raises(MachineError, match=r"4 workers in a row were lost .*; the last one: no disk"):
            engine._lose(member, "died", "no disk")
        member.held[0, 2] = _Owed(0, requests(1)[0], sample=2, version=0, losses=7)
        with pytest.raises(MachineError, match=r"8 workers were lost on the same prompt \(no disk\): \(5, 6"):
            engine._lose(member, "died", "no disk")


def test_samples_of_rft_are_those_of_the_local_engine_row_by_row(tmp_path, monkeypatch, capsys):
    recipe = letters_recipe(tmp_path, tiny_model(tmp_path / "model"))
    command = ["rft", "sample", str(recipe), "--device", "cpu", "--set", "sample.samples_per_question=8"]
    # the same bits need a local engine that promises them
    monkeypatch.setattr("redline.rft.session.LocalEngine", partial(LocalEngine, reproducible=True))
    assert main([*command, "--run", str(tmp_path / "here")]) == 0
    assert main([*command, "--run", str(tmp_path / "there"), "--on", "ray", "--workers", "1"]) == 0
    assert stored(tmp_path / "there") == stored(tmp_path / "here") != {}
    said = capsys.readouterr().out
    assert re.search(r"worker-1 joined", said)
    assert re.search(r"1 worker, [\d.e+-]+ samples/s", said)
    events = read_lines(tmp_path / "there" / "events.jsonl")
    ended = [event for event in events if event["event"] == "worker" and event["state"] == "ended"]
    assert sum(event["samples"] for event in ended) == len(stored(tmp_path / "there"))
    assert {"engine", "logprob_gap"} <= {event["event"] for event in events}
    assert ray.is_initialized(), "it was not this command that started Ray"


def test_options_that_do_not_go_together_are_refused(tmp_path, capsys, monkeypatch):
    recipe = str(letters_recipe(tmp_path, tiny_model(tmp_path / "model")))
    for options, rule in (
        (["--workers", "2"], "are for samples drawn on Ray: add --on ray"),
        (["--on", "ray", "--workers", "0"], "--workers"),
        (
            ["--on", "ray", "--set", "sample.server=http://127.0.0.1:1"],
            "remove sample.server from the recipe",
        ),
    ):
        assert main(["rft", "sample", recipe, *options]) == 2
        assert rule in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["rft", "run", recipe, "--on", "ray"]) == MissingExtra.exit_code
    assert "pip install 'redline[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_left_with_the_cluster(tmp_path):
    """The command ends; the run goes on in a process of the cluster, which reads a copy of the working directory."""
    (tmp_path / "verses.txt").write_text("To be, or not to be, that is the question:\n" * 200)
    (tmp_path / "small.toml").write_text(RECIPE.format(source="verses.txt"))
    words = ["launch", "small.toml", "--on", "ray", "--gpus", "0", "--cpus", "1", "--memory", "1M", "--json"]
    sets = [
        "--set",
        "train.steps=2",
        "--set",
        "train.warmup_steps=0",
        "--set",
        "data.valid_fraction=0",
        "--set",
        "train.eval_every=0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "redline", *words, *sets],
        cwd=tmp_path, env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (left,) = json.loads(done.stdout)
    assert left["run"] == str(tmp_path / "runs" / "small")
    deadline_s = time.monotonic() + 300
    named_so = {"name": left["job"], "namespace": "redline"}
    while time.monotonic() < deadline_s and named_so in ray.util.list_named_actors(all_namespaces=True):
        time.sleep(0.2)  # it is gone when the run has ended
    ends = [line for line in read_lines(Path(left["run"]) / "events.jsonl") if line["event"] == "end"]
    assert [line["step"] for line in ends] == [2], Path(left["log"]).read_text()
