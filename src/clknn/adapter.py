"""The contrastive adapter: the module, the samplers of anchors, positives and hard negatives, the loss, the training.

In go states, their values and settings; out comes an `Adapter` under whose z the states of one value lie together and
apart from those of the values most easily confused with it. It hides the class arithmetic that draws whole batches
without a loop over anchors, the class centres that make hard negatives cheap, and checkpoints. The trade-off: centres
go stale while the adapter moves; how often they are refreshed is a setting, and docs/log.md has what it costs.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from clknn.errors import InputError

CHUNK = 16_384

Halves = npt.NDArray[np.float16]
Values = npt.NDArray[np.int32]


class Adapter(torch.nn.Module):
    """z = W2 ReLU(W1 h + b1) + b2, and where residual + h: such an adapter can start from the state itself.

    With `tanh`, tanh takes the place of ReLU.
    """

    def __init__(self, width_in: int, inner: int, width: int, residual: bool, tanh: bool = False) -> None:
        super().__init__()
        self.width, self.residual, self.tanh = width, residual, tanh
        self.inner = torch.nn.Linear(width_in, inner)
        self.outer = torch.nn.Linear(inner, width)

    def forward(self, states: Tensor) -> Tensor:
        bend = torch.tanh if self.tanh else torch.relu
        z: Tensor = self.outer(bend(self.inner(states)))  # [R, E]
        return z + states if self.residual else z

    @torch.no_grad()
    def start_from(self, mean: Tensor) -> None:
        """Makes z = h - mean: what every state shares would otherwise make all cosines alike."""
        torch.nn.init.normal_(self.inner.weight, std=self.inner.in_features**-0.5)
        self.inner.bias.copy_(-self.inner.weight @ mean)
        torch.nn.init.zeros_(self.outer.weight)
        self.outer.bias.copy_(-mean)

    def tensors(self) -> dict[str, Tensor]:
        mine = {**self.state_dict(), "residual": torch.tensor(self.residual), "tanh": torch.tensor(self.tanh)}
        return {f"adapter.{name}": tensor.detach().contiguous() for name, tensor in mine.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Adapter | None:
        """The adapter that `tensors()` wrote, or None where there is none among them."""
        mine = {k.removeprefix("adapter."): v for k, v in tensors.items() if k.startswith("adapter.")}
        if not mine:
            return None
        inner, width_in = mine["inner.weight"].shape
        residual, tanh = bool(mine.pop("residual")), bool(mine.pop("tanh"))
        adapter = cls(width_in, inner, mine["outer.weight"].shape[0], residual, tanh)
        adapter.load_state_dict(mine)
        return adapter.eval().requires_grad_(False)


@dataclass(frozen=True)
class AdapterSettings:
    """What the paper fixes, what it leaves open, and what we added. None: derived from D.

    `PAPER` has the published values; docs/log.md has the measurements behind these.
    """

    inner: int | None = None  # d_f; None: 4 D
    width: int | None = None  # d_o; None: D with residual, else D / 2
    residual: bool = True  # start from the states themselves; the paper starts from nothing
    positives: int = 1  # M
    negatives: int = 1  # N
    nearest: int = 128  # K, the class centres from whose classes the negatives come
    shared: bool = True  # every other anchor's candidates are negatives too, unless of the anchor's class
    centre_term: float = 1.0  # weight of a second loss, a softmax over all class centres; 0 leaves it out
    temperature: float = 0.05  # T'
    anchor_power: float = 0.5  # a class is drawn with probability count ** power: 1 is uniform over entries
    refresh: int | None = None  # steps between computations of the centres; None: once
    centre_entries: int | None = 64  # entries of each class that make its centre; None: all
    batch: int = 512
    steps: int = 1000
    learning_rate: float = 1e-3
    warmup: int = 50
    validate_every: int = 200
    patience: int = 5  # validations without a better one before training stops
    seed: int = 0


PAPER = AdapterSettings(
    residual=False,
    positives=2,
    negatives=32,
    shared=False,
    centre_term=0.0,
    temperature=0.01,
    anchor_power=1.0,
    centre_entries=None,
    batch=32,
    steps=500_000,
    learning_rate=3e-4,
    warmup=4_000,
    validate_every=5_000,
    patience=20,
)


@dataclass(frozen=True)
class Classes:
    """Entries grouped by value: class c holds order[starts[c] : starts[c] + counts[c]]."""

    order: Tensor  # [N] entry ids, class by class
    starts: Tensor  # [C]
    counts: Tensor  # [C]
    of_entry: Tensor  # [N] the class of each entry
    rank: Tensor  # [N] the place of each entry within its class

    @classmethod
    def of(cls, values: Values) -> Classes:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable")
        starts = np.cumsum(counts) - counts
        rank = np.empty(len(values), np.int64)
        rank[order] = np.arange(len(values)) - np.repeat(starts, counts)
        return cls(*(torch.from_numpy(a.astype(np.int64)) for a in (order, starts, counts, inverse, rank)))


def draw_anchors(classes: Classes, n: int, power: float, rng: torch.Generator) -> Tensor:
    """[n] entries of classes with at least two members; a class is drawn with probability count ** power."""
    chance = torch.where(classes.counts > 1, classes.counts.double() ** power, 0.0)
    c = torch.multinomial(chance, n, replacement=True, generator=rng)  # [n]
    return one_of_each(classes.order, classes.starts[c], classes.counts[c], rng)


def draw_positives(classes: Classes, anchors: Tensor, m: int, rng: torch.Generator) -> Tensor:
    """[B, m] other entries of each anchor's class, distinct where the class has m to give."""
    c = classes.of_entry[anchors]  # [B]
    others = _choose(classes.counts[c] - 1, m, rng)  # [B, m] places among the others
    place = others + (others >= classes.rank[anchors][:, None])  # step over the anchor itself
    return classes.order[classes.starts[c][:, None] + place]


