"""A tokenizer of its own for tests that need a file of one."""

from __future__ import annotations

import inspect
import random
from pathlib import Path


def train(path: Path, template: bool = False) -> Path:
    """Train a byte-level BPE tokenizer with 2,000 tokens on this project's own text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<s>"], show_progress=False)
    model.train_from_iterator([inspect.getsource(random), inspect.getsource(inspect)], trainer)
    if template:
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        model.enable_truncation(max_length=8)
    model.save(str(path))
    return path
