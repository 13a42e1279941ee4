"""Flat parameters from one model: the signature, the form's schema, and what a bad value is answered with."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from pydantic import Field

from virnuc.flows import prefect_flows
from virnuc.flows.cli import main, run_from_terminal
from virnuc.flows.parameters import build, fields_of, form_description, with_flow_signature
from virnuc.flows.prefect_flows.predict import predict
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import (
    AttentionChoice,
    ComputeSettings,
    GeluChoice,
    PrecisionChoice,
)
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.validate import ValidateSettings
from virnuc_core.allowed_paths import require_allowed_options
from virnuc_core.config import Attention, Devices, EngineSpec, Gelu, Precision, RunSpec, Spec
from virnuc_core.encoders.model_config import HeadShape, read_shape
from virnuc_core.errors import ConfigError, InputError, WeightsError
from virnuc_core.profiles import load_profile
from virnuc_core.reads.parse import ParseLog, parse
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.validation import ValidationRecord


def flow_parameters(model: type[Any]) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """What a flow does with its parameters, without Prefect and what else surrounds its work."""

    def decorate(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def called(**values: Any) -> Any:
            settings = build(model, values)
            require_allowed_options(settings)
            return function(settings)

        return with_flow_signature(called, function, model)

    return decorate


class Base(Spec):
    """Inherited settings."""

    workers: int = Field(2, ge=1, le=8, description="how many")


class Cooking(Base):
    """A model."""

    dish: str = Field(min_length=2, description="what is cooked")
    heat: Literal["low", "high"] = Field("low", description="how hot")


@flow_parameters(Cooking)
def cook(settings: Cooking) -> str:
    """Cooks."""
    return f"{settings.dish} on {settings.heat} by {settings.workers}"


def test_a_function_of_a_model_becomes_one_of_its_fields() -> None:
    assert list(inspect.signature(cook).parameters) == ["dish", "heat", "workers"]
    assert cook(dish="soup", workers=3) == "soup on low by 3"


def test_own_fields_stand_before_inherited_ones() -> None:
    assert list(fields_of(Cooking)) == ["dish", "heat", "workers"]


def test_the_form_knows_descriptions_bounds_choices_and_defaults() -> None:
    properties = parameter_schema(cook).properties
    assert properties["workers"]["minimum"] == 1
    assert properties["workers"]["maximum"] == 8
    assert properties["workers"]["default"] == 2
    assert properties["workers"]["description"] == "how many"
    assert properties["heat"]["enum"] == ["low", "high"]
    assert parameter_schema(cook).required == ["dish"]


FLOWS_OF_A_FORM = [
    importlib.import_module(f"virnuc.flows.prefect_flows.{module.name}")
    for module in pkgutil.iter_modules(prefect_flows.__path__)
]


@pytest.mark.parametrize("module", FLOWS_OF_A_FORM, ids=lambda module: module.__name__)
def test_a_form_asks_first_for_what_every_run_needs(module: ModuleType) -> None:
    (flow,) = (item for item in vars(module).values() if isinstance(item, Flow))
    schema = parameter_schema(flow)
    names = sorted(schema.properties, key=lambda name: schema.properties[name]["position"])
    needed = {*schema.required, *({"reads"} & {*names})}
    assert {*names[: len(needed)]} == needed
    assert names.index("out") < names.index("models"), "in the same order everywhere"
    if "samples" in names:
        assert names.index("samples") == len(needed)


def test_a_form_explains_reads_samples_and_out() -> None:
    properties = parameter_schema(predict).properties
    assert "as the worker's machine sees them" in properties["reads"]["description"]
    assert "other names belong in mates_1 and mates_2" in properties["reads"]["description"]
    assert "Leave it empty if you name a sample sheet" in properties["reads"]["description"]
    assert "columns sample, fastq_1 and fastq_2" in properties["samples"]["description"]
    assert "a folder of its own" in properties["out"]["description"]


def test_a_form_names_fields_and_no_options_of_the_command() -> None:
    assert form_description(PredictSettings, "mates_1").endswith("in step with one of mates_2")
    assert form_description(ValidateSettings, "baseline_reads").endswith("with baseline_seconds")
    assert form_description(PredictSettings, "interleaved").endswith("in reads")
    for model in (PredictSettings, ValidateSettings, TrainSettings, InboxSettings):
        for name in fields_of(model):
            assert "--" not in form_description(model, name)


def test_a_field_that_is_defined_anew_has_its_own_words_in_the_form() -> None:
    assert form_description(OverheadSettings, "out") == "directory of a finished validation"
    assert form_description(ValidateSettings, "out") == "directory of the runs and the report"
    assert "on where it was" in form_description(PredictSettings, "out")


def test_a_value_of_no_known_form_is_told_the_forms_and_no_pattern() -> None:
    good = {"reads": ("a",), "out": Path("o"), "models": Path("m")}
    for name, value, forms in (
        (
            "cluster",
            "foo",
            r"compute on the nodes of .* \(tcp://… or tls://…\), of FILE\.yaml, or of local:N",
        ),
        ("baseline_device", "4090", "what that run was on: 2x RTX 4090"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^{name}: unknown form; {forms} \(given '{value}'\)$"
        ):
            build(ValidateSettings, good | {name: value})


def test_a_bad_value_is_one_sentence_that_names_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^workers: input should be less than or equal to 8 \(given 9\)$"
    ):
        cook(dish="soup", workers=9)
    with pytest.raises(ConfigError, match="spoon"):
        build(Cooking, {"dish": "soup", "spoon": 1})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-1", "a1", "b1", "-2", "a2", "b2"], ((), ("a1", "b1"), ("a2", "b2"))),
        (["one", "-1", "a1", "-2", "-"], (("one",), ("a1",), ("-",))),
        (["--mates-2", "a2", "--mates-1", "a1"], ((), ("a1",), ("a2",))),
        (["-", "--interleaved"], (("-",), (), ())),
    ],
)
def test_mates_are_named_by_one_and_two(
    words: list[str], named: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_settings: list[PredictSettings] = []
    monkeypatch.setattr(
        run_from_terminal,
        "run_from_terminal",
        lambda _flow, _model, settings: parsed_settings.append(settings),
    )
    with suppress(Exception):
        main(["predict", *words, "-o", "out", "--models", "m", "--no-pairs"])
    (found,) = parsed_settings
    assert (found.reads, found.mates_1, found.mates_2) == named
    assert (found.interleaved, found.pairs) == ("--interleaved" in words, False)


def test_reads_that_are_not_named_or_lack_their_mates_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, message in (
        ([], "reads: none are named; name files or folders, or the files of pairs by -1 and -2"),
        (["-1", "a1"], "-1 names 1 files, -2 0; name both of each pair"),
        (["-1", "a1", "b1", "-2", "a2"], "-1 names 2 files, -2 1; name both of each pair"),
        (["a1", ""], "an argument is empty; is a variable of the shell not set?"),
    ):
        assert main(["predict", *words, "-o", "out", "--models", "m"]) == 2
        assert capsys.readouterr().err == f"virnuc: {message}\n"
    assert main(["sample", "a1", "-n", "1", "-o", ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="reads: none are named"):
        RunSpec(reads=("",), out=Path("out"), models=Path("m"))


@pytest.mark.parametrize("name", [b"latin-\xe9".decode("utf-8", "surrogateescape"), "a\0b"])
def test_a_name_that_is_no_text_is_refused_by_the_setting_it_stands_in(name: str) -> None:
    for arguments in ({"reads": (name,)}, {"out": Path(name)}, {"models": name}):
        with pytest.raises(ConfigError, match=f"^{next(iter(arguments))}: .* is no text"):
            build(PredictSettings, {"reads": ("a.fa",), "out": "o", "models": "m"} | arguments)


def test_no_message_tells_what_stands_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text('precision = "hunter2"\n')
    with pytest.raises(ConfigError, match=r"^precision: ") as of_settings:
        ComputeSettings(settings=path).engine()
    path.write_text('name = ["hunter2"]\npassword = "hunter2"\n')
    with pytest.raises(ConfigError, match="password: extra") as of_profile:
        load_profile(str(path))
    path.write_text("hunter2\n")
    with pytest.raises(InputError, match="neither FASTA nor FASTQ") as of_reads:
        list(parse((str(path),), ParseLog("stop")))
    (tmp_path / "config.json").write_text('{"model": "hunter2"}')
    with pytest.raises(WeightsError, match="model: ") as of_models:
        read_shape(tmp_path / "config.json", HeadShape)
    for message in (of_settings, of_profile, of_reads, of_models):
        assert "hunter2" not in str(message.value)


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of reads and one of results are allowed; a link leads out of the first."""
    allowed_roots = tmp_path / "reads", tmp_path / "results"
    for folder in allowed_roots:
        folder.mkdir()
    (tmp_path / "secret").write_text("key")
    (tmp_path / "reads" / "link.fa").symlink_to(tmp_path / "secret")
    monkeypatch.setenv("VIRNUC_ROOTS", ":".join(map(str, allowed_roots)))
    return tmp_path


