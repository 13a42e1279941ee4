"""Ways to forge a finished validation: small edits, and the care that a forger takes to hide them.

A clumsy forger edits a file. A careful one also renews the digests of what he edited and has the report
made anew. A thorough one also renews every list of digests in the validation. What all of them leave
is that files contradict each other, or their sources.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.damage import edit_json, seal_again
from virnuc_core.checked_files import OWN_DIGEST_FIELD, with_own_digest
from virnuc_core.profiles import load_profile
from virnuc_core.report.build import write_report
from virnuc_core.runfiles import digest
from virnuc_core.telemetry.log import read_telemetry, telemetry_file

Forgery = Callable[[Path], None]  # changes a validation's directory
Columns = dict[str, np.ndarray]


def text(name: str, pattern: str, replacement: str) -> Forgery:
    """Replace the first match of a pattern in a text file."""

    def change(out: Path) -> None:
        (path,) = out.glob(name)
        text_before = path.read_text(encoding="utf-8")
        text_after = re.sub(pattern, replacement, text_before, count=1, flags=re.MULTILINE)
        assert text_after != text_before, f"{pattern} is not in {path.name}"
        path.write_text(text_after, encoding="utf-8")

    return change


def figure(name: str, *keys: str | int, to: object) -> Forgery:
    """Give a value of a JSON file another value. A value `...` removes its key."""

    def put(whole: Any) -> None:
        for key in keys[:-1]:
            whole = whole[key]
        if to is ...:
            del whole[keys[-1]]
            return
        assert whole[keys[-1]] != to
        whole[keys[-1]] = to

    def change(out: Path) -> None:
        (path,) = out.glob(name)
        edit_json(path, put)

    return change


def clumsy(name: str, *keys: str | int, to: object) -> Forgery:
    """Give a value of a JSON file another value, and leave the file's own digest as it was."""

    def change(out: Path) -> None:
        (path,) = out.glob(name)
        own_digest = json.loads(path.read_text(encoding="utf-8"))[OWN_DIGEST_FIELD]
        figure(name, *keys, to=to)(out)
        body = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(body | {OWN_DIGEST_FIELD: own_digest}, indent=1) + "\n")

    return change


def removed(*names: str) -> Forgery:
    """Remove files or folders."""

    def change(out: Path) -> None:
        for name in names:
            (path,) = out.glob(name)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return change


def emptied(name: str) -> Forgery:
    """Leave a file without content."""

    def change(out: Path) -> None:
        (path,) = out.glob(name)
        path.write_bytes(b"")

    return change


def copied(source: str, target: str) -> Forgery:
    """Put a file or folder in the place of another one."""

    def change(out: Path) -> None:
        (source_path,), (target_path,) = out.glob(source), out.glob(target)
        if target_path.is_dir():
            shutil.rmtree(target_path)
            shutil.copytree(source_path, target_path)
        else:
            shutil.copyfile(source_path, target_path)

    return change


def swapped(a: str, b: str) -> Forgery:
    """Exchange the content of two files."""

    def change(out: Path) -> None:
        content = (out / a).read_bytes()
        (out / a).write_bytes((out / b).read_bytes())
        (out / b).write_bytes(content)

    return change


def telemetry(name: str, group: str, change_columns: Callable[[Columns], Columns]) -> Forgery:
    """Change columns of a table of a run's telemetry file, and give the file the seal of its new content.

    Args:
        name: The folder of the run.
        group: The table: `/` (batches), `host`, `samples` or `shards`.
        change_columns: Gets all columns of the table, and returns those that change.
    """

    def change(out: Path) -> None:
        (path,) = out.glob(f"{name}/telemetry/*.h5")
        with h5py.File(path, "r+") as file:
            table = file[group]
            columns = {
                key: values[:] for key, values in table.items() if isinstance(values, h5py.Dataset)
            }
            for key, values in change_columns(columns).items():
                del table[key]
                table[key] = values
        seal_again(path)

    return change


def scaled(column: str, factor: float) -> Callable[[Columns], Columns]:
    """Multiply the last value of a column."""

    def change(columns: Columns) -> Columns:
        values = columns[column].copy()
        values[-1] = (values[-1:] * factor).astype(values.dtype)[0]
        return {column: values}

    return change


def both(*forgeries: Forgery) -> Forgery:
    """Do one after the other."""

    def change(out: Path) -> None:
        for forgery in forgeries:
            forgery(out)

    return change


def listed(name: str, forgery: Forgery) -> Forgery:
    """The forger knows that the summary lists the file."""

    def change(out: Path) -> None:
        forgery(out)
        path = out / name
        file_digest = digest(path)
        edit_json(
            path.parent / "summary.json",
            lambda body: body["files"].update({path.name: file_digest.model_dump()}),
        )

    return change


def reported(forgery: Forgery, profile: str) -> Forgery:
    """The forger has the report made anew from what he forged."""

    def change(out: Path) -> None:
        forgery(out)
        write_report(out, load_profile(profile))

    return change


def careful(forgery: Forgery, profile: str) -> Forgery:
    """The forger renews the digest that each edited file carries, and has the report made anew."""

    def change(out: Path) -> None:
        forgery(out)
        renew_own_digests(out)
        write_report(out, load_profile(profile))

    return change


def thorough(forgery: Forgery, profile: str) -> Forgery:
    """The forger also renews all digests that files of the validation hold of each other."""

    def change(out: Path) -> None:
        forgery(out)
        renew_all_digests(out)
        write_report(out, load_profile(profile))

    return change


def renew_own_digests(out: Path) -> None:
    """Give each JSON file that lacks its own digest, because it was edited, the present one."""
    for path in out.rglob("*.json"):
        body = json.loads(path.read_text(encoding="utf-8"))
        if OWN_DIGEST_FIELD not in body and path.parent.name not in ("shards", "report"):
            path.write_text(with_own_digest(json.dumps(body, indent=1)), encoding="utf-8")


def renew_all_digests(out: Path) -> None:
    """Bring all digests of a validation up to date, from the runs' files to the comparison's list."""
    renew_own_digests(out)
    for path in (*out.glob("*/summary.json"), out / "comparison.json"):
        if path.is_file():
            edit_json(path, lambda body, folder=path.parent: _renew_lists(body, folder))
            renew_own_digests(out)


def _renew_lists(body: dict[str, Any], folder: Path) -> None:
    """Renew the digests of the files that are listed and still there."""
    for key in ("files", "measurements"):
        for name in body.get(key) or {}:
            content = digest(folder / name)
            if content is not None:
                body[key][name] = content.model_dump()


def summarised_again(name: str) -> Forgery:
    """Compute the JSON file of a run's telemetry again from its tables, as the product does."""

    def change(out: Path) -> None:
        (path,) = out.glob(f"{name}/telemetry/*.json")
        old = json.loads(path.read_text(encoding="utf-8"))
        summary: Mapping[str, Any] = old["summary"]
        file = telemetry_file(
            read_telemetry(path.with_suffix(".h5")),
            n_reads=summary["total_sequences"],
            wall_s=summary["wall_s"],
            window_s=old["window_s"],
            sequences_per_hour=summary["sequences_per_hour"],
        )
        path.write_text(with_own_digest(file.model_dump_json(indent=1)), encoding="utf-8")

    return change
