"""The checks of `redline verify` that show each plan value in effect, as docs/optimizations.md lists them; none: only
its speed shows it."""

PROOFS: dict[str, tuple[str, ...]] = {
    "precision": ("precision of matrix products", "TF32 state", "FP8 products"),
    "micro_batch": ("passes of an update",),
    "accumulation": ("passes of an update",),
    "compile": ("compilation", "no recompilation"),
    "recompute": ("recomputation",),
    "attention": ("attention kernel",),
    "cross_entropy": ("cross entropy",),
    "update": ("optimiser kernels",),
    "loss_chunks": ("pieces of the loss",),
    "loader_threads": ("loader ahead of the step",),
    "prefetch": ("loader ahead of the step",),
    "allocator": ("allocator",),
    "shards": (),
    "tf32": (),
    "padded": ("loss and gradients",),
    "graph": ("CUDA graph of the update",),
    "slots": (),
    "cached": ("log-probabilities of the engine",),
    "merged": (),
    "refilled": (),
    "shared": (),
    "graphs": ("CUDA graphs of generation",),
    "clear_cache": (),
}
