"""`virnuc predict --no-prefect` where Prefect cannot be imported, is damaged, or has no home; other flows there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from virnuc.flows.prefect_flows.predict import predict

from .flow_runs import RESULTS
from .processes import PATIENCE_S, VIRNUC, committed
from .running_command import SERVER, SIZES, results_digest, running

RUNS_ALONE = "the run goes on without a Prefect server, and is not in the UI"
# Every Python process of the run executes this at its start. It writes down imports of Prefect.
WATCH_IMPORTS = """
import os, sys, traceback
class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "prefect":
            with open(os.environ["IMPORTS_OF_PREFECT"], "a") as log:
                log.write(name + "\\n" + "".join(traceback.format_stack()))
sys.meta_path.insert(0, Watcher())
"""
# a container with a user id that its /etc/passwd does not have
NO_ACCOUNT = """
import pwd
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
"""


@dataclass(frozen=True)
class Surroundings:
    """The environment of a command, and what its processes import of Prefect.

    Attributes:
        environment: All variables.
        home: The home directory, unless a test takes it away.
        startup: A program that every Python process of the command executes at its start.
        imports: A file that exists only if a process has asked for Prefect.
    """

    environment: dict[str, str]
    home: Path
    startup: Path
    imports: Path

    def virnuc(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            [*VIRNUC, *map(str, words)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def predict(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a prediction without Prefect to its end."""
        return self.virnuc("predict", *words, "--devices", "cpu:1", "--no-prefect")


@pytest.fixture
def surroundings(tmp_path: Path) -> Surroundings:
    """A sound environment, in which imports of Prefect are seen."""
    home = tmp_path / "home"
    home.mkdir()
    packages = tmp_path / "packages"
    packages.mkdir()
    startup = packages / "sitecustomize.py"
    startup.write_text(WATCH_IMPORTS)
    imports = tmp_path / "imports"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    environment |= {
        "HOME": str(home),
        "PYTHONPATH": str(packages),
        "IMPORTS_OF_PREFECT": str(imports),
    }
    return Surroundings(environment, home, startup, imports)


def sound(_surroundings: Surroundings) -> None:
    """Leave all as it is."""


def not_importable(surroundings: Surroundings) -> None:
    package = surroundings.startup.parent / "prefect"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")


def home_unset(surroundings: Surroundings) -> None:
    for name in ("HOME", "USER", "LOGNAME", "USERNAME"):
        surroundings.environment.pop(name, None)
    with surroundings.startup.open("a") as program:
        program.write(NO_ACCOUNT)


def home_absent(surroundings: Surroundings) -> None:
    surroundings.environment["HOME"] = "/nonexistent"


def home_is_a_file(surroundings: Surroundings) -> None:
    """Nobody can write there, not even root, for whom permission bits are no hindrance."""
    surroundings.home.rmdir()
    surroundings.home.write_text("a file")


def damaged_profiles(surroundings: Surroundings) -> None:
    folder = surroundings.home / ".prefect"
    folder.mkdir()
    (folder / "profiles.toml").write_text("= [")


def damaged_database(surroundings: Surroundings) -> None:
    folder = surroundings.home / ".prefect"
    folder.mkdir()
    (folder / "prefect.db").write_text("no tables")


def damaged_logging(surroundings: Surroundings) -> None:
    """Prefect reads this file when a flow is loaded, after the server was started."""
    folder = surroundings.home / ".prefect"
    folder.mkdir()
    (folder / "logging.yml").write_text(": : [")


def wrong_address(surroundings: Surroundings) -> None:
    surroundings.environment["PREFECT_API_URL"] = "nonsense"


def wrong_level(surroundings: Surroundings) -> None:
    surroundings.environment["PREFECT_LOGGING_LEVEL"] = "nonsense"


def wrong_number(surroundings: Surroundings) -> None:
    surroundings.environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "soon"


def wrong_serializer(surroundings: Surroundings) -> None:
    """Prefect reads this when a flow run begins, after the server has answered."""
    surroundings.environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] = "nonsense"


def missing_profile(surroundings: Surroundings) -> None:
    surroundings.environment["PREFECT_PROFILE"] = "missing"


