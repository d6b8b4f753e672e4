"""The paper's figures, drawn of any datastore, each with the numbers that a picture alone would not prove.

In go a datastore and pairs it does not hold; out come retrieval accuracy@k of its keys beside the raw states, the
paper's t-SNE of frequent, middling and rare values, and how confidence tells right neighbours from wrong ones: PNG, SVG
and figures.json. It hides matplotlib and scikit-learn, which are imported when something is drawn. The numbers beside a
t-SNE are of the full vectors, as they are searched, and the mean of 20 draws of which the picture is the first. The
trade-off: raw states are searched exactly for 2,000 tokens, a minute for each ten million entries of width 256.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from clknn import __version__
from clknn import datastore as stores
from clknn import index as indices
from clknn.adaptation import KS, Report, force_pairs, silent
from clknn.adapter import Classes
from clknn.corpus import Pair
from clknn.datastore import Datastore
from clknn.errors import InputError
from clknn.evaluation import retrieval_accuracy
from clknn.mixing import Neighbours, confidence
from clknn.model import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

QUERIES = 2_000  # tokens asked for
LEAST_COUNT = 10  # occurrences of a value that can be in the picture, and entries drawn of it
MOST_VALUES = 10  # of a band, in one draw
DRAWS = 20
BINS = 10
# Okabe and Ito's colours, which the colour-blind tell apart, and two more; a shape each for print in grey.
COLOURS = "#0072B2 #E69F00 #009E73 #D55E00 #CC79A7 #56B4E9 #000000 #882255 #999999 #F0E442".split()
SHAPES = "o s ^ D v P X < > *".split()
DASHES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text, whatever script a token is in
    "svg.hashsalt": "clknn",  # the same numbers give the same file
}


# ---- values of three frequencies, and how well vectors keep them apart


@dataclass(frozen=True)
class Band:
    """Values of like frequency."""

    name: str
    classes: Ids  # [c] of `Classes`, the most frequent first
    number: int  # of them in one draw


@dataclass(frozen=True)
class Apart:
    """How well vectors of some values keep these apart, by Euclidean distance."""

    silhouette: float  # -1 to 1
    purity: float  # share of vectors whose nearest other is of their own value


def bands(classes: Classes) -> list[Band]:
    """High, middle and low: the first 1%, 40-60% and last 1% of the values with at least 10 occurrences, by count.

    Where 1% is less than one draw needs, a band is as many values as that.
    """
    counts = classes.counts.numpy()
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[: int((counts >= LEAST_COUNT).sum())]
    n = len(ranked)
    number = min(MOST_VALUES, n // 3)
    if number < 2:
        raise InputError(
            f"{n} values occur {LEAST_COUNT} times or more, and 6 are needed to compare frequent ones with rare ones; "
            "build from more pairs"
        )
    end = max(number, math.ceil(n / 100))
    middle = min(math.floor(0.4 * n), (n - number) // 2)
    return [
        Band("high", ranked[:end], number),
        Band("middle", ranked[middle : max(math.ceil(0.6 * n), middle + number)], number),
        Band("low", ranked[n - end :], number),
    ]


def draw(band: Band, classes: Classes, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """[c] classes of a band, the most frequent first, and [c, 10] entries of each."""
    chosen = np.sort(rng.permutation(len(band.classes))[: band.number])
    drawn = [
        classes.order[classes.starts[c] : classes.starts[c] + classes.counts[c]].numpy() for c in band.classes[chosen]
    ]
    return band.classes[chosen], np.stack([rng.permutation(entries)[:LEAST_COUNT] for entries in drawn])


def apart(vectors: Floats, labels: Ids) -> Apart:
    """Of vectors [n, P] with labels [n]."""
    from sklearn.metrics import silhouette_score

    distance = torch.cdist(*(torch.from_numpy(vectors),) * 2, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    silhouette = silhouette_score(distance, labels, metric="precomputed")
    np.fill_diagonal(distance, np.inf)
    return Apart(float(silhouette), float((labels[distance.argmin(1)] == labels).mean()))


def picture(vectors: Floats, seed: int) -> Floats:
    """[n, 2]: t-SNE of vectors [n, P], as wide as one value's entries."""
    from sklearn.manifold import TSNE

    # "exact" has no threads whose order of adding could show
    placed = TSNE(perplexity=LEAST_COUNT - 1, init="pca", random_state=seed, method="exact").fit_transform(vectors)
    return np.asarray(placed, np.float32)


