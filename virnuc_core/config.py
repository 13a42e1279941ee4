"""Settings of every part, built once where a command or flow starts and written to the record."""

import errno
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from virnuc_core.encoder_names import DNA, MODEL_FOLDERS, PROTEIN
from virnuc_core.errors import MAX_SHOWN_LETTERS, ConfigError, VirnucError, join_first
from virnuc_core.input_names import expand_input

Precision = Literal["auto", "fp32", "fp16", "bf16", "int8"]
Int8Kernels = Literal["auto", "hopper", "triton"]
Attention = Literal["auto", "fused", "reference"]
Gelu = Literal["exact", "tanh"]
BaselineName = Literal["vanilla", "v1"]
OnError = Literal["stop", "skip"]
Share = Annotated[float, Field(ge=0, le=1)]
OnShare = Callable[[float], None]  # is called with the share of the work that is done, 0 to 1
# "models": measure workers that keep their models against workers that load them anew halfway.
Switch = Literal["commits", "sampler", "models"]
SWITCHES: tuple[Switch, ...] = get_args(Switch)

DEFAULT_MODEL_LENGTH = 500
# The largest file that is read whole: settings, sizes of a model, a tokenizer, markers.
SMALL_BYTES = 1 << 24
MAX_FAULTS = 5  # that one message names of a file or of settings
INPUT_FIELDS = ("mates_1", "mates_2", "reads")  # settings that name reads
# Numbers of synthetic reads, by the names of sizes
SIMULATED_SIZES = {
    "tiny": 10,
    "small": 100,
    "medium": 1000,
    "large": 10000,
    "100k": 10**5,
    "1m": 10**6,
    "6m": 6 * 10**6,
}
MAX_PROCESSES = 8  # that stage; with more, the process that unpacks is the limit
DEFAULT_THRESHOLD = 0.5  # viral score from which a read is called viral, unless another is given


