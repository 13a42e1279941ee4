"""Heads put into a models directory and taken back: what is refused, what is said, and that none is ever lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.damage import flip_bit
from virnuc.flows.cli import main
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.encoders.convert import init_random, random_tensor
from virnuc_core.encoders.digests import part_digest
from virnuc_core.encoders.kept_heads import install_head, kept_heads, use_head
from virnuc_core.encoders.model_config import Estimate, HeadCard, HeadShape, read_shape, write_shape
from virnuc_core.encoders.model_files import write_part
from virnuc_core.errors import ConfigError, WeightsError

from .head_cards import CARD

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of different seeds, which are copied."""
    folders = [tmp_path_factory.mktemp("drawn") / str(seed) for seed in range(3)]
    for seed, folder in enumerate(folders):
        init_random(folder, seed=seed)
    return folders


@pytest.fixture
def models(tmp_path: Path, drawn: list[Path]) -> Path:
    return Path(shutil.copytree(drawn[0], tmp_path / "models"))


@pytest.fixture
def trained(tmp_path: Path, drawn: list[Path]) -> Make:
    def make(auroc: float, seed: int = 1, **changes: object) -> Path:
        """A head with a card of this AUROC, a tenth to each side."""
        folder = tmp_path / f"head-{auroc}-{seed}"
        shutil.copytree(drawn[seed] / "head", folder)
        estimate = Estimate(value=auroc, low=auroc - 0.1, high=min(1.0, auroc + 0.1))
        card = HeadCard.model_validate(CARD.model_dump() | {"auroc": estimate} | changes)
        shape = read_shape(folder / "config.json", HeadShape)
        write_shape(shape.model_copy(update={"card": card}), folder / "config.json")
        (folder / "README.md").write_text("A card for people.\n")
        return folder

    return make


def test_the_head_before_is_kept_by_number_and_digest(models: Path, trained: Make) -> None:
    digest_before, new = part_digest(models / "head"), trained(0.9)
    message = install_head(new, models)
    assert message.startswith(
        f"installed as 002-{part_digest(new)[:8]}; the one before was not tested on these reads"
    )
    assert part_digest(models / "head") == part_digest(new)
    assert (models / "head" / "README.md").exists()
    assert sorted(path.name for path in (models / "heads").iterdir()) == [
        f"001-{digest_before[:8]}",
        f"002-{part_digest(new)[:8]}",
    ]
    assert part_digest(models / "heads" / f"001-{digest_before[:8]}") == digest_before
    assert [(head.number, head.is_installed) for head in kept_heads(models)] == [
        (1, False),
        (2, True),
    ]
    check_models(models)


def test_going_back_and_forth_keeps_each_once(models: Path, trained: Make) -> None:
    first_digest, second, third = part_digest(models / "head"), trained(0.8), trained(0.9, seed=2)
    install_head(second, models)
    install_head(third, models)
    assert part_digest(use_head(models, 1)) == first_digest == part_digest(models / "head")
    use_head(models, 2)
    assert part_digest(models / "head") == part_digest(second)
    install_head(third, models)
    assert [head.number for head in kept_heads(models) if head.is_installed] == [3]
    assert len(list((models / "heads").iterdir())) == 3
    with pytest.raises(ConfigError, match="no head is kept under 9; there are 1, 2, 3"):
        use_head(models, 9)


def test_a_kept_copy_that_was_damaged_since_is_made_again(models: Path, trained: Make) -> None:
    new = trained(0.9)
    install_head(new, models)
    use_head(models, 1)
    (kept_head,) = (models / "heads").glob(f"*-{part_digest(new)[:8]}")
    weights = kept_head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400] + bytes(400))
    install_head(new, models)
    assert part_digest(models / "head") == part_digest(kept_head) == part_digest(new)


def test_a_kept_copy_with_a_flipped_bit_is_not_installed(
    models: Path, trained: Make, caplog: pytest.LogCaptureFixture
) -> None:
    install_head(trained(0.9), models)
    digest_before = part_digest(models / "head")
    (kept_head,) = models.glob("heads/001-*")
    flip_bit(kept_head / "model.safetensors")
    with pytest.raises(WeightsError, match="is not the head that was kept here: its digest"):
        use_head(models, 1)
    assert part_digest(models / "head") == digest_before
    assert main(["models", "use-head", "1", "--models", str(models)]) == WeightsError.exit_code
    assert [head.number for head in kept_heads(models)] == [2]
    assert "is not the head that was kept here" in caplog.text


