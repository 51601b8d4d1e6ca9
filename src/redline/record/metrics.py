"""The metrics of a run: every name, its unit and its meaning, stated once. The documentation, the exporters and the
live view read this table."""

from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    meaning: str


_TABLE = """
step | updates | optimiser updates done, this one included
loss | nats/token | mean cross entropy over the tokens of this update, before the update
lr | 1 | learning rate of this update (of AdamW's parameters under Muon)
grad_norm | 1 | global norm of the gradient before clipping
tokens | tokens | tokens trained on since the start of the run
step_s | s | time of this update, since the end of the one before or of the validation or checkpoint between them
tokens_per_s | tokens/s | tokens of this update over step_s, all processes together
rows_per_s | rows/s | examples of this update over step_s; only in fine-tuning
padding_share | 1 | share of the computed positions that held no token; if batches can hold padding
mfu | 1 | model FLOPs (6N + 12LdT per token, PaLM convention; kernel attention: its own products) over the dense datasheet peak of the compute dtype (bf16 for FP8)
ceiling_share | 1 | model FLOPs over the matmul rate measured on this machine for the compute dtype
data_wait_s | s | time the step waited for the loader
diagnose_s | s | time of the comparisons of train.diagnose_every, on the updates that have them
copy_s | s | time for the batch to reach the device; on the GPU's clock, like the phases below
forward_s | s | time in forward passes, launch gaps included, waits for other processes excluded
backward_s | s | time in backward passes, recomputation included, waits for other processes excluded
combine_s | s | time in keeping and combining the gradients of several domains; with PCGrad
optimizer_s | s | time in clipping and updating the weights
communication_s | s | time in which process 0 packed gathers and reductions or waited for those that nothing hid; only with several processes
slowest_rank | 1 | the process that took longest over the update before, waits for others excluded; only with several processes
slowest_s | s | the time it took: data wait, copy, forward, backward, combining, reference, critic, optimiser
others_s | s | mean time of the other processes: the difference is what they waited for the slowest
generate_s | s | time in which text was generated; in reinforcement learning, and in a watched loop that marks it
weights_s | s | time in which the weights were put into the engine: gathered, cast or merged; in RL, like those below
reward_s | s | time in which the step waited for rewards that generation did not hide
beside_s | s | time in which workers drew this step's answers beside the update before it; not part of step_s, whose generate_s and reward_s are what it waited for; with --on ray
versions_behind | 1 | updates that the weights which drew this step's answers lacked, mean over the questions; with --on ray
reference_s | s | time of this update in the forward passes of the reference model; with rl.kl
critic_s | s | time of this update in the critic: what it expects, and its own update; with PPO
update_s | s | time of this update in the policy: forward, backward, combining, optimiser, waits
reward | 1 | mean reward of all answers of this step, before a penalty for their length
accuracy | 1 | share of the answers of this step that are correct
reward.D | 1 | the same of domain D
accuracy.D | 1 | the same of domain D
response_tokens | tokens | mean length of the answers of this step
cut_share | 1 | share of the answers that reached rl.max_new_tokens
groups | questions | questions asked in this step, the replaced ones included
skipped_groups | questions | questions among them that taught nothing
new_tokens | tokens | tokens generated in this step
clip_share | 1 | share of the trained tokens whose ratio was clipped
entropy | nats/token | mean surprise of the trained tokens under the policy: an estimate of its entropy
kl | nats/token | estimated divergence from the reference model (k3); with rl.kl
logprob_gap | nats/token | mean difference between the log-probabilities of the engine and of the trainer
critic_loss | 1 | mean squared error of the critic's values, halved and clipped; with PPO
critic_grad_norm | 1 | global norm of the critic's gradient before clipping; with PPO
actor_tflop | TFLOP | work of the policy's update by our convention (see mfu), over all processes
actor_tflop_verl | TFLOP | the same as verl counts it
actor_mfu | 1 | actor_tflop over update_s and the datasheet peak of all GPUs
perf/throughput | tokens/s/GPU | tokens trained on over step_s and the number of processes
perf/mfu/actor | 1 | actor_mfu as verl counts it
perf/mfu/critic | 1 | the same of the critic, over critic_s; with PPO
training/global_step | updates | step, under verl's name
issue_s | s | time the host took to issue this update; if it equals step_s, the GPU waits for the host
memory_bytes | bytes | peak memory allocated by torch on the GPU since the process started, read once a second; on a CPU resident memory
elapsed_s | s | training time of the run, validations and checkpoints included; for a killed attempt, the time up to its last checkpoint
gpu_util | 1 | share of the last second in which a kernel ran, by NVML (one small kernel counts, so it says little); only on GPUs
energy_j | J | energy drawn by process 0's GPU since this attempt's loop began, by NVML, read once a second; only on GPUs
power_w | W | power drawn by the GPU, by NVML; only on GPUs
sm_clock_mhz | MHz | clock of the multiprocessors, by NVML; only on GPUs
temperature_c | °C | temperature of the GPU, by NVML; only on GPUs
memory_used_bytes | bytes | memory in use on the GPU by all processes, by NVML; only on GPUs
cosine.A.B | 1 | cosine of the gradients of domains A and B; with PCGrad, or where conflicts are watched
conflict.A.B | 1 | share of the weight tensors in which the gradients of domains A and B point against each other
orthogonality_violation | 1 | norm of W W^T - I over sqrt(head width), root mean square of the heads' query and key maps; with train.orthogonality
dfa_cosine | 1 | cosine of the gradients of feedback alignment and of back-propagation, over the blocks that learn from feedback; every train.diagnose_every updates
dfa_cosine.N | 1 | the same of block N
dfa_error | 1 | norm of the difference of the two gradients over the norm of back-propagation's
dfa_error.N | 1 | the same of block N
attention_similarity | 1 | mean cosine of the outputs of kernel attention and exact attention for the same queries, keys and values
loss_scale | 1 | factor on the loss against fp16 underflow; only with fp16
skipped | 1 | 1 where fp16 overflowed and the update was skipped; only with fp16
valid_loss | nats/token | mean cross entropy on the validation split; on steps that validate
valid_accuracy | 1 | share of held-out questions answered correctly, greedily; the mean of the domains
valid_accuracy.D | 1 | the same of domain D
valid_accuracy_low.D | 1 | lower end of its 95 % interval (Wilson)
valid_accuracy_high.D | 1 | upper end of its 95 % interval
valid_perplexity | 1 | exp(valid_loss): perplexity per token, which depends on the tokenizer
valid_word_perplexity | 1 | exp of the nats per word, words being what lies between white space: perplexity per word, whatever the tokenizer
valid_bits_per_byte | bits/byte | valid_loss in bits over the bytes of text behind the tokens
"""
"""`mfu` and `ceiling_share` are null if no peak is known (a CPU has no datasheet peak)."""

METRICS = {
    name: Metric(*about) for name, *about in (line.split(" | ") for line in _TABLE.strip().splitlines())
}
