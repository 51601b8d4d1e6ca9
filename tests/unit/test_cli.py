"""The command line as a user meets it: quick answers without torch, and for every mistake one line and its
exit code."""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_folders import lines, write_run

from redline.cli.arguments import declare, folded
from redline.cli.main import COMMANDS, main, module_of, parser
from redline.cli.options import run_of
from redline.cli.train import print_outcome
from redline.config.load import load_recipe, shipped, to_toml
from redline.config.recipe import ModelConfig
from redline.errors import ConfigError, RedlineError, nearest
from redline.machine.facts import read_facts
from redline.model.huggingface_out import write_folder
from redline.model.transformer import build_model
from redline.model.weights import Loaded

SMALL = [
    "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.ffn_size=16",
    "model.context_length=32", "data.seq_len=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, two data folders with different tokenizers, a model folder, and plans for recipes that train
    on them."""
    root = tmp_path_factory.mktemp("cli")
    before = dict(os.environ)
    os.environ["REDLINE_CACHE"] = str(root / "cache")
    text = "Line {} of {}: the quick brown fox jumps over {} lazy dogs, again and again."
    rows = [json.dumps({"text": text.format(i, i * i, i % 7)}) for i in range(800)]
    (root / "corpus.jsonl").write_text("\n".join(rows))
    for name, vocabulary in (("data", "300"), ("other", "290")):
        how = ["--out", str(root / name), "--vocab-size", vocabulary, "--valid-fraction", "0.3"]
        assert main(["data", "build", str(root / "corpus.jsonl"), *how]) == 0
    config = ModelConfig(
        vocab_size=320, num_layers=1, hidden_size=16, num_heads=2, ffn_size=16, context_length=32
    )
    weights = {name: p.detach() for name, p in build_model(config, device="cpu", seed=0).named_parameters()}
    tokenizer = (root / "data" / "tokenizer.json").read_text()
    write_folder(
        root / "model", Loaded(config=config, weights=weights, tokenizer_json=tokenizer), torch.float32
    )
    (root / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    (root / "run" / "recipe.toml").write_text(to_toml(load_recipe("nano", ["train.lr=0.5"])))
    os.environ.clear()
    os.environ.update(before)
    return root


@pytest.fixture(autouse=True)
def _elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(made / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("A100_BATCH_SIZE", "A100_GRAD_ACCUM", "MICRO_BATCH_SIZE", "CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str] | str, code: int, *parts: str) -> None:
    """The command ends with `code`, nothing on standard output, and its last word is one line that holds the
    parts."""
    capsys.readouterr()
    arguments = arguments.split() if isinstance(arguments, str) else arguments
    assert main(arguments) == code
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert [line for line in lines if line.startswith("redline: ")] == lines[-1:], shown.err
    # those say how they are getting on
    assert len(lines) == 1 or arguments[0] in ("train", "data"), shown.err
    assert shown.out == ""
    for part in parts:
        assert part in lines[-1]


# ---- quick, and without torch ----

QUICK = {
    "nothing": [],
    "help": ["--help"],
    "recipes": ["recipes"],
    "recipe": ["recipes", "gpt2-124m"],
    "plan": ["plan", "gpt2-124m", "--as", "h100-80g"],
    "machine": ["machine", "--facts"],
    "data build help": ["data", "build", "--help"],
    "data info": ["data", "info", "DATA"],
    "train help": ["train", "--help"],
}
REFUSED = {
    "a model": ["generate", "nowhere"],
    "a checkpoint": ["generate", "RUN", "--checkpoint", "step-7"],
    "a device": ["generate", "MODEL", "--device", "tpu"],
    "sampling": ["generate", "MODEL", "--temperature", "-1"],
    "samples": ["generate", "MODEL", "--samples", "0"],
    "a model to talk to": ["chat", "nowhere"],
    "a model to evaluate": ["evaluate", "nowhere"],
    "a text to evaluate on": ["evaluate", "MODEL", "--data", "nowhere.txt"],
    "no text to evaluate on": ["evaluate", "MODEL"],
    "sequences": ["evaluate", "MODEL", "--data", "DATA", "--sequences", "0"],
    "a model to export": ["export", "nowhere", "out"],
    "a folder to export to": ["export", "MODEL", "DATA"],
    "a fork": ["train", "nano", "--fork", "nowhere", "--run", "new"],
    "a corpus": ["train", "nano", "--set", "data.source=nowhere.txt"],
    "a run folder": ["train", "nano", "--run", "RUN"],
    "an exporter": ["train", "nano", "--export", "tensorbord"],
    "processes": ["train", "nano", "--nproc", "0"],
    "a plan": ["train", "nano", "--plan", "none.json"],
    "a model to tune": ["finetune", "nowhere", "DATA"],
    "examples": ["finetune", "MODEL", "nowhere.jsonl", "--set", "data.seq_len=16"],
    "an RFT model": ["rft", "run", "rft/demo", "--set", "model.init_from=nowhere"],
    "a task": ["rft", "run", "rft/demo", "--set", "task.name=unit"],
    "rounds": ["rft", "run", "rft/demo", "--rounds", "0"],
    "a sampler": ["rft", "sample", "rft/demo", "--set", "sample.sampler=nowhere"],
    "samples to export": ["rft", "export", "nowhere", "rft.json"],
    "a plan to verify": ["verify", "nano", "--plan", "none.json"],
    "minutes": ["tune", "nano", "--minutes", "0"],
    "an entry": ["ablate", "nano", "--only", "spda"],
    "an arm": ["bench", "train", "--arm", "lop"],
    "an arm of generation": ["bench", "generate", "--arm", "lop"],
    "an arm of fine-tuning": ["bench", "finetune", "--arm", "lop"],
    "the verb": ["train", "rl/demo"],
    "a group": ["rl", "run", "rl/demo", "--set", "rl.group_size=0"],
    "a recipe to look at": ["rl", "doctor", "nano"],
    "a run to compare": ["rl", "compare", "nowhere", "nowhere"],
    "learning rates": ["okadfa", "ablate", "okadfa/nano", "--lrs", "1e-3,nan"],
    "a folder to write": ["okadfa", "ablate", "okadfa/nano", "--out", "/dev/null/study"],
}
"""Each with one thing that is not there or cannot be."""
WITHOUT_TORCH = """
import json, sys
from redline.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    heavy = {"torch", "transformers", "pyarrow", "wandb"} & set(sys.modules)
    assert not heavy, f"{arguments} imported {heavy}"
    print("exit code", code or 0)
"""


def without_torch(made: Path, commands: dict[str, list[str]]) -> list[str]:
    """What the commands print, one after the other in one process that has imported nothing heavy in the end."""
    places = {"MODEL": "model", "DATA": "data", "RUN": "run"}
    given = [[str(made / places[w]) if w in places else w for w in words] for words in commands.values()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(given)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def test_commands_that_need_no_torch_do_not_import_it(made):
    lines = without_torch(made, QUICK)
    assert lines.count("exit code 0") == len(QUICK)


def test_mistakes_are_found_before_torch_is_imported(made):
    lines = without_torch(made, REFUSED)
    assert "exit code 0" not in lines
    assert sum(line.startswith("redline: ") for line in lines) == len(REFUSED)


@pytest.mark.timing
@pytest.mark.parametrize("name", QUICK)
def test_a_command_that_needs_no_torch_answers_within_half_a_second(made, name):
    started_s = time.perf_counter()
    for _ in range(5):
        without_torch(made, {name: QUICK[name]})
    assert (time.perf_counter() - started_s) / 5 < 0.5


def test_importing_the_package_warns_of_nothing_and_loads_nothing():
    check = (
        "import redline.cli.main, sys; assert not {'torch', 'numpy', 'tomllib'} & set(sys.modules);"
        " print(redline.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", check], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_says_it_all_in_80_columns_and_breaks_no_word(command, capsys):
    module = module_of(command)
    verbs = module.ARGUMENTS if isinstance(module.ARGUMENTS, dict) else {}
    for verb, text in (("", module.__doc__), *verbs.items()):
        with pytest.raises(SystemExit) as ended:
            main([command, *([verb] if verb else []), "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        about, _, listed = text.partition("\n")
        told = " ".join(line.partition("  ")[2] for line in listed.splitlines()) if verb else listed
        assert words(f"{about} {told}") <= words(shown)


def test_an_example_that_is_folded_keeps_options_with_their_values():
    shown = folded(
        "\nredline train gpt2-124m --run runs/wiki --nproc 2 --quiet --set data.source=data/wiki  about it"
    )
    assert shown.splitlines() == [
        "redline train gpt2-124m --run runs/wiki --nproc 2 --quiet \\",
        "        --set data.source=data/wiki",
        "    about it",
    ]


def words(text: str) -> set[str]:
    return {word.rstrip(".;").lower() for word in text.split()}


def test_arguments_are_what_their_help_says():
    command = argparse.ArgumentParser()
    declare(
        command,
        """
        [TASK]            may be left out
        RUN...            run folders
        --count N         a number (default 6), 95% of the time
        --seed N          another (default: 0)
        --out DIR         a folder (required)
        --set KEY=VALUE...   pairs
        --as {a,b}        a choice (default b)
        --json            a switch
        """,
    )
    given = command.parse_args(["t", "r", "s", "--out", "o", "--set", "a=1", "--set", "b=2", "--json"])
    assert vars(given) == {
        "task": "t", "run": [Path("r"), Path("s")], "count": 6, "seed": None, "out": Path("o"),
        "set": ["a=1", "b=2"], "as_": "b", "json": True,
    }  # fmt: skip
    assert "95% of the time" in command.format_help()
    with pytest.raises(SystemExit):
        command.parse_args(["r"])


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80
    refused(capsys, ["trian", "nano"], 2, "no command 'trian' (did you mean 'train'?)")


# ---- what they answer ----


def test_plan_prints_every_reason_and_saves_what_it_printed(capsys, tmp_path):
    given = "gpt2-124m --as h100-80g --set plan.loss_chunks=2 --save plan.json --json"
    assert main(["plan", *given.split()]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "plan.json").read_text())
    assert shown["loss_chunks"] == {"value": 2, "reason": "--set plan.loss_chunks", "source": "user"}
    assert main(["plan", "seeds/h100-after", "--as", "h100-80g"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "cudnn" in table
    assert "854" not in table
    assert "[plan]" in table, "brackets in a reason are text, not markup"
    assert main(["plan", "rl/demo", "--as", "h100-80g"]) == 0
    assert "allocator – rule" in " ".join(capsys.readouterr().out.split()), "no column is left empty"


def test_recipes_lists_and_prints(capsys):
    assert main(["recipes", "--json"]) == 0
    listed = {r["name"]: r["parameters"] for r in json.loads(capsys.readouterr().out)}
    assert listed["gpt2-124m"] == 124_475_904
    assert main(["recipes", "gpt2-124m", "--set", "train.lr=0.5"]) == 0
    assert "\nlr = 0.5\n" in capsys.readouterr().out


def test_every_shipped_recipe_has_a_run_folder_of_its_own():
    """The README trains nano and okadfa/nano, rft/demo and rl/demo: the second of each was refused."""

    def folder(name: str, *sets: str) -> Path:
        return run_of(argparse.Namespace(recipe=name, run=None), load_recipe(name, sets))

    folders = {name: folder(name) for name in shipped()}
    assert len(set(folders.values())) == len(folders)
    assert (folders["nano"], folders["rl/demo"]) == (Path("runs/nano"), Path("runs/rl-demo"))
    assert folder("okadfa/nano", "name=mine") == Path("runs/mine")


def test_data_info_says_what_was_built(made, capsys):
    assert main(["data", "info", str(made / "data"), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert main(["data", "info", str(made / "data"), "--verify"]) == 0
    text = capsys.readouterr().out
    assert f"{sum(s['tokens'] for s in manifest['train']):,} tokens" in text
    assert manifest["tokenizer"][:12] in text


def test_generate_and_evaluate_a_model_folder(made, capsys):
    model, how = str(made / "model"), "--prompt The --samples 2 --max-new-tokens 4 --json"
    assert main(["generate", model, *how.split()]) == 0
    texts = json.loads(capsys.readouterr().out)
    assert [t["sample"] for t in texts] == [0, 1]
    code = main(["generate", model, "--max-new-tokens", str(10**9), "--json"])
    assert code == 0, "memory is for what the context holds"
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main(["evaluate", model, "--data", str(made / "data"), "--sequences", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 4 * 32
    assert found["valid_loss"] == pytest.approx(5.77, abs=0.3), "a model that knows nothing: log 320"


def test_the_outcome_breaks_no_word_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    losses = {"valid_loss": 5.2, "valid_perplexity": 181.28, "valid_word_perplexity": 148_606.6}
    folder = write_run(
        tmp_path / "run", metrics=[*lines(3), {**lines(4)[-1], **losses, "valid_bits_per_byte": 3.1}]
    )
    print_outcome("finished", 4, folder)
    told = capsys.readouterr().out.splitlines()
    (first,) = (place for place, line in enumerate(told) if line.startswith("validation loss"))
    assert told[first].rstrip().endswith("148,607 per")
    assert told[first + 1] == "word, 3.1000 bits/byte"


# ---- mistakes: recipes and options ----


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["plan", "gpt2-125m"], ["no recipe 'gpt2-125m' (did you mean 'gpt2-124m'?)"]),
        (["finetune", "demo", "x", "--full", "--set", "lora.rank=4"], ["--full trains all weights"]),
        (["generate", "demo", "--prompt", "\udcff"], ["--prompt: the value must be UTF-8 text"]),
        (["recipes", "nanoo"], ["did you mean 'nano'?"]),
        (["train", "nan0"], ["did you mean 'nano'?"]),
        (["plan", "nano", "--set", "train.step=3"], ["unknown key 'step'", "did you mean 'steps'?"]),
        (["plan", "nano", "--set", "train.steps"], ["--set takes table.key=value"]),
        (["race", "nano", "nano@train.lr"], ["a variant is RECIPE@TABLE.KEY=VALUE, got 'train.lr'"]),
        (["plan", "nano", "--set", "train.steps=-5"], ["train.steps must not be negative, got -5"]),
        (["train", "nano", "--set", "train.lr=-1"], ["train.lr must be greater than 0, got -1"]),
        (["plan", "nano", "--set", "train.lr=nan"], ["finite number"]),
        (["plan", "nano", "--set", "train.steps=1e3"], ["steps must be a whole number, got 1000.0"]),
        (["plan", "nano", "--set", "train.batch_size=1" + "0" * 30], ["64 bits"]),
        (["plan", "nano", "--set", "model.num_heads=0"], ["model.num_heads must be greater than 0"]),
        (["plan", "nano", "--as", "h100-80"], ["no GPU 'h100-80'", "did you mean 'h100-80g'?"]),
        (["plan", "nano", "--profile", "a100"], ["no profile 'a100'", "did you mean"]),
        (["plan", "nano", "--nproc", "0"], ["at least 1, got 0"]),
        (["plan", "nano", "--nproc", "-2"], ["at least 1, got -2"]),
        (["plan", "gpt2-124m", "--as", "h100-80g", "--nproc", "7"], ["train.batch_size (512)", "7"]),
        (["train", "nano", "--nproc", "0"], ["--nproc must be at least 1, got 0"]),
        (["train", "nano", "--plan", "none.json"], ["no plan at none.json", "redline plan RECIPE --save"]),
        (["generate", "MODEL", "--temperature", "1e-9"], ["temperature must be 0 (greedy) or", "got 1e-09"]),
        (["generate", "MODEL", "--temperature", "-1"], ["must be a finite number of at least 0, got -1"]),
        (["generate", "MODEL", "--temperature", "inf"], ["must be a finite number of at least 0, got inf"]),
        (["generate", "MODEL", "--samples", "0"], ["--samples must be at least 1, got 0"]),
        (["generate", "MODEL", "--seed", "-1"], ["--seed must be at least 0, got -1"]),
        (["generate", "MODEL", "--seed", str(2**63)], ["seed must be a signed number of at most 64 bits"]),
        (
            ["data", "build", "DATA", "--out", "new", "--vocab-size", str(2**64)],
            ["--vocab-size must be a signed number of at most 64 bits, got 18446744073709551616"],
        ),
        (["generate", "MODEL", "--top-p", "2"], ["top_p must be"]),
        (["generate", "MODEL", "--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (
            ["generate", "MODEL", "--prompt", "again and " * 100],
            ["a prompt has", "the model's context holds 32"],
        ),
        (["evaluate", "MODEL"], ["give --data SOURCE"]),
        (
            ["evaluate", "MODEL", "--data", "DATA", "--seq-len", "33"],
            ["between 1 and the model's context, 32; got 33"],
        ),
        (["evaluate", "MODEL", "--data", "DATA", "--seq-len", "-1"], ["got -1"]),
        (["evaluate", "MODEL", "--data", "DATA", "--sequences", "0"], ["at least 1, got 0"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_a_wrong_recipe_or_option_is_one_line_and_code_2(made, capsys, arguments, parts):
    places = {"MODEL": str(made / "model"), "DATA": str(made / "data")}
    refused(capsys, [places.get(word, word) for word in arguments], 2, *parts)


def test_a_folder_where_a_file_is_to_be_written(capsys, tmp_path):
    refused(
        capsys,
        "plan nano --as t4 --save .",
        5,
        ". is a folder, and a file is to be written: give a file name",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_file_that_is_broken(capsys, tmp_path):
    (tmp_path / "bad.toml").write_text("[train\nsteps = 1")
    refused(capsys, ["plan", "bad.toml"], 2, "bad.toml: not valid TOML")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    refused(capsys, ["plan", "binary.toml"], 2, "binary.toml cannot be read as text")


def test_an_environment_that_would_change_the_batch(capsys, monkeypatch):
    monkeypatch.setenv("A100_BATCH_SIZE", "7")
    refused(capsys, "plan gpt2-124m --as a100-80g", 2, "A100_BATCH_SIZE=7", "must keep the recipe's batch")


def test_a_recipe_that_does_not_fit_names_the_numbers(capsys):
    refused(capsys, "plan gpt-1.3b --as t4-16g", 6, "gpt-1.3b does not fit T4 16 GB", "GiB")
    refused(capsys, "plan seeds/h100-after --as a100-80g", 6, "fp8 needs compute capability 8.9")


def test_a_plan_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    refused(capsys, "plan nano --save file/plan.json", 5, "cannot be written")


def test_what_argparse_refuses_is_one_line_too(capsys):
    for arguments, part in (
        (["train"], "RECIPE"),
        (["plan", "nano", "--nproc", "two"], "--nproc"),
        (["data"], "VERB"),
        (["machine", "--speed"], "no such argument: --speed"),
    ):
        refused(capsys, arguments, 2, part, f"`redline {arguments[0]} --help`")
    refused(
        capsys, "train nano --batch-size 8", 2, "--batch-size 8 (did you mean --set train.batch_size=8?);"
    )
    refused(capsys, "race nano --lr=1e-3", 2, "--lr=1e-3 (did you mean --set train.lr=1e-3?);")
    refused(capsys, "rft stats run --all", 2, "no such argument: --all; `redline rft stats --help`")


def test_a_hint_is_near_or_there_is_none():
    """`nosuch` was taken for `bench`."""
    hints = {word: nearest(word, COMMANDS) for word in ("trian", "gen", "opt", "nosuch")}
    assert hints == {
        "trian": " (did you mean 'train'?)",
        "gen": " (did you mean 'generate'?)",
        "opt": " (did you mean 'optimizations'?)",
        "nosuch": "",
    }


def test_an_empty_value_is_refused_but_for_a_text(capsys):
    """`--run "$RUN"` without the variable would train into the working directory."""
    for arguments in (["train", ""], ["train", "nano", "--run", ""], ["plan", "nano", "--as", ""]):
        refused(capsys, arguments, 2, "the value must not be empty", f"`redline {arguments[0]} --help`")
    assert parser(only="generate").parse_args(["generate", "demo", "--prompt", ""]).prompt == [""]


def test_the_standard_benchmark_does_not_start_on_a_cpu(capsys, monkeypatch):
    facts = replace(read_facts(), gpus=())
    monkeypatch.setattr("redline.cli.bench.read_facts", lambda: facts)
    refused(capsys, ["bench", "train"], 6, "needs a GPU", "--recipe nano")


def test_a_folder_that_cannot_hold_the_results_is_refused_before_they_are_measured(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("redline.bench.rl.bench_rl", None)
    refused(
        capsys, ["bench", "rl", "--quick", "--out", "file/results"], 5, "file/results", "choose another path"
    )
    monkeypatch.setattr("os.access", lambda path, mode: False)
    refused(capsys, ["bench", "rl", "--quick", "--out", "results"], 5, "results cannot be written to")


# ---- mistakes: data ----


def test_a_corpus_that_is_missing_empty_or_no_text(capsys, tmp_path):
    build = ["data", "build", "--out", "out", "--vocab-size", "300"]
    refused(capsys, [*build, "missing.txt"], 3, "no such corpus: missing.txt")
    (tmp_path / "empty.txt").write_text("")
    refused(capsys, [*build, "empty.txt"], 3, "the corpus is empty")
    (tmp_path / "folder").mkdir()
    refused(capsys, [*build, "folder"], 3, "holds no file")
    (tmp_path / "latin.txt").write_bytes("Käse\n".encode("latin-1"))
    refused(capsys, "data build latin.txt --out out2 --vocab-size 300", 3, "latin.txt, line 1: not UTF-8")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    refused(capsys, "data build rows.jsonl --out out3 --vocab-size 300", 3, "no field 'text'")
    refused(capsys, "data build latin.txt --out out4 --vocab-size 3", 3, "at least 257")
    refused(
        capsys, "data build latin.txt --out out5 --tokenizer missing.json", 3, "missing.json cannot be read"
    )


@pytest.mark.parametrize(
    "option",
    [
        ("--valid-fraction", "-0.5", 3),
        ("--workers", "0", 2),
        ("--workers", "-2", 2),
        ("--vocab-size", "-1", 2),
    ],
)
def test_a_build_with_an_absurd_number(made, capsys, option):
    *option, code = option
    command = ["data", "build", str(made / "corpus.jsonl"), "--out", "out", *option]
    refused(capsys, command, code, f"got {option[1]}")


def test_a_data_folder_that_is_missing_truncated_or_altered(made, capsys, tmp_path):
    refused(capsys, ["data", "info", "nowhere"], 3, "nowhere is not a data folder")
    for path in (made / "data").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(capsys, ["data", "info", str(tmp_path)], 3, "train-00000.bin", "bytes and should have")
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert main(["data", "info", str(tmp_path)]) == 0, "only --verify reads every byte"
    refused(capsys, ["data", "info", str(tmp_path), "--verify"], 3, "train-00000.bin", "was altered")
    shard.unlink()
    refused(capsys, ["data", "info", str(tmp_path)], 3, "train-00000.bin", "cannot be read")
    (tmp_path / "manifest.json").write_text("{")
    refused(capsys, ["data", "info", str(tmp_path)], 3, "manifest.json is damaged")


def train_with(capsys, overrides: list[str], code: int, *parts: str, more: tuple[str, ...] = ()) -> None:
    """Train nano with overrides, by a plan made for it, so that nothing is measured first; it must be
    refused."""
    sets = [word for override in [*SMALL, *overrides] for word in ("--set", override)]
    assert main(["plan", "nano", *sets, "--save", "plan.json"]) == 0
    command = ["train", "nano", *sets, "--plan", "plan.json", "--run", "run", "--quiet", *more]
    refused(capsys, command, code, *parts)


def test_training_on_data_that_cannot_be_used(made, capsys, tmp_path):
    data, other = (f"data.source={made / name}" for name in ("data", "other"))
    train_with(capsys, ["data.source=missing"], 3, "no such corpus: missing")
    train_with(
        capsys, [data, "model.vocab_size=280"], 3, "the tokenizer has 300 ids and model.vocab_size is 280"
    )
    (tmp_path / "run" / "recipe.toml").unlink()
    train_with(
        capsys, [other, f"data.tokenizer={made / 'data'}", "model.vocab_size=320"], 3, "wrong tokenizer"
    )
    (tmp_path / "run" / "recipe.toml").unlink()
    long = ["model.vocab_size=320", "model.context_length=999999", "data.seq_len=999999"]
    train_with(capsys, [data, *long], 3, "one sequence needs 1000000")


def test_training_with_an_exporter_or_a_folder_that_does_not_fit(made, capsys, tmp_path):
    data = [f"data.source={made / 'data'}", "model.vocab_size=320"]
    hint = "an exporter is one of", "did you mean 'tensorboard'?"
    train_with(capsys, data, 2, *hint, more=("--export", "tensorbord"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "recipe.toml").write_text(to_toml(load_recipe("nano")))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    train_with(capsys, [*data, "train.lr=0.5"], 2, "holds a run of another recipe")
    assert not (tmp_path / "run" / "events.jsonl").exists(), "the run that is there has not failed"
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "recipe.toml").write_text(to_toml(load_recipe("rft/demo")))
    (tmp_path / "run" / "samples.db").touch()
    train_with(capsys, data, 2, "another recipe: workload (rft before, pretrain now)")
    (tmp_path / "run" / "recipe.toml").write_text("[broken")
    train_with(capsys, data, 2, "not valid TOML")
    assert main(["plan", "nano", "--save", "other.json"]) == 0
    refused(capsys, "train nano --set train.optimizer=muon --plan other.json", 2, "another workload")


# ---- mistakes: models ----


def test_a_model_that_is_missing_empty_pickled_or_broken(made, capsys, tmp_path):
    for command in (["generate"], ["evaluate", "--data", str(made / "data")]):
        refused(capsys, [*command, "nowhere"], 4, "no such path: nowhere")
        (tmp_path / "empty").mkdir(exist_ok=True)
        refused(capsys, [*command, "empty"], 4, "empty")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "pickled").mkdir(exist_ok=True)
        (tmp_path / "pickled" / name).write_bytes((made / "model" / name).read_bytes())
    refused(capsys, ["generate", "pickled"], 4, "pickled")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(capsys, ["generate", "pickled"], 4, "its weights are pickled, which can run code")
    weights = (made / "model" / "model.safetensors").read_bytes()
    (tmp_path / "pickled" / "model.safetensors").write_bytes(weights[:-100])
    refused(capsys, ["generate", "pickled"], 4, "model.safetensors")
    (tmp_path / "pickled" / "config.json").write_text("{")
    refused(capsys, ["generate", "pickled"], 4, "config.json")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    refused(capsys, ["generate", "broken.gguf"], 4, "broken.gguf")


def test_a_checkpoint_of_a_finished_model_cannot_be_chosen(made, capsys):
    """It was ignored: whoever asked for the best of an RL run got the last."""
    for command in ("generate", "evaluate", "export"):
        given = [command, str(made / "model"), *["out"] * (command == "export"), "--checkpoint", "best"]
        refused(capsys, given, 4, "--checkpoint best is for pre-training runs", "leave it out")


def test_evaluating_on_tokens_of_another_tokenizer(made, capsys):
    refused(capsys, ["evaluate", str(made / "model"), "--data", str(made / "other")], 3, "wrong tokenizer")
    refused(capsys, ["evaluate", str(made / "model"), "--data", "missing.txt"], 3, "no such corpus")


def test_exporting_over_another_folder(made, capsys, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    refused(capsys, ["export", str(made / "model"), "full"], 5, "a model needs a new folder, but full exists")
    assert (tmp_path / "full" / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for here in (".", str(tmp_path / "empty")):
        refused(
            capsys, ["export", str(made / "model"), here], 5, "a model needs a new folder, but", "you are in"
        )


# ---- the way out ----


def test_an_error_of_ours_keeps_its_traceback_and_a_user_s_has_none(monkeypatch, capsys):
    def broken(_options):
        raise ZeroDivisionError("our mistake")

    monkeypatch.setattr(module_of("recipes"), "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])


@pytest.mark.parametrize(
    "kind", [ConfigError, *sorted(RedlineError.__subclasses__(), key=lambda kind: kind.exit_code)]
)
def test_exit_codes_are_those_of_the_tree(kind, monkeypatch, capsys):
    def fail(_options):
        raise kind("the rule, the value, the way out")

    monkeypatch.setattr(module_of("recipes"), "run", fail)
    refused(capsys, ["recipes"], kind.exit_code, "the rule, the value, the way out")
    assert kind.exit_code in range(2, 9)


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module_of("recipes"), "run", interrupt)
    refused(capsys, ["recipes"], 130, "interrupted")


@pytest.mark.parametrize("arguments", [["recipes"], ["--help"], ["recipes", "nano", "--json"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "redline", *arguments]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_is_told_which_model_is_opened(monkeypatch, capsys):
    """torch is imported next, which takes seconds; a pipe gets only the answer."""
    for seen in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda seen=seen: seen, raising=False)
        assert main(["evaluate", "demo"]) == 2  # needs --data
        assert capsys.readouterr().err.startswith("opening ") == seen


@pytest.mark.parametrize("environment", [{"REDLINE_LAUNCHER": "1"}, {"RANK": "1"}])
def test_of_several_processes_one_says_that_the_warm_up_is_shortened(environment, monkeypatch, capsys):
    command = ["plan", "nano", "--set", "train.steps=2"]
    assert main(command) == 0
    assert capsys.readouterr().err.count("exceeds the run's 2 steps: using 1") == 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 0
    assert "exceeds" not in capsys.readouterr().err


def test_a_mistake_in_a_real_process_is_one_line_without_a_traceback():
    command = [sys.executable, "-m", "redline", "plan", "nanoo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("redline: no recipe 'nanoo'")
    assert done.stderr.count("\n") == 1


def test_ablate_tokenises_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text("a few words of no meaning, many times over. " * 500)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    said: list[str] = []
    monkeypatch.setattr(
        "redline.cli.ablate.ablate", lambda *_, **__: said.append(capsys.readouterr().err) or []
    )
    sets = [*SMALL, "model.vocab_size=300", f"data.source={tmp_path / 'corpus.txt'}"]
    sets = [
        part for text in (*sets, "data.valid_fraction=0", "train.eval_every=0") for part in ("--set", text)
    ]
    command = ["ablate", "nano", *sets, "--out", str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    assert "tokenising" in said[0]
    assert main(command) == 0
    assert "tokenising" not in said[1], "it is there"
