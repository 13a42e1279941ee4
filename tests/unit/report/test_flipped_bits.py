"""One bit is flipped in every file that virnuc reads again: it is named or computed anew, never used.

The files are those that are found in the directories of a real run, a real validation and a real
models directory. So a new kind of file cannot be forgotten: a file that no rule below names fails
the test.
"""

from __future__ import annotations

import fnmatch
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.damage import flip_bit
from virnuc.flows import cli
from virnuc_core.config import RunSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.kept_heads import install_head
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import predict
from virnuc_core.profiles import QUESTIONS, load_profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.compare import compare as compare_runs
from virnuc_core.report.regression import HISTORY
from virnuc_core.report.verify import verify_report
from virnuc_core.runfiles import write
from virnuc_core.telemetry.log import open_frame
from virnuc_core.validation import (
    OVERHEAD,
    TUNING,
    ApprovalRecord,
    OverheadFile,
    TuningFile,
)

from ...bare import PROFILE, validate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("forked_workers"),
]
# Places of a file at which a bit is flipped, as shares of its length. The first byte, the last one,
# and some between them.
PLACES = (0.0, 0.31, 0.62, 1.0)
FEWER_PLACES = (0.47, 1.0)  # where a command takes seconds
# Each kind of file in the first run of a validation is in its second run, too, and damaged there at
# both places.
PLACES_OF_RUN = {"devices-1": FEWER_PLACES[:1]}


@dataclass(frozen=True)
class Scene:
    """Copies of the directories, in which one file is damaged."""

    run: Path
    validation: Path
    models: Path
    spec: RunSpec


Command = Callable[[Scene], object]


def outputs_of(folder: Path) -> dict[str, bytes]:
    """Return the tables in a folder by their names."""
    return {path.name: path.read_bytes() for path in folder.glob("*.[tc]*") if path.is_file()}


def export(scene: Scene) -> object:
    """Export the run, and return the tables, or None if the command has refused."""
    out = scene.run.parent / "exports"
    status = cli.main(["export", str(scene.run), "-o", str(out), "--force"])
    return outputs_of(out) if status == 0 else None


def rescore(scene: Scene) -> object:
    """Judge the run by another threshold, and return the tables, or None after a refusal."""
    out = scene.run.parent / "rescored"
    status = cli.main(["rescore", str(scene.run), "-o", str(out), "--threshold", "0.4"])
    return outputs_of(out) if status == 0 else None


def compare(scene: Scene) -> object:
    """Compare the run with the untouched one, from which it was copied."""
    comparison = compare_runs(scene.run, scene.spec.out, bits=True, embeddings=True)
    assert comparison.bitwise is not None
    for name in comparison.bitwise.differing:
        logging.getLogger(__name__).warning("%s", name)
    return comparison


def resume(scene: Scene) -> object:
    """Start the command of the run again."""
    return predict(scene.spec.model_copy(update={"out": scene.run, "models": scene.models}))


def read_telemetry(scene: Scene) -> object:
    return open_frame(scene.run)


def verify(scene: Scene) -> object:
    for difference in verify_report(scene.validation).differences:
        logging.getLogger(__name__).warning("%s", difference)
    return None


def report(scene: Scene) -> object:
    """Judge the validation again. What could not be used is a warning in the report."""
    history = scene.validation.parent / HISTORY
    written = write_report(scene.validation, load_profile(PROFILE), history)
    for warning in written.warnings:
        logging.getLogger(__name__).warning("%s", warning)
    return None


def write_pages_again(scene: Scene) -> object:
    return rerender(scene.validation)


def use_head(scene: Scene) -> object:
    return cli.main(["models", "use-head", "1", "--models", str(scene.models)])


def list_heads(scene: Scene) -> object:
    return cli.main(["models", "heads", "--models", str(scene.models)])