OUTSIDE = {
    "reads": ["reads/a.fa", "secret"],
    "out": "results/../other",
    "models": "models",
    "history": "h.jsonl",
    "settings": "s.toml",
    "profile": "p.toml",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_outside_of_the_roots_is_refused_whichever_parameter_it_stands_in(
    roots: Path, name: str
) -> None:
    parsed_settings = []
    flow = flow_parameters(ValidateSettings)(parsed_settings.append)
    good = {"reads": ["reads/a.fa"], "out": "results/x", "models": "reads/m"}

    def absolute(value):
        if isinstance(value, list):
            return [str(roots / path) for path in value]
        return str(roots / value)

    good = {key: absolute(value) for key, value in good.items()}
    flow(**good, history=None, profile="ci-smoke")
    assert len(parsed_settings) == 1
    with pytest.raises(
        ConfigError, match=f"^{name}: .* lies in none of the folders that VIRNUC_ROOTS names"
    ):
        flow(**good | {name: absolute(OUTSIDE[name])})
    assert len(parsed_settings) == 1


def test_a_name_too_long_for_a_file_is_not_looked_into(roots: Path) -> None:
    long = PredictSettings(
        reads=(str(roots / "reads" / ("x" * 300)),), out=roots / "results", models=roots / "results"
    )
    require_allowed_options(long)


def test_links_and_what_is_made_beside_the_output_stay_within_the_roots(
    roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "reads": [str(roots / "reads")],
        "out": str(roots / "results" / "x"),
        "models": str(roots / "results"),
    }
    flow = flow_parameters(PredictSettings)(lambda settings: settings)
    with pytest.raises(ConfigError, match=r"^reads: .*link\.fa lies in none"):
        flow(**arguments)
    (roots / "reads" / "link.fa").unlink()
    with pytest.raises(ConfigError, match=r"^mates_2: .*secret lies in none"):
        flow(
            **arguments
            | {"mates_1": [str(roots / "reads" / "a.fa")], "mates_2": [str(roots / "secret")]}
        )
    assert flow(**arguments | {"reads": ["-", "https://a.b/c.fa", "ncbi:X1", *arguments["reads"]]})
    validate = flow_parameters(ValidateSettings)(lambda settings: settings)
    with pytest.raises(ConfigError, match=r"^history: "):
        validate(**arguments | {"out": str(roots / "results")})
    monkeypatch.delenv("VIRNUC_ROOTS")
    assert flow(**arguments | {"out": "/elsewhere"})


@pytest.mark.parametrize("model", [PredictSettings, ValidateSettings, InboxSettings, TrainSettings])
def test_every_parameter_of_every_flow_is_explained(model: type[ComputeSettings]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        assert len(field.description) < 100, name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("token_budget = 99999999999", "token_budget: input should be less than or equal to"),
        ("shard_tokens = 99999999999999", "shard_tokens: input should be less than or equal to"),
        ("token_budget = " + "9" * 5_000, "not valid TOML"),
        ("token_budget = " + "[" * 5_000, "not valid TOML"),
        ("precision = '" + "x" * 5_000 + "'", r"precision: .{,300}$"),
        pytest.param(
            "#" * (1 << 24), r"cannot be read \(larger than 16,777,216 bytes\)", id="large"
        ),
    ],
)
def test_sizes_in_a_file_of_settings_are_bounded(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=says):
        ComputeSettings(settings=path).engine()
    path.write_text(f"name = 'x'\ntitle = 'x'\n[engine]\n{text}")
    with pytest.raises(ConfigError, match=says):
        load_profile(str(path))
    with pytest.raises(ConfigError, match="not a device"):
        Devices.parse("cpu:99999999999")


