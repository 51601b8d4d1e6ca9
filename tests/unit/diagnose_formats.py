"""What trainers print, made here: a template a format, filled with a run whose times are known.

    text = FORMATS["megatron"].text(run)

The lines are in the form that each trainer's own code gives them; no line is from somebody's log.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Run:
    """A run as it was: every update and what it took."""

    updates: int = 60
    step_s: float = 0.5
    tokens: int = 65_536
    gpus: int = 8
    losses: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def took_s(self, step: int) -> float:
        return self.times[step - 1] if self.times else self.step_s

    def loss(self, step: int) -> float:
        return self.losses[step - 1] if self.losses else 8.0 * (0.2 + 1 / (1 + step / 20))

    def clock_s(self, step: int) -> float:
        return sum(self.took_s(each) for each in range(1, step + 1)) if self.times else step * self.step_s

    def at(self, step: int) -> datetime:
        return datetime(2026, 3, 1, 9, 30) + timedelta(seconds=self.clock_s(step))

    def stamp(self, step: int) -> str:
        return f"{self.at(step):%Y-%m-%d %H:%M:%S},{self.at(step).microsecond // 1000:03d}"


def hms(seconds: float) -> str:
    whole = int(seconds)
    return (
        f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60:02d}:{whole % 60:02d}"
    )


@dataclass(frozen=True)
class Format:
    line: Callable[[Run, int], str]
    head: str = ""
    tail: str = ""
    every: int = 1
    name: str = "train.log"
    trainer: str = ""
    tokens: bool = True
    """Whether tokens/s of all GPUs follow from the log."""
    times: bool = True
    """Whether the log holds times at all."""
    exact: float = 0.02
    """How well the time of an update can be known from it."""
    losses: bool = True
    per_line: int = 1
    """Updates that a line counts."""

    @property
    def exact_lines(self) -> bool:
        """Whether every update has a line, with a time that is its own."""
        return self.every == 1 and self.exact <= 0.02 and self.per_line == 1

    def text(self, run: Run) -> str:
        lines = [self.line(run, step) for step in range(1, run.updates + 1) if step % self.every == 0]
        return (
            "\n".join([*([self.head] if self.head else []), *lines, *([self.tail] if self.tail else [])])
            + "\n"
        )


def _bar(r: Run, n: int, name: str = "", more: str = "") -> str:
    left = (r.updates - n) * r.step_s
    return f"{name}{100 * n // r.updates:3d}%|███       | {n}/{r.updates} [{hms(r.clock_s(n))}<{hms(left)}, {r.took_s(n):5.2f}s/it{more}]"


def _hf(r: Run, n: int) -> str:
    dict_line = (
        f"{{'loss': {r.loss(n):.4f}, 'grad_norm': 1.2, 'learning_rate': 2e-05, 'epoch': {n / 20:.2f}}}\n"
        if n % 10 == 0
        else ""
    )
    return f"\r{_bar(r, n)}{dict_line}"


def _jsonl(**cells: Callable[[Run, int], object]) -> Callable[[Run, int], str]:
    return lambda r, n: json.dumps({name: value(r, n) for name, value in cells.items()})


PER_GPU = "of one GPU"
FORMATS: dict[str, Format] = {
    "nanogpt": Format(
        lambda r, n: f"iter {n}: loss {r.loss(n):.4f}, time {r.took_s(n) * 1e3:.2f}ms, mfu 13.50%",
        head="number of parameters: 10.65M\ntokens per iteration will be: 65,536",
        trainer="nanogpt",
    ),
    "build-nanogpt": Format(
        lambda r, n: (
            f"step {n:5d} | loss: {r.loss(n):.6f} | lr 6.0e-04 | norm: 0.3197 | dt: {r.took_s(n) * 1e3:.2f}ms | tok/sec: {r.tokens / r.took_s(n):.2f}"
        ),
        head="total desired batch size: 65536\n=> calculated gradient accumulation steps: 2",
        trainer="build-nanogpt",
    ),
    "a tutorial": Format(
        lambda r, n: (
            f"step {n}, loss: {r.loss(n):.4f}, norm:1.2, dt: {r.took_s(n) * 1e3:.2f}ms, tok/sec: {r.tokens / r.took_s(n):,.0f}"
        )
    ),
    "seed 002": Format(
        lambda r, n: (
            f"Step {n}: loss={r.loss(n):.4f}, lr=3.00e-04, tokens/sec={r.tokens / r.took_s(n):.0f}, time={r.took_s(n):.4f}s"
        )
    ),
    "modded-nanogpt": Format(
        lambda r, n: (
            f"step:{n}/{r.updates} train_loss:{r.loss(n):.4f} train_time:{r.clock_s(n) * 1e3:.0f}ms step_avg:{r.clock_s(n) / n * 1e3:.2f}ms"
        ),
        head="import torch\n\n# the code of this file\nclass Muon(torch.optim.Optimizer):\n    def step(self, lr=0.02):\n        pass\n\n@dataclass\nclass Hyperparameters:\n    batch_size : int = 8*64\n    sequence_length : int = 128\n",
        trainer="modded-nanogpt",
    ),
    "nanochat": Format(
        lambda r, n: (
            f"step {n - 1:05d}/{r.updates:05d} ({100 * (n - 1) / r.updates:.2f}%) | loss: {r.loss(n):.6f} | lrm: 1.00 | dt: {r.took_s(n) * 1e3:.2f}ms"
            f" | tok/sec: {r.tokens / r.took_s(n):,.0f} | mfu: 48.85 | total time: {r.clock_s(n) / 60:.2f}m"
        ),
        head="Distributed world size: 8\nTotal batch size 65,536 => gradient accumulation steps: 1\nNumber of parameters: 560,988,160",
        trainer="nanochat",
    ),
    "llm.c": Format(
        lambda r, n: (
            f"step {n:4d}/{r.updates} | loss {r.loss(n):7.6f} (+0.12z)| norm 1.2345 (-0.42z)| lr 6.00e-04 | {r.took_s(n) * 1e3:.2f} ms | 37.5% bf16 MFU | {r.tokens / r.took_s(n):.0f} tok/s"
        ),
        head="| micro batch size B    | 32   |\n| total batch size      | 65536 |\n| num_processes         | 8    |",
        trainer="llmc",
    ),
    "llm.c main.log": Format(
        lambda r, n: f"s:{n} trl:{r.loss(n):.4f} lr:0.000600 norm:1.20",
        times=False,
        tokens=False,
        name="main.log",
        trainer="llmc",
    ),
    "minimind": Format(
        lambda r, n: (
            f"Epoch:[1/1]({n}/{r.updates}), loss: {r.loss(n):.4f}, lr: 0.0005, epoch_time: {(r.updates - n) * r.step_s / 60:.1f}min"
        ),
        trainer="minimind",
        tokens=False,
        exact=0.25,
    ),
    "minimind of old": Format(
        lambda r, n: (
            f"Epoch:[1/19]({n}/{r.updates}) loss:{r.loss(n):.3f} lr:0.000200000000"
            f" epoch_Time:{(r.updates - n) * r.step_s / 60:.1f}min:"
        ),
        trainer="minimind",
        tokens=False,
        exact=0.25,
    ),
    "torchtitan": Format(
        lambda r, n: (
            f"[rank0]:[titan] {r.stamp(n)} - root - INFO - \x1b[31mstep: {n:2d}  \x1b[32mloss: {r.loss(n):8.5f}  \x1b[33mmemory: 37.00GiB(46.25%)  \x1b[34mtps: {r.tokens / r.took_s(n) / r.gpus:,.0f}  \x1b[35mmfu: 31.69%\x1b[39m"
        ),
        head="[rank0]:[titan] 2026-03-01 09:29:00,000 - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1\n"
        "[rank0]:[titan] 2026-03-01 09:29:00,000 - root - INFO - Trainer is initialized with local batch size 4, global batch size 32, gradient accumulation steps 1, sequence length 2048, total steps 60",
        trainer="torchtitan",
    ),
    "megatron": Format(
        lambda r, n: (
            f"31:  [{r.at(n):%Y-%m-%d %H:%M:%S.%f}] iteration {n:8d}/{r.updates:8d} | consumed samples: {n * 32:12d} | elapsed time per iteration (ms): {r.took_s(n) * 1e3:.1f} |"
            f" throughput per GPU (TFLOP/s/GPU): 365.7 | learning rate: 3.99E-04 | global batch size:   32 | lm loss: {r.loss(n):.6E} | loss scale: 1.0 | grad norm: 0.192 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
        ),
        head="31: using world size: 8, data-parallel size: 8\n31:   seq_length ...................................... 2048\n31:   global_batch_size ............................... 32",
        trainer="megatron",
    ),
    "gpt-neox": Format(
        lambda r, n: (
            f"[{r.stamp(n)}] [INFO] [training.py:1]  samples/sec: {32 / r.took_s(n):.3f} | iteration {n:8d}/  320000 | elapsed time per iteration (ms): {r.took_s(n) * 1e3:.1f} |"
            f" learning rate: 1.8E-05 | approx flops per GPU: 52.6TFLOPS | lm_loss: {r.loss(n):.6E} | number of skipped iterations:   0 |"
        ),
        trainer="megatron",
        tokens=False,
    ),
    "deepspeed": Format(
        lambda r, n: (
            f"[{r.stamp(n)}] [INFO] [timer.py:199:stop] epoch=0/micro_step={n}/global_step={n}, RunningAvgSamplesPerSec=60.1, CurrSamplesPerSec={32 / r.took_s(n):.6f}, MemAllocated=3.96GB, MaxMemAllocated=22.95GB"
        ),
        head="cmd = deepspeed main.py --per_device_train_batch_size 4 --max_seq_len 2048 --gradient_accumulation_steps 1",
        every=10,
        losses=False,
        trainer="deepspeed",
    ),
    "maxtext": Format(
        lambda r, n: (
            f"completed step: {n - 1}, seconds: {r.took_s(n):.3f}, TFLOP/s/device: 167.154, Tokens/s/device: {r.tokens / r.took_s(n) / r.gpus:.3f}, total_weights: {r.tokens}, loss: {r.loss(n):.3f}"
        ),
        head="System Information: Jax Version: 0.8.2\nNum_devices: 8, shape (1, 1, 8)",
        trainer="maxtext",
    ),
    "fairseq": Format(
        lambda r, n: (
            f"{r.at(n):%Y-%m-%d %H:%M:%S} | INFO | train_inner | epoch 001:  {n:5d} / 478 loss={r.loss(n):.3f}, ppl=12.3, wps={r.tokens / r.took_s(n):.1f}, ups={1 / r.took_s(n):.2f}, wpb={r.tokens}, bsz=32, num_updates={n}, lr=3e-06, gnorm=1.421, train_wall=4, gb_free=23.1, wall={r.clock_s(n):.0f}"
        ),
        every=5,
        trainer="fairseq",
    ),
    "fairseq json": Format(
        lambda r, n: (
            f"[{r.stamp(n)}][train_inner][INFO] - "
            + json.dumps(
                {
                    "epoch": 1,
                    "update": n / 50,
                    "loss": f"{r.loss(n):.3f}",
                    "wps": f"{r.tokens / r.took_s(n):.1f}",
                    "ups": f"{1 / r.took_s(n):.2f}",
                    "wpb": str(r.tokens),
                    "num_updates": str(n),
                    "gnorm": "1.4",
                    "train_wall": "4",
                    "wall": f"{r.clock_s(n):.0f}",
                }
            )
        ),
        every=5,
        trainer="fairseq",
    ),
    "hf console": Format(
        _hf,
        head="***** Running training *****\n  Instantaneous batch size per device = 4\n  Total train batch size (w. parallel, distributed & accumulation) = 32",
        tail="{'train_runtime': 30.0, 'train_samples_per_second': 64.0, 'train_steps_per_second': 2.0, 'train_loss': 2.1, 'epoch': 3.0}",
        trainer="huggingface",
        tokens=False,
        exact=0.07,
    ),
    "hf new console": Format(
        lambda r, n: (
            f"\r{_bar(r, n)}"
            + (
                f"{{'loss': '{r.loss(n):.4f}', 'grad_norm': '1.2', 'learning_rate': '2e-05', 'epoch': '{n / 20:.2f}'}}\n"
                if n % 10 == 0
                else ""
            )
        ),
        trainer="huggingface",
        tokens=False,
        exact=0.07,
    ),
    "trl grpo": Format(
        lambda r, n: (
            f"{{'loss': {r.loss(n):.4f}, 'grad_norm': 0.4, 'learning_rate': 1e-06, 'num_tokens': {float(n * r.tokens)}, 'completions/mean_length': 200.5, 'completions/max_length': 256.0, 'reward': 0.4, 'step_time': {r.took_s(n):.4f}, 'epoch': {n / 20:.2f}}}"
        ),
        head="GRPOTrainer",
        trainer="trl",
    ),
    "llama-factory": Format(
        _jsonl(
            current_steps=lambda r, n: n,
            total_steps=lambda r, n: r.updates,
            loss=lambda r, n: r.loss(n),
            lr=lambda r, n: 1e-5,
            epoch=lambda r, n: n / 20,
            percentage=lambda r, n: 100 * n / r.updates,
            elapsed_time=lambda r, n: str(timedelta(seconds=int(r.clock_s(n)))),
            remaining_time=lambda r, n: "0:00:10",
        ),
        every=10,
        name="trainer_log.jsonl",
        trainer="llama-factory",
        tokens=False,
        exact=0.07,
    ),
    "ms-swift": Format(
        lambda r, n: json.dumps(
            {
                "loss": r.loss(n),
                "grad_norm": 1.0,
                "epoch": n / 20,
                "global_step/max_steps": f"{n}/{r.updates}",
                "percentage": f"{100 * n / r.updates:.2f}%",
                "elapsed_time": f"{int(r.clock_s(n))}s",
                "remaining_time": "10s",
                "memory(GiB)": 16.5,
                "train_speed(iter/s)": n / r.clock_s(n),
            }
        ),
        every=10,
        name="logging.jsonl",
        trainer="ms-swift",
        tokens=False,
        exact=0.07,
    ),
    "ms-swift console": Format(
        lambda r, n: (
            f"{{'loss': {r.loss(n):.6f}, 'grad_norm': 1.0, 'epoch': {n / 20:.2f}, 'global_step/max_steps': '{n}/{r.updates}', 'percentage': '{100 * n / r.updates:.2f}%', 'elapsed_time': '{int(r.clock_s(n))}s', 'remaining_time': '10s', 'memory(GiB)': 16.5, 'train_speed(iter/s)': {n / r.clock_s(n):.6f}}}"
        ),
        every=10,
        trainer="ms-swift",
        tokens=False,
        exact=0.07,
    ),
    "wandb history": Format(
        lambda r, n: f"{n},{n},{r.clock_s(n):.6f},{1.77e9 + r.clock_s(n):.3f},{r.loss(n):.6f},0.0001",
        head=",_step,_runtime,_timestamp,train/loss,train/lr",
        name="wandb_history.csv",
        trainer="wandb",
        tokens=False,
    ),
    "lightning csv": Format(
        lambda r, n: (
            f"0,{n},{r.loss(n):.4f},{r.tokens / r.took_s(n) / r.gpus:.1f},{4 / r.took_s(n):.6f},{r.clock_s(n):.4f},{32 / r.took_s(n):.6f}"
        ),
        head="epoch,step,train_loss,train/device/items_per_sec,train/device/samples_per_sec,train/time,train/samples_per_sec",
        name="metrics.csv",
        trainer="lightning",
    ),
    "lightning bar": Format(
        lambda r, n: (
            f"\rEpoch 0: {100 * n // r.updates:3d}%|█         | {n}/{r.updates} [{hms(r.clock_s(n))}<00:10,  {1 / r.took_s(n):.2f}it/s, v_num=0, train_loss={r.loss(n):.3f}]"
        ),
        trainer="lightning",
        tokens=False,
        exact=0.07,
    ),
    "litgpt": Format(
        lambda r, n: (
            f"Epoch 1 | iter {n} step {n} | loss train: {r.loss(n):.3f}, val: n/a | iter time: {r.took_s(n) * 1e3:.2f} ms (step) remaining time: 0:12:34"
        ),
        trainer="litgpt",
        tokens=False,
    ),
    "torch example": Format(
        lambda r, n: (
            f"Epoch: [0][{n:5d}/5005]\tTime {r.took_s(n):6.3f} ({r.step_s:6.3f})\tData  0.001 ( 0.010)\tLoss {r.loss(n):.4e} (7.0e+00)\tAcc@1   0.39 (  0.20)"
        ),
        tokens=False,
    ),
    "timm": Format(
        lambda r, n: (
            f"Train: 0 [{n:4d}/1251 (  4%)]  Loss: {r.loss(n):.3f} (6.95)  Time: {r.took_s(n):.3f}s, {256 / r.took_s(n):.2f}/s  ({r.step_s:.3f}s,  500.00/s)  LR: 1.000e-06  Data: 0.010 (0.015)"
        ),
        tokens=False,
    ),
    "mmcv": Format(
        lambda r, n: (
            f"{r.stamp(n)} - mmdet - INFO - Epoch [1][{n}/7330]\tlr: 1.978e-03, eta: 21:59:46, time: {r.took_s(n):.3f}, data_time: 0.008, memory: 3770, loss: {r.loss(n):.4f}"
        ),
        tokens=False,
    ),
    "detectron2": Format(
        lambda r, n: (
            f"[{r.at(n):%m/%d %H:%M:%S} d2.utils.events]:  eta: 0:05:11  iter: {n}  total_loss: {r.loss(n):.3f}  loss_cls: 1.516  time: {r.took_s(n):.4f}  data_time: 0.0053  lr: 1.6e-05  max_mem: 2000M"
        ),
        every=10,
        trainer="detectron2",
        tokens=False,
    ),
    "olmo": Format(
        lambda r, n: (
            f"{r.at(n):%Y-%m-%d %H:%M:%S.%f}\thost:0\tolmo.train:720\tINFO\t[step={n}/739328]\n    train/CrossEntropyLoss={r.loss(n):.4f}\n    train/Perplexity=3.2\n    throughput/total_tokens={n * r.tokens:,}\n    throughput/device/tokens_per_second={r.tokens / r.took_s(n) / r.gpus:,.0f}"
        ),
        head="world_size: 8",
    ),
    "nemo": Format(
        lambda r, n: (
            f"Training epoch 0, iteration {n}/{r.updates} | lr: 1e-05 | global_batch_size: 32 | global_step: {n} | reduced_train_loss: {r.loss(n):.3f} | train_step_timing in s: {r.took_s(n):.4f} | consumed_samples: {n * 32}"
        ),
        tokens=False,
    ),
    "torchtune": Format(
        lambda r, n: (
            f"Step {n} | loss:{r.loss(n):.6f} lr:2e-05 tokens_per_second_per_gpu:{r.tokens / r.took_s(n) / r.gpus:.4f} peak_memory_active:12.3 step_time:{r.took_s(n):.5f}"
        ),
        head="world_size: 8",
    ),
    "nanotron": Format(
        lambda r, n: (
            f"[default0]:{r.at(n):%m/%d/%Y %H:%M:%S} [INFO|DP=0|PP=0|TP=0]: iteration: {n} / 100 | consumed_tokens: {n * r.tokens / 1e6:.4f}M | elapsed_time_per_iteration_ms: {r.took_s(n) * 1e3:.1f} | tokens_per_sec: {r.tokens / r.took_s(n) / 1e3:.1f}K | tokens_per_sec_per_gpu: {r.tokens / r.took_s(n) / r.gpus / 1e3:.2f}K | global_batch_size: 32 | lm_loss: {r.loss(n):.3f} | lr: 0.0003 | grad_norm: 12.3"
        )
    ),
    "prime-rl": Format(
        lambda r, n: (
            f"{r.at(n):%H:%M:%S}    INFO Step {n} | Time: {r.took_s(n):.2f}s | Loss: {r.loss(n):.4f} | Entropy: 0.2 | Throughput: {r.tokens / r.took_s(n):.0f} tokens/s | MFU: 30.1% | Peak Mem.: 50.2/79.6 GiB"
        )
    ),
    "keras": Format(
        lambda r, n: (
            f"Epoch {n}/{r.updates}\n100/100 [==============================] - {r.took_s(n) * 100:.0f}s {r.took_s(n) * 1e3:.0f}ms/step - loss: {r.loss(n):.4f} - accuracy: 0.8012"
        ),
        tokens=False,
        per_line=100,
    ),
    "flair": Format(
        lambda r, n: (
            f"{r.stamp(n)} epoch 1 - iter {n}/219 - loss {r.loss(n):.8f} - samples/sec: {32 / r.took_s(n):.2f} - lr: 0.000500"
        ),
        tokens=False,
    ),
    "deepspeed engine": Format(
        lambda r, n: (
            f"steps: {n} loss: {r.loss(n):.4f} iter time (s): {r.took_s(n):.3f} samples/sec: {32 / r.took_s(n):.3f}"
        ),
        tokens=False,
    ),
    "verl": Format(
        lambda r, n: (
            f"\x1b[36m(TaskRunner pid=14640)\x1b[0m step:{n} - actor/pg_loss:np.float64({r.loss(n):.4f}) - actor/grad_norm:2.037 - perf/mfu/actor:0.067 - response_length/mean:128.6 - response_length/max:256.0 - prompt_length/mean:103.5 - prompt_length/max:199.0 - timing_s/gen:{0.2 * r.took_s(n):.4f} - timing_s/update_actor:{0.5 * r.took_s(n):.4f} - timing_s/step:{r.took_s(n):.4f} - perf/total_num_tokens:{r.tokens} - perf/time_per_step:{r.took_s(n):.4f} - perf/throughput:{r.tokens / r.took_s(n) / r.gpus:.3f}"
        ),
        trainer="verl",
    ),
    "csv": Format(
        lambda r, n: f"{n},{r.loss(n):.4f},{r.took_s(n) * 1e3:.2f},{r.tokens / r.took_s(n):.1f}",
        head="iteration,loss,dt_ms,tokens_per_sec",
        name="log.csv",
    ),
    "jsonl with a clock": Format(
        _jsonl(step=lambda r, n: n, loss=lambda r, n: r.loss(n), elapsed=lambda r, n: r.clock_s(n)),
        name="log.jsonl",
        tokens=False,
    ),
    "composer": Format(
        lambda r, n: (
            f"[batch={n}/4800]:\n\t Train time/batch: {n - 1}\n\t Train loss/train/total: {r.loss(n):.4f}\n\t Train throughput/batches_per_sec: {1 / r.took_s(n):.4f}\n\t Train throughput/device/tokens_per_sec: {r.tokens / r.gpus / r.took_s(n):.4f}"
        ),
        tokens=False,
    ),
    "open_clip": Format(  # counts samples, 64 in an update, and a line comes every tenth
        lambda r, n: (
            f"{r.at(n):%Y-%m-%d,%H:%M:%S} | INFO | Train Epoch: 0 [{64 * n:6}/109468 (3%)] Loss: {r.loss(n):.5f} (1.02) Data (t): 0.008 Batch (t): {r.took_s(n):.3f}, {64 / r.took_s(n):.4f}/s LR: 0.000001 Logit Scale: 99.995"
        ),
        head="2026-03-01,09:30:00 | INFO | Train Epoch: 0 [    64/109468 (0%)] Loss: 8.0 (8.0) Data (t): 0.008 Batch (t): 0.500, 128.0/s LR: 0.000000 Logit Scale: 100.000",
        every=10,
        tokens=False,
        exact=0.1,
    ),
    "espnet": Format(
        lambda r, n: (
            f"[host] {r.stamp(n)} (trainer:732) INFO: 1epoch:train:{n}-{n}batch: iter_time=1.2e-04, forward_time=0.123, loss_ctc=150.1, loss={r.loss(n):.3f}, backward_time=0.2, optim_step_time=0.05, optim0_lr0=1e-5, train_time={r.took_s(n):.3f}"
        ),
        tokens=False,
    ),
    "pointcept": Format(
        lambda r, n: (
            f"[{r.stamp(n)} INFO misc.py line 120 1066359] Train: [1/100][{n}/510] Data 0.003 (1.491) Batch {r.took_s(n) + 0.001:.3f} (3.309) Remain 46:51:04 loss: {r.loss(n):.4f} Lr: 0.09995"
        ),
        tokens=False,
    ),
    "deberta": Format(  # the time on a line is that of the ten updates before it
        lambda r, n: (
            f"{r.at(n):%m/%d/%Y %H:%M:%S}|INFO|RTD|00| [D][0.0%][-1813.71h] Steps={n}, loss={r.loss(n):.13f}, examples={64 * n}, loss_scale=4096.0, {10 * r.took_s(n):.1f}s"
        ),
        every=10,
        tokens=False,
        exact=0.1,
    ),
    "w&b chart": Format(
        lambda r, n: f'"{n}","{r.loss(n):.6f}"',
        head='"Step","lively-tree-3 - train/loss"',
        name="chart.csv",
        tokens=False,
        times=False,
    ),
    "coqui": Format(
        lambda r, n: (
            f"   --> TIME: {r.at(n):%Y-%m-%d %H:%M:%S} -- STEP: {n}/11864 -- GLOBAL_STEP: {n}\n     | > loss: {r.loss(n):.6f}  (5.1)\n     | > step_time: {r.took_s(n):.3f}  (0.5001)\n     | > loader_time: 0.005  (0.0059)"
        ),
        tokens=False,
    ),
    "a step in brackets": Format(
        lambda r, n: (
            f"I0301 {r.at(n):%H:%M:%S.%f} 140 metric_writer.py:70] [{n}] train/loss={r.loss(n):.4f}, timing/steps_per_second={1 / r.took_s(n):.4f}, timing/target_tokens_per_second={r.tokens / r.took_s(n):.1f}"
        )
    ),
    "step twice": Format(
        lambda r, n: (
            f"step {n}/5000 | tok {n * r.tokens} | step {r.took_s(n) * 1e3:.1f} ms {r.tokens / r.took_s(n):.1f} tok/s | loss {r.loss(n):.4f} (-0.0120)"
        )
    ),
    "parts and their total": Format(
        lambda r, n: (
            f"step {n} | loss {r.loss(n):.4f} | data 0.010s | fwd {0.3 * r.took_s(n):.3f}s | bwd {0.6 * r.took_s(n):.3f}s | total {r.took_s(n):.3f}s"
        ),
        tokens=False,
    ),
    "a callback beside the bar": Format(
        lambda r, n: _bar(r, n) + (f"\nstep={n} | loss={r.loss(n):.6f} | lr=2.0e-05" if n % 10 == 0 else ""),
        tokens=False,
        exact=0.05,
    ),
    "bars in one line": Format(
        lambda r, n: (
            " ".join(_bar(r, each) for each in range(n - 9, n + 1))
            + f"{{'loss': '{r.loss(n):.4g}', 'epoch': '{n / 60:.4g}'}}"
        ),
        tokens=False,
        every=10,
        trainer="huggingface",
        exact=0.05,
    ),
    "nested jsonl": Format(
        lambda r, n: json.dumps(
            {
                "event": "train",
                "data": {
                    "step": n,
                    "metrics": {"loss": r.loss(n), "step_time_s": r.took_s(n), "tokens": r.tokens},
                },
            }
        ),
        name="log.jsonl",
    ),
    "llama2.c": Format(
        lambda r, n: f"{n} | loss {r.loss(n):.4f} | lr 5.000000e-04 | {r.took_s(n) * 1e3:.2f}ms | mfu 35.22%",
        tokens=False,
    ),
    "gpt-2 of old": Format(
        lambda r, n: f"[{n} | {r.clock_s(n):.2f}] loss={r.loss(n):.2f} avg={r.loss(n):.2f}", tokens=False
    ),
    "tensorflow": Format(
        lambda r, n: f"INFO:tensorflow:global step {n}: loss = {r.loss(n):.4f} ({r.took_s(n):.3f} sec/step)",
        tokens=False,
    ),
    "mmengine": Format(
        lambda r, n: (
            f"03/01 09:30:00 - mmengine - INFO - Iter(train) [{n:6d}/40000]  lr: 1.0e-02  eta: 6:48:13  time: {r.took_s(n):.4f}  data_time: 0.0060  memory: 5021  loss: {r.loss(n):.4f}"
        ),
        tokens=False,
    ),
    "levanter": Format(
        lambda r, n: (
            f"{r.at(n):%Y-%m-%dT%H:%M:%S} - 0 - levanter.callbacks - INFO - Progress on:train {n}it/10.0kit rate:{1 / r.took_s(n):.1f}it/s remaining:02:00:00 elapsed:{hms(r.clock_s(n))} postfix:loss={r.loss(n):.3f}"
        ),
        tokens=False,
        exact=0.05,
    ),
    "picotron": Format(
        lambda r, n: (
            f"[rank 0] Step: {n:<5d} | Loss: {r.loss(n):6.4f} | Global batch size: {r.tokens / 1e3:.1f}K | Tokens/s: {r.tokens / r.took_s(n) / 1e3:.2f}K | Tokens/s/GPU: {r.tokens / r.took_s(n) / r.gpus / 1e3:.2f}K | Tokens: {n * r.tokens / 1e6:.2f}M | MFU: 41.1% | Memory usage: 50.2GB"
        )
    ),
    "olmo by its rates": Format(
        lambda r, n: (
            f"2026-03-01 09:30:00.123\thost:0\tolmo.train:967\tINFO\t[step={n}/739328,epoch=0]\n    train/CrossEntropyLoss={r.loss(n):.3f}\n    throughput/total_tokens={n * r.tokens:,}\n    throughput/device/tokens_per_second={r.tokens / r.took_s(n) / r.gpus:,.0f}\n    throughput/device/batches_per_second={1 / r.took_s(n):.4f}"
        )
    ),
    "nemo-rl": Format(
        lambda r, n: (
            f"========== Step {n}/100 ==========\n📊 Training Results:\n  • Loss: {r.loss(n):.4f}\n⏱️  Timing:\n  • Total step time: {r.took_s(n):.2f}s\n  • generation: {0.6 * r.took_s(n):.2f}s (60.0%)"
        ),
        tokens=False,
    ),
    "slime": Format(
        lambda r, n: (
            f"(TrainRayActor pid=123) [2026-03-01 09:30:00] log_utils.py:331 - step {n}: {{'train/loss': {r.loss(n)}, 'train/grad_norm': 0.2, 'perf/step_time': {r.took_s(n)}, 'perf/train_time': {0.5 * r.took_s(n)}}}"
        ),
        tokens=False,
    ),
    "speed with a unit": Format(
        lambda r, n: (
            f"[Step  {n}] Loss: {r.loss(n):.4f} | Speed: {r.tokens / r.took_s(n) / 1e3:.2f}K tok/s | MFU: 46.76% | Time: {r.took_s(n):.2f}s"
        )
    ),
    "a date with its month first": Format(
        lambda r, n: f"{r.at(n):%m/%d/%Y %H:%M:%S} - INFO - __main__ - Step {n}: loss={r.loss(n):.4f}",
        tokens=False,
        exact=0.05,
    ),
    "a month by its name": Format(
        lambda r, n: f"{r.at(n):%b %d %H:%M:%S} gpu01 train[77]: step {n} loss {r.loss(n):.4f}",
        tokens=False,
        exact=0.05,
    ),
    "a time of day": Format(
        lambda r, n: f"[{r.at(n):%H:%M:%S.%f}] INFO train.py: step {n} loss {r.loss(n):.4f}", tokens=False
    ),
    "a host in front": Format(
        lambda r, n: (
            f"worker-0: [{r.stamp(n)}] [INFO] [timer.py:199:stop] epoch=0/micro_step={n}/global_step={n}, RunningAvgSamplesPerSec=60.1, CurrSamplesPerSec={32 / r.took_s(n):.6f}, MemAllocated=3.96GB, MaxMemAllocated=22.95GB"
        ),
        every=10,
        losses=False,
        tokens=False,
        trainer="deepspeed",
    ),
    "nemo's bar": Format(
        lambda r, n: (
            f"\rEpoch 0: : {100 * n // r.updates:3d}%|███       | {n}/{r.updates} [{hms(r.clock_s(n))}<00:10, reduced_train_loss={r.loss(n):.3f}, global_step={n - 1:.3f}, consumed_samples={n * 32:.1f}, train_step_timing in s={r.took_s(n):.3f}, val_loss=0.212]"
        ),
        tokens=False,
    ),
    "a loss in the name of a bar": Format(
        lambda r, n: f"\r{_bar(r, n, name=f'Epoch 0, Loss {r.loss(n):.3f}, LR 1.00e-05: ')}",
        tokens=False,
        exact=0.05,
    ),
    "torchtune's bar": Format(
        lambda r, n: f"\r{_bar(r, n, name=f'1|{n}|Loss: {r.loss(n)}: ')}", tokens=False, exact=0.05
    ),
    "times in brackets": Format(
        lambda r, n: (
            f"step {n}/{r.updates} loss {r.loss(n):.4f} ({r.took_s(n) * 1e3:.1f}ms, {r.tokens / r.took_s(n) / 1e3:.2f}k tok/s) lr 3e-4"
        )
    ),
    "argonne's megatron": Format(
        lambda r, n: (
            f"[{r.at(n):%Y-%m-%d %H:%M:%S}][INFO][training:1251] - iteration= {n:7d}/  317892 | consumed_samples= {n * 32:12d} | consumed_tokens= {n * r.tokens:12d} | elapsed_time_per_iteration_ms={r.took_s(n) * 1e3:.1f} | learning_rate=1.5e-07 | global_batch_size=   32 | lm loss={r.loss(n):.6f} | loss_scale=1.0 | grad_norm=9.6 | samples_per_second={32 / r.took_s(n):.3f} | tokens_per_gpu_per_second_tgs={r.tokens / r.took_s(n) / r.gpus:.3f} | [LM]TFLOPs=42.80 |"
        )
    ),
    "mlx": Format(
        lambda r, n: (
            f"Iter {n}: Train loss {r.loss(n):.3f}, Learning Rate 1.000e-05, It/sec {1 / r.took_s(n):.3f}, Tokens/sec {r.tokens / r.took_s(n):.3f}, Trained Tokens {n * r.tokens}, Peak mem 5.123 GB"
        )
    ),
    "deepspeed-chat's third step": Format(
        lambda r, n: (
            f"|E2E latency={r.took_s(n):.3f}s |Gather latency=0.00s (0.00%) |Generate time={0.4 * r.took_s(n):.2f}s (40.0%) |Training time={0.5 * r.took_s(n):.2f}s (50.0%) |CurSamplesPerSec={8 / r.took_s(n):.2f}\n"
            f"Epoch: 0 | Step: {n} | PPO Epoch: 1 | Actor Loss: {r.loss(n)} | Critic Loss: 0.02 | Unsupervised Loss: 0.0\n"
            f"End-to-End => Latency: {r.took_s(n):.3f}s, TFLOPs: 3.29, Samples/sec: {8 / r.took_s(n):.2f}, Batch Size: 8, Total Seq. Length: 512\n"
            f"Generation => Latency: {0.4 * r.took_s(n):.2f}s, Per-token Latency 6.92 ms, Answer Seq. Length: 256\n"
            "Actor Model Parameters => 0.388 B, Critic Model Parameters => 0.125 B"
        ),
        tokens=False,
        trainer="deepspeed",
    ),
    "paddlenlp": Format(
        lambda r, n: (
            f"[{r.stamp(n)}] [    INFO] - loss: {r.loss(n):.6f}, learning_rate: 3e-05, global_step: {n}, interval_runtime: {r.took_s(n):.4f}, interval_samples_per_second: {32 / r.took_s(n):.4f}, interval_tokens_per_second_per_device: {r.tokens / r.gpus / r.took_s(n):.4f}, interval_steps_per_second: {1 / r.took_s(n):.4f}"
        ),
        tokens=False,
    ),
}
