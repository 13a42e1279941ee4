"""`virnuc models`: make, convert, fetch or check weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flows.options import Parser, command_parser
from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.errors import ConfigError

CODON: Final = 3

ACTIONS = {
    "init-random": "a models directory with random weights of any size, for trying things out",
    "convert": "public checkpoints on disk into a models directory",
    "fetch": "download the public encoders at pinned revisions into a models directory",
    "verify": "is a models directory complete, sound, and equal to VirNucPro where that can be told?",
}


def models(words: Sequence[str]) -> int:
    """Dispatch to the action."""
    listed = "\n".join(f"  {name:<14}{text}" for name, text in ACTIONS.items())
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: virnuc models ACTION [options]\n\nactions:\n{listed}\n")
        return 0 if words else 2
    action, rest = words[0], words[1:]
    match action:
        case "init-random":
            return _init_random(rest)
        case "convert":
            return _convert(rest)
        case "fetch":
            return _fetch(rest)
        case "verify":
            return _verify(rest)
        case _:
            raise ConfigError(f"'{action}' is not an action of virnuc models; choose {', '.join(ACTIONS)}")


def _parser(action: str) -> Parser:
    return command_parser(f"models {action}", ACTIONS[action])


def _init_random(words: Sequence[str]) -> int:
    from virnuc_core.encoders.checkpoint import STORAGE, init_random
    from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES

    parser = _parser("init-random")
    parser.add_argument("out", metavar="DIR", type=Path, help="models directory to write")
    parser.add_argument("--esm2", choices=tuple(ESM2_SIZES), default="tiny", help="size of the ESM-2")
    parser.add_argument("--dnabert-s", choices=tuple(DNABERT_SIZES), default="tiny", help="size of the DNABERT-S")
    parser.add_argument(
        "--head",
        metavar="S",
        type=_model_length,
        default=DEFAULT_MODEL_LENGTH,
        help="model length S of the head: 300 or 500 as VirNucPro's, or another (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=tuple(STORAGE), default="fp32", help="what the encoders are stored in")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal bytes")
    arguments = parser.parse_args(words)
    init_random(
        arguments.out,
        esm2=arguments.esm2,
        dnabert_s=arguments.dnabert_s,
        model_length=arguments.head,
        seed=arguments.seed,
        dtype=arguments.dtype,
    )
    sys.stdout.write(
        f"{arguments.out}: random weights, ESM-2 {arguments.esm2}, DNABERT-S {arguments.dnabert_s}, "
        f"head for length {arguments.head}\n"
    )
    return 0


def _model_length(word: str) -> int:
    """A length that a codon fits in; argparse says what is wrong with any other word."""
    if not word.isascii() or not word.isdigit() or int(word) < CODON:
        raise argparse.ArgumentTypeError(f"'{word}' is not a model length: bases, at least {CODON}")
    return int(word)


def _convert(words: Sequence[str]) -> int:
    from virnuc_core.encoders.checkpoint import STORAGE
    from virnuc_core.encoders.convert import convert_dnabert_s, convert_esm2, convert_head

    parser = _parser("convert")
    parser.add_argument("out", metavar="DIR", type=Path, help="models directory to write")
    parser.add_argument("--esm2", metavar="PATH", type=Path, help="ESM-2: a folder in HF layout, or fair-esm's .pt")
    parser.add_argument("--dnabert-s", metavar="PATH", type=Path, help="DNABERT-S: a folder in HF layout")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="tokenizer.json, when not beside DNABERT-S")
    parser.add_argument("--head", metavar="FILE", type=Path, help="VirNucPro's 300_model.pth or 500_model.pth")
    parser.add_argument("--model-length", type=int, help="read length S of the head, when its name does not say it")
    parser.add_argument("--dtype", choices=tuple(STORAGE), help="store the encoders in this type")
    arguments = parser.parse_args(words)
    if arguments.esm2 is None and arguments.dnabert_s is None and arguments.head is None:
        raise ConfigError("nothing to convert; give --esm2, --dnabert-s or --head")
    if arguments.esm2 is not None:
        convert_esm2(arguments.esm2, arguments.out, arguments.dtype)
        sys.stdout.write(f"{arguments.out / 'esm2'}\n")
    if arguments.dnabert_s is not None:
        convert_dnabert_s(arguments.dnabert_s, arguments.out, arguments.tokenizer, arguments.dtype)
        sys.stdout.write(f"{arguments.out / 'dnabert_s'}\n")
    if arguments.head is not None:
        convert_head(arguments.head, arguments.out, arguments.model_length)
        sys.stdout.write(f"{arguments.out / 'head'}\n")
    return 0


def _fetch(words: Sequence[str]) -> int:
    from virnuc_core.encoders.checkpoint import STORAGE
    from virnuc_core.encoders.convert import fetch

    parser = _parser("fetch")
    parser.add_argument("out", metavar="DIR", type=Path, help="models directory to write")
    parser.add_argument(
        "--head", metavar="FILE", type=Path, required=True, help="VirNucPro's 300_model.pth or 500_model.pth"
    )
    parser.add_argument("--model-length", type=int, help="read length S of the head, when its name does not say it")
    parser.add_argument("--dtype", choices=tuple(STORAGE), help="store the encoders in this type")
    arguments = parser.parse_args(words)
    fetch(arguments.out, arguments.head, model_length=arguments.model_length, dtype=arguments.dtype)
    sys.stdout.write(f"{arguments.out}: ESM-2 3B, DNABERT-S and {arguments.head.name}\n")
    return 0


def _verify(words: Sequence[str]) -> int:
    parser = _parser("verify")
    parser.add_argument("out", metavar="DIR", type=Path, help="models directory")
    parser.add_argument("--device", default="cpu", help="where the anchors are computed: cpu or cuda:0")
    arguments = parser.parse_args(words)
    import torch

    from virnuc_core.encoders.verify import verify
    from virnuc_core.errors import DeviceError, WeightsError

    try:
        device = torch.device(arguments.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {arguments.device} cannot be used: {str(error).splitlines()[0]}") from error
    checks = verify(arguments.out, device)
    for check in checks:
        sys.stdout.write(f"{check.verdict:<8} {check.name}: {check.detail}\n")
    failed = [check.name for check in checks if check.verdict == "fail"]
    if failed:
        raise WeightsError(f"{arguments.out}: {', '.join(failed)} did not pass")
    return 0
