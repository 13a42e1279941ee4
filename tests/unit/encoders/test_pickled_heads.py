"""Pickled heads: read as they were saved, and hostile ones refused without running a thing."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from virnuc_core.encoders import pickles
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import convert_head
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.pickles import HEAD_MAX_BYTES, read_pickled
from virnuc_core.errors import WeightsError

CPU = torch.device("cpu")


class MLPClassifier(nn.Module):
    """As the training script defines it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.hidden_layer = nn.Linear(width, 512)
        self.bn1 = nn.BatchNorm1d(512)
        self.dropout = nn.Dropout(0.5)
        self.output_layer = nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.dropout(torch.relu(self.bn1(self.hidden_layer(x)))))


@pytest.fixture
def trained() -> MLPClassifier:
    torch.manual_seed(1)
    model = MLPClassifier()
    model.train()
    for _ in range(3):
        model(torch.randn(64, 128))  # moves the running statistics
    return model.eval()


@pytest.fixture
def _in_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class pickles as `__main__.MLPClassifier`, which is how the public files name it."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "MLPClassifier", MLPClassifier, raising=False)
    monkeypatch.setattr(MLPClassifier, "__module__", "__main__")


@pytest.mark.usefixtures("_in_main")
def test_a_whole_pickled_module_gives_the_originals_scores(
    trained: MLPClassifier, models: Path, tmp_path: Path
) -> None:
    torch.save(trained, tmp_path / "500_model.pth")
    for part in ("esm2", "dnabert_s"):
        (tmp_path / part).symlink_to(models / part)
    shape = convert_head(tmp_path / "500_model.pth", tmp_path, dna_width=64)
    assert (shape.model_length, shape.protein_width) == (500, 64)
    features = torch.randn(40, 128)
    with torch.no_grad():
        expected = trained(features).softmax(1)
    head = Head(*open_part(tmp_path, HeadShape), CPU)
    torch.testing.assert_close(head.scores(features), expected, atol=1e-6, rtol=0)
    assert head.shape.model_length == 500


@pytest.mark.parametrize("form", ["state", "dictionary", "with parameters"])
def test_dictionaries_are_read_too(form: str, trained: MLPClassifier, tmp_path: Path) -> None:
    state: Any = trained.state_dict()
    if form == "with parameters":
        state = OrderedDict(
            (name, nn.Parameter(t) if t.is_floating_point() else t) for name, t in state.items()
        )
    if form == "dictionary":
        state = {
            "metadata": {"checkpoint_version": "2.0.0", "epochs": 3, "loss": 0.25},
            "model_state_dict": state,
        }
    torch.save(state, tmp_path / "300_model.pth")
    got = read_pickled(tmp_path / "300_model.pth")
    assert got.keys() == trained.state_dict().keys()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(got[name], tensor)


def test_a_view_into_a_larger_block_is_read_as_a_view(tmp_path: Path) -> None:
    block = torch.arange(24.0)
    torch.save({"a": block[2:14].view(3, 4).t()}, tmp_path / "head.pth")
    assert torch.equal(read_pickled(tmp_path / "head.pth")["a"], block[2:14].view(3, 4).t())


# -- hostile files -----------------------------------------------------------------------------------------------------


class Reduce:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def call(module: bytes, name: bytes, argument: bytes) -> bytes:
    """A protocol-0 program that calls one function with one string."""
    return b"c" + module + b"\n" + name + b"\n(S'" + argument + b"'\ntR."