def words(
    representations: Mapping[str, npt.NDArray[np.float16]],
    classes: Classes,
    named: Callable[[int], str],
    seed: int = 0,
    report: Report = silent,
) -> tuple[Figure, dict[str, Any]]:
    """The t-SNE of each representation [N, P] of the same entries, and its numbers.

    `named` says how to write a class.
    """
    made, panels = dict[str, Any](), dict[str, dict[str, tuple[Floats, list[str], Apart]]]()
    for band in bands(classes):
        rng = np.random.default_rng(seed)
        draws = [draw(band, classes, rng) for _ in range(DRAWS)]
        labels = np.repeat(np.arange(band.number), LEAST_COUNT)  # [n]
        shown = [named(int(c)) for c in draws[0][0]]
        counts = classes.counts[torch.from_numpy(band.classes)]
        made[band.name] = {
            "values in the band": len(band.classes),
            "occurrences": [int(counts.min()), int(counts.max())],
            "values in a draw": band.number,
            "shown": shown,
        }
        for name, vectors in representations.items():
            of_draws = [vectors[entries.ravel()].astype(np.float32) for _, entries in draws]  # each [n, P]
            reached = [apart(each, labels) for each in of_draws]
            silhouettes, purities = [a.silhouette for a in reached], [a.purity for a in reached]
            mean = Apart(float(np.mean(silhouettes)), float(np.mean(purities)))
            made[band.name][name] = {
                "silhouette": round(mean.silhouette, 4),
                "silhouette, standard deviation of draws": round(float(np.std(silhouettes)), 4),
                "purity": round(mean.purity, 4),
                "purity, standard deviation of draws": round(float(np.std(purities)), 4),
            }
            panels.setdefault(name, {})[band.name] = picture(of_draws[0], seed), shown, mean
        report("figures", len(made), 3, "bands")
    return _words_figure(panels), made