def all_settings_wrong(surroundings: Surroundings) -> None:
    """All at once: one of them alone would stop a command that asks Prefect."""
    for spoil in (damaged_profiles, wrong_address, wrong_level, missing_profile):
        spoil(surroundings)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
    few_reads: Path,
    models: Path,
    prefect_backend: Path,
) -> dict[str, bytes]:
    """The result files of a run that a Prefect server showed, by name."""
    out_dir = tmp_path_factory.mktemp("with-server") / "run"
    predict(reads=[str(few_reads)], out=out_dir, models=models, devices="cpu:1")
    return {name: (out_dir / name).read_bytes() for name in RESULTS}


@pytest.mark.parametrize(
    "spoil",
    [
        not_importable,
        pytest.param(home_unset, marks=pytest.mark.slow),
        pytest.param(sound, marks=pytest.mark.slow),
        pytest.param(home_absent, marks=pytest.mark.slow),
        pytest.param(home_is_a_file, marks=pytest.mark.slow),
        pytest.param(all_settings_wrong, marks=pytest.mark.slow),
    ],
)
def test_a_prediction_without_prefect_never_asks_for_it(
    spoil: Callable[[Surroundings], None],
    surroundings: Surroundings,
    few_reads: Path,
    models: Path,
    results: dict[str, bytes],
    tmp_path: Path,
) -> None:
    spoil(surroundings)
    out_dir = tmp_path / "run"
    outcome = surroundings.predict(few_reads, "-o", out_dir, "--models", models)
    assert outcome.returncode == 0, outcome.stderr
    assert {name: (out_dir / name).read_bytes() for name in RESULTS} == results
    assert not surroundings.imports.exists(), surroundings.imports.read_text()
    *_, results_line, _, time_line = outcome.stdout.splitlines()
    assert results_line == f"Results: {out_dir}"
    assert time_line.startswith("Time: ")
    for trace in ("Traceback", "Warning", "Prefect", "prefect"):
        assert trace not in outcome.stderr
    left = {path.name for path in Path.cwd().glob("~*")}
    assert left == set()


@pytest.fixture
def no_prefect(surroundings: Surroundings) -> Surroundings:
    """An environment without Prefect and without a home."""
    not_importable(surroundings)
    home_unset(surroundings)
    return surroundings


@pytest.mark.slow
def test_samples_are_predicted_and_resumed_without_prefect(
    no_prefect: Surroundings, few_reads: Path, models: Path, tmp_path: Path
) -> None:
    sheet = tmp_path / "samples.csv"
    same_reads = shutil.copy(few_reads, tmp_path / "same.fastq.gz")  # a file is of one sample only
    sheet.write_text(f"sample,fastq_1,fastq_2\nlung,{few_reads},\ngut,{same_reads},\n")
    out_dir = tmp_path / "run"
    words = ("--samples", sheet, "-o", out_dir, "--models", models)
    first = no_prefect.predict(*words)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("2 samples: ")
    shutil.rmtree(out_dir / "gut")
    summary = out_dir / "lung" / "summary.json"
    written_ns = summary.stat().st_mtime_ns
    second = no_prefect.predict(*words)
    assert second.returncode == 0, second.stderr
    # The last line tells the time, which differs.
    assert second.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]
    assert summary.stat().st_mtime_ns == written_ns  # what is complete is not computed again
    for name in RESULTS:
        assert (out_dir / "gut" / name).read_bytes() == (out_dir / "lung" / name).read_bytes()
    assert not no_prefect.imports.exists()


def test_a_script_gets_the_outcome_without_prefect(
    no_prefect: Surroundings, few_reads: Path, models: Path, tmp_path: Path
) -> None:
    words = (few_reads, "-o", tmp_path / "run", "--models", models, "--json", "--quiet")
    first = no_prefect.predict(*words)
    second = no_prefect.predict(*words)
    assert [outcome.returncode for outcome in (first, second)] == [0, 0]
    assert first.stderr == second.stderr == ""
    facts = json.loads(first.stdout)
    assert (facts["state"], facts["exit_code"]) == ("Completed", 0)
    assert sum(facts["data"]["fates"].values()) == 60
    repeated = json.loads(second.stdout)
    assert repeated["message"] == f"{facts['message']}; nothing had to be computed"
    assert repeated["data"] == facts["data"]
    # The time that the user waited, of the command that has computed the run.
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["data"]["waited_s"] == summary["waited_s"] > summary["total_s"] > 0


def damaged_reads(folder: Path) -> tuple[int, dict[str, object]]:
    (folder / "damaged.fq").write_text("@r1\nACGT\n+\nII\n")
    return 2, {"reads": folder / "damaged.fq"}


