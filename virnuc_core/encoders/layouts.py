"""Names that public checkpoints give their tensors, and ours for them."""

from __future__ import annotations

import re
from typing import Final

import torch

from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape
from virnuc_core.encoders.tensor_files import DictSource, Rule, Source, Stored, Tensors


def _rule(theirs: str, ours: str, part: int = 0, of: int = 1) -> Rule:
    return Rule(re.compile(theirs), ours, part, of)


_HF_ESM = r"(?:esm\.)?"
_FAIR = r"(?:encoder\.)?(?:sentence_encoder\.)?"
_HF_LAYER = _HF_ESM + r"encoder\.layer\.(\d+)\."
_FAIR_LAYER = _FAIR + r"layers\.(\d+)\."
_WB = r"\.(weight|bias)"

ESM2_RULES: Final = (
    # as ported to transformers
    _rule(_HF_ESM + r"embeddings\.word_embeddings\.weight", "embed.weight"),
    _rule(_HF_LAYER + r"attention\.self\.query" + _WB, r"layers.\1.qkv.\2", 0, 3),
    _rule(_HF_LAYER + r"attention\.self\.key" + _WB, r"layers.\1.qkv.\2", 1, 3),
    _rule(_HF_LAYER + r"attention\.self\.value" + _WB, r"layers.\1.qkv.\2", 2, 3),
    _rule(_HF_LAYER + r"attention\.output\.dense" + _WB, r"layers.\1.out.\2"),
    _rule(_HF_LAYER + r"attention\.LayerNorm" + _WB, r"layers.\1.attn_norm.\2"),
    _rule(_HF_LAYER + r"intermediate\.dense" + _WB, r"layers.\1.fc1.\2"),
    _rule(_HF_LAYER + r"output\.dense" + _WB, r"layers.\1.fc2.\2"),
    _rule(_HF_LAYER + r"LayerNorm" + _WB, r"layers.\1.ffn_norm.\2"),
    _rule(_HF_LAYER + r"attention\.self\.rotary_embeddings\.inv_freq", "inv_freq"),
    _rule(_HF_ESM + r"encoder\.emb_layer_norm_after" + _WB, r"final_norm.\1"),
    _rule(_HF_ESM + r"(?:embeddings\.position_(?:ids|embeddings\.weight)|contact_head\..*|pooler\..*)", ""),
    # as fair-esm saved it
    _rule(_FAIR + r"embed_tokens\.weight", "embed.weight"),
    _rule(_FAIR_LAYER + r"self_attn\.q_proj" + _WB, r"layers.\1.qkv.\2", 0, 3),
    _rule(_FAIR_LAYER + r"self_attn\.k_proj" + _WB, r"layers.\1.qkv.\2", 1, 3),
    _rule(_FAIR_LAYER + r"self_attn\.v_proj" + _WB, r"layers.\1.qkv.\2", 2, 3),
    _rule(_FAIR_LAYER + r"self_attn\.out_proj" + _WB, r"layers.\1.out.\2"),
    _rule(_FAIR_LAYER + r"self_attn\.rot_emb\.inv_freq", "inv_freq"),
    _rule(_FAIR_LAYER + r"self_attn_layer_norm" + _WB, r"layers.\1.attn_norm.\2"),
    _rule(_FAIR_LAYER + r"fc1" + _WB, r"layers.\1.fc1.\2"),
    _rule(_FAIR_LAYER + r"fc2" + _WB, r"layers.\1.fc2.\2"),
    _rule(_FAIR_LAYER + r"final_layer_norm" + _WB, r"layers.\1.ffn_norm.\2"),
    _rule(_FAIR + r"emb_layer_norm_after" + _WB, r"final_norm.\1"),
    # what predicts tokens or contacts is not used here
    _rule(_FAIR + r"(?:lm_head|contact_head)\..*", ""),
)

_BERT = r"(?:bert\.)?"
_BERT_LAYER = _BERT + r"encoder\.layer\.(\d+)\."

DNABERT_RULES: Final = (
    _rule(_BERT + r"embeddings\.word_embeddings\.weight", "embed.weight"),
    _rule(_BERT + r"embeddings\.token_type_embeddings\.weight", "token_type.weight"),
    _rule(_BERT + r"embeddings\.LayerNorm" + _WB, r"embed_norm.\1"),
    _rule(_BERT_LAYER + r"attention\.self\.Wqkv" + _WB, r"layers.\1.qkv.\2"),
    _rule(_BERT_LAYER + r"attention\.output\.dense" + _WB, r"layers.\1.out.\2"),
    _rule(_BERT_LAYER + r"attention\.output\.LayerNorm" + _WB, r"layers.\1.attn_norm.\2"),
    _rule(_BERT_LAYER + r"mlp\.gated_layers\.weight", r"layers.\1.gated.weight"),
    _rule(_BERT_LAYER + r"mlp\.wo" + _WB, r"layers.\1.wo.\2"),
    _rule(_BERT_LAYER + r"mlp\.layernorm" + _WB, r"layers.\1.ffn_norm.\2"),
    # what predicts tokens, or pools the first one, is not used here
    _rule(r"cls\..*", ""),
    _rule(_BERT + r"(?:pooler\..*|embeddings\.position_ids)", ""),
)

HEAD_RULES: Final = (_rule(r"bn1\.num_batches_tracked", ""),)


def esm2_tensors(source: Source, shape: Esm2Shape) -> Tensors:
    """An ESM-2 checkpoint of any public layout under our names; `WeightsError` names what is missing or unexpected.

    Newer ports do not save the rotary frequencies, which follow from the head size: they are computed then.
    """
    if not any(name == "inv_freq" or name.endswith(".inv_freq") for name in source.names()):
        source = _With(source, "inv_freq", inv_freq(shape.head_dim))
    return Tensors(source, shape.tensors(), ESM2_RULES)


def dnabert_tensors(source: Source, shape: DnabertShape) -> Tensors:
    """A DNABERT-S checkpoint under our names; `WeightsError` names what is missing or unexpected."""
    return Tensors(source, shape.tensors(), DNABERT_RULES)


def head_tensors(source: Source, shape: HeadShape) -> Tensors:
    """A head under our names, which are VirNucPro's."""
    return Tensors(source, shape.tensors(), HEAD_RULES)


def inv_freq(head_dim: int) -> torch.Tensor:
    """Rotary frequencies in base 10,000, float32 [head_dim / 2]."""
    return 1.0 / (10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


class _With:
    """A source with one more tensor."""

    def __init__(self, source: Source, name: str, tensor: torch.Tensor) -> None:
        self._source, self._extra = source, DictSource(source.origin, {name: tensor})

    @property
    def origin(self) -> str:
        return self._source.origin

    def names(self) -> list[str]:
        return [*self._source.names(), *self._extra.names()]

    def stored(self, name: str) -> Stored:
        return self._extra.stored(name) if name in self._extra.tensors else self._source.stored(name)

    def get(self, name: str) -> torch.Tensor:
        return self._extra.get(name) if name in self._extra.tensors else self._source.get(name)