def test_settings_left_empty_are_those_of_the_profile() -> None:
    settings = ValidateSettings(
        reads=("r.fa",), out=Path("o"), models=Path("m"), profile="ci-smoke", dna_token_budget=512
    )
    assert settings.engine() == load_profile("ci-smoke").engine.model_copy(
        update={"dna_token_budget": 512}
    )


@pytest.mark.parametrize(
    ("devices", "good"),
    [
        ("auto", True),
        ("cpu", True),
        ("cpu:2", True),
        ("cuda:0,cuda:1", True),
        ("cuda:GPU-3f2c11aa-0000", True),
        ("cpu:0", False),
        ("gpu:1", False),
        ("cuda:0,,cuda:1", False),
        ("", False),
    ],
)
def test_the_form_and_the_model_agree_on_devices(devices: str, good: bool) -> None:
    import re

    pattern = parameter_schema(
        flow_parameters(ComputeSettings)(lambda settings: settings)
    ).properties["devices"]["pattern"]
    assert bool(re.search(pattern, devices)) is good
    if good:
        ComputeSettings(devices=devices)
    else:
        with pytest.raises(ConfigError, match="devices"):
            build(ComputeSettings, {"devices": devices})


@pytest.mark.parametrize(
    ("choice", "words"),
    [(PrecisionChoice, Precision), (AttentionChoice, Attention), (GeluChoice, Gelu)],
)
def test_the_form_offers_every_word_the_engine_knows(choice: object, words: object) -> None:
    assert get_args(choice) == ("default", *get_args(words))


