"""`VIRNUC_ROOTS` holds for every option of every command, and for links in folders they name."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclopts import App
from cyclopts.argument import Argument

from virnuc.flows.cli import main
from virnuc.flows.cli.app import app
from virnuc_core.allowed_paths import READS_OPTIONS, SUFFIXES_OF_FILES

# Options whose texts never name a file. A new option of type text must be listed here, or be known
# to `allowed_paths`.
NOT_PATHS = {
    "baseline_device",
    "completion",  # patterns of names, not of paths
    "device",
    "devices",
    "email",
    "nodes",
    "note",
    "number",
    "read_group",
    "reviewer",
    "sample",
    "shell",
    "simulate",
}
# the id of a flow run, and a duration
NOT_PATHS_OF_COMMAND = {("approve", "run"), ("serve", "idle")}
# Commands of the library that reads command lines.
NOT_OURS = {"--install-completion"}


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    command: tuple[str, ...]
    argument: Argument

    @property
    def name(self) -> str:
        return self.argument.field_info.name

    @property
    def types(self) -> set[object]:
        """The types that one value may have, such as `str` and `Path`."""
        return set(simple_types(self.argument.hint))

    @property
    def is_positional_only(self) -> bool:
        field = self.argument.field_info
        return field.kind in (field.POSITIONAL_ONLY, field.VAR_POSITIONAL)

    @property
    def takes_path(self) -> bool:
        names_file = self.name in READS_OPTIONS or self.name in SUFFIXES_OF_FILES
        return Path in self.types or (str in self.types and names_file)

    def outside_path(self, outside: Path) -> Path:
        """A path outside of the allowed folders, which has the suffix that makes it a path."""
        (suffix, *_) = SUFFIXES_OF_FILES.get(self.name, ("",))
        return outside / f"x{suffix}"


def simple_types(hint: object) -> Iterator[object]:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return
    if not parts:
        yield hint
    for part in parts:
        yield from simple_types(part)


def commands(of: App = app, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command with its words, those of `virnuc models` too."""
    for name in of:
        if name.startswith("-"):
            continue
        command = of[name]
        words = (*prefix, name)
        if any(not sub_name.startswith("-") for sub_name in command):
            yield from commands(command, words)
        else:
            yield words, command


def options_of(words: tuple[str, ...], command: App) -> list[Option]:
    return [Option(words, argument) for argument in command.assemble_argument_collection()]


ALL_COMMANDS = dict(commands())
PATH_OPTIONS = [
    option
    for words, command in ALL_COMMANDS.items()
    for option in options_of(words, command)
    if option.takes_path
]


def test_the_walk_sees_the_commands() -> None:
    assert {("predict",), ("models", "convert"), ("rescore",), ("doctor",)} <= set(ALL_COMMANDS)
    assert len(PATH_OPTIONS) > 60


def test_an_option_of_type_text_is_known_to_be_a_path_or_not_to_be_one() -> None:
    unknown = set()
    for words, command in ALL_COMMANDS.items():
        for option in options_of(words, command):
            is_text = str in option.types and not option.takes_path
            is_known = option.name in NOT_PATHS or (words[-1], option.name) in NOT_PATHS_OF_COMMAND
            if is_text and not is_known:
                unknown.add((words, option.name))
    assert not unknown


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.setenv("VIRNUC_ROOTS", str(folder))
    monkeypatch.delenv("VIRNUC_MODELS", raising=False)
    return folder


def command_line(option: Option, value: Path, inside: Path) -> list[str]:
    """A command line that gives an option this value, and each required one an allowed value."""
    words = list(option.command)
    for other in options_of(option.command, ALL_COMMANDS[option.command]):
        is_tested = other.name == option.name
        if not is_tested and not other.argument.required:
            continue
        text = str(value) if is_tested else str(inside / "x")
        if int in other.types and not is_tested:
            text = "1"
        if not other.is_positional_only:
            words.append(other.argument.names[0])
        words.append(text)
    if option.name == "mates_1":
        words += ["--mates-2", str(inside / "b.fq")]
    if option.name == "mates_2":
        words += ["--mates-1", str(inside / "a.fq")]
    path_names = {
        other.name
        for other in options_of(option.command, ALL_COMMANDS[option.command])
        if other.takes_path
    }
    has_reads = option.name in ("reads", "samples", "mates_1", "mates_2")
    # The option `--reads` of `virnuc sample` is a number; its inputs are positional.
    if {"mates_1", "reads"} <= path_names and not has_reads:
        words += ["--reads", str(inside / "a.fq")]
    return words


@pytest.mark.parametrize(
    "option", PATH_OPTIONS, ids=lambda option: f"{'-'.join(option.command)}-{option.name}"
)
def test_a_path_outside_is_refused_whichever_option_names_it(
    option: Option, inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = option.outside_path(tmp_path / "outside")
    assert main(command_line(option, value, inside)) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"virnuc: {option.name}: {value} lies in none of the folders")


RECURSIVE_OPTIONS = [
    option for option in PATH_OPTIONS if option.name in ("models", "run", "out", "head", "vanilla")
]


@pytest.mark.parametrize(
    "option", RECURSIVE_OPTIONS, ids=lambda option: f"{'-'.join(option.command)}-{option.name}"
)
def test_a_link_deep_in_a_folder_is_refused(
    option: Option, inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("key")
    folder = inside / "folder"
    (folder / "esm2").mkdir(parents=True)
    link = folder / "esm2" / "model.safetensors"
    link.symlink_to(tmp_path / "secret")
    assert main(command_line(option, folder, inside)) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"virnuc: {option.name}: {link} lies in none of the folders")