def archive(path: Path, program: bytes, **more: bytes) -> Path:
    """A file as torch.save lays it out, around any pickle program."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        file.writestr("archive/version", b"3\n")
        for name, content in more.items():
            file.writestr(f"archive/{name}", content)
    return path


def payloads(mark: Path, protocol: int = 2) -> dict[str, bytes]:
    """Programs that leave a file behind when they run."""
    touch = f"touch {mark}"
    python = f"open({str(mark)!r}, 'w').close()"

    def reduced(function: Any, *arguments: Any) -> bytes:
        return pickle.dumps(Reduce(function, *arguments), protocol)

    return {
        "os.system": reduced(os.system, touch),
        "posix.system": call(b"posix", b"system", touch.encode()),
        "builtins.eval": reduced(builtins.eval, python),
        "builtins.exec": reduced(builtins.exec, python),
        "__builtin__.eval, python 2": call(
            b"__builtin__", b"eval", python.replace("'", "\\'").encode()
        ),
        "subprocess.Popen": reduced(subprocess.Popen, ["touch", str(mark)]),
        "getattr": reduced(getattr, Reduce(__import__, "os"), "system"),
        "nested in a state": pickle.dumps(
            OrderedDict(hidden=OrderedDict(weight=Reduce(os.system, touch))), protocol
        ),
        "nested in a call": reduced(set, (Reduce(os.system, touch),)),
        "another pickle inside": reduced(pickle.loads, pickle.dumps(Reduce(os.system, touch))),
        "torch.load inside": reduced(torch.load, str(mark)),
        "torch.hub": call(b"torch.hub", b"load", b"x"),
        "a dotted name": b"\x80\x04\x8c\x08builtins\x8c\x08set.copy\x93.",
        "through a module of ours": call(
            b"virnuc_core.encoders.convert", b"io.open", str(mark).encode()
        ),
        "instance opcode": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "object opcode": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "torch's own rebuild with a type": b"ctorch._tensor\n_rebuild_from_type_v2\n(tR.",
    }


@pytest.mark.parametrize("name", list(payloads(Path("mark"))))
@pytest.mark.parametrize("layout", ["archive", "archive, newer protocol", "bare pickle"])
def test_an_exploit_is_refused_and_never_runs(name: str, layout: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    program = payloads(mark, 4 if "newer" in layout else 2)[name]  # torch.save writes protocol 2
    path = tmp_path / "500_model.pth"
    if layout.startswith("archive"):
        archive(path, program)
    else:
        path.write_bytes(program)
    with pytest.raises(WeightsError, match=r"refused|not a file of torch\.save") as error_info:
        read_pickled(path)
    assert not mark.exists()
    assert "\n" not in str(error_info.value)
    assert str(path) in str(error_info.value)


def test_the_payloads_do_run_where_nothing_stops_them(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    for name in (
        "os.system",
        "posix.system",
        "builtins.eval",
        "nested in a state",
        "instance opcode",
        "object opcode",
    ):
        mark = tmp_path / name.replace(" ", "_")
        pickle.loads(payloads(mark)[name])
        assert mark.exists(), name


def test_a_head_with_one_hostile_part_is_refused_whole(
    trained: MLPClassifier, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    state: Any = dict(trained.state_dict())
    state["bn1.bias"] = Reduce(os.system, f"touch {mark}")
    torch.save(state, tmp_path / "500_model.pth")
    with pytest.raises(WeightsError, match=r"refused.*posix\.system"):
        convert_head(tmp_path / "500_model.pth", tmp_path / "out", dna_width=64)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def test_a_pickle_cannot_change_the_reader_for_the_next_file(
    trained: MLPClassifier, tmp_path: Path
) -> None:
    """BUILD may set attributes on whatever a pickle names, our stand-ins included."""
    program = b"c__main__\nMLPClassifier\n(N(S'tensors'\nccollections\nOrderedDict\nS'__setstate__'\nc__builtin__\nset\ndtb."
    with pytest.raises(WeightsError):
        read_pickled(archive(tmp_path / "evil.pth", program))
    program = b"ctorch._utils\n_rebuild_tensor_v2\n(N(S'__defaults__'\n(I1\ntdtb."
    with pytest.raises(WeightsError):
        read_pickled(archive(tmp_path / "evil.pth", program))
    assert pickles.ModuleState.__setstate__.__qualname__ == "ModuleState.__setstate__"
    torch.save(trained.state_dict(), tmp_path / "500_model.pth")
    assert read_pickled(tmp_path / "500_model.pth").keys() == trained.state_dict().keys()


@pytest.mark.usefixtures("_in_main")
def test_modules_within_modules_beyond_measure_are_refused(tmp_path: Path) -> None:
    module: nn.Module = MLPClassifier(4)
    for _ in range(40):  # 2 ** 40 tensors under their dotted names
        outer = MLPClassifier(4)
        outer.hidden_layer = outer.output_layer = module  # type: ignore[assignment]
        module = outer
    torch.save(module, tmp_path / "500_model.pth")
    with pytest.raises(WeightsError, match="more tensors than any head has"):
        read_pickled(tmp_path / "500_model.pth")


def spoilt(change: Callable[[dict[str, bytes]], object], tmp_path: Path) -> Path:
    """A state dictionary whose archive has been tampered with."""
    buffer = io.BytesIO()
    torch.save({"hidden_layer.weight": torch.ones(4, 4)}, buffer)
    with zipfile.ZipFile(buffer) as file:
        parts = {name.split("/", 1)[1]: file.read(name) for name in file.namelist()}
    change(parts)
    path = tmp_path / "head.pth"
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(f"head/{name}", content)
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.update({"data/0": b"\0" * 12}), r"record size \(12 bytes\) does not match"),
        (lambda p: p.pop("data/0"), "refused"),
        (lambda p: p.update(byteorder=b"big"), "big-endian"),
        (lambda p: p.update({"constants.pkl": b"", "code/x.py": b""}), "TorchScript"),
        (lambda p: p.pop("data.pkl"), r"failed locating file data\.pkl"),
        (lambda p: p.update({"data.pkl": p["data.pkl"][:-9]}), "refused"),
    ],
)
def test_a_tampered_archive_is_refused(
    change: Callable[[dict[str, bytes]], object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=says):
        read_pickled(spoilt(change, tmp_path), HEAD_MAX_BYTES)


def test_a_tensor_that_leaves_its_block_is_refused(tmp_path: Path) -> None:
    def widen(parts: dict[str, bytes]) -> None:
        assert parts["data.pkl"].count(b"K\x04K\x04\x86") == 1  # the size (4, 4)
        parts["data.pkl"] = parts["data.pkl"].replace(b"K\x04K\x04\x86", b"K\x40K\x40\x86")

    with pytest.raises(WeightsError, match="resize storage"):
        read_pickled(spoilt(widen, tmp_path))

    def shift(parts: dict[str, bytes]) -> None:
        parts["data.pkl"] = parts["data.pkl"].replace(
            b"K\x04K\x01\x86", b"K\x7fK\x01\x86"
        )  # the strides

    with pytest.raises(WeightsError, match="refused"):
        read_pickled(spoilt(shift, tmp_path))


def test_what_is_too_large_for_a_head_is_not_read(tmp_path: Path) -> None:
    torch.save({"hidden_layer.weight": torch.ones(100)}, tmp_path / "head.pth")
    with pytest.raises(WeightsError, match="bytes is no head"):
        read_pickled(tmp_path / "head.pth", 100)


@pytest.mark.parametrize(
    "content", [{}, {"a": 1}, {"model_state_dict": {}}, OrderedDict(), {"a": {"b": None}}]
)
def test_what_is_no_head_is_said(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "head.pth")
    with pytest.raises(WeightsError, match="no dictionary of tensors"):
        read_pickled(tmp_path / "head.pth")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"500_model\.pth: cannot be read"):
        read_pickled(tmp_path / "500_model.pth")