def draw_negatives(
    classes: Classes, anchors: Tensor, similarity: Tensor, nearest: int, n: int, rng: torch.Generator
) -> Tensor:
    """[B, n] entries, one uniform of each of n classes among the `nearest` others; similarity to centres is [B, C]."""
    own = classes.of_entry[anchors][:, None]  # [B, 1]
    others = min(nearest, similarity.shape[1] - 1)
    apart = similarity.scatter(1, own, -math.inf).numpy()  # [B, C]
    # Partitioning values and then finding them takes a sixth of the time of argpartition, or a third of torch's topk.
    least = np.partition(apart, -others, axis=1)[:, -others, None]  # [B, 1]
    near = torch.from_numpy(np.flatnonzero(apart >= least))  # row by row; more than K of a row where centres tie
    ends = torch.searchsorted(near, torch.arange(1, len(anchors) + 1) * apart.shape[1])  # [B]
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.long))  # [B]
    c = near[(ends - sizes)[:, None] + _choose(sizes, n, rng)] % apart.shape[1]  # [B, n]
    return one_of_each(classes.order, classes.starts[c], classes.counts[c], rng)


def one_of_each(order: Tensor, starts: Tensor, counts: Tensor, rng: torch.Generator) -> Tensor:
    """A uniform one of order[start : start + count] for each start and count, whatever their shape."""
    place = (torch.rand(counts.shape, generator=rng, dtype=torch.float64) * counts).long()
    return order[starts + place]


def _choose(sizes: Tensor, m: int, rng: torch.Generator) -> Tensor:
    """[B, m] numbers below sizes [B]: distinct (Floyd's algorithm) where size >= m, else drawn with replacement."""
    chosen = torch.empty(len(sizes), m, dtype=torch.long)
    for j in range(m):
        top = sizes - m + j  # [B], at least 0 where size >= m
        uniform = torch.rand(len(sizes), generator=rng, dtype=torch.float64)
        drawn = (uniform * (top + 1)).long()
        taken = (chosen[:, :j] == drawn[:, None]).any(1)
        chosen[:, j] = torch.where(sizes >= m, torch.where(taken, top, drawn), (uniform * sizes).long())
    return chosen


