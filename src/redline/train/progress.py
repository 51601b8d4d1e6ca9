"""Where a run stands, how well it has done, and when it is over.

    progress = Progress()
    progress.validated(2.31)                    # True: the best validation so far
    progress.ended(train, clock_s=120.0)        # why the run is over, or None

Every field is saved with every checkpoint. A request to stop is not part of it: the loop asks all processes for that.
"""

from dataclasses import dataclass

from redline.config.recipe import TrainConfig
from redline.train.objective import Position


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    position: Position | None = None
    best_loss: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0

    def validated(self, loss: float) -> bool:
        """Take in the loss of a validation; returns whether it is the best so far."""
        better = self.best_loss is None or loss < self.best_loss
        self.evals_without_gain = 0 if better else self.evals_without_gain + 1
        if better:
            self.best_loss, self.best_step = loss, self.step
        return better

    def forget_validations(self) -> None:
        """The losses so far belong to another training."""
        self.best_loss = self.best_step = None
        self.evals_without_gain = 0

    def ended(self, train: TrainConfig, clock_s: float) -> str | None:
        target, patience = train.target_loss, train.early_stop_evals
        if target is not None and self.best_loss is not None and self.best_loss <= target:
            return f"target loss of {target:g} reached ({self.best_loss:.4f})"
        if self.step >= train.steps:
            return "finished"
        if train.max_hours is not None and clock_s >= train.max_hours * 3600:
            return f"time limit of {train.max_hours:g} h"
        if patience and self.evals_without_gain >= patience:
            return f"early stop: {self.evals_without_gain} validations without a better loss"
        return None