# Of a shard these commands read the scores, which have a checksum of their own. A bit that is flipped
# in the embeddings, which they do not read, must not change what they write.
READ_SCORES_ONLY = (export, rescore)
NOT_READ = ()  # no command reads the file as data
# For each kind of file, the commands that read it again. The first pattern that matches holds.
RUN_FILES: dict[str, tuple[Command, ...]] = {
    ".virnuc": NOT_READ,  # only says whose the directory is
    "logs/*": NOT_READ,  # for people
    "run.json": (resume, export, rescore, compare),
    "summary.json": (resume, export, compare),
    "orfs.h5": (resume, export, rescore),
    "orfs.made.json": (resume,),
    "shards/plan.json": (resume, export, rescore),
    "shards/*.h5": (resume, export, rescore, compare),
    "embeddings.h5": (resume, compare),
    "prediction_results.txt": (resume, compare),
    "prediction_results_highestscore.csv": (resume, compare),
    "reads.tsv": (resume, export),
    "failed.tsv": (resume, compare),
    "telemetry/*.h5": (read_telemetry,),
    "telemetry/*.json": NOT_READ,  # of a run by itself; `virnuc verify` reads it in a validation
}
VALIDATION_FILES: dict[str, tuple[Command, ...]] = {
    ".virnuc": NOT_READ,
    "*/.virnuc": NOT_READ,
    "*/logs/*": NOT_READ,
    "report/report.json": (verify, write_pages_again),
    "report/approval.json": (verify, report),
    OVERHEAD: (verify, report),
    TUNING: (verify, report),
    "report/*": (verify,),
    "orfs.h5": (verify,),
    "orfs.made.json": NOT_READ,  # when the validation is started again; see `RUN_FILES`
    "*/failed.tsv": (verify,),
    "*/shards/*": (verify,),
    "*/embeddings.h5": (verify,),
    # The report draws the scores of the run that it judges, and counts its reads.
    "devices-2/prediction_results.txt": (verify, report),
    "devices-2/reads.tsv": (verify, report),
    "*/prediction_results.txt": (verify,),
    "*/prediction_results_highestscore.csv": (verify,),
    "*/reads.tsv": (verify,),
    "*/telemetry/*.json": (verify,),
    "*/telemetry/*.h5": (verify, report),
    "*/run.json": (verify, report),
    "*/summary.json": (verify, report),
    "run.json": (verify, report),
    "comparison.json": (verify, report),
    "regression.json": (verify,),
}
MODELS_FILES: dict[str, tuple[Command, ...]] = {
    "heads/001-*/config.json": (use_head, list_heads),
    "heads/001-*/model.safetensors": (use_head, list_heads),
    "heads/*/config.json": (list_heads,),
    "heads/*/model.safetensors": (list_heads,),
    "heads/.virnuc": NOT_READ,
    # The record of the run has the digest of each model.
    "*/config.json": (resume,),
    "*/model.safetensors": (resume,),
    "*/tokenizer.json": (resume,),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run, a validation with its history, and models with two kept heads; never changed."""
    folder = tmp_path_factory.mktemp("originals")
    models = folder / "models"
    init_random(models, seed=1)
    init_random(folder / "other", seed=2)
    reads = simulate(SimulateSpec(reads=40, seed=3), folder / "few.fasta.gz").reads_file
    install_head(folder / "other" / "head", models, install_anyway=True)
    assert cli.main(["models", "use-head", "1", "--models", str(models)]) == 0
    spec = RunSpec(reads=(str(reads),), models=models, devices="cpu:1", out=folder / "run")
    predict(spec)
    validation = folder / "v" / "validation"
    validate(reads, models, validation, "cpu:2", shard_tokens=2048)
    # Files that only some validations have.
    overhead = OverheadFile(job="7", devices=("cpu",), shards=1, shard_tokens=2048, pairs=())
    write(validation / OVERHEAD, overhead)
    write(validation / TUNING, TuningFile())
    answers = dict.fromkeys(QUESTIONS, "yes")
    answer = ApprovalRecord.model_validate({**answers, "verdict": "approved", "reviewer": "A. B."})
    write(validation / "report" / "approval.json", answer)
    write_report(validation, load_profile(PROFILE), validation.parent / HISTORY)
    return Scene(run=spec.out, validation=validation, models=models, spec=spec)


@pytest.fixture
def scene(originals: Scene, tmp_path: Path) -> Scene:
    """Copies that may be damaged."""
    return Scene(
        run=Path(shutil.copytree(originals.run, tmp_path / "run")),
        validation=Path(shutil.copytree(originals.validation.parent, tmp_path / "v"))
        / "validation",
        models=Path(shutil.copytree(originals.models, tmp_path / "models")),
        spec=originals.spec,
    )


def files_of(folder: Path) -> Iterator[str]:
    """Yield the files below a folder by their relative names."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def commands_for(name: str, rules: dict[str, tuple[Command, ...]]) -> tuple[Command, ...]:
    """Return the commands that read a file again. A file that no rule names fails the test."""
    for pattern, commands in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return commands
    pytest.fail(f"{name}: say in this test which commands read this kind of file again")


def names_of_damage(path: Path) -> tuple[str, ...]:
    """Return words of which a message about a damaged file has at least one."""
    if path.parent.parent.name == "heads":
        return (path.parent.name,)
    if path.name in ("config.json", "model.safetensors", "tokenizer.json"):
        return (path.parent.name,)  # a run that was made from other models is called another run
    return (path.name,)


def require_not_used(
    path: Path,
    command: Command,
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    undamaged_result: object,
) -> None:
    """Run a command over a damaged file, and check that it names the file or writes it anew.

    Args:
        path: The file.
        command: The command.
        scene: The directories.
        capsys: What the command prints.
        caplog: What the command logs.
        undamaged_result: What the command returns if no file is damaged, for files of which the
            command reads only a part. None for all other files.
    """
    caplog.clear()
    capsys.readouterr()
    damaged_content = path.read_bytes()
    result = None
    message = ""
    try:
        result = command(scene)
    except VirnucError as error:  # a refusal, if it names the file
        message = str(error)
    output = capsys.readouterr()
    text = "\n".join([message, output.out, output.err, *caplog.messages])
    is_named = any(word in text for word in names_of_damage(path))
    is_replaced = not path.exists() or path.read_bytes() != damaged_content
    is_same = undamaged_result is not None and result == undamaged_result
    assert is_named or is_replaced or is_same, (
        f"{path.name} was used by {command.__name__}:\n{text}"
    )
    assert "Traceback" not in text


def walk(
    folder: Path,
    rules: dict[str, tuple[Command, ...]],
    scene: Scene,
    original: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    places: tuple[float, ...] = PLACES,
    places_of_run: Mapping[str, tuple[float, ...]] | None = None,
) -> None:
    """Damage each file of a folder at several places, one after the other.

    Args:
        folder: The copy that is damaged.
        rules: The commands that read each kind of file.
        scene: The directories.
        original: The folder without damage.
        capsys: What the commands print.
        caplog: What the commands log.
        places: Where a file is damaged, as shares of its length.
        places_of_run: Other places for the files in these subfolders.
    """
    n_tried = 0
    for name in files_of(original):
        for command in commands_for(name, rules):
            undamaged_result = None
            if Path(name).parent.name == "shards" and command in READ_SCORES_ONLY:
                undamaged_result = command(scene)
            run_name = Path(name).parts[0]
            for share in (places_of_run or {}).get(run_name, places):
                path = folder / name
                size = path.stat().st_size
                if size == 0:
                    continue
                flip_bit(path, place=int(share * (size - 1)), bit=n_tried % 8)
                n_tried += 1
                require_not_used(path, command, scene, capsys, caplog, undamaged_result)
                shutil.rmtree(folder)
                shutil.copytree(original, folder)
    assert n_tried > 10


def test_every_file_of_a_run(
    scene: Scene,
    originals: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    walk(scene.run, RUN_FILES, scene, originals.run, capsys, caplog)


def test_every_file_of_a_validation(
    scene: Scene,
    originals: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    walk(
        scene.validation,
        VALIDATION_FILES,
        scene,
        originals.validation,
        capsys,
        caplog,
        FEWER_PLACES,
        PLACES_OF_RUN,
    )


def test_every_file_of_a_models_directory(
    scene: Scene,
    originals: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    walk(scene.models, MODELS_FILES, scene, originals.models, capsys, caplog)


def test_the_history_beside_a_validation(
    scene: Scene,
    originals: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    history = scene.validation.parent / HISTORY
    content = history.read_bytes()
    for command in (verify, report):
        for share in PLACES:
            flip_bit(history, place=int(share * (len(content) - 2)), bit=2)
            require_not_used(history, command, scene, capsys, caplog, None)
            history.write_bytes(content)
