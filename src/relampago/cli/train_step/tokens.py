"""Real text as tokens: the language reference that every Python carries, by byte pairs learnt from itself.

No tokenizer of the models' own is needed, nor a network. The text has some 100,000 tokens; longer runs begin again.
"""

from __future__ import annotations

from torch import Tensor


def tokens(vocabulary: int) -> Tensor:
    """The whole text, int64 (tokens,), each below `vocabulary`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from relampago.cli.demo.text import chapters

    text = chapters()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return torch.tensor(tokenizer.encode("\n\n".join(text)).ids)


def sequence(text: Tensor, length: int, number: int) -> Tensor:
    """The `number`-th run of length + 1 tokens, the text taken as a ring: inputs and their successors."""
    import torch

    places = torch.arange(length + 1) + number * length
    return text[places % len(text)]
