"""Train on a loader daemon's batches with nothing but PyTorch: `python examples/plain_pytorch.py ENDPOINT STEPS [JOB]`.

The model guesses the next token from the current one and the mean colour of the micro-batch's images. Its loss is
averaged over the label tokens of the whole global batch, whose number every micro-batch carries.
"""

import sys

import torch

from trainer.client import LoaderClient

if len(sys.argv) < 3:
    sys.exit(__doc__)
endpoint, steps, job = [*sys.argv[1:], ""][:3]
embedding, colour, head = torch.nn.Embedding(1024, 64), torch.nn.Linear(3, 64), torch.nn.Linear(64, 1024)
optimizer = torch.optim.AdamW([*embedding.parameters(), *colour.parameters(), *head.parameters()], lr=3e-3)
total = 0.0

with LoaderClient(endpoint, job=job, steps=int(steps)) as client:
    for batch in client:
        pixels, tokens, labels = (batch.fields[name] for name in ("pixels_NHWC", "tokens_T", "labels_T"))
        mean = pixels.float().mean((0, 1, 2)) / 255 if pixels.numel() else torch.zeros(3)
        logits = head(embedding(tokens) + colour(mean))
        loss = torch.nn.functional.cross_entropy(logits, labels.long(), reduction="sum") / max(1, batch.step_labels)
        loss.backward()
        total += loss.item()
        if batch.ends_step:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {batch.cursor.step} loss {total:.3f}")  # noqa: T201
            total = 0.0
