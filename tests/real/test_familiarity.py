"""Foreign kinds of real genomes are told from the kinds of a training, where codons tell them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .familiarity import NARROW, cut_material, genomes_of
from .kinds import all_genomes

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
LENGTH = 300
MIN_FAR_BACTERIA = 0.2  # share of reads; 0.30 was measured


def test_a_training_on_two_kinds_tells_bacteria(
    wheels: Path, real_data: Path, tmp_path: Path
) -> None:
    material = cut_material(all_genomes(wheels, real_data), LENGTH, tmp_path)
    is_known = np.isin(material.kinds, NARROW)
    composition = material.train(is_known, "training")
    for kind in composition.kinds.values():
        assert kind.false_alarms is None or kind.false_alarms <= 0.051
    far = material.far_reads(composition, material.kinds == "bacteria", "bacteria")
    genomes = genomes_of(composition, far)
    assert len(genomes) >= 5
    assert np.mean([genome.is_far.mean() for genome in genomes]) > MIN_FAR_BACTERIA
