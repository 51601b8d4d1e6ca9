"""Two agents on loopback, each with its processes: what two nodes train, what becomes of a job that loses one, and how a
job on several nodes stops. The agents are ours; in one test they are torchrun's."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline import (
    Nano,
    assert_close_training,
    events,
    lines_written,
    on_two,
    one_line,
    real,
    steps,
    training,
    weights,
)
from precision import CLOSE, CLOSE_FP32
from warm import LIMIT_S, Command, Fault, Warm

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from rft_model import tiny_model
from rl_model import letters_rl

from redline.errors import MachineError, RedlineError, TrainingError
from redline.launch.agent import Agent, Stopped, own_address
from redline.launch.processes import Member, reserved_port
from redline.rl.samples import Samples


def awaited(condition: Callable[[], Any], *commands: Command) -> Any:
    """What the condition returns when it is true; none of the commands may have ended before."""
    until_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        for command in commands:
            assert command.alive(), command.wait().err
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return found


def two_nodes(
    start: Callable[..., Command],
    nnodes: str,
    *,
    faults: tuple[Fault, Fault] = (Fault("node"), Fault("node")),
) -> tuple[Command, Command]:
    """Start the second when the first says where they meet."""
    first = start("--nnodes", nnodes, "--rdzv", "127.0.0.1:0", fault=faults[0])
    return first, start("--nnodes", nnodes, "--rdzv", meeting(first), fault=faults[1])


def meeting(first: Command) -> str:
    found = awaited(lambda: re.search(r"nodes at (127\.0\.0\.1:\d+)\n", first.said()), first)
    return str(found[1])


@pytest.mark.numerics
def test_a_copy_in_every_node_trains_what_one_process_trains(nano: Nano, tmp_path: Path) -> None:
    """Two nodes of two processes, one of which is asked to stop; one process resumes from what they saved, and four end
    the run."""
    alone, nodes = nano.in_double(), {**nano.in_double().environment, "LOCAL_WORLD_SIZE": "2"}
    recipe = nano.recipe(
        tmp_path, "train.steps=9", "train.lr=2e-3", "train.optimizer=muon", "train.muon_normalize=true"
    )
    run = tmp_path / "run"
    alone.outcome(recipe, tmp_path / "single")
    command = ("train", recipe, "--run", run, "--json")
    stopped = (None, None, Fault("signalled_at", update=3), None)
    for done in on_two(nano.warm, *command, environment=nodes, faults=stopped):
        assert done.code == 0, done.err
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["shards"]["value"]) == (4, 2)
    assert alone.outcome(recipe, run, fault=Fault("signalled_at", update=3))["step"] == 6
    for done in on_two(nano.warm, *command, environment=nodes, faults=(None,) * 4):
        assert done.code == 0, done.err
    assert [event["world_size"] for event in events(run, "start", "resume")] == [4, 1, 4]
    assert_close_training(run, tmp_path / "single", CLOSE)
    for name, tensor in weights(tmp_path / "single").items():
        if not name.startswith("rng."):
            torch.testing.assert_close(weights(run)[name], tensor, rtol=CLOSE, atol=1e-12)


@pytest.mark.numerics
@pytest.mark.parametrize("workload", ["finetune", "rl"])
def test_two_nodes_fine_tune_and_reinforce_as_two_processes_do(
    warm: Warm, tmp_path: Path, workload: str
) -> None:
    """Each node holds a copy of the weights, where two processes of one node share one."""
    model = tiny_model(tmp_path / "model", chat=True, dtype=torch.float64)
    if workload == "rl":
        words = ["rl", "run", letters_rl(tmp_path, model), "--set=train.steps=2", "--set=rl.importance_cap=0"]
    else:
        rows = [{"prompt": f"Write {n}", "completion": "a" * (1 + n % 3)} for n in range(20)]
        (examples := tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["finetune", model, examples, "--set=train.epochs=1", "--set=train.batch_size=4"]
    start = partial(warm.start, *words, "--json", environment={"IN_DOUBLE": "1"})
    here, there = tmp_path / "here", tmp_path / "there"
    done = start("--run", here, "--nproc", "2", fault=Fault("forked_members")).wait()
    assert done.code == 0, done.err
    for node in two_nodes(partial(start, "--run", there), "2"):
        done = node.wait()
        assert done.code == 0, done.err
    plans = [json.loads((run / "plan.json").read_text()) for run in (here, there)]
    assert [(plan["world_size"], plan["shards"]["value"]) for plan in plans] == [(2, 2), (2, 1)]
    assert_close_training(there, here, CLOSE)
    if workload == "rl":
        assert answers(there) == answers(here)


def answers(run: Path) -> list[dict[Any, list[list[int]]]]:
    """Of every step the tokens of every sample."""
    return [
        {group.key: [list(answer.tokens) for answer in group.answers] for group in Samples(run).of(step)}
        for step in range(1, len(steps(run)) + 1)
    ]


@pytest.mark.slow
def test_two_torchruns_from_outside_train_as_two_processes_do(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=4", "train.warmup_steps=2", "train.eval_every=0")
    here, there = tmp_path / "here", tmp_path / "there"
    nano.outcome(recipe, here, "--nproc", "2", fault=Fault("forked_members"))
    with reserved_port() as port:
        # without an address of its own torchrun gives the others this machine's name, which need not be known
        place = ("--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1")
        meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--no-python", "--")
        train = (sys.executable, "-m", "redline", "train", recipe, "--run", there, "--json")
        nodes = [real(nano, "-m", "torch.distributed.run", *place, *meet, *train) for _ in range(2)]
        ends = [node.communicate(timeout=LIMIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    (said,) = [out for out, _ in ends if out]
    assert json.loads(said)["why"] == "finished"
    (start,) = events(there, "start", "resume")
    assert start["world_size"] == 2
    plan = json.loads((there / "plan.json").read_text())
    assert (plan["world_size"], plan["shards"]["value"]) == (2, 1)
    assert [line["tokens"] for line in training(there)] == [line["tokens"] for line in training(here)]
    assert len(steps(there)) == 4
    assert steps(there)[0]["loss"] == pytest.approx(steps(here)[0]["loss"], rel=CLOSE_FP32)


def test_the_node_where_they_meet_is_known_by_the_name_that_the_others_use() -> None:
    """Its own name may be a loopback address there, which would lead the others to themselves."""
    assert own_address("localhost") == "localhost"
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(MachineError, match=r"--rdzv: there is no way to nowhere\.invalid from here: "):
        own_address("nowhere.invalid")


@pytest.mark.numerics
def test_a_lost_node_ends_the_step_and_the_job_resumes_without_it(nano: Nano, tmp_path: Path) -> None:
    """The second of two nodes is killed in update 12, after the checkpoint of update 5 is complete: that of update 10
    waits for it. Every update is recorded once, with the numbers of a run on one process."""
    nano, run = nano.in_double(), tmp_path / "run"
    recipe = nano.recipe(
        tmp_path, "train.steps=20", "train.lr=2e-3", "train.checkpoint_every=5", "train.eval_every=0"
    )
    nano.outcome(recipe, tmp_path / "single")
    lost = Fault("node", fault="node_lost_at", update=12)
    first, second = two_nodes(
        partial(nano.start, recipe, run), "1:2", faults=(Fault("node", later_s=0.1), lost)
    )
    done = first.wait()
    assert done.code == 0, done.err
    assert second.wait().code == -signal.SIGKILL
    assert json.loads(done.out)["why"] == "finished"
    assert "starting again from the last checkpoint with the nodes that remain" in done.err
    (changed,) = events(run, "resized")
    assert (changed["world_size_before"], changed["world_size"]) == (2, 1)
    assert changed["step"] in (5, 10)
    assert [(event["step"], event["world_size"]) for event in events(run, "start", "resume")] == [
        (0, 2),
        (changed["step"], 1),
    ]
    assert len(steps(run)) == 20
    assert_close_training(run, tmp_path / "single", CLOSE)


def test_a_process_that_runs_out_of_memory_restarts_all_nodes(nano: Nano, tmp_path: Path) -> None:
    """Four sequences a pass do not fit the second node from its third update on; all go on with two."""
    recipe = nano.recipe(tmp_path, "train.steps=8", "train.checkpoint_every=2", "train.eval_every=0")
    run, full = tmp_path / "run", Fault("node", fault="out_of_memory", above=2, from_pass=3)
    for node in two_nodes(partial(nano.start, recipe, run), "2", faults=(Fault("node"), full)):
        done = node.wait()
        assert done.code == 0, done.err
    (short,) = events(run, "out_of_memory")
    assert (short["micro_batch_before"], short["micro_batch"]) == (4, 2)
    assert [(event["world_size"], event["micro_batch"]) for event in events(run, "start", "resume")] == [
        (2, 4),
        (2, 2),
    ]
    assert len(steps(run)) == 8


def test_an_error_of_the_user_is_one_line_on_every_node(nano: Nano, tmp_path: Path) -> None:
    """It is not tried again: the same would happen. A node whose processes lose the others before they meet the error says
    that another node ended the job."""
    recipe, run = nano.recipe(tmp_path, "train.steps=8"), tmp_path / "run"
    broken = Fault("node", fault="gradient_not_a_number", update=3)
    ends = [node.wait() for node in two_nodes(partial(nano.start, recipe, run), "2", faults=(broken, broken))]
    said = {one_line(done.err): done.code for done in ends}
    assert TrainingError.exit_code in said.values()
    for line, code in said.items():
        assert code in (TrainingError.exit_code, MachineError.exit_code)
        expected = (
            "grad_norm is nan at step 3"
            if code == TrainingError.exit_code
            else "the same command on every node"
        )
        assert expected in line
    assert len(events(run, "start", "resume")) == 1


@pytest.mark.parametrize(
    ("codes", "ends"),
    [((75, 75), Stopped), ((-signal.SIGTERM, 1), Stopped), ((75, 4), RedlineError), ((4, 1), RedlineError)],
)
def test_a_node_that_cannot_save_when_it_is_asked_to_stop_says_so(
    codes: tuple[int, int], ends: type[BaseException]
) -> None:
    """A process that has not begun when the signal comes is no failure."""
    agent, full = object.__new__(Agent), "redline: cannot write the checkpoint: the disk is full\n"
    agent._stopping, agent.members = True, [object.__new__(Member) for _ in codes]
    for member, code in zip(agent.members, codes, strict=True):
        member.stopped, member.failure = False, [full] * (code == 4)
        member.reader = SimpleNamespace(join=lambda: None)
        member.process = SimpleNamespace(returncode=code, poll=lambda code=code: code)
    with pytest.raises(ends) as raised:
        agent._monitor_workers(SimpleNamespace(workers=[]))
    assert ends is Stopped or "the disk is full" in str(raised.value)


@pytest.mark.slow
def test_a_node_that_comes_costs_no_update_and_one_that_leaves_stops_the_others(
    nano: Nano, tmp_path: Path
) -> None:
    """The first trains alone until the second comes, which takes a checkpoint. It then leaves, and with it the place
    where they meet."""
    recipe = nano.recipe(tmp_path, "train.steps=1000000", "train.eval_every=0", "train.checkpoint_every=0")
    run, options = tmp_path / "run", ("--nnodes", "1:2", "--rdzv")
    first = nano.start(recipe, run, *options, "127.0.0.1:0", fault=Fault("node", patience_s=5))
    awaited(lambda: lines_written(run), first)
    second = nano.start(recipe, run, *options, meeting(first), fault=Fault("node"))
    came = awaited(lambda: events(run, "resized"), first, second)[0]
    assert (came["world_size_before"], came["world_size"]) == (1, 2)
    awaited(lambda: lines_written(run) > came["step"] + 1, first, second)
    first.send(signal.SIGTERM)
    assert first.wait().code == 0
    done = second.wait()
    assert done.code == MachineError.exit_code
    assert "run the same command on every node" in one_line(done.err)
    assert {event["metrics_dropped"] for event in events(run, "start", "resume")} == {0}
    assert {event["why"] for event in events(run, "end")} == {"stopped by signal"}
    assert events(run, "end")[-1]["step"] == len(steps(run))