def test_paths_arrive_as_paths() -> None:
    settings = build(PredictSettings, {"reads": ["a.fa"], "out": "run", "models": "m"})
    assert settings.out == Path("run")
    assert settings.reads == ("a.fa",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.fq", "b.fq", "-o", "run"], {"reads": ("a.fq", "b.fq"), "out": Path("run")}),
        (["-o", "run", "--reads", "a.fq", "b.fq"], {"reads": ("a.fq", "b.fq"), "out": Path("run")}),
        (["-", "--out=run"], {"reads": ("-",), "out": Path("run")}),
        (["a.fq", "-o", "run", "--force"], {"force": True}),
        (["a.fq", "-o", "run", "--no-force"], {"force": False}),
        (
            ["a.fq", "-o", "run", "--on-error", "skip", "--token-budget", "512"],
            {"on_error": "skip", "token_budget": 512},
        ),
        (["a.fq", "-o", "run", "--devices", "cuda:0,cuda:1"], {"devices": "cuda:0,cuda:1"}),
        (["a.fq", "-o", "run", "--models", "other"], {"models": Path("other")}),
        (["a.fq", "-o", "run"], {"models": Path("named"), "force": False, "devices": "auto"}),
    ],
)
def test_words_become_settings_and_the_models_may_come_from_the_environment(
    words: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_settings: list[PredictSettings] = []

    def stop_early(_flow: str, _model: object, settings: PredictSettings) -> None:
        parsed_settings.append(settings)
        raise ConfigError("far enough")

    monkeypatch.setattr(run_from_terminal, "run_from_terminal", stop_early)
    monkeypatch.setenv("VIRNUC_MODELS", "named")
    assert main(["predict", *words]) == 2
    assert {name: getattr(parsed_settings[0], name) for name in expected} == expected


def test_an_empty_variable_names_no_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIRNUC_MODELS", "")
    assert main(["predict", "a.fq", "-o", "run"]) == 2
    assert "--models" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["a", "--models", "m"],  # no output
        ["a", "-o", "x", "--models", "m", "--on-error", "maybe"],
        ["a", "-o", "x", "--models", "m", "--unknown"],
        ["a", "-o", "x", "--models", "m", "--forc"],  # no guessing of abbreviations
        ["a", "-o", "x", "--models", "m", "--devices", "gpu"],
        ["a", "-o", "x", "--models", "m", "--token-budget", "3"],
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("virnuc: ")


@pytest.mark.parametrize(
    "text",
    [
        '"a\\nvirnuc: done {0}" = 1\n' + "".join(f'"k{i}" = 1\n' for i in range(500)),
        '"{0}" = 1\n"{0}" = 2\n',
        "[{0}]\n[{0}]\n",
        'precision = "{0}\\u0000"\n',
        'token_budget = {{"{0}" = "{0}"}}\n',
    ],
)
def test_a_file_of_settings_names_no_more_of_itself_than_short_keys(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text.format("secret" * 1000))
    with pytest.raises(ConfigError) as error_info:
        ComputeSettings(settings=path).engine()
    message = str(error_info.value).removeprefix(f"settings {path}")
    assert len(message) < 400
    assert "\n" not in message
    assert message.count("secret") < 20


def test_samples_and_a_single_run_do_not_share_a_directory(tmp_path: Path) -> None:
    single = PredictSettings(reads=("a.fq",), out=tmp_path, models=Path("m"))
    single.check_flow_files()
    (tmp_path / "samples.tsv").touch()
    with pytest.raises(ConfigError, match="holds samples; choose another directory"):
        single.check_flow_files()
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match="holds a single run; choose another directory"):
        single.model_copy(update={"sample_from": "name"}).check_flow_files()