def test_a_kept_card_that_was_edited_is_not_installed(models: Path, trained: Make) -> None:
    install_head(trained(0.9), models)
    install_head(trained(0.95, seed=2), models)
    (kept_head,) = models.glob("heads/002-*")
    config = kept_head / "config.json"
    config.write_text(config.read_text().replace("0.9", "0.8"))
    with pytest.raises(WeightsError, match="is not the head that was kept here"):
        use_head(models, 2)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_head_stops_neither_the_list_nor_going_back(
    models: Path, trained: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    install_head(trained(0.9), models)
    broken_file = models / "head" / name
    broken_file.unlink() if name != "config.json" else broken_file.write_text("{")
    assert [head.number for head in kept_heads(models)] == [1, 2]
    assert "head/" in caplog.text
    use_head(models, 2)
    check_models(models)
    next(models.glob("heads/001-*")).joinpath(name).unlink()
    assert [head.number for head in kept_heads(models)] == [2]
    (models / "head" / "config.json").write_text("{")
    assert "not tested on these reads" in install_head(trained(0.8, seed=2), models)


def test_a_head_that_was_put_there_by_hand_is_kept_too(
    models: Path, trained: Make, drawn: list[Path]
) -> None:
    install_head(trained(0.9), models)
    shutil.rmtree(models / "head")
    shutil.copytree(drawn[2] / "head", models / "head")
    by_hand = part_digest(models / "head")
    assert [(head.number, head.is_installed) for head in kept_heads(models)] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    use_head(models, 1)
    assert [head.digest for head in kept_heads(models)][2] == by_hand


@pytest.mark.parametrize("auroc", [0.55, 0.6, 0.3])
def test_a_head_that_may_be_chance_is_refused(models: Path, trained: Make, auroc: float) -> None:
    new, digest_before = trained(auroc), part_digest(models / "head")
    with pytest.raises(
        WeightsError, match=rf"not installed: its AUROC is {auroc:.3f} .* chance; --install-anyway"
    ):
        install_head(new, models)
    assert part_digest(models / "head") == digest_before
    assert not (models / "heads").exists()
    assert f"although its AUROC is {auroc:.3f}" in install_head(new, models, install_anyway=True)
    assert part_digest(models / "head") == part_digest(new)


def test_a_head_worse_on_the_same_test_is_refused_and_on_another_it_is_said(
    models: Path, trained: Make
) -> None:
    install_head(trained(0.9), models)
    with pytest.raises(
        WeightsError, match=r"it is worse: AUROC 0\.800 .*, of the one before 0\.900 .* same test"
    ):
        install_head(trained(0.8, seed=2), models)
    with pytest.raises(WeightsError, match="it is worse"):  # the same labels in another file
        install_head(trained(0.75, seed=2, truth="e" * 64), models)
    assert "cannot be compared" in install_head(trained(0.7, seed=2, test="d" * 64), models)
    assert "AUROC 0.850" in (message := install_head(trained(0.85, seed=1, test="d" * 64), models))
    assert "of the one before 0.700" in message


def test_a_head_without_a_card_is_refused(models: Path, drawn: list[Path]) -> None:
    with pytest.raises(WeightsError, match="no card that tells how well it does"):
        install_head(drawn[1] / "head", models)
    assert "although it has no card" in install_head(drawn[1] / "head", models, install_anyway=True)


def test_a_head_of_other_encoders_is_refused_in_any_case(models: Path, tmp_path: Path) -> None:
    shape = HeadShape(model_length=500, dna_width=60, protein_width=68)
    write_part(tmp_path, shape, partial(random_tensor, shape), "random", "fp32")
    with pytest.raises(
        WeightsError, match=r"60 \(DNA\) \+ 68 \(protein\), the encoders beside it give 64 \+ 64"
    ):
        install_head(tmp_path / "head", models, install_anyway=True)


def test_a_head_that_is_not_finite_is_not_put_in_place_but_makes_place(
    models: Path, trained: Make, drawn: list[Path]
) -> None:
    bad, good = shutil.copytree(drawn[1] / "head", models / "bad"), part_digest(models / "head")
    tensors = load_file(bad / "model.safetensors")
    tensors["bn1.weight"][0] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(WeightsError, match="holds NaN"):
        install_head(bad, models, install_anyway=True)
    shutil.rmtree(models / "head")
    bad.rename(models / "head")
    assert [head.is_installed for head in kept_heads(models)] == [True]
    install_head(drawn[0] / "head", models, install_anyway=True)
    assert part_digest(models / "head") == good
    with pytest.raises(WeightsError, match="holds NaN"):
        use_head(models, 1)
    assert part_digest(models / "head") == good


def test_a_models_directory_without_a_head_takes_its_first(models: Path, trained: Make) -> None:
    shutil.rmtree(models / "head")
    assert install_head(new := trained(0.9), models) == f"installed as 001-{part_digest(new)[:8]}"
    check_models(models)


@pytest.mark.parametrize("step", range(14))
def test_killed_at_any_step_no_head_is_lost_and_the_next_call_mends_it(
    models: Path, trained: Make, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Every copy, rename and removal may be the last thing that happens."""
    heads = {part_digest(models / "head"), part_digest(new := trained(0.9))}
    steps_left = step

    def dies(whole: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal steps_left
            if steps_left == 0:
                raise KeyboardInterrupt
            steps_left -= 1
            return whole(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((shutil, "copyfile"), (shutil, "rmtree"), (Path, "rename")):
            patch.setattr(owner, name, dies(getattr(owner, name)))
        try:
            install_head(new, models)
        except KeyboardInterrupt:
            assert steps_left == 0
    check_models(models)  # there is one at every moment
    lying = {
        part_digest(p.parent)
        for p in models.rglob("config.json")
        if p.parent.name not in ("esm2", "dnabert_s")
    }
    assert lying | {part_digest(new)} == heads, "the one before is whole somewhere, at least"
    install_head(new, models)
    assert {head.digest for head in kept_heads(models)} == heads
    assert part_digest(models / "head") == part_digest(new)
    assert not list(models.glob(".head*"))


def test_the_commands_list_heads_and_go_back(
    models: Path, trained: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest_before = part_digest(models / "head")
    install_head(trained(0.9), models)
    assert main(["models", "heads", "--models", str(models)]) == 0
    output = capsys.readouterr().out
    assert all(
        word in output
        for word in (
            digest_before[:8],
            "no card",
            "0.900 (0.800 to 1.000)",
            "60-150-300",
            "installed",
        )
    )
    monkeypatch.setenv("VIRNUC_MODELS", str(models))
    assert main(["models", "use-head", "1"]) == 0
    assert f"is now 001-{digest_before[:8]}" in capsys.readouterr().out
    assert part_digest(models / "head") == digest_before
    (models / "heads" / "001x-6c0daf88").mkdir()  # not ours
    for number in ("7", "1.5", "x"):
        assert main(["models", "use-head", number]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["models", "heads"]) == 0
    assert json.loads((models / "head" / "config.json").read_text()).get("card") is None
