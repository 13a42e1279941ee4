"""Real ESM-2 weights: converted, compared with fair-esm's own class, and run in half precision."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from Bio.Seq import translate
from torch import Tensor

from virnuc.flows.cli import main
from virnuc_core.encoders.checkpoint import load_encoder, open_part
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.tokenize import Esm2Tokenizer

from ..unit.encoders.encoder_batches import packed
from .genomes import cut, hosts, viruses

pytestmark = pytest.mark.real
CPU = torch.device("cpu")
IN_LAYER = {  # of transformers, and of fair-esm
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.self.rotary_embeddings": "self_attn.rot_emb",  # rounded to 16 bits once, by who published them
    "attention.output.dense": "self_attn.out_proj",
    "attention.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "LayerNorm": "final_layer_norm",
}


@pytest.fixture(scope="module")
def proteins(wheels: Path) -> list[bytes]:
    """Frames without a stop, of reads of 30 to 300 bases of both kinds."""
    selected = []
    for length in (30, 90, 150, 300):
        for genomes in (list(viruses(wheels, 1)), list(hosts(wheels, 100))):
            frames = [
                sequence[offset:][: length // 3 * 3 - 3]
                for _, _, sequence in cut(genomes, length, 60)
                for offset in range(3)
            ]
            selected += [text for frame in frames if "*" not in (text := translate(frame.decode()))]
    return [text.encode() for text in selected]


@pytest.fixture(scope="module")
def fair_esm(public: Path) -> Any:
    """fair-esm's own ESM-2 with the weights of the published file, put there without our code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from esm.model.esm2 import ESM2

    model = ESM2(num_layers=6, embed_dim=320, attention_heads=20, alphabet="ESM-1b")
    checkpoint = torch.load(public / "pytorch_model.bin", map_location="cpu", weights_only=True)
    state: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        bare, end = name.removeprefix("esm.").rsplit(".", 1)
        if layer := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", bare):
            if layer[2] in IN_LAYER:
                state[f"layers.{layer[1]}.{IN_LAYER[layer[2]]}.{end}"] = tensor
        elif bare in ("encoder.emb_layer_norm_after", "embeddings.word_embeddings"):
            state[
                {"encoder.emb_layer_norm_after": "emb_layer_norm_after"}.get(bare, "embed_tokens")
                + f".{end}"
            ] = tensor
    assert len(state) == 6 * 17 + 3
    absent = model.load_state_dict(state, strict=False).missing_keys
    assert all(re.search("lm_head|contact_head", name) for name in absent)
    return model.eval()


def test_a_task_head_is_left_out_with_a_remark(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["models", "convert", str(tmp_path / "models"), "--esm2", str(public)]) == 0
    assert (
        "left out classifier.dense.bias, classifier.dense.weight, classifier.out_proj.bias and 1 more"
        in caplog.text
    )
    shape, _ = open_part(tmp_path / "models", Esm2Shape)
    assert (shape.layers, shape.width, shape.heads, shape.ffn_width) == (6, 320, 20, 1280)


def test_packed_rows_equal_fair_esm(fair_esm: Any, models: Path, proteins: list[bytes]) -> None:
    got = load_encoder(Esm2, models, CPU).embed(packed(Esm2Tokenizer(), proteins))
    for i in range(0, len(proteins), 7):
        tokens, _ = Esm2Tokenizer().encode([proteins[i]])
        with torch.no_grad():
            hidden = fair_esm(tokens[None], repr_layers=[6])["representations"][6]
        torch.testing.assert_close(
            got[i], hidden[0, 1:-1].mean(0), atol=2e-5, rtol=0
        )  # float32 noise of both


@pytest.mark.parametrize(("precision", "least"), [("fp16", 0.9999), ("bf16", 0.99)])
def test_half_precision_keeps_real_embeddings(
    precision: Resolved,
    least: float,
    models: Path,
    proteins: list[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch, (shape, read_tensor) = packed(Esm2Tokenizer(), proteins), open_part(models, Esm2Shape)
    wide = load_encoder(Esm2, models, CPU).embed(batch).double()
    half = (
        Esm2(shape, read_tensor, CPU, precision=precision, attention="reference")
        .embed(batch)
        .double()
    )
    plain = torch.cosine_similarity(wide, half)
    centred_cosines = torch.cosine_similarity(wide - wide.mean(0), half - wide.mean(0))
    with capsys.disabled():
        summary = f"cosine {plain.min():.6f} at worst, centred {centred_cosines.min():.6f}, in the mean {centred_cosines.mean():.6f}"
        print(f"\n{precision}: {summary} of {len(wide)} rows")
    assert centred_cosines.min() > least