class Spec(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineSpec(Spec):
    """How the packing engine computes.

    The fields of `RESULT_FIELDS` may change the bytes of results, the others never do.
    """

    precision: Precision = Field(
        "auto", description=f"auto: fp16 on CUDA, fp32 on CPU; int8: {PROTEIN.title}, calibrated"
    )
    attention: Attention = Field(
        "auto", description="attention backend; auto chooses once per device and records it"
    )
    gelu: Gelu = Field(
        "exact",
        description=f"GELU of {PROTEIN.title}; tanh: an approximation, faster in fp16 and bf16",
    )
    int8_kernels: Int8Kernels = Field(
        "auto",
        description="what rounds rows to int8; auto: the library for Hopper GPUs (H100, H200) if "
        "all devices are such, else Triton",
    )
    token_budget: int = Field(
        16_384, ge=64, le=1 << 20, description=f"token slots of one packed {PROTEIN.title} batch"
    )
    dna_token_budget: int = Field(
        16_384, ge=64, le=1 << 20, description=f"token slots of one packed {DNA.title} batch"
    )
    shard_tokens: int = Field(
        262_144,
        ge=64,
        le=1 << 32,
        description=f"{PROTEIN.title} tokens of one shard: the unit of commit",
    )
    num_workers: int = Field(
        0, ge=0, le=64, description="loader processes of one worker; 0: a thread of the worker"
    )
    prefetch_factor: int = Field(
        4, ge=1, le=64, description="packed batches kept ready for each loader"
    )
    pin_memory: bool = Field(True, description="pack into page-locked memory on CUDA")
    commit: bool = Field(
        True, description="write shards to disk; off: no resuming, and no embeddings are kept"
    )
    max_shard_attempts: int = Field(
        2, ge=1, le=10, description="workers a shard may kill before it is set aside"
    )
    heartbeat_s: float = Field(
        2.0, gt=0, description="a worker says at least this often that it lives"
    )
    device_wait_s: float = Field(
        0.0, ge=0, description="wait this long for a GPU another run is using"
    )
    silence_s: float = Field(
        120.0, gt=0, description="a worker silent for longer is ended and restarted"
    )


RESULT_FIELDS = (
    *("precision", "attention", "gelu", "token_budget", "dna_token_budget", "shard_tokens"),
)


def gelu_problem(gelu: Gelu, precision: str, attention: str, kind: str) -> str:
    """Return why a form of GELU cannot run with other settings; "" if it can.

    The library computes GELU by tanh together with the product before it. This is done only for
    numbers of 16 bits, on a GPU, and with our kernels around it.

    Args:
        gelu: The form of GELU.
        precision: The number format, with `auto` replaced.
        attention: The implementation of the encoders: auto, fused or reference.
        kind: The kind of device: cuda or cpu.
    """
    if gelu == "exact":
        return ""
    if kind != "cuda":
        return f"gelu '{gelu}' needs a CUDA device, this is {kind}; use exact"
    if precision not in ("fp16", "bf16"):
        return f"gelu '{gelu}' wants precision fp16 or bf16, not {precision}; use exact"
    if attention == "reference":
        return f"gelu '{gelu}' wants attention fused, not reference; use exact"
    return ""


class TraceOptions(Spec):
    """What torch's profiler records of a run."""

    traced_shards: int = Field(
        1, ge=1, le=8, description="shards recorded on each device, after one to warm up"
    )
    operations: int = Field(20, ge=1, le=100, description="rows of the table of operations")
    shapes: bool = Field(False, description="tell operations apart by the shapes of their inputs")
    memory: bool = Field(False, description="record allocations as well")
    memory_history: bool = Field(
        False,
        description="GPUs: write each allocation to a file for pytorch.org/memory_viz",
    )
    stacks: bool = Field(False, description="record the lines of Python behind each operation")
    tensorboard: bool = Field(
        False, description="name traces DEVICE.pt.trace.json.gz, as TensorBoard's plugin wants them"
    )
    max_trace_mb: int = Field(
        200, ge=0, le=4096, description="a larger trace or history is removed, its tables stay"
    )


class TraceSpec(TraceOptions):
    """What a worker records: whole shards, so that every encoder and the classifier are in it."""

    folder: str  # for `<device>.json.gz` and `<device>.operations.json`
    skip: int = 1  # shards that are not recorded first, because they warm caches and allocators


class Devices(Spec):
    """The devices of a run: CUDA devices by index or UUID, or a number of CPU cores."""

    kind: Literal["cuda", "cpu", "auto"]
    ids: tuple[str, ...] = ()
    # Why `auto` took these devices, for the record of a run. Empty if the user named them.
    auto_remark: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `cuda:0,cuda:1`, `cuda:GPU-<uuid>`, `cpu:2`, `cpu` (one core) or `auto`.

        Args:
            text: The devices as the user gave them.

        Returns:
            The devices. It is not checked whether this machine has them.

        Raises:
            ConfigError: The text has another form, or names a device twice.
        """
        text = text.strip()
        if text == "auto":
            return cls(kind="auto")
        cores = re.fullmatch(r"cpu(?::(\d{1,4}))?", text)
        if cores:
            n_cores = int(cores[1] or 1)
            if n_cores == 0:
                raise ConfigError(f"devices '{text}': cpu:0 has no core; use cpu:1 or more")
            return cls(kind="cpu", ids=tuple(map(str, range(n_cores))))
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if not re.fullmatch(r"cuda:(\d+|(GPU|MIG)-[0-9a-fA-F-]+)", name):
                raise ConfigError(
                    f"devices '{text}': '{name}' is not a device; "
                    "use cuda:0,cuda:1 or cpu:2 or auto"
                )
        if len(set(names)) != len(names):
            raise ConfigError(f"devices '{text}': a device is named twice; name each once")
        return cls(kind="cuda", ids=tuple(name.removeprefix("cuda:") for name in names))

    def __str__(self) -> str:
        """Return the devices in the form that `parse` reads."""
        if self.kind == "cuda":
            return ",".join(f"cuda:{device}" for device in self.ids)
        if self.kind == "cpu":
            return f"cpu:{len(self.ids)}"
        return "auto"


def _parse_devices(value: object) -> object:
    """Read devices that are given as text. Anything else is left to pydantic's own check."""
    if isinstance(value, str):
        return Devices.parse(value)
    return value


DevicesAsText = Annotated[Devices, BeforeValidator(_parse_devices), PlainSerializer(str)]


class ClusterSpec(Spec):
    """Other machines to compute on, through Dask. `devices` chooses the GPUs or cores of each."""

    cluster: str | None = Field(
        None,
        description="compute on the nodes of a Dask scheduler (tcp://… or tls://…), "
        "of FILE.yaml, or of local:N",
        pattern=r"^((tcp|tls)://\S+|local:[1-9][0-9]{0,2}|.+\.ya?ml)$",
    )
    nodes: str = Field(
        "1",
        description="nodes that FILE.yaml asks for: 4, or 2:8 by shards left",
        pattern=r"^[1-9]\d*(:[1-9]\d*)?$",
    )
    node_wait_s: float = Field(
        600.0, gt=0, description="seconds to wait for a node where there is none"
    )
    mixed_devices: bool = Field(
        False, description="nodes of other GPU models or torch: results then are not bit-exact"
    )
    models_local: Path | None = Field(
        None, description="folder of a node's own disk to copy the models to, once"
    )
    transfer: bool = Field(
        False, description="nodes share no file system: reads, models and results go through Dask"
    )


class LiveSpec(Spec):
    """Where a run shows its figures while it goes on."""

    metrics_file: Path | None = Field(
        None,
        description="FILE.prom: live figures for Prometheus, "
        "read by node_exporter's textfile collector",
    )


class HostSpec(Spec):
    """What the cores of this machine do beside the devices."""

    stage_workers: int = Field(
        0,
        ge=0,
        le=256,
        description=f"processes that stage reads, write results; 0: one a core, to {MAX_PROCESSES}",
    )

    @property
    def workers(self) -> int:
        """Return the number of processes that stage reads and write results.

        If the user gave none, it is the number of cores that this process may use, up to a limit.
        """
        if self.stage_workers:
            return self.stage_workers
        n_cores = len(os.sched_getaffinity(0))  # cores that this process may use
        return min(MAX_PROCESSES, n_cores)


class ReadingSpec(HostSpec):
    """How input is read."""

    on_error: OnError = Field("stop", description="a broken record: stop, or skip it and count it")
    strict: bool = Field(
        False, description="refuse duplicate read ids instead of keeping them apart"
    )
    email: str | None = Field(
        None,
        description="mail address that NCBI asks for, when reads are ncbi: accessions; "
        "it is recorded nowhere",
    )


class ReadsSpec(ReadingSpec):
    """Which reads are read, which of them are mates, and how."""

    reads: tuple[str, ...] = Field(
        (),
        description="FASTA, FASTQ or BAM files or folders, plain or compressed; -; "
        "https://…; ncbi:ACCESSIONS",
    )
    mates_1: tuple[str, ...] = Field(
        (), description="files of first mates, each in step with one of --mates-2"
    )
    mates_2: tuple[str, ...] = Field((), description="files of second mates, as many")
    interleaved: bool = Field(False, description="mates follow each other in READS")
    pairs: bool = Field(
        True,
        description="judge mates together; files that are mates by their names or flags (BAM)",
    )
    read_group: str = Field(
        "",
        description="of BAM, CRAM or SAM: only reads of read groups of this sample (SM, else ID)",
    )

    @property
    def all_inputs(self) -> tuple[str, ...]:
        """All inputs as the user gave them: files of first mates, of second mates, and of reads."""
        return (*self.mates_1, *self.mates_2, *self.reads)

    @field_validator("mates_1", "mates_2", "reads")
    @classmethod
    def _expand_inputs(cls, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """Replace `~` by the home folder, and refuse addresses that virnuc does not read."""
        return tuple(expand_input(name) for name in inputs)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        """Require some input of reads, and a file of second mates for each file of first mates."""
        if len(self.mates_1) != len(self.mates_2):
            raise ConfigError(
                f"-1 names {len(self.mates_1)} files, -2 {len(self.mates_2)}; "
                "name both of each pair"
            )
        # Settings derived from these may have a field `samples`, a sheet that lists the reads, or
        # `simulate`: the reads are made by the flow.
        substitute = getattr(self, "samples", None) or getattr(self, "simulate", None)
        inputs = self.all_inputs or (str(substitute or ""),)
        if "" in inputs:  # as a path it would be the working directory
            raise ConfigError(
                "reads: none are named; name files or folders, or the files of pairs by -1 and -2"
            )
        return self


class SamplesSpec(ReadsSpec):
    """Reads of one sample, or of several that are each a run of their own."""

    samples: Path | None = Field(
        None,
        description="sample sheet (columns sample, fastq_1, fastq_2): "
        "a run for each sample, in OUT/sample",
    )
    sample_from: Literal["none", "name", "read-group"] = Field(
        "none",
        description="one run per sample, named by file name or by the read groups of a BAM "
        "(SM, else ID)",
    )

    @property
    def has_samples(self) -> bool:
        """Tell whether the reads are of several samples, each with a run of its own."""
        return self.samples is not None or self.sample_from != "none"


class VerdictSpec(Spec):
    """Which scores are called viral, and which reads are written out."""

    threshold: float = Field(
        DEFAULT_THRESHOLD, ge=0, le=1, description="viral score from which a read is called viral"
    )
    fdr: Share | None = Field(
        None, description="instead: the head's own threshold for this false discovery rate: 0.01"
    )
    abstain: bool = Field(
        False, description="reads with scores that the head's card calls uncertain are not judged"
    )
    fdr_outside_domain: bool = Field(
        False,
        description="use --fdr and --abstain also on reads unlike those of the head's training",
    )
    write_viral: bool = Field(
        False, description="also write the viral reads in the input's own format, gzipped"
    )
    write_nonviral: bool = Field(
        False, description="also write all other reads, those without a verdict among them"
    )

    @property
    def written_verdicts(self) -> tuple[str, ...]:
        """Return the verdicts whose reads are written out, of "viral" and "nonviral"."""
        verdicts = []
        if self.write_viral:
            verdicts.append("viral")
        if self.write_nonviral:
            verdicts.append("nonviral")
        return tuple(verdicts)


class ClassifySpec(VerdictSpec, ClusterSpec, LiveSpec, HostSpec):
    """One run over staged reads."""

    models: Path = Field(description=f"models directory: {MODEL_FOLDERS}")
    devices: DevicesAsText = Devices(kind="auto")
    engine: EngineSpec = EngineSpec()
    force: bool = Field(
        False, description="start over: results of an earlier run in the directory are removed"
    )
    parameters: dict[str, Any] = Field(
        {}, description="all that the run was started with, and its sample's name"
    )

    @model_validator(mode="after")
    def _can_do_without_shards(self) -> Self:
        """Refuse a run on a cluster that writes no shards: its nodes answer by these files."""
        if self.cluster is not None and not self.engine.commit:
            raise ConfigError(
                "checkpoints cannot be disabled on a cluster, whose nodes hand over their results "
                "in these files; leave out --disable-checkpointing"
            )
        return self


class RunSpec(ReadsSpec, ClassifySpec):
    """One predict run: reads in, result files out."""

    out: Path = Field(description="run directory")


class TrainSpec(Spec):
    """How a classifier (head) is trained and evaluated.

    Optimiser and stopping rule are those of VirNucPro; batch size and step are larger.
    """

    truth: Path = Field(
        description="table of read id, label (virus or others), genome and, if known, kind"
    )
    groups: Path | None = Field(
        None, description="table of genome and group: genomes of a group are never parted"
    )
    genomes: Path | None = Field(
        None, description="FASTA of the genomes: for kin, and tests at 150, 300 and 500 bases"
    )
    coding_only: Path | None = Field(
        None, description="GFF of the genomes: only frames in coding regions are used"
    )
    method: Literal["network", "linear", "mean"] = Field(
        "mean",
        description="a network, a logistic regression (linear), or the mean of their log-odds",
    )
    epochs: int = Field(200, ge=1, description="passes over the training rows at most")
    patience: int = Field(
        5, ge=1, description="epochs without a lower validation loss before stopping"
    )
    learning_rate: float = Field(5e-3, gt=0, description="step of the optimiser at first")
    hidden: int = Field(512, ge=1, description="width of the head's hidden layer")
    rows_per_class: int = Field(
        25_000, ge=2, description="frames of a class that are used; the rest is left out"
    )
    sampling: Literal["even", "natural"] = Field(
        "even", description="of each genome a read in turn, or by chance"
    )
    balance: Literal["none", "kind", "gc", "kind-gc"] = Field(
        "none", description="what weighs alike within a class: each kind, each range of GC, or both"
    )
    validation_share: float = Field(
        0.2, gt=0, le=0.5, description="share of what is not tested to stop by"
    )
    test_share: float = Field(0.2, gt=0, le=0.5, description="share of the frames to test with")
    folds: int = Field(
        5, ge=3, le=50, description="parts of a cross-validation; each is asked about by the others"
    )
    repeats: int = Field(2, ge=0, le=20, description="cross-validations, each dealt anew; 0: none")
    prevalence: float = Field(
        0.01, gt=0, lt=1, description="share of viral reads that figures are also given for"
    )
    similarity: float = Field(
        0.05, gt=0, le=1, description="share of k-mers in common from which genomes are kin"
    )
    seed: int = Field(0, ge=0, description="of the splits and of the first weights")


def explain(
    error: ValidationError, *, show_values: bool = False, model: type[BaseModel] = BaseModel
) -> str:
    """Return a pydantic error as one line: `engine.token_budget: should be ≥ 64 (given 3)`.

    Args:
        error: The error. It may hold several faults; the first `MAX_FAULTS` are named.
        show_values: Show the values that were given. Not for files: the reader of the message may
            not be allowed to read the file.
        model: The model that was validated. Where a value misses a pattern, the description of the
            field tells the forms that it may have.
    """
    faults = []
    for item in error.errors()[:MAX_FAULTS]:
        problem = f"{item['msg'][0].lower()}{item['msg'][1:]}"
        if item["type"] == "json_invalid":  # the value is a whole file
            return problem
        # Where the wrong value is, for example engine.token_budget.
        place = re.sub(r"\s", " ", ".".join(map(str, item["loc"])))[:MAX_SHOWN_LETTERS]
        field = model.model_fields.get(place)
        if item["type"] == "string_pattern_mismatch" and field is not None:
            problem = f"unknown form; {field.description}"
        if item["type"] == "extra_forbidden" and model.model_fields:
            problem = "there is no such setting"
            similar_names = get_close_matches(place, model.model_fields, n=1)
            if similar_names:
                problem += f", did you mean {similar_names[0]}?"
        fault = f"{place or 'settings'}: {problem}"
        if show_values:
            value = repr(item.get("input"))
            if len(value) > MAX_SHOWN_LETTERS:
                value = f"{value[:MAX_SHOWN_LETTERS]}…"
            fault += f" (given {value})"
        faults.append(fault)
    n_hidden = error.error_count() - len(faults)
    if n_hidden > 0:
        faults.append(f"and {n_hidden} more")
    return "; ".join(faults)


@contextmanager
def refuse_unreadable(
    what: object, form: str, error_class: type[VirnucError] = ConfigError
) -> Iterator[None]:
    """Turn an error, while the body reads a file, into one line that names the file.

    Args:
        what: The file, or what it is.
        form: The format of the file, for the message.
        error_class: Class of the error to raise.

    Raises:
        VirnucError: An error of `error_class`: the file cannot be read, is not of this format, or
            has a wrong value. Its `__cause__` is the original error. `UnreadableError` and other
            errors of virnuc in the body are raised as they are.
    """
    try:
        yield
    except OSError as error:
        raise error_class(f"{what}: cannot be read ({error.strerror or error})") from error
    except ValidationError as error:
        raise error_class(f"{what}: {explain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise error_class(f"{what}: not valid {form}: {join_first([error])}") from error


def read_small_text(path: Path, max_bytes: int = SMALL_BYTES) -> str:
    """Return the text of a file.

    Args:
        path: The file, which may be a link.
        max_bytes: A larger file is refused, so that a wrong path cannot fill the memory.

    Raises:
        OSError: The file cannot be read, or is larger than `max_bytes` (`EOVERFLOW`).
        UnicodeDecodeError: It is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EOVERFLOW, f"larger than {max_bytes:,} bytes")
    return content.decode()


def read_settings(path: Path) -> dict[str, Any]:
    """Read engine settings from a TOML file.

    Args:
        path: The file.

    Returns:
        Name of the field of `EngineSpec` → value. The values are not checked yet.

    Raises:
        ConfigError: The file cannot be read, or contains something that is no engine setting.
    """
    with refuse_unreadable(f"settings {path}", "TOML"):
        settings = tomllib.loads(read_small_text(path))
    allowed_names = set(EngineSpec.model_fields) - {"commit"}  # commit is for measurements only
    unknown = sorted(set(settings) - allowed_names)
    if unknown:
        raise ConfigError(
            f"settings {path}: {join_first(unknown)} is no engine setting; see docs/operations.md"
        )
    return settings
