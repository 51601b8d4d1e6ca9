"""Many GPUs by arithmetic: bytes and times computed by hand, an RL step beside one that was recorded, and what
`redline plan` says of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.bench.results import SMOLLM2_360M
from redline.cli.main import main
from redline.config.load import build, load_recipe
from redline.config.recipe import ModelConfig
from redline.errors import ConfigError
from redline.machine.specs import find_spec, spec_of
from redline.plan.arithmetic import Traffic, parameters, traffic
from redline.plan.capacity import (
    BASE_S,
    LINK_SHARE,
    NETWORK_HOP_S,
    NVLINK_HOP_S,
    Capacity,
    capacity,
    efficiency,
    exchanged,
    on,
    where_it_stops,
)
from redline.plan.hardware import hardware_as
from redline.plan.plan import Hardware
from redline.plan.planner import make_plan

SMALL = ModelConfig(vocab_size=100, num_layers=2, hidden_size=8, num_heads=2, ffn_size=16, context_length=32)
H100 = hardware_as("h100-80g", cores=8)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_specification_counts_gpus_and_changes_their_links() -> None:
    spec = spec_of("64 x rtx 4090,network=400Gbit/s,node=4")
    assert (spec.count, spec.node_gpus, spec.network_bytes_per_s) == (64, 4, 50e9)
    assert spec.link_bytes_per_s == find_spec("rtx 4090").link_bytes_per_s
    assert "network=400Gbit/s, node=4 as given" in spec.source
    given = spec_of("8xmemory=24GB,bf16=165,bandwidth=1008GB/s,link=64GB/s")
    assert (given.count, given.link_bytes_per_s, given.memory_bytes) == (8, 64e9, 24 * 2**30)


@pytest.mark.parametrize("text", ["0xh100-80g", "8xh100-80g,node=2.5", "8xh100-80g,link=fast", "8x"])
def test_a_specification_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        spec_of(text)


def test_links_are_those_of_the_systems_that_the_boards_come_in() -> None:
    """NVLink adds up both directions: 600 GB/s for an A100, 900 for an H100."""
    boards = [find_spec(name) for name in ("a100-80g", "h100-80g")]
    assert [(b.link_bytes_per_s, b.network_bytes_per_s) for b in boards] == [(300e9, 25e9), (450e9, 50e9)]


def test_bytes_of_each_layout_are_counted() -> None:
    """Two blocks, embedding and last norm; bf16 in the blocks, two passes an update."""
    count = parameters(SMALL)
    blocks, rest = count.blocks, count.total - count.blocks

    def counted(shards: int, replicas: int) -> Traffic:
        return traffic(SMALL, precision="bf16", accumulation=2, shards=shards, replicas=replicas)

    assert counted(1, 1) == Traffic(0, 0, 0, 0, 0, 0)
    plain = counted(1, 4)  # an all-reduce is a reduce-scatter and a gather
    assert plain == Traffic(0, 0, 2 * 2 * 4 * count.total * 3 // 4, 0, 0, 2 * 3)
    sharded = counted(4, 1)
    assert sharded.gathered == 2 * (2 * 2 * blocks + 4 * rest) * 3 // 4
    assert sharded.scattered == 2 * 4 * count.total * 3 // 4
    assert (sharded.gathers, sharded.scatters, sharded.reductions) == (2 * 5, 2 * 3, 0)
    both = counted(2, 4)
    assert both.gathered == 2 * (2 * 2 * blocks + 4 * rest) // 2
    assert both.reduced == 2 * 2 * 4 * (count.total // 2) * 3 // 4
    assert both.total == both.gathered + both.scattered + both.reduced


@pytest.mark.parametrize(
    ("shards", "replicas", "rate", "far", "hops_s"),
    [
        # in a node: seven hops over NVLink
        (8, 1, 450e9, None, 7 * NVLINK_HOP_S),
        # eight nodes: the cards of a node together carry a ring, 400 GB/s
        (64, 1, 400e9, None, 56 * NVLINK_HOP_S + 7 * NETWORK_HOP_S),
        # sharded in the node; eight rings between the nodes, a card each
        (8, 8, 450e9, 50e9, 7 * NVLINK_HOP_S),
    ],
)
def test_the_time_of_the_collectives(
    shards: int, replicas: int, rate: float, far: float | None, hops_s: float
) -> None:
    recipe = load_recipe("gpt-1.3b", [])
    plan = replace(make_plan(recipe, H100, world_size=shards * replicas), shards=shards)
    found = exchanged(recipe, plan)
    t, round_s = found.traffic, BASE_S + hops_s
    expected_s = (t.gathered + t.scattered) / (LINK_SHARE * rate) + (t.gathers + t.scatters) * round_s
    if far is not None:
        expected_s += t.reduced / (LINK_SHARE * far) + t.reductions * (BASE_S + 2 * 7 * NETWORK_HOP_S)
    assert found.elapsed_s == pytest.approx(expected_s)
    assert 0 < found.exposed_s < found.elapsed_s


def test_a_step_lies_between_its_bounds_and_one_gpu_has_no_communication() -> None:
    rows = capacity(load_recipe("gpt-1.3b", []), H100, 64)
    assert [row.gpus for row in rows] == [1, 8, 16, 32, 64]
    for row in rows:
        low, high = row.bounds_s
        assert low == max(row.compute_s, row.communication_s)
        assert high == row.compute_s + row.communication_s
        assert low <= row.step_s <= high
    assert rows[0].communication_s == 0
    assert max(efficiency(rows).values()) == 1


def test_it_says_where_scaling_stops_and_why() -> None:
    recipe = load_recipe("gpt-1.3b", [])
    slow = replace(H100, link_bytes_per_s=32e9, network_bytes_per_s=1e9)
    assert "communication takes longer" in where_it_stops(recipe, capacity(recipe, slow, 64))
    assert "It still scales on 8 GPUs" in where_it_stops(recipe, capacity(recipe, H100, 8))
    free = replace(H100, link_bytes_per_s=1e15, network_bytes_per_s=1e15)
    tiny = load_recipe("gpt2-124m", ["train.batch_size=64"])
    assert "too few to fill its passes" in where_it_stops(tiny, capacity(tiny, free, 64))
    large = load_recipe("gpt-1.3b", ["train.batch_size=40"])
    assert "Scaling ends at 8 GPUs: train.batch_size (40)" in where_it_stops(large, capacity(large, H100, 64))
    rl = load_recipe("rl/guru-8gpu", [])
    assert "as many decode steps as a full engine" in where_it_stops(rl, capacity(rl, H100, 128))


def test_what_runs_nowhere_is_said() -> None:
    rows = [Capacity(gpus=1, problem="it does not fit")]
    assert where_it_stops(load_recipe("nano", []), rows).endswith("it does not fit.")


def test_a_step_of_rl_takes_the_time_that_was_recorded() -> None:
    """On an H200 (benchmarks/rl): the answers there are of at most this length. Within a quarter, part by part."""
    recorded = json.loads((BENCHMARKS / "train_nvidia-h200_20261115.json").read_text())
    hardware = build(Hardware, recorded["results"][0]["plan"]["hardware"], where="hardware")
    base = load_recipe("rl/guru-8gpu", ["plan.compile=off"])  # as recorded
    assert base.rl is not None
    rl = replace(base.rl, group_size=8, max_prompt_tokens=96, max_new_tokens=256)
    for answers, generate_s, update_s in ((128, 0.415, 0.302), (512, 0.693, 1.225)):
        train = replace(base.train, batch_size=answers // 8)
        recipe = replace(base, model=SMOLLM2_360M, train=train, rl=rl)
        found = on(recipe, make_plan(recipe, hardware)).parts_s
        assert found["generate"] == pytest.approx(generate_s, rel=0.25)
        assert found["update"] == pytest.approx(update_s, rel=0.25)


def test_a_reference_and_a_critic_have_their_parts() -> None:
    plain = load_recipe("rl/guru-8gpu", [])
    more = load_recipe("rl/guru-8gpu", ["rl.kl=0.01", "rl.algorithm=ppo"])
    a100 = hardware_as("a100-80g", cores=8)
    parts = [on(recipe, make_plan(recipe, a100, world_size=16)).parts_s for recipe in (plain, more)]
    assert list(parts[0]) == ["weights to the engine", "generate", "reward", "update"]
    assert parts[1]["reference"] == pytest.approx(parts[1]["update"] / 3)
    assert parts[1]["critic"] == pytest.approx(parts[1]["update"] * 4 / 3)


# ---- redline plan ----


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_plan_shows_a_row_for_each_number_of_gpus_and_the_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, "gpt-1.3b", "--as", "16xh100-80g", "--price", "2.50")
    recipe = load_recipe("gpt-1.3b", [])
    hours = capacity(recipe, H100, 16)[-1].gpu_hours(recipe.train.steps)
    taken, given = [line for line in out.splitlines() if line.startswith("  16  ")]
    assert "HSDP 2x8" in taken
    assert given.split()[-2:] == [f"{hours:,.1f}", f"{hours * 2.5:,.2f}"]
    for text in ("a copy in every node", "80% of 450 GB/s", "50 GB/s", "It still scales on 16 GPUs"):
        assert text in out
    out = printed(capsys, monkeypatch, "gpt-1.3b", "--as", "16xh100-80g", "--set", "plan.shards=1")
    assert "data parallel" in next(line for line in out.splitlines() if line.startswith("  16  ")), (
        "another layout"
    )


def test_plan_stands_beside_the_guides_targets_read_per_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, "rl/guru-8gpu", "--as", "8xa100-80g")
    assert "tokens/s per GPU" in out
    assert "536 to 664" in out
    for part in ("weights to the engine", "generate", "reward", "update"):
        assert part in out


def test_plan_on_more_gpus_than_sequences_says_on_how_many_it_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["plan", "gpt-1.3b", "--as", "1024xh100-80g"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "Scaling stops paying after" in out
    problem = "train.batch_size (512) must be a multiple of 1024"
    assert f"on 1,024: {problem}" in out
    assert main([*asked, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert problem in found["problem"]
    assert [row["gpus"] for row in found["capacity"] if not row["problem"]][-1] == 512
    assert main([*asked, "--save", str(tmp_path / "plan.json")]) == 2
    assert problem in capsys.readouterr().err


def test_plan_gives_the_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-1.3b", "--as", "8xh100-80g", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 8
    assert [row["gpus"] for row in found["capacity"]] == [1, 8]


def test_a_price_that_nothing_can_be_charged_at_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It was ignored: the plan came without a cost."""
    for command in ("nano", "finetune --as 8xh100-80g --set model.init_from=demo"):
        assert main(["plan", *command.split(), "--price", "2.5"]) == 2
        assert (
            "--price needs a GPU of the table (--as) and workload pretrain or rl, got "
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("option", "said"), [("--nproc 4", "got --nproc 4"), ("--price 0", "--price must be")]
)
def test_the_number_of_gpus_is_given_once_and_a_price_is_above_zero(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt-1.3b", "--as", "8xh100-80g", *option.split()]) == 2
    assert said in capsys.readouterr().err
