"""The projection state -> key, one frozen thing that keys and queries share: adapter, then PCA, then L2 norm.

In go states of width D, out come keys of width P. With an adapter or PCA the keys have length one and are compared
by inner product; the vanilla projection is the identity, compared by squared L2 distance. Building and querying call
the same object, so that they cannot drift apart. The trade-off: PCA is fitted on at most 250,000 entries drawn at
random, which moves retrieval accuracy by less than it varies between draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor

from clknn.adapter import Adapter
from clknn.errors import DatastoreError

FITTED_ON = 250_000
CHUNK = 16_384


@dataclass(frozen=True)
class Projection:
    """Keys of states. `normed` keys have inner products in [-1, 1]; the others have squared L2 distances."""

    adapter: Adapter | None = None
    mean: Tensor | None = None  # [E]; None: uncentred
    axes: Tensor | None = None  # [E, P]; None: no PCA
    normed: bool = False

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """[R, D] float32 -> [R, P] float32."""
        z = states if self.adapter is None else self.adapter(states)  # [R, E]
        if self.mean is not None:
            z = z - self.mean
        if self.axes is not None:
            z = z @ self.axes  # [R, P]
        return torch.nn.functional.normalize(z, dim=-1) if self.normed else z

    def width(self, state_width: int) -> int:
        if self.axes is not None:
            return self.axes.shape[1]
        return state_width if self.adapter is None else self.adapter.width

    def keys(self, states: npt.NDArray[np.float16]) -> Iterator[npt.NDArray[np.float16]]:
        """The keys of all states, chunk by chunk, as they are stored."""
        for start in range(0, len(states), CHUNK):
            block = torch.from_numpy(states[start : start + CHUNK].astype(np.float32))  # [R, D]
            yield self(block).numpy().astype(np.float16)  # [R, P]


def fit(
    states: npt.NDArray[np.float16], adapter: Adapter | None, size: int, centred: bool = True, seed: int = 0
) -> Projection:
    """PCA onto the `size` directions of largest variance of the adapted states, then L2 norm.

    Centring matters: uncentred, all inner products crowd near 1 and the confidence hardly varies.
    """
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(states))[:FITTED_ON]
    rows.sort()
    adapted = Projection(adapter)
    width, n = adapted.width(states.shape[1]), len(rows)
    total, second = torch.zeros(width).double(), torch.zeros(width, width).double()  # [E], [E, E]
    for start in range(0, n, CHUNK):
        chunk = torch.from_numpy(states[rows[start : start + CHUNK]].astype(np.float32))
        z = adapted(chunk).double()  # [R, E]
        total, second = total + z.sum(0), second + z.T @ z
    mean = total / n if centred else torch.zeros_like(total)
    covariance = second / n - torch.outer(mean, mean)  # [E, E]
    axes = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :size]  # largest variance first
    axes = axes * torch.where(axes.abs().amax(0) == axes.amax(0), 1.0, -1.0)  # eigenvectors have no sign of their own
    return Projection(adapter, mean.float() if centred else None, axes.float().contiguous(), normed=True)


def save(projection: Projection, path: Path) -> None:
    tensors = {} if projection.adapter is None else projection.adapter.tensors()
    if projection.mean is not None:
        tensors["pca.mean"] = projection.mean
    if projection.axes is not None:
        tensors["pca.axes"] = projection.axes
    note = {"projection": json.dumps({"normed": projection.normed})}
    path.write_bytes(serialised(tensors, note))  # save_file lets only its owner read it


def read(path: Path) -> Projection:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            normed = json.loads(file.metadata()["projection"])["normed"]
        return Projection(Adapter.of(tensors), tensors.get("pca.mean"), tensors.get("pca.axes"), normed)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DatastoreError(f"{path}: not a projection ({error}); run `clknn project` again") from error
