"""Claims of the seeds that cannot hold, or name what does not exist: each with the arithmetic."""

from redline.optimizations.entry import Claim, Optimization, Workload


def _refuted(name: str, title: str, workload: Workload, claim: Claim, note: str) -> Optimization:
    return Optimization(
        name=name,
        title=title,
        workloads=(workload,),
        effect="changes-training",
        claims=(claim,),
        standing="refuted",
        note=note,
    )


ENTRIES = (
    _refuted(
        "seed-000-16x",
        "bf16 is 16x faster than fp32",
        "generate",
        Claim(
            source="seed 000", words="BFloat16 is 16x faster than FP32; lower down: 2x", low=16.0, high=16.0
        ),
        "312 / 19.5 TFLOP/s = 16 is the ratio of an A100's datasheet peaks, the bound of a program of nothing"
        " but matrix products. Decoding reads its weights once a token and is bound by memory: bf16 halves"
        " the bytes, so 2x. The document claims both.",
    ),
    _refuted(
        "seed-000-parallel",
        "8 questions in parallel",
        "generate",
        Claim(source="seed 000 §3C", words="8x parallelism", low=8.0, high=8.0),
        "With 20 or more samples (the default is 30) the code takes one question at a time in chunks of"
        " CHUNK_SIZE=10: the GPU sees 10 sequences. MICRO_BATCH_SIZE=256 counts prompts and never binds.",
    ),
    _refuted(
        "seed-000-utilisation",
        "GPU utilisation 30-40 % to 90-95 %, 2.5x better",
        "generate",
        Claim(source="seed 000; seed 001 (targets: over 80 %)", words="fully utilised", low=2.5, high=2.5),
        "nvidia-smi's figure is the share of time in which any kernel ran: one thread adding two numbers"
        " makes 100 %. Speed is tokens/s; how full the GPU is, the share of the measured ceiling.",
    ),
    _refuted(
        "seed-001-units",
        "67-83 tokens/s, should be 2000+ for 8 A100",
        "generate",
        Claim(source="seed 001", words="83 to 2000+ tokens/s, 24x", low=24.0, high=24.0),
        "verl's perf/throughput is tokens / (time x GPUs): 67-83 is per GPU, 536-664 for 8. And no A100 has"
        " 94 GB (72 of 94 is claimed): they have 40 or 80.",
    ),
    _refuted(
        "seed-002-500k",
        "500K+ tokens/s at 70-80 % MFU",
        "train",
        Claim(
            source="seed 002",
            words="60-70K to 500K+ tokens/s, 7x; MFU 29-32 % to 70-80 %, 2.5x",
            low=7.0,
            high=7.0,
        ),
        "Same model: MFU and tokens/s rise by one factor, not by 7 and 2.5. 454M parameters x 6 FLOPs x"
        " 500,000 tokens/s = 1.36 PFLOP/s; an H100's dense bf16 peak is 0.989.",
    ),
    _refuted(
        "seed-002-fp8-api",
        "float8_dynamic_activation_float8_weight() for training",
        "train",
        Claim(source="seed 002 §2", words="proper FP8 quantisation, 2x", low=2.0, high=2.0),
        "That is torchao's inference quantisation, without gradients, by now"
        " Float8DynamicActivationFloat8WeightConfig. Training is convert_to_float8_training: entry fp8.",
    ),
    _refuted(
        "seed-003-product",
        "3-5x overall",
        "finetune",
        Claim(
            source="seed 003",
            words="2-3x, 1.2-1.3x, 1.5-2x, 1.2-1.5x, 1.2-1.5x; overall 3-5x",
            low=3.0,
            high=5.0,
        ),
        "The five factors multiply to 5.2-17.6x, not to 3-5x: the gains overlap (TF32 after fp16 is worth 0),"
        " so they do not multiply.",
    ),
    _refuted(
        "seed-003-arguments",
        "fp16_opt_level and gradient_clip_norm",
        "finetune",
        Claim(source="seed 003", words="fp16_opt_level='O2', gradient_clip_norm=1.0"),
        "Neither is an argument of TrainingArguments in transformers 5.17: a TypeError. The second is"
        " max_grad_norm, 1.0 by default. The first was one in version 4 and set Apex, not torch's own mixed"
        " precision.",
    ),
    _refuted(
        "seed-004-parameters",
        "85M, 175M, 355M (GPT-2 Large scale), 750M parameters",
        "train",
        Claim(source="seed 004", words="four configurations up to 750M"),
        "The commands leave d_ff at 3072, which gives 123.7M, 177.4M, 303.4M and 583.9M (85.1M is the first"
        " without its embedding). GPT-2 Large has 774M; 355M is Medium.",
    ),
)
