"""Train with Lightning: `python examples/lightning_module.py ENDPOINT STEPS [JOB [CHECKPOINT]]`.

Lightning keeps the state of any loader that has one, so its checkpoints hold the cursor, and a run that is given one
goes on at the very next micro-batch. Started by a launcher, every process reads its own data rank.
"""

import logging
import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from trainer.dataset import Item, LoaderDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class NextToken(lightning.LightningModule):
    """Guesses the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step ends where the loader says so
        self.embedding, self.head = torch.nn.Embedding(1024, 64), torch.nn.Linear(64, 1024)

    def training_step(self, batch: Item) -> None:
        optimizer = self.optimizers()
        logits, labels = self.head(self.embedding(batch["tokens_T"])), batch["labels_T"].long()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / batch["step_labels"].clamp(min=1)
        self.manual_backward(loss * ranks)  # gradients are averaged over ranks; the loss is a sum
        print(f"loss {loss.item():.6f}")  # noqa: T201
        if batch["ends_step"]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(endpoint: str, steps: str, job: str = "", checkpoint: str | None = None) -> None:
    """Train to step `steps`, with a checkpoint every fourth step in `lightning/`."""
    lightning.seed_everything(0, verbose=False)
    dataset = LoaderDataset(endpoint, int(steps), job=job, data_rank=rank, data_ranks=ranks)
    saving = ModelCheckpoint("lightning", "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NextToken(), dataset, ckpt_path=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
