"""Generated recipes for property-based tests: every shape that the rules of `config/recipe.py` allow, small
enough to count by hand."""

from hypothesis import strategies as st

from redline.config.recipe import DataConfig, ModelConfig, PlanPins, Recipe, TrainConfig


@st.composite
def models(draw: st.DrawFn, largest: int = 64) -> ModelConfig:
    """Any dense transformer: norms, positions, activations, biases, grouped heads, free head widths."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    head_dim = draw(st.none() | st.integers(1, 12).map(lambda n: 2 * n))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 20 * largest)),
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, largest)) if head_dim else heads * 2 * draw(st.integers(1, 8)),
        num_heads=heads,
        num_kv_heads=draw(st.just(kv_heads) if kv_heads != heads else st.sampled_from([None, kv_heads])),
        head_dim=head_dim,
        ffn_size=draw(st.integers(1, 2 * largest)),
        context_length=draw(st.integers(1, 2 * largest)),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        activation=draw(st.sampled_from(["swiglu", "gelu", "relu2"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        norm_eps=draw(_positive),
        rope_theta=draw(_positive),
    )


_positive = st.floats(min_value=0.0, exclude_min=True, max_value=1e300, allow_subnormal=False)
_share = st.floats(0.0, 1.0)
_names = st.from_regex(r"[\w+][\w .+-]{0,20}(/[\w+][\w .+-]{0,20})?", fullmatch=True)
_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe that `check` accepts, with any subset of its plan pinned."""
    model = draw(models())
    micro = draw(st.none() | st.integers(1, 8))
    steps = draw(st.integers(1, 10**6))
    data = DataConfig(
        source=draw(_words.filter(bool)),
        seq_len=draw(st.integers(1, model.context_length)),
        tokenizer=draw(_words),
        text_field=draw(_words),
        valid_fraction=draw(st.floats(0.001, 0.9)),
        stream=draw(st.booleans()),
    )
    train = TrainConfig(
        batch_size=draw(st.integers(1, 600)) * (micro or 1),
        steps=steps,
        lr=draw(_positive),
        max_hours=draw(st.none() | _positive),
        optimizer=draw(st.sampled_from(["adamw", "muon"])),
        weight_decay=draw(_share),
        schedule=draw(st.sampled_from(["cosine", "linear", "wsd", "constant"])),
        warmup_steps=draw(st.integers(0, steps)),
        decay_fraction=draw(_share),
        min_lr_ratio=draw(_share),
        clip_norm=draw(st.just(0.0) | _positive),
        seed=draw(st.integers(0, 2**63 - 1)),
        eval_every=draw(st.integers(0, 10)),
    )
    pins = PlanPins(
        precision=draw(st.sampled_from([None, "fp32", "tf32", "bf16", "fp16"])),
        micro_batch=micro,
        compile=draw(st.sampled_from([None, "off", "default"])),
        recompute=draw(st.sampled_from([None, "none", "selective", "full"])),
        loss_chunks=draw(st.none() | st.integers(1, 16)),
        prefetch=draw(st.none() | st.integers(1, 4)),
    )
    return Recipe(name=draw(_names), about=draw(_words), model=model, data=data, train=train, plan=pins)