@torch.no_grad()
def class_centres(
    adapter: Adapter,
    states: Halves,
    classes: Classes,
    per_class: int | None = None,
    rng: torch.Generator | None = None,
) -> Tensor:
    """[C, E]: the mean z of each class, at length one, over all its entries or a random `per_class` of them."""
    total = torch.zeros(len(classes.counts), adapter.width)
    entries = torch.arange(len(states))
    if per_class is not None:
        sizes = classes.counts.clamp(max=per_class)
        c = torch.arange(len(sizes)).repeat_interleave(sizes)
        offset = (torch.rand(len(c), generator=rng, dtype=torch.float64) * classes.counts[c]).long()
        within = torch.arange(len(c)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        place = torch.where(classes.counts[c] <= per_class, within, offset)
        entries = classes.order[classes.starts[c] + place].sort().values
    for block in torch.split(entries, CHUNK):
        total.index_add_(0, classes.of_entry[block], adapter(_states(states, block)))
    return torch.nn.functional.normalize(total, dim=-1)


def contrastive_loss(
    anchors: Tensor, candidates: Tensor, positive: Tensor, negative: Tensor, temperature: float
) -> Tensor:
    """-log(sum over positives of exp s / sum over positives and negatives of exp s), s = cosine / temperature.

    anchors [B, E], candidates [J, E]; positive and negative [B, J] say what each candidate is to each anchor. The sum
    stands inside the logarithm, and the quotient is a difference of logsumexp: exp(1 / 0.01) overflows float32.
    """
    a, c = (torch.nn.functional.normalize(z.float(), dim=-1) for z in (anchors, candidates))
    s = a @ c.T / temperature  # [B, J]
    over_positives = torch.logsumexp(s.masked_fill(~positive, -math.inf), 1)  # [B]
    over_all = torch.logsumexp(s.masked_fill(~(positive | negative), -math.inf), 1)
    return (over_all - over_positives).mean()


@dataclass(frozen=True)
class Step:
    """What training reports at each validation."""

    step: int
    loss: float
    accuracy: float
    best: float
    seconds: float
    sampling: float  # share of the time


@dataclass(frozen=True)
class Trained:
    adapter: Adapter
    curve: list[Step]


class Pace(Protocol):
    """How long a training lasts and how often it is judged: what the settings of every training say."""

    @property
    def steps(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def validate_every(self) -> int: ...

    @property
    def patience(self) -> int: ...

    @property
    def seed(self) -> int: ...


class Training:
    """The moving parts of one training: weights, optimiser, the best weights so far."""

    def __init__(self, adapter: Adapter, pace: Pace) -> None:
        self.adapter, self.pace = adapter, pace
        self.optimiser = torch.optim.AdamW(
            adapter.parameters(), lr=pace.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.step, self.curve = 0, list[Step]()
        self.best = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
        self.spent, self.sampling = 0.0, 0.0

    def go(
        self,
        learn: Callable[[int, torch.Generator], float],
        validate: Callable[[Adapter], float],
        judged: Callable[[Step], None],
    ) -> Trained:
        """Does the steps that are left: `learn` does one and gives its loss, `judged` hears of each validation."""
        pace = self.pace
        if self.step == 0:
            self.judge(validate(self.adapter), loss=math.nan)
        while self.step < pace.steps and not self.stale():
            # Every stretch between validations has a seed of its own, so that a resumed run draws what it would have.
            rng = torch.Generator().manual_seed(pace.seed * 1_000_003 + self.step)
            stretch = range(self.step, min(self.step + pace.validate_every, pace.steps))
            losses = [learn(step, rng) for step in stretch]
            self.step = stretch.stop
            self.judge(validate(self.adapter), loss=float(np.mean(losses)))
            judged(self.curve[-1])
        best = Adapter.of(self.best)
        assert best is not None
        return Trained(best, self.curve)

    def descend(self, loss: Tensor) -> float:
        """One update of the weights."""
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), 1.0)
        self.optimiser.step()
        return loss.item()

    def judge(self, accuracy: float, loss: float) -> None:
        before = max((s.accuracy for s in self.curve), default=-1.0)
        if accuracy > before:
            self.best = {name: tensor.clone() for name, tensor in self.adapter.tensors().items()}
        share = self.sampling / self.spent if self.spent else 0.0
        self.curve.append(Step(self.step, loss, accuracy, max(accuracy, before), self.spent, share))

    def stale(self) -> bool:
        accuracies = [s.accuracy for s in self.curve]
        return len(accuracies) - 1 - int(np.argmax(accuracies)) >= self.pace.patience


def trainable(values: Values) -> bool:
    """Contrast needs two entries of one value, and one of another."""
    _, counts = np.unique(values, return_counts=True)
    return bool(len(counts) > 1 and counts.max() > 1)


def train(
    states: Halves,
    values: Values,
    settings: AdapterSettings,
    validate: Callable[[Adapter], float],
    checkpoint: Path | None = None,
    advance: Callable[[Step], None] = lambda _: None,
) -> Trained:
    """Trains on entries (states [N, D], values [N]) and keeps the step that `validate` liked best.

    With `checkpoint`, progress is saved there at each validation and taken up again from there.
    """
    if not trainable(values):
        raise InputError(
            "the adapter cannot train: no two entries share a value, or all share one; "
            "use --method knn-mt, which needs no training"
        )
    classes = Classes.of(values)
    run = _Run(_fresh_adapter(states, settings), settings, values)
    if checkpoint is not None and checkpoint.exists():
        centres = run.resume(checkpoint)
    else:
        rng = torch.Generator().manual_seed(settings.seed)
        centres = class_centres(run.adapter, states, classes, settings.centre_entries, rng)

    def learn(step: int, rng: torch.Generator) -> float:
        nonlocal centres
        if settings.refresh is not None and step > 0 and step % settings.refresh == 0:
            centres = class_centres(run.adapter, states, classes, settings.centre_entries, rng)
        return run.learn(states, classes, centres, step, rng)

    def judged(step: Step) -> None:
        advance(step)
        if checkpoint is not None:
            run.save(checkpoint, centres)

    return run.go(learn, validate, judged)


class _Run(Training):
    """The training of the contrastive adapter, which can be taken up again from a checkpoint."""

    def __init__(self, adapter: Adapter, settings: AdapterSettings, values: Values) -> None:
        super().__init__(adapter, settings)
        self.settings = settings
        self.entries = zlib.crc32(np.ascontiguousarray(values).data)  # a datastore can change between two calls

    def learn(self, states: Halves, classes: Classes, centres: Tensor, step: int, rng: torch.Generator) -> float:
        s, started = self.settings, time.perf_counter()
        anchors = draw_anchors(classes, s.batch, s.anchor_power, rng)  # [B]
        positives = draw_positives(classes, anchors, s.positives, rng)  # [B, M]
        drawn = time.perf_counter()
        z = self.adapter(_states(states, anchors))  # [B, E]
        to_centres = torch.nn.functional.normalize(z, dim=-1) @ centres.T  # [B, C]
        again = time.perf_counter()
        negatives = draw_negatives(classes, anchors, to_centres.detach(), s.nearest, s.negatives, rng)  # [B, N]
        self.sampling += time.perf_counter() - again + drawn - started
        candidates = torch.cat([positives.flatten(), negatives.flatten()])  # [J]
        positive, negative = _roles(classes, anchors, candidates, positives.numel(), s)
        loss = contrastive_loss(z, self.adapter(_states(states, candidates)), positive, negative, s.temperature)
        if s.centre_term:
            own = classes.of_entry[anchors]
            loss = loss + s.centre_term * torch.nn.functional.cross_entropy(to_centres / s.temperature, own)
        for group in self.optimiser.param_groups:
            group["lr"] = s.learning_rate * _schedule(step, s)
        reached = self.descend(loss)
        self.spent += time.perf_counter() - started
        return reached

    def save(self, path: Path, centres: Tensor) -> None:
        tensors = {"centres": centres} | {f"now.{k}": v for k, v in self.adapter.tensors().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        for i, moments in self.optimiser.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{name}": torch.as_tensor(value) for name, value in moments.items()}
        notes = {
            "settings": asdict(self.settings),
            "entries": self.entries,
            "curve": [asdict(s) for s in self.curve],
            "step": self.step,
            "sampling": self.sampling,
        }
        new = path.with_name(path.name + ".new")
        save_file({k: v.contiguous() for k, v in tensors.items()}, new, {"run": json.dumps(notes)})
        new.rename(path)

    def resume(self, path: Path) -> Tensor:
        """Takes up where `save` was; gives the centres as they were then."""
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            notes = json.loads(file.metadata()["run"])
        for what, mine in ("settings", asdict(self.settings)), ("entries", self.entries):
            if notes[what] != mine:
                raise InputError(f"{path}: a training with other {what} is half-finished here; delete it to start over")
        now = Adapter.of({k.removeprefix("now."): v for k, v in tensors.items() if k.startswith("now.")})
        assert now is not None
        self.adapter.load_state_dict(now.state_dict())
        self.best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("adam."):
                _, i, name = key.split(".")
                state.setdefault(int(i), {})[name] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})
        self.step, self.sampling = notes["step"], notes["sampling"]
        self.curve = [Step(**s) for s in notes["curve"]]
        self.spent = self.curve[-1].seconds
        centres: Tensor = tensors["centres"]
        return centres