def no_weights(folder: Path) -> tuple[int, dict[str, object]]:
    (folder / "none").mkdir()
    return 3, {"--models": folder / "none"}


def no_device(_folder: Path) -> tuple[int, dict[str, object]]:
    return 4, {"--devices": "cpu:4096"}


@pytest.mark.parametrize(
    "wrong",
    [
        damaged_reads,
        pytest.param(no_weights, marks=pytest.mark.slow),
        pytest.param(no_device, marks=pytest.mark.slow),
    ],
)
def test_exit_codes_are_the_same_without_prefect(
    wrong: Callable[[Path], tuple[int, dict[str, object]]],
    no_prefect: Surroundings,
    few_reads: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    code, changes = wrong(tmp_path)
    values = {"reads": few_reads, "--models": models, "--devices": "cpu:1"} | changes
    reads = values.pop("reads")
    options = [word for option in values.items() for word in option]
    outcome = no_prefect.virnuc(
        "predict", reads, "-o", tmp_path / "run", *options, "--no-prefect", "--quiet"
    )
    assert outcome.returncode == code, outcome.stderr
    [line] = outcome.stderr.splitlines()
    assert line.startswith("virnuc: ")
    assert "unexpected" not in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_without_prefect_leaves_no_process_and_goes_on_later(
    number: signal.Signals,
    no_prefect: Surroundings,
    some_reads: Path,
    models: Path,
    undisturbed: str,
    tmp_path: Path,
) -> None:
    environment = no_prefect.environment | {"VIRNUC_NO_PREFECT": "1"}
    with running(tmp_path, some_reads, models, environment) as run:
        assert SERVER not in run.commands()
        run.process.send_signal(number)
        assert run.ends() == 130, run.log.read_text()
        assert "interrupted; what was committed stays" in run.log.read_text()
    n_committed = committed(run.out)
    assert n_committed >= 2
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    outcome = no_prefect.predict(some_reads, "-o", run.out, "--models", models, *sizes)
    assert outcome.returncode == 0, outcome.stderr
    assert results_digest(run.out) == undisturbed
    assert not no_prefect.imports.exists()


@pytest.mark.slow
def test_a_cluster_needs_no_prefect(
    no_prefect: Surroundings,
    few_reads: Path,
    models: Path,
    results: dict[str, bytes],
    tmp_path: Path,
) -> None:
    out_dir = tmp_path / "run"
    words = (few_reads, "-o", out_dir, "--models", models, "--cluster", "local:2")
    outcome = no_prefect.predict(*words)
    assert outcome.returncode == 0, outcome.stderr
    assert {name: (out_dir / name).read_bytes() for name in RESULTS} == results
    assert not no_prefect.imports.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        home_unset,
        home_is_a_file,
        damaged_profiles,
        damaged_logging,
        wrong_level,
        wrong_number,
        wrong_serializer,
    ],
)
def test_a_prediction_goes_on_whatever_is_wrong_with_prefect(
    spoil: Callable[[Surroundings], None],
    surroundings: Surroundings,
    few_reads: Path,
    models: Path,
    results: dict[str, bytes],
    tmp_path: Path,
) -> None:
    spoil(surroundings)
    out_dir = tmp_path / "run"
    words = ("predict", few_reads, "-o", out_dir, "--models", models, "--devices", "cpu:1")
    outcome = surroundings.virnuc(*words)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.count(RUNS_ALONE) == 1, outcome.stderr
    assert {name: (out_dir / name).read_bytes() for name in RESULTS} == results


# the words of each flow by hand besides --out and --models, and a file that it must write
FLOWS = {
    "predict": (("{reads}",), "reads.tsv"),
    "predict-inbox": (("--inbox", "{inbox}", "--settle-s", "0"), "inbox.tsv"),
    "profile": (("{reads}",), "telemetry/traces/profile.md"),
    "tune": (
        (
            *("{reads}", "--profile", "ci-smoke", "--repeats", "1", "--token-budgets", "8192"),
            *("--loader-workers", "0", "--prefetch-factors", "2"),
        ),
        "settings.toml",
    ),
    "train": (
        ("{reads}", "--truth", "{truth}", "--epochs", "2", "--folds", "3", "--repeats", "0"),
        "train.html",
    ),
    "scale": (("{reads}", "--profile", "ci-smoke"), "report/report.html"),
    "validate": (("{reads}", "--profile", "ci-smoke"), "report/report.html"),
}

