"""Checkpoints of the seven families, made once a session; one thread, since the models are tiny."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from clknn import model as models
from clknn.model import Model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny checkpoint."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = tiny.save_checkpoint(family, root / family)
        return made[family]

    return checkpoint


@pytest.fixture(scope="session")
def load(checkpoints: Callable[[str], Path]) -> Callable[[str], Model]:
    """A family's tiny model, German to English (the first mBART and M2M100 are told so)."""
    made: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in made:
            made[family] = models.load(str(checkpoints(family)), "de", "en")
        return made[family]

    return model
