"""Records TRL's own GRPO losses on fixed inputs, for the comparison in test_rl.py, which then needs no TRL.

    pip install 'redline[bench]' && python tests/unit/trl_losses.py        # writes tests/data/trl-losses.json

`GRPOTrainer._compute_loss` runs as it is, with `loss_type="dapo"`; only the model is replaced, by log-probabilities that are given.
The term of a token is the loss of a batch in which it is the only one that counts.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

STORED = Path(__file__).parents[1] / "data" / "trl-losses.json"
CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 2.0
VARIANTS: dict[str, dict[str, Any]] = {
    "on-policy": {"old": False, "corrected": False, "kl": 0.0},
    "on-policy, corrected": {"old": False, "corrected": True, "kl": 0.0},
    "clipped": {"old": True, "corrected": False, "kl": 0.0},
    "clipped, corrected": {"old": True, "corrected": True, "kl": 0.0},
    "clipped, corrected, KL": {"old": True, "corrected": True, "kl": 0.05},
}


def inputs() -> dict[str, Tensor]:
    """Three answers of at most seven tokens: log-probabilities, advantages, and which tokens count."""
    generator = torch.Generator().manual_seed(0)
    names = ("now", "old", "engine", "reference")
    made = {name: -torch.rand(3, 7, generator=generator, dtype=torch.float64) for name in names}
    mask = torch.ones(3, 7, dtype=torch.float64)
    mask[1, 4:] = 0
    return made | {"advantage": torch.tensor([1.2, -0.7, 0.3], dtype=torch.float64), "mask": mask}


def trl_loss(given: dict[str, Tensor], variant: dict[str, Any], now: Tensor, mask: Tensor) -> Tensor:
    """What TRL computes from these log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = MagicMock(
        _get_per_token_logps_and_entropies=lambda *given, **named: (now, torch.zeros_like(now), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        beta=variant["kl"], loss_type="dapo", epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH,
        use_vllm=variant["corrected"], vllm_importance_sampling_correction=True, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, current_gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer.args.configure_mock(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.accelerator.configure_mock(num_processes=1, gather=lambda found: found)
    trainer.model.training = True
    ids, old = torch.zeros(3, 7, dtype=torch.long), given["old"] if variant["old"] else now.detach()
    batch = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
        "advantages": given["advantage"], "old_per_token_logps": old, "ref_per_token_logps": given["reference"],
        "importance_sampling_ratio": (old - given["engine"]).exp().clamp(max=CAP), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    found: Tensor = GRPOTrainer._compute_loss(trainer, MagicMock(), batch)
    return found


def record() -> dict[str, Any]:
    import trl

    given, variants = inputs(), {}
    for name, variant in VARIANTS.items():
        now = given["now"].clone().requires_grad_()
        loss = trl_loss(given, variant, now, given["mask"])
        loss.backward()
        assert now.grad is not None
        terms = torch.zeros(3, 7, dtype=torch.float64)
        for place in given["mask"].nonzero().tolist():
            alone = torch.zeros_like(terms)
            alone[tuple(place)] = 1.0
            terms[tuple(place)] = trl_loss(given, variant, given["now"], alone)
        variants[name] = {"loss": loss.item(), "terms": terms.tolist(), "gradient": now.grad.tolist()}
    return {
        "trl": trl.__version__,
        "made_by": "python tests/unit/trl_losses.py",
        "inputs": {name: tensor.tolist() for name, tensor in given.items()},
        "variants": variants,
    }


if __name__ == "__main__":
    STORED.write_text(json.dumps(record(), indent=1) + "\n")
