"""Train a Llama with transformers' Trainer: `python examples/hf_trainer.py ENDPOINT STEPS [JOB [CHECKPOINT]]`.

Samples stay apart in their pack because positions start anew at each. A checkpoint keeps the loader's place beside the
weights. Started by a launcher, every process reads its own data rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from trainer.audio_frontend import import_torchaudio
from trainer.dataset import Item, LoaderDataset

import_torchaudio()  # transformers imports it, which fails beside a torch without CUDA unless this has been done
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OPTIONS = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}


def inputs(item: Item) -> Item:
    """What the model takes of a micro-batch, whose labels are the next tokens already."""
    tokens, labels, positions = (item[name].long()[None] for name in ("tokens_T", "labels_T", "positions_T"))
    return {"input_ids": tokens, "labels": labels, "shift_labels": labels, "position_ids": positions}


class LoaderTrainer(Trainer):
    """Takes micro-batches as they come."""

    def get_train_dataloader(self) -> DataLoader[Item]:
        return DataLoader(self.train_dataset, batch_size=None, collate_fn=inputs)


class KeepPlace(TrainerCallback):
    """Saves the loader's place with each checkpoint."""

    def __init__(self, dataset: LoaderDataset) -> None:
        self.dataset = dataset

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **rest: Any) -> None:
        place = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        place.write_text(json.dumps(self.dataset.state_dict()))


def main(endpoint: str, steps: str, job: str = "", checkpoint: str | None = None) -> None:
    """Train to step `steps`, with a checkpoint every fourth step in `hf/`."""
    set_seed(0)
    arguments = TrainingArguments(
        "hf",
        max_steps=int(steps),
        gradient_accumulation_steps=4,  # data.batch.micro_batches, divided by the data ranks
        learning_rate=3e-3,
        save_steps=4,
        ignore_data_skip=True,  # the loader itself goes on at the right place
        **OPTIONS,
    )
    rank, ranks = arguments.process_index, arguments.world_size
    dataset = LoaderDataset(endpoint, int(steps), job=job, data_rank=rank, data_ranks=ranks)
    if checkpoint:
        dataset.load_state_dict(json.loads(Path(checkpoint, "loader.json").read_text()))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **SIZE))
    trainer = LoaderTrainer(model, arguments, train_dataset=dataset, callbacks=[KeepPlace(dataset)])
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
