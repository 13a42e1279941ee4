"""A small byte-pair vocabulary learned from random DNA, in the form of DNABERT-2's tokenizer file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS: Final = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")  # ids 0 … 4, as in DNABERT-2
PIECE_BASES: Final = 60
BASES_PER_TOKEN: Final = 500  # of random DNA for each entry of the vocabulary: rarer pairs than that are not worth one


def train_tokenizer(path: Path, vocab: int, seed: int) -> None:
    """Write a tokenizer of exactly `vocab` entries; the same arguments give the same file."""
    letters = np.frombuffer(b"ACGT", dtype=np.uint8)
    drawn = np.random.default_rng(seed).choice(letters, size=(vocab * BASES_PER_TOKEN // PIECE_BASES, PIECE_BASES))
    pieces = [row.tobytes().decode("ascii") for row in drawn]
    bpe = Tokenizer(models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=list("ACGT"), show_progress=False
    )
    bpe.train_from_iterator(pieces, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    bpe.save(str(path))
