"""The raw files of a validation, read without ever failing: what is not there is `None`, what is wrong is noted."""

import filecmp
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import h5py

from virnuc_core.errors import ShardError, VirnucError
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import File, FileDigest, digest, read
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.reader import read_telemetry
from virnuc_core.validation import BitwiseEquality

RUN_PREFIX: Final = "devices-"
BASELINE: Final = "baseline"
SUMMARY: Final = "summary.json"
RECORD: Final = "run.json"
COMPARISON: Final = "comparison.json"
NAMED: Final = 8  # things that differ; of more, their number is said

Content = TypeVar("Content")


@dataclass
class RawFolder:
    """The files of one validate directory; remembers which were used and what could not be read."""

    root: Path
    used: dict[str, Path] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by file

    def read(self, kind: type[File], *parts: str) -> File | None:
        """The content of a file; `None` when it is missing, or one of its values is wrong, which is noted."""
        return self.attempt(self.root.joinpath(*parts), lambda path: read(path, kind))

    def telemetry(self, run: str, named: str | None) -> tuple[str, Telemetry] | None:
        """The telemetry of a run: the file its summary names, else the newest; `None` when there is none."""
        folder = self.root / run / "telemetry"
        path = max(folder.glob("telemetry_*.h5"), default=None) if named is None else folder / f"{Path(named).stem}.h5"
        if path is None or (found := self.attempt(path, read_telemetry)) is None:
            return None
        return path.relative_to(self.root).as_posix(), found

    def attempt(self, path: Path, load: Callable[[Path], Content]) -> Content | None:
        """What `load` makes of a file; `None` when it is missing, or cannot be read, which is noted."""
        if not path.is_file():
            return None
        name = self.use(path)
        try:
            return load(path)
        except VirnucError as error:
            self.problems[name] = str(error).removeprefix(f"{path}: ")
            return None

    def use(self, path: Path) -> str:
        """Note that `path` was read; returns its name within the folder."""
        name = path.relative_to(self.root).as_posix()
        self.used[name] = path
        return name

    def remarks(self) -> tuple[str, ...]:
        """A sentence on each thing that could not be read."""
        return tuple(f"{name}: {said}" for name, said in self.problems.items())

    def evidence(self) -> dict[str, FileDigest]:
        """Size and digest of every file that was read, by name."""
        return {name: found for name, path in sorted(self.used.items()) if (found := digest(path)) is not None}


def run_names(out: Path, prefix: str = RUN_PREFIX) -> list[str]:
    """The run directories of a validation, fewest devices first; with `devices-N.` those that repeat the run on N."""
    folders = [folder.name.removeprefix(prefix) for folder in out.glob(f"{prefix}*") if folder.is_dir()]
    return [f"{prefix}{number}" for number in sorted(filter(str.isdecimal, folders), key=int)]


def bitwise(a: Path, b: Path) -> BitwiseEquality:
    """Whether the result files of two runs hold the same bytes, and the arrays of their shards the same bits.

    Nothing to compare is not identity."""
    run = RunDir(a)
    names = [path.name for path in run.tables]
    files = [name for name in names if (a / name).is_file() or (b / name).is_file()]
    equal = filecmp.cmpfiles(a, b, files, shallow=False)[0]
    shards_a, shards_b = ({path.name: path for path in RunDir(side).shards.glob("*.h5")} for side in (a, b))
    shared = sorted(shards_a.keys() & shards_b.keys())
    differing = [
        *(name for name in files if name not in equal),
        *(f"shards/{name} is in one run only" for name in sorted(shards_a.keys() ^ shards_b.keys())),
        *(f"shards/{name}: {what}" for name in shared for what in _differences(shards_a[name], shards_b[name])),
        *(() if files else ("no result file to compare",)),
        *(() if shared else ("no shard to compare",)),
    ]
    more = (f"and {len(differing) - NAMED} more",) if len(differing) > NAMED else ()
    return BitwiseEquality(
        identical=not differing,
        files_compared=len(files),
        shards_compared=len(shared),
        differing=(*differing[:NAMED], *more),
    )


def _differences(a: Path, b: Path) -> Iterator[str]:
    """The arrays of two shards that are not the same."""
    try:
        with h5py.File(a, "r") as file_a, h5py.File(b, "r") as file_b:
            for name in sorted({*file_a, *file_b}):
                left, right = (file[name][()] if name in file else None for file in (file_a, file_b))
                if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
                    yield f"{name} is not the same kind of array"
                elif left.tobytes() != right.tobytes():
                    yield f"{name} differs"
    except OSError as error:
        yield f"cannot be read ({error})"


@contextmanager
def open_embeddings(*runs: RunDir) -> Iterator[list[h5py.File]]:
    """`embeddings.h5` of each run, of which every row can be read; meanwhile the limit of open files is higher.

    Errors: `ShardError` names the shard that cannot be read, or the limit when it cannot be raised; `OSError`,
    `KeyError` for a file that is none of ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:
        files = [held.enter_context(h5py.File(run.embeddings, "r")) for run in runs]
        tables = [file["embeddings"] for file in files]
        mapped = [table.virtual_sources() if table.is_virtual else [] for table in tables]
        parts = [run.root / part.file_name for run, found in zip(runs, mapped, strict=True) for part in found]
        needed = len(list(Path("/proc/self/fd").iterdir())) + len(parts) + 8
        if needed > soft:
            if hard != resource.RLIM_INFINITY and needed > hard:
                raise ShardError(f"{len(parts)} shards are read at once, {hard} files may be open; raise `ulimit -n`")
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for path in parts:
            try:
                with h5py.File(path, "r") as file:
                    len(file["embeddings"])
            except (OSError, KeyError, RuntimeError) as error:
                raise ShardError(f"{path} cannot be read ({error}); run again to compute it") from error
        yield files