def _words_figure(panels: Mapping[str, Mapping[str, tuple[Floats, list[str], Apart]]]) -> Figure:
    """A row for each representation, a column for each band, and the values' names below."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 2.75 * len(panels) + 1.4), layout="constrained")
        grid = figure.add_gridspec(len(panels) + 1, 3, height_ratios=[2.75] * len(panels) + [1.2])
        for row, (name, of_band) in enumerate(panels.items()):
            for column, (band, (placed, shown, numbers)) in enumerate(of_band.items()):
                axes = figure.add_subplot(grid[row, column])
                for i in range(len(shown)):
                    points = placed[i * LEAST_COUNT : (i + 1) * LEAST_COUNT]
                    axes.scatter(
                        points[:, 0], points[:, 1], s=26, c=COLOURS[i], marker=SHAPES[i], linewidths=0.4,
                        edgecolors="#333333",
                    )  # fmt: skip
                axes.set_xticks([])
                axes.set_yticks([])
                axes.spines[:].set_visible(True)
                axes.set_title(f"{name}, {band} frequency")
                axes.set_xlabel(f"silhouette {numbers.silhouette:.2f}, purity {numbers.purity:.2f}")
        for column, (_, shown, _) in enumerate(next(iter(panels.values())).values()):
            _legend_below(figure.add_subplot(grid[len(panels), column]), shown)
    return figure


def _legend_below(axes: Axes, shown: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    axes.axis("off")
    handles = [
        Line2D([], [], linestyle="", marker=SHAPES[i], color=COLOURS[i], markeredgecolor="#333333", markeredgewidth=0.4)
        for i in range(len(shown))
    ]
    legend = axes.legend(
        handles, [_short(name) for name in shown], loc="upper center", ncols=2, frameon=False, columnspacing=1.2,
        handletextpad=0.3, borderaxespad=0,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a token can be a dollar sign


def _written(piece: str) -> str:
    """A token as a legend can show it: where a word begins as SentencePiece writes it, no line ends."""
    return "".join(c if c.isprintable() else "�" for c in piece.replace(" ", "▁"))


def _short(name: str, most: int = 16) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


# ---- retrieval accuracy@k


def accuracy_figure(panels: Mapping[str, Mapping[str, Mapping[int, float]]], columns: int = 3) -> Figure:
    """A panel for each datastore, at most `columns` beside each other, in it a curve for each system."""
    import matplotlib
    from matplotlib.figure import Figure

    systems = list(dict.fromkeys(system for curves in panels.values() for system in curves))
    columns = min(columns, len(panels))
    rows, below = math.ceil(len(panels) / columns), math.ceil(len(systems) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * columns + 0.4, 2.7 * rows + 0.25 * below + 0.2), layout="constrained")
        for place, (title, curves) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.set_xscale("log", base=2)
            for system, curve in curves.items():
                i = systems.index(system)
                axes.plot(
                    list(curve), list(curve.values()), label=system, color=COLOURS[i % len(COLOURS)],
                    linestyle=DASHES[i % len(DASHES)], marker=SHAPES[i % len(SHAPES)], markersize=4.5, linewidth=1.2,
                    markeredgecolor="#333333", markeredgewidth=0.4,
                )  # fmt: skip
            ks = sorted({k for curve in curves.values() for k in curve})
            axes.set_xticks(ks, [str(k) for k in ks])
            axes.minorticks_off()
            axes.grid(axis="y", linewidth=0.4, color="#cccccc")
            axes.set_title(title)
            axes.set_xlabel("k")
            if place % columns == 0:
                axes.set_ylabel("retrieval accuracy@k")
        handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
        figure.legend([handles[s] for s in systems], systems, loc="outside lower center", ncols=columns, frameon=False)
    return figure


# ---- confidence and what it is worth


def trust(neighbours: Neighbours, truth: Ids) -> tuple[Figure, dict[str, Any]]:
    """How confidence is distributed where the nearest neighbour has the right token [R], and where it has a wrong one.

    Of keys that have distances, the mean distance stands in its place.
    """
    found = neighbours.found.any(1).numpy()
    right = (neighbours.values[:, 0].numpy() == truth)[found]  # [r]
    if neighbours.similarity is not None:
        what, near = "confidence", confidence(neighbours).numpy()[found]
        order = near
    else:
        assert neighbours.distance is not None
        far = neighbours.distance.masked_fill(~neighbours.found, 0).sum(1) / neighbours.found.sum(1).clamp(min=1)
        what, near = "mean squared distance", far.numpy()[found]
        order = -near
    edges = np.quantile(near, np.linspace(0, 1, BINS + 1))
    part = np.clip(np.searchsorted(edges, near, side="right") - 1, 0, BINS - 1)  # [r]
    tenths = [
        {"tokens": int((part == b).sum()), what: float(near[part == b].mean()), "right": float(right[part == b].mean())}
        for b in range(BINS)
        if (part == b).any()
    ]
    made: dict[str, Any] = {
        "neighbours": neighbours.found.shape[1],
        "tokens": len(right),
        "right": float(right.mean()),
        f"median {what}, right": _median(near[right]),
        f"median {what}, wrong": _median(near[~right]),
        "chance that a right token is nearer than a wrong one": _area(order, right),
        "tenths": tenths,
    }
    return _trust_figure(near, right, what, tenths), made


def _median(numbers: Floats) -> float | None:
    return float(np.median(numbers)) if len(numbers) else None


def _area(score: Floats, right: Mask) -> float | None:
    """The area under the ROC curve; None where all are right, or none is."""
    if right.all() or not right.any():
        return None
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]  # [R] ties share the mean of their ranks
    n = int(right.sum())
    return float((rank[right].sum() - n * (n + 1) / 2) / (n * (len(right) - n)))


def _trust_figure(near: Floats, right: Mask, what: str, tenths: list[dict[str, Any]]) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 2.9), layout="constrained")
        left, middle = figure.subplots(1, 2)
        bins = np.linspace(float(near.min()), float(near.max()) + 1e-9, 41)
        for chosen, label, colour, dashes in ((right, "right", COLOURS[0], "-"), (~right, "wrong", COLOURS[3], "--")):
            left.hist(
                near[chosen], bins=list(bins), histtype="step", label=f"{label} ({int(chosen.sum()):,})", color=colour,
                linestyle=dashes, linewidth=1.4,
            )  # fmt: skip
        left.set_xlabel(what)
        left.set_ylabel("tokens")
        left.set_title("the nearest neighbour's token is …")
        left.legend(frameon=False)
        middle.plot(
            [t[what] for t in tenths], [t["right"] for t in tenths], marker="o", color=COLOURS[0], linewidth=1.2
        )
        middle.axhline(float(right.mean()), color="#777777", linewidth=0.8, linestyle=":")
        middle.annotate(
            "all tokens", (1, float(right.mean())), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=8, color="#555555",
        )  # fmt: skip
        middle.set_ylim(0, 1.02)
        middle.set_xlabel(f"{what}, mean of a tenth of the tokens")
        middle.set_ylabel("share that is right")
        middle.set_title("what it is worth")
    return figure


# ---- a datastore's own figures


def of_datastore(
    store: Datastore, model: Model, pairs: Sequence[Pair], folder: Path, seed: int = 0, report: Report = silent
) -> list[Path]:
    """Draws all figures of a datastore, asked with these pairs, into `folder`; gives the files.

    The pairs should not be stored: figures.json says how many are.
    """
    forced = force_pairs(model, [p.source for p in pairs], [p.target for p in pairs])
    if forced is None:
        raise InputError("no segment fits the model, so there is nothing to retrieve for")
    classes, values = Classes.of(store.values), np.unique(store.values)
    bands(classes)  # where it refuses, it does so before anything is searched or made
    _make_folder(folder)
    some = torch.from_numpy(np.random.default_rng(seed).permutation(len(forced.truth))[:QUERIES]).sort().values
    asked, truth = forced.states[some], forced.truth[some].numpy()  # [R, D], [R]
    queries = store.project(asked)  # [R, P]
    states = stores.array(store.path, store.manifest, "states")
    report("figures", 0, 3, "exact search")
    searched = {"raw states": (states, asked, False)}
    if store.projection.normed or store.projection.adapter is not None:
        searched["keys"] = store.index.keys, queries, store.projection.normed
    k = min(max(KS), store.entries)
    curves = {}
    for name, (vectors, vector_queries, inner) in searched.items():
        near = indices.exact_search(vectors, vector_queries.numpy(), k, inner)
        curves[name] = retrieval_accuracy(store.values[near.ids].astype(np.int64), near.found, truth, KS)
    asked_for = k if store.combiner is None else store.combiner.k
    drawn: dict[str, tuple[Figure, Any]] = {
        "accuracy": (accuracy_figure({f"{store.path.name}, {store.entries:,} entries": curves}), curves),
        "words": words(
            {name: each[0] for name, each in searched.items()}, classes,
            lambda c: _written(model.pieces([int(values[c])])[0]), seed, report,
        ),
        "confidence": trust(store.neighbours(queries, asked_for), truth),
    }  # fmt: skip
    files = [file for name, (figure, _) in drawn.items() for file in save(figure, folder, name)]
    signature = {
        "datastore": str(store.path), "keys": store.manifest.files["keys"].blake2b, "model": model.fingerprint,
        "segments": len(pairs), "known": store.pairs.known((p.source, p.target) for p in pairs),
        "tokens": len(truth), "seed": seed, "clknn": __version__,
    }  # fmt: skip
    record = {name: numbers for name, (_, numbers) in drawn.items()} | {"signature": signature}
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    return [*files, _write(folder / "figures.json", text.encode())]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """NAME.png for looking at and NAME.svg for print."""
    pictures = {"png": rendered(figure, "png", {"Software": None}), "svg": rendered(figure, "svg", {"Date": None})}
    return [_write(folder / f"{name}.{suffix}", content) for suffix, content in pictures.items()]


def rendered(figure: Figure, suffix: str, metadata: dict[str, str | None]) -> bytes:
    """A file of this suffix; matplotlib's own metadata would make it another file every day."""
    import warnings

    import matplotlib

    drawn = BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A script that the font lacks shows as boxes in the PNG, and as itself in the SVG.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(drawn, format=suffix, dpi=200, metadata=metadata)
    return drawn.getvalue()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made a folder ({error.strerror}); choose another --out") from error


def _write(file: Path, content: bytes) -> Path:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror}); make room, or choose another --out") from error
    return file