# what the terminal shows in a table at the end
TABLES = {
    "profile": ("Total wall time", "Recorded stages", "Operations that took most time"),
    "tune": ("queue depth", "recommended"),
    "scale": ("GPU Scaling", "Efficiency"),
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reads with their origins, and an inbox with one file of reads, by the words in `FLOWS`."""
    from virnuc_core.reads.simulate import SimulateSpec, simulate

    folder = tmp_path_factory.mktemp("labelled")
    simulation = simulate(SimulateSpec(reads=200, seed=5), folder / "train.fastq")
    (folder / "inbox").mkdir()
    shutil.copy(simulation.reads_file, folder / "inbox" / "new.fastq")
    return {
        "reads": str(simulation.reads_file),
        "truth": str(simulation.truth_file),
        "inbox": str(folder / "inbox"),
    }


def words_of(name: str, labelled: dict[str, str], out_dir: Path, models: Path) -> list[str]:
    """Return the command line of a flow."""
    words, _ = FLOWS[name]
    own_words = [word.format(**labelled) for word in words]
    files = ["--out", str(out_dir), "--models", str(models), "--devices", "cpu:1"]
    return [name, *own_words, *files]


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("spoil", [not_importable, damaged_database])
def test_every_flow_goes_on_if_no_server_can_be_had_and_says_so_in_one_line(
    name: str,
    spoil: Callable[[Surroundings], None],
    surroundings: Surroundings,
    labelled: dict[str, str],
    models: Path,
    tmp_path: Path,
) -> None:
    spoil(surroundings)
    out_dir = tmp_path / "run"
    outcome = surroundings.virnuc(*words_of(name, labelled, out_dir, models))
    # a curve over one device judges nothing, see `test_nothing_judged_is_no_success`
    expected_code = 7 if name == "scale" else 0
    assert outcome.returncode == expected_code, outcome.stderr
    assert outcome.stderr.count(RUNS_ALONE) == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert (out_dir / FLOWS[name][1]).is_file()
    for text in TABLES.get(name, ()):
        assert text in outcome.stdout
    if name == "validate":
        assert "In the UI: the run is not there" in outcome.stdout


@pytest.mark.parametrize(
    "spoil",
    [
        not_importable,
        wrong_number,
        pytest.param(home_unset, marks=pytest.mark.slow),
        pytest.param(damaged_profiles, marks=pytest.mark.slow),
        pytest.param(damaged_database, marks=pytest.mark.slow),
    ],
)
def test_a_validation_that_needs_a_reviewer_stops_in_one_line_without_a_server(
    spoil: Callable[[Surroundings], None],
    surroundings: Surroundings,
    labelled: dict[str, str],
    models: Path,
    tmp_path: Path,
) -> None:
    spoil(surroundings)
    out_dir = tmp_path / "run"
    words = words_of("validate", labelled, out_dir, models)
    outcome = surroundings.virnuc(*words, "--approval")
    assert outcome.returncode == 2, outcome.stderr
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("virnuc: Prefect")
    assert "leave out --approval" in line
    assert RUNS_ALONE not in outcome.stderr
    assert not out_dir.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        not_importable,
        pytest.param(damaged_profiles, marks=pytest.mark.slow),
        pytest.param(wrong_level, marks=pytest.mark.slow),
    ],
)
def test_a_named_server_is_needed_even_where_prefect_cannot_be_loaded(
    spoil: Callable[[Surroundings], None],
    surroundings: Surroundings,
    few_reads: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    """Its user looks for the run there; without a word it would be missed."""
    spoil(surroundings)
    surroundings.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    outcome = surroundings.virnuc(
        "predict", few_reads, "-o", tmp_path / "run", "--models", models, "--devices", "cpu:1"
    )
    assert outcome.returncode == 2, outcome.stderr
    line = outcome.stderr.splitlines()[-1]  # Prefect itself may write others before
    assert line.startswith("virnuc: Prefect cannot be loaded")
    assert "--no-prefect" in line


@pytest.mark.slow
def test_doctor_says_that_prefect_cannot_be_used(no_prefect: Surroundings) -> None:
    """The other checks are made all the same."""
    outcome = no_prefect.virnuc("doctor")
    assert "unexpected" not in outcome.stderr
    (line,) = [line for line in outcome.stdout.splitlines() if "Prefect server:" in line]
    assert line.startswith("warn  Prefect server: Prefect cannot be used here (")
    assert line.endswith("; virnuc predict --no-prefect works")
    assert "This machine is " in outcome.stdout