def test_a_script_can_say_all_that_the_command_takes() -> None:
    """A new option of `predict` belongs into a group of settings in `virnuc_core/config.py`."""
    several = {"samples", "sample_from"}  # runs, each of which is said by itself
    names = {*PredictSettings.model_fields} - {"settings", *several}
    # The command has VirNucPro's word for a setting of the engine.
    names = names - {"disable_checkpointing"} | {"commit"}
    assert names <= {
        *RunSpec.model_fields,
        *EngineSpec.model_fields,
    }


def test_overhead_of_a_folder_that_is_no_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run virnuc validate first"):
        OverheadSettings(out=tmp_path, models=tmp_path).check_output_folder()


def test_overhead_computes_with_the_engine_settings_of_the_validation(tmp_path: Path) -> None:
    """It times the same work as the validation did, not the engine's own defaults."""
    profile = load_profile("ci-smoke")
    engine = profile.engine.model_copy(update={"token_budget": 1_024})
    assert engine.token_budget != EngineSpec().token_budget
    validated_profile = profile.model_copy(update={"engine": engine})
    record = ValidationRecord(fingerprints={}, profile=validated_profile)
    write(RunDir(tmp_path).record, record)
    assert OverheadSettings(out=tmp_path, models=tmp_path).engine() == engine
