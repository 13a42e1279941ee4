"""`virnuc doctor`: its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows import settings
from flows.options import command_parser


def doctor(words: Sequence[str]) -> int:
    """Ask everything; 1 when a check failed. Warnings leave the exit code at 0."""
    parser = command_parser("doctor", "Is this machine sound? One line a check; exit code 1 when one failed.")
    parser.add_argument("-o", "--out", type=Path, default=Path(), metavar="PATH", help="where runs would be written")
    parser.add_argument(
        "--models", type=Path, default=settings.models_folder(), metavar="PATH", help="models directory"
    )
    parser.add_argument("--devices", default="auto", help="devices to compute on: cuda:0,cuda:1, cpu:2 or auto")
    parser.add_argument("--hash", action="store_true", help="hash weights of any size")
    parser.add_argument("--no-compute", action="store_true", help="leave out the embedding on each device")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(words)
    settings.prepare()
    from flows.doctor import doctor as examine

    return examine(
        arguments.out,
        models=arguments.models,
        devices=arguments.devices,
        hashed=arguments.hash,
        computed=not arguments.no_compute,
        as_json=arguments.json,
    )
