"""Events in words: how a line of events.jsonl reads on every screen and page.

    told("checkpoint", {"step": 500, "stalled_s": 0.009})      # checkpoint of update 500, 9 ms of training lost

A kind has one or more sentences; the first whose facts are all there is used. Other kinds are shown by their name and
facts. `{name}` is the value with its unit, which the name's ending gives.
"""

from typing import Any

from redline.record.units import fact, named

WORDS: dict[str, tuple[str, ...]] = {
    "note": ("{text}",),
    "stage": ("{title}",),
    "start": ("{recipe}: training begins", "training begins"),
    "start_up": ("the first update was done {total_s} after the command",),
    "resume": ("resumed at update {step}",),
    "process_died": ("{error}",),
    "workers": ("samples from {workers} workers: {samples_per_s}",),
    "worker_joined": ("{name} joined",),
    "worker": (
        "{name} {state} after {seconds} s and {samples} samples: {why}",
        "{name} {state}: {samples} samples in {seconds} s",
    ),
    "resized": (
        "processes: {world_size_before} before, {world_size} from update {step} on; the batch is the same",
    ),
    "extended": ("extended: {changes}",),
    "forked": ("forked from {source}: {changes}", "forked from {source}"),
    "examples_left_out": ("left out {rows} rows that cannot be read or are longer than data.seq_len",),
    "end": ("{why} at update {step} after {elapsed_s}", "{why}"),
    "failed": ("failed: {error}",),
    "refused": ("refused: {error}",),
    "validation": (
        "validation loss {valid_loss} at update {step}",
        "held-out accuracy {valid_accuracy} at update {step}",
        "validation at update {step} took {stalled_s}",
    ),
    "checkpoint": (
        "checkpoint of update {step}, {stalled_s} of training lost",
        "checkpoint of update {step}",
    ),
    "out_of_memory": (
        "out of memory at update {step} with {micro_batch_before} sequences a pass: continuing with {micro_batch}",
        "out of memory with {slots_before} sequences at once ({stage}): continuing with {slots}",
    ),
    "validation_out_of_memory": (
        "out of memory while validating at update {step}: {validation_micro_batch} sequences a pass from now on",
    ),
    "scorer_failed": (
        "the scorer failed on {answers} answers of update {step}, which count as wrong: {why}",
    ),
    "nothing_to_learn": (
        "update {step} had nothing to learn from: in each of {groups} questions all answers were equally good",
    ),
    "pcgrad": ("PCGrad ({mode}) keeps the domains' gradients on the {kept_on}: {why}",),
    "phase_hung": (
        "{phase} has taken {spent_s}, usually {usual_s}: the run ends",
        "{phase} has taken {spent_s}: the run ends",
    ),
    "updates_not_recorded": ("updates {first} to {last} are missing from metrics.jsonl",),
    "shards_not_hashed": ("{size_bytes} of token shards were not verified; `{to_check}` verifies them",),
    "communication_not_timed": ("communication is not timed: {why}",),
    "sampling_end": (
        "sampling {why}: {correct} of {samples} samples correct ({cut} cut off at sample.max_new_tokens),"
        " {solved} of {questions} questions solved, {elapsed_s}",
    ),
    "engine": ("the engine kept {occupancy_share} of its {slots} slots busy",),
    "logprob_gap": (
        "log-probabilities of sampling and training differ by {mean} on average, {max} at most ({tokens} tokens)",
    ),
    "training_on_samples": ("fine-tuning on the samples {why} after {step} updates, {elapsed_s}",),
    "training_on_answers": ("fine-tuning on the answers {why} after {step} updates, {elapsed_s}",),
    "test": ("accuracy {name} {accuracy_share} ({low_share} to {high_share}), {n} questions",),
    "writer_not_checked": ("could not check which model wrote the samples: {why}",),
    "generation": ("text generated in update {step}: {tokens} tokens in {calls} calls, {generate_s}",),
    "waits_for_gpu": ("the host waited for the GPU {times} times in update {step}: {where}",),
    "logging": ("{times} logs of the trainer took {stalled_s}",),
}
_VALIDATION = {
    "valid_perplexity": "perplexity {:.2f} per token",
    "valid_word_perplexity": "{:,.1f} per word",
    "valid_bits_per_byte": "{:.4f} bits/byte",
}
BAD = ("failed", "process_died", "out_of_memory", "validation_out_of_memory", "updates_not_recorded")
"""Shown in red."""
LOST = ("died", "hung")
"""States of a worker that are, too."""
_QUIET = ("at", "event", "exit_code")


def told_validation(line: dict[str, Any]) -> list[str]:
    """What a line says of a validation beside its loss: `perplexity 33.45 per token`, and so on."""
    known = {name: line[name] for name in _VALIDATION if isinstance(line.get(name), int | float)}
    return [_VALIDATION[name].format(value) for name, value in known.items()]


def _change(pair: Any) -> str:
    return f"{pair[0]} to {pair[1]}" if isinstance(pair, list) and len(pair) == 2 else str(pair)


def told(kind: str, facts: dict[str, Any]) -> str:
    """One event as a sentence."""
    kind = "worker_joined" if kind == "worker" and facts.get("state") == "joined" else kind
    if kind == "engine" and "occupancy" in facts:
        facts = facts | {"occupancy_share": facts["occupancy"]}
    if isinstance(changed := facts.get("changed"), dict) and changed:
        facts = facts | {"changes": ", ".join(f"{name} {_change(pair)}" for name, pair in changed.items())}
    values = {name: named(name, value)[1] for name, value in facts.items() if value is not None}
    for sentence in WORDS.get(kind, ()):
        try:
            more = ", the best so far" if kind == "validation" and facts.get("best") is True else ""
            return sentence.format_map(values) + more
        except KeyError:
            continue
    rest = [fact(name, value) for name, value in facts.items() if value is not None and name not in _QUIET]
    return "; ".join([kind.replace("_", " "), *rest]) if rest else kind.replace("_", " ")
