"""Generation: key/value cache, slots, precision, shared prompts, CUDA graphs, cache clearing, merged
adapters."""

from redline.optimizations.entry import Claim, Optimization, needs_capability, needs_cuda

ENTRIES = (
    Optimization(
        name="kv-cache",
        title="keys and values of earlier tokens kept",
        workloads=("generate",),
        effect="rounding",
        claims=(
            Claim(
                source="seed 001 (its real cause: use_cache=false)",
                words="2000+ instead of 83 tokens/s, by larger batches",
                low=24.0,
                high=24.0,
            ),
        ),
        off={"cached": False},
        on={"cached": True},
        note=(
            "Without it a token costs a pass over all tokens before it: a sequence of T tokens T/2 times the"
            " work."
        ),
    ),
    Optimization(
        name="batched-generation",
        title="many sequences at once",
        workloads=("generate",),
        effect="rounding",
        claims=(
            Claim(
                source="seed 000",
                words="8 questions in parallel, micro-batch 32 to 256: generation 6-10x",
                low=6.0,
                high=10.0,
            ),
            Claim(source="seed 000 §1", words="8x more sequences per GPU call", low=8.0, high=8.0),
            Claim(
                source="seed 001, targets", words="actor MFU over 40 %, critic over 30 %, over 1,000 tokens/s"
            ),
        ),
        off={"sequences": 10},
        on={"sequences": None},
        note=(
            "Off is the seed's real batch: with 20 or more samples it takes one question at a time in chunks"
            " of 10. On: what fits."
        ),
    ),
    Optimization(
        name="bf16-generation",
        title="bf16 weights, keys and values",
        workloads=("generate",),
        effect="rounding",
        claims=(Claim(source="seed 000 §3", words="2x faster inference", low=2.0, high=2.0),),
        off={"precision": "fp32"},
        on={"precision": "bf16"},
        why_not=needs_capability((8, 0), "bf16 at full rate"),
        note="Half the bytes to read for every token.",
    ),
    Optimization(
        name="slots",
        title="slots that are refilled instead of a batch that waits for its longest",
        workloads=("generate",),
        effect="rounding",
        claims=(
            Claim(
                source="vLLM, arXiv 2309.06180",
                words="2-4x over FasterTransformer and Orca at the same latency",
                low=2.0,
                high=4.0,
            ),
        ),
        off={"refilled": False},
        on={"refilled": True},
        note=(
            "Lengths differ from 1 to the limit here, evenly, so a waiting batch is half empty on average."
            " Orca refills too: vLLM's gain over it is of paged memory. Orca's own claim (OSDI 2022) is 36.9x"
            " over FasterTransformer at the same latency, GPT-3 175B."
        ),
    ),
    Optimization(
        name="prefix-sharing",
        title="samples of a prompt share its keys and values",
        workloads=("generate",),
        effect="rounding",
        claims=(
            Claim(
                source="SGLang, arXiv 2312.07104 (June 2024)",
                words="up to 6.4x over the state of the art, all its parts together",
                low=1.0,
                high=6.4,
            ),
        ),
        off={"shared": False},
        on={"shared": True},
        note="The prompt is read once for all of its samples, and its keys and values once a step.",
    ),
    Optimization(
        name="cuda-graphs-decode",
        title="a decode step as one CUDA graph",
        workloads=("generate",),
        effect="exact",
        claims=(
            Claim(
                source="transformers docs, static cache with torch.compile",
                words="up to 4x",
                low=1.0,
                high=4.0,
            ),
        ),
        off={"graphs": False},
        on={"graphs": True},
        why_not=needs_cuda,
        note="A step of a small model is hundreds of launches of a few microseconds each.",
    ),
    Optimization(
        name="cache-clearing",
        title="torch.cuda.empty_cache() seldom or never",
        workloads=("generate",),
        effect="exact",
        claims=(
            Claim(
                source="seed 000 §3D",
                words="every 10th batch, not every question: 45 s to 4.5 s of 45-60 minutes",
                low=1.011,
                high=1.015,
            ),
            Claim(source="seed 002, memory management", words="at strategic points"),
        ),
        off={"clear_cache": True},
        on={"clear_cache": False},
        why_not=needs_cuda,
        note=(
            "Clearing gives cached memory back to the driver, and the next allocation waits for it. The"
            " engine's memory is fixed."
        ),
    ),
    Optimization(
        name="lora-merge",
        title="adapters merged into the weights before sampling",
        workloads=("generate",),
        effect="rounding",
        claims=(Claim(source="LoRA, arXiv 2106.09685", words="no additional inference latency"),),
        off={"merged": False},
        on={"merged": True},
        note=(
            "Two small products a layer less. Measured without the key/value cache: the engine takes merged"
            " models only."
        ),
    ),
    Optimization(
        name="reward-processes",
        title="rewards computed beside generation",
        workloads=("generate",),
        effect="exact",
        claims=(
            Claim(
                source="seed 001, root causes",
                words="CPU bottleneck: data loading and reward computation overhead",
            ),
        ),
        standing="built in",
        note="Completions are scored in processes of their own while the next ones are generated.",
    ),
)
