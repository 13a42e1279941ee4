"""The installed wheel works wherever it is started, also beside folders named `flows`, `tasks` and `deployments`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from tests.distributions import Distributions, build, check

from .deployment_runs import ended_run
from .processes import background, reserved_port

pytestmark = pytest.mark.slow
SAME_NAMES = ("flows", "tasks", "deployments")
DEPLOYMENT = """
name: elsewhere
pull:
  - prefect.deployments.steps.set_working_directory: {{directory: .}}
deployments:
  - name: installed
    entrypoint: virnuc.flows.prefect_flows.predict.predict
    work_pool: {{name: wheel, job_variables: {{working_dir: {folder}}}}}
"""


@dataclass(frozen=True)
class Installation:
    """The wheel in a virtual environment of its own, and a folder to start it from."""

    bin: Path
    folder: Path

    def run(
        self, program: str, *words: object, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the virtual environment in the folder."""
        return subprocess.run(
            [self.bin / program, *map(str, words)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )


def pip(*words: object) -> None:
    """Run pip of this environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def create_environment(folder: Path, wheel: Path) -> Path:
    """Install the wheel into a new virtual environment; other packages are those of this one."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", python, "install", "--quiet", "--no-deps", wheel)
    (own_packages,) = folder.glob("lib/python*/site-packages")
    # .pth files in these folders are not read, so an editable virnuc is not found through them
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    (own_packages / "other_packages.pth").write_text("\n".join(packages) + "\n")
    return folder / "bin"


def create_folder(folder: Path) -> Path:
    """Create a folder with packages of the same names as our source folders; all refuse an import."""
    for name in SAME_NAMES:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('this is another {name}')\n")
    return folder


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The source distribution, and the wheel that was built from it."""
    return build(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, distributions: Distributions
) -> Installation:
    """The installed wheel."""
    bin_folder = create_environment(tmp_path_factory.mktemp("environment"), distributions.wheel)
    return Installation(bin_folder, create_folder(tmp_path_factory.mktemp("elsewhere")))


@pytest.fixture
def environment() -> dict[str, str]:
    """This environment without what leads Python to our sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_both_distributions_have_their_files_and_no_others(distributions: Distributions) -> None:
    """The library for Hopper GPUs is there; tests, caches and what a build leaves are not."""
    assert check(distributions) == []


def test_the_wheel_and_not_the_sources_is_imported(
    installation: Installation, environment: dict[str, str]
) -> None:
    program = "import virnuc.flows.cli, virnuc_core; print(virnuc.__file__, virnuc_core.__file__)"
    process = installation.run("python", "-c", program, environment=environment)
    assert process.returncode == 0, process.stderr
    for path in process.stdout.split():
        assert Path(path).is_relative_to(installation.bin.parent)


def test_the_command_says_its_version(
    installation: Installation, environment: dict[str, str]
) -> None:
    process = installation.run("virnuc", "--version", environment=environment)
    assert (process.returncode, process.stdout) == (0, f"virnuc {version('virnuc')}\n"), (
        process.stderr
    )


def test_the_command_finds_its_own_modules_before_those_of_the_working_directory(
    installation: Installation, environment: dict[str, str]
) -> None:
    process = installation.run("virnuc", "--help", environment={**environment, "PYTHONPATH": "."})
    assert process.returncode == 0, process.stderr
    assert "  predict: " in process.stdout


def test_the_command_writes_simulated_reads(
    installation: Installation, environment: dict[str, str]
) -> None:
    process = installation.run(
        "virnuc", "simulate", "reads.fastq", "--reads", "20", environment=environment
    )
    assert process.returncode == 0, process.stderr
    lines = (installation.folder / "reads.fastq").read_text().splitlines()
    assert len(lines) == 4 * 20  # a FASTQ record has four lines


def test_a_worker_runs_a_deployment_of_the_installed_flow(
    installation: Installation, server: dict[str, str], few_reads: Path, models: Path
) -> None:
    prefect_file = installation.folder / "prefect.yaml"
    prefect_file.write_text(textwrap.dedent(DEPLOYMENT).format(folder=installation.folder))
    server = {name: value for name, value in server.items() if name != "PYTHONPATH"}
    prefect = ("-m", "prefect", "--no-prompt")
    for words in (
        ("work-pool", "create", "wheel", "--type", "process"),
        ("deploy", "--prefect-file", prefect_file, "--all"),
    ):
        process = installation.run("python", *prefect, *words, environment=server)
        assert process.returncode == 0, process.stdout + process.stderr

    out_dir = installation.folder / "run"
    log = installation.folder / "worker.log"
    parameters = {
        "reads": [str(few_reads)],
        "out": str(out_dir),
        "models": str(models),
        "devices": "cpu:1",
    }
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("predict/installed")
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    worker = (str(installation.bin / "python"), *prefect, "worker", "start", "-p", "wheel")
    with reserved_port() as port:
        server |= {"PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1"}
        server |= {"PREFECT_WORKER_WEBSERVER_PORT": str(port)}
        with background((*worker, "--with-healthcheck"), server, log, cwd=installation.folder):
            run = ended_run(flow_run.id)
            health = ("-m", "virnuc.deployments.worker_health")  # as the container asks
            healthy = installation.run("python", *health, environment=server)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert run.state is not None
    assert run.state.name == "Completed", log.read_text()
    assert (out_dir / "prediction_results.txt").is_file()
