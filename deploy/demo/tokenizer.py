"""A small byte-level BPE tokenizer trained on the captions."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<image>", "<audio>")  # ids 0..4


def train(captions: Iterable[str]) -> Tokenizer:
    """Train on `captions`. The vocabulary stays under VOCAB_SIZE where they are too few to fill it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    return tokenizer
