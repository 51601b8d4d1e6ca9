"""The metrics of a run: every name, its unit and its meaning, stated once. Documents, exporters and the live
view read this table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "step": Metric("updates", "optimiser updates done, this one included"),
    "loss": Metric("nats/token", "mean cross entropy over the tokens of this update, before the update"),
    "lr": Metric("1", "learning rate of this update (of AdamW's parameters under Muon)"),
    "grad_norm": Metric("1", "global norm of the gradient before clipping"),
    "tokens": Metric("tokens", "tokens trained on since the start of the run"),
    "step_s": Metric(
        "s",
        "time of this update: from the end of the one before it, or of the validation or checkpoint between"
        " them",
    ),
    "tokens_per_s": Metric("tokens/s", "tokens of this update over step_s, all processes together"),
    "rows_per_s": Metric("rows/s", "examples of this update over step_s; only in fine-tuning"),
    "padding_share": Metric(
        "1", "share of the positions computed that held no token; where batches may hold padding"
    ),
    "mfu": Metric(
        "1",
        "model FLOPs (6N + 12LdT per token, PaLM convention) over the dense datasheet peak of the compute"
        " dtype (bf16 for FP8)",
    ),
    "ceiling_share": Metric(
        "1", "model FLOPs over the matmul rate measured on this machine for the compute dtype"
    ),
    "data_wait_s": Metric("s", "time the step waited for the loader"),
    "copy_s": Metric(
        "s",
        "time of this update that the batch took to reach the device; on the GPU's clock, like the four"
        " after it",
    ),
    "forward_s": Metric(
        "s", "time of this update in forward passes, launch gaps included, waits for other processes not"
    ),
    "backward_s": Metric(
        "s", "time of this update in backward passes, recomputation included, waits for other processes not"
    ),
    "combine_s": Metric(
        "s", "time of this update in keeping and combining the gradients of several domains; with PCGrad"
    ),
    "optimizer_s": Metric("s", "time of this update in clipping and changing the weights"),
    "communication_s": Metric(
        "s",
        "time of this update in which process 0 waited for gathers and reductions that nothing hid, or packed"
        " them; only with several",
    ),
    "generate_s": Metric(
        "s",
        "time of this update in which text was generated; in reinforcement learning, and in a watched loop that"
        " marks it",
    ),
    "weights_s": Metric(
        "s",
        "time in which the weights were put into the engine: gathered, cast or merged; in RL, like those below",
    ),
    "reward_s": Metric("s", "time in which the step waited for rewards that generation did not hide"),
    "reference_s": Metric(
        "s", "time of this update in the forward passes of the reference model; with rl.kl"
    ),
    "critic_s": Metric(
        "s", "time of this update in the critic: what it expects, and its own update; with PPO"
    ),
    "update_s": Metric(
        "s", "time of this update in the policy: forward, backward, combining, optimiser, waits"
    ),
    "reward": Metric("1", "mean reward of all answers of this step, before a penalty for their length"),
    "accuracy": Metric("1", "share of the answers of this step that are correct"),
    "reward.D": Metric("1", "the same of domain D"),
    "accuracy.D": Metric("1", "the same of domain D"),
    "response_tokens": Metric("tokens", "mean length of the answers of this step"),
    "cut_share": Metric("1", "share of the answers that reached rl.max_new_tokens"),
    "groups": Metric("questions", "questions asked in this step, the replaced ones included"),
    "skipped_groups": Metric("questions", "questions among them that taught nothing"),
    "new_tokens": Metric("tokens", "tokens generated in this step"),
    "clip_share": Metric("1", "share of the trained tokens whose ratio was clipped"),
    "entropy": Metric(
        "nats/token", "mean surprise of the trained tokens under the policy: an estimate of its entropy"
    ),
    "kl": Metric("nats/token", "estimated divergence from the reference model (k3); with rl.kl"),
    "logprob_gap": Metric(
        "nats/token", "mean difference between the log-probabilities of the engine and of the trainer"
    ),
    "critic_loss": Metric("1", "mean squared error of the critic's values, halved and clipped; with PPO"),
    "critic_grad_norm": Metric("1", "global norm of the critic's gradient before clipping; with PPO"),
    "actor_tflop": Metric(
        "TFLOP", "work of the policy's update by our convention (see mfu), over all processes"
    ),
    "actor_tflop_verl": Metric("TFLOP", "the same as verl counts it"),
    "actor_mfu": Metric("1", "actor_tflop over update_s and the datasheet peak of all GPUs"),
    "perf/throughput": Metric("tokens/s/GPU", "tokens trained on over step_s and the number of processes"),
    "perf/mfu/actor": Metric("1", "actor_mfu as verl counts it"),
    "perf/mfu/critic": Metric("1", "the same of the critic, over critic_s; with PPO"),
    "training/global_step": Metric("updates", "step, under verl's name"),
    "issue_s": Metric(
        "s", "time the host took to issue this update; as long as step_s: the GPU waits for the host"
    ),
    "memory_bytes": Metric(
        "bytes",
        "peak memory allocated by torch on the GPU since the process began, read once a second; on a CPU"
        " resident memory",
    ),
    "elapsed_s": Metric(
        "s",
        "training time of the run, validations and checkpoints included; of a killed attempt the time up to"
        " its last checkpoint",
    ),
    "gpu_util": Metric(
        "1",
        "share of the last second in which a kernel ran, by NVML (says little: one small kernel counts); only"
        " on GPUs",
    ),
    "power_w": Metric("W", "power drawn by the GPU, by NVML; only on GPUs"),
    "sm_clock_mhz": Metric("MHz", "clock of the multiprocessors, by NVML; only on GPUs"),
    "temperature_c": Metric("°C", "temperature of the GPU, by NVML; only on GPUs"),
    "memory_used_bytes": Metric("bytes", "memory in use on the GPU by everybody, by NVML; only on GPUs"),
    "cosine.A.B": Metric(
        "1", "cosine of the gradients of domains A and B; with PCGrad, or where conflicts are watched"
    ),
    "conflict.A.B": Metric(
        "1", "share of the weight tensors in which the gradients of domains A and B point against each other"
    ),
    "orthogonality_violation": Metric(
        "1",
        "norm of W W^T - I over sqrt(head width), root mean square of the heads' query and key maps; with train.orthogonality",
    ),
    "loss_scale": Metric("1", "factor on the loss against fp16 underflow; only with fp16"),
    "skipped": Metric("1", "1 where fp16 overflowed and the update was skipped; only with fp16"),
    "valid_loss": Metric("nats/token", "mean cross entropy on the validation split; on steps that validate"),
    "valid_accuracy": Metric(
        "1", "share of held-out questions answered correctly, greedily; the mean of the domains"
    ),
    "valid_accuracy.D": Metric("1", "the same of domain D"),
    "valid_accuracy_low.D": Metric("1", "lower end of its 95 % interval (Wilson)"),
    "valid_accuracy_high.D": Metric("1", "upper end of its 95 % interval"),
    "valid_perplexity": Metric("1", "exp(valid_loss)"),
    "valid_bits_per_byte": Metric("bits/byte", "valid_loss in bits over the bytes of text behind the tokens"),
}
"""`mfu` and `ceiling_share` are null where no peak is known (a CPU has no datasheet peak)."""