def _roles(
    classes: Classes, anchors: Tensor, candidates: Tensor, n_positive: int, s: AdapterSettings
) -> tuple[Tensor, Tensor]:
    """[B, J] twice: which candidates are positives and negatives of which anchors."""
    row = torch.arange(len(anchors))[:, None]  # [B, 1]
    of_row = torch.cat(  # [J]: the anchor that each candidate was drawn for
        [row.expand(-1, s.positives).flatten(), row.expand(-1, s.negatives).flatten()]
    )
    own = of_row[None] == row  # [B, J]
    drawn_as_positive = torch.arange(len(candidates)) < n_positive
    positive = own & drawn_as_positive
    if not s.shared:
        return positive, own & ~drawn_as_positive
    other_class = classes.of_entry[candidates][None] != classes.of_entry[anchors][:, None]
    return positive, other_class


def _schedule(step: int, s: AdapterSettings) -> float:
    """Linear warm-up, then half a cosine down to a hundredth."""
    if step < s.warmup:
        return (step + 1) / s.warmup
    done = (step - s.warmup) / max(1, s.steps - s.warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def _fresh_adapter(states: Halves, s: AdapterSettings) -> Adapter:
    width = states.shape[1]
    out = s.width or (width if s.residual else width // 2)
    if s.residual and out != width:
        raise InputError(f"a residual adapter keeps the state's width {width}; --width {out} needs --no-residual")
    with torch.random.fork_rng():
        torch.manual_seed(s.seed)
        adapter = Adapter(width, s.inner or 4 * width, out, s.residual)
        if s.residual:
            some = torch.randperm(len(states))[:CHUNK].sort().values
            adapter.start_from(_states(states, some).mean(0))
    return adapter


def _states(states: Halves, entries: Tensor) -> Tensor:
    return torch.from_numpy(states[entries.numpy()].astype(np.float32))  # [R, D]
