"""`transformers`' own training loop over the global batches of `step_program`, one padded row for each sample."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from shared.batch import IGNORE
from shared.sections import RunConfig
from tests.support.hugging import transformers
from tests.support.packs import Plan, global_batch
from trainer.feed import MicroBatch
from trainer.optim import lr_at

Rows = dict[str, Tensor]


class Record(msgspec.Struct):
    """Mean loss per label token and gradient norm before clipping of each step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class OrderedTrainer(transformers.Trainer):  # type: ignore[misc]
    """Takes micro-batches as they come, and keeps every loss as `training_step` gives it (the log rounds them)."""

    losses: list[float]

    def get_train_dataloader(self) -> DataLoader[Rows]:
        return DataLoader(self.train_dataset, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


class Batches(torch.utils.data.IterableDataset[Rows]):
    """The micro-batches of step 0, then those of step 1, and so on."""

    def __init__(self, config: RunConfig, plans: tuple[Plan, ...]) -> None:
        self.config, self.plans = config, plans

    def __iter__(self) -> Iterator[Rows]:
        for step in range(self.config.train.steps):
            yield from (rows_of(micro) for micro in global_batch(self.config, self.plans, seed=step))


def rows_of(micro_batch: MicroBatch) -> Rows:
    """A pack as transformers wants it: one sample a row, padded on the right, each label at its own token's place.

    Our labels stand at the place before; the first of a row is therefore none, so all that are counted are learned.
    """
    (tokens_T, _, segments_T, *_), (labels_T, _) = micro_batch
    places = [torch.nonzero(segments_T == sample)[:, 0] for sample in range(1, int(segments_T.max()) + 1)]
    shifted = [torch.cat([torch.tensor([IGNORE]), labels_T[at[:-1]]]).long() for at in places]
    return {
        "input_ids": pad_sequence([tokens_T[at].long() for at in places], True),
        "attention_mask": pad_sequence([torch.ones_like(at) for at in places], True),
        "labels": pad_sequence(shifted, True, IGNORE),
    }


def train_with_transformers(start: Path, config: RunConfig, plans: tuple[Plan, ...], folder: Path) -> Record:
    """`Trainer` on the model saved in `start`, with the run file's AdamW, schedule, clipping and accumulation."""
    optim, count = config.train.optim, config.data.batch.micro_batches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=config.train.steps,
            gradient_accumulation_steps=count,
            max_grad_norm=optim.clip,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(start)
        optimizer = adamw(model, config)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_at(step, config.train.steps, optim) / optim.lr
        )
        trainer = OrderedTrainer(
            model, arguments, train_dataset=Batches(config, plans), optimizers=(optimizer, schedule)
        )
        trainer.losses = []
        trainer.train()
    losses = [sum(trainer.losses[at : at + count]) for at in range(0, len(trainer.losses), count)]
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return Record(losses, norms, {name: p.detach().clone() for name, p in model.state_dict().items()})


def adamw(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Matrices decay; norms, biases and the embedding (with a head tied to it) do not."""
    optim, embedding = config.train.optim, model.get_input_embeddings().weight  # type: ignore[operator]
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1 and p is not embedding]
    others = [p for p in parameters if p.ndim < 2 or p is embedding]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas)
