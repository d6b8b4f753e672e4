"""The ten laws of the design, for tiny random models of all seven families, greedy and with a beam."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from clknn import adaptation, datastore, projection
from clknn import model as models
from clknn.adapter import Adapter
from clknn.corpus import Pair
from clknn.datastore import Datastore
from clknn.decoder import decode, search
from clknn.errors import DatastoreError
from clknn.mixing import Mixing, Neighbours, kernel, weights
from clknn.model import Decoding, Model, TransformersModel
from clknn.states import force_decode
from clknn.translator import Translator

STORED = tiny.pairs(40)
UNSEEN = tiny.pairs(12, seed=5)
BEAMS = (1, 5)

Load = Callable[[str], Model]
Stores = Callable[[str], Datastore]
per_family = pytest.mark.parametrize("family", tiny.FAMILIES)
per_beam = pytest.mark.parametrize("beam", BEAMS)
per_engine = pytest.mark.parametrize("reference", [False, True], ids=["search", "generate"])


def vanilla_store(path: Path, rows: list[Pair], model: Model, hold_out: int = 0) -> Datastore:
    """Raw states, squared L2, exact: the datastore with nothing between it and the law."""
    file = tiny.write_tsv(path.with_suffix(".tsv"), rows)
    adaptation.build(path, [file], model, hold_out)
    adaptation.project(path, model, vanilla=True)
    return datastore.open_datastore(path, model)


@pytest.fixture(scope="module")
def stores(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root, made = tmp_path_factory.mktemp("stores"), dict[str, Datastore]()

    def store(family: str) -> Datastore:
        if family not in made:
            made[family] = vanilla_store(root / family, STORED, load(family))
        return made[family]

    return store


def reference_generate(model: Model, texts: list[str], decoding: Decoding) -> list[list[int]]:
    """transformers' own generate, called as its documentation does: tokens after the prompt, through the end."""
    assert isinstance(model, TransformersModel)
    batch = model._tokenizer([model.prefix + t for t in texts], return_tensors="pt", padding=True)
    options = {"decoder_start_token_id": model._start}
    if model._forced:
        options["forced_bos_token_id"] = model._forced[0]
    with torch.inference_mode():
        out = model._network.generate(
            **batch,
            num_beams=decoding.beam,
            max_new_tokens=decoding.max_new_tokens,
            do_sample=False,
            **{"length_penalty": decoding.length_penalty, **options, **decoding.further},
        )
    ends = model._network.generation_config.eos_token_id
    rows = []
    for row in out[:, 1 + len(model._forced) :].tolist():
        stop = row.index(ends) + 1 if ends in row else len(row)
        rows.append(row[:stop])
    return rows


# -- law 1 -------------------------------------------------------------------------------------------------------------

OPTIONS = (
    {},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.7},
    {"min_new_tokens": 6},
    {"length_penalty": 0.2},
    {"early_stopping": True},
    {"suppress_tokens": [7, 8, 9, 10, 11, 12]},
)


@per_family
@per_beam
@pytest.mark.parametrize("further", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_1_weight_0_is_the_base_models_own_generate(
    load: Load, stores: Stores, family: str, beam: int, further: dict[str, object]
) -> None:
    if beam == 1 and ("length_penalty" in further or "early_stopping" in further):
        further = {}  # options of beam search
    model, texts = load(family), [p.source for p in UNSEEN]
    decoding = Decoding(beam, max_new_tokens=14, longest_ratio=None, further=further)
    mixing = Mixing(4, 1.0, 0.0, scaled=False)
    expected = reference_generate(model, texts, decoding)
    for one in (decoding, replace(decoding, reference=True)):
        mixed = decode(model, model.tokenise_sources(texts), one, stores(family), mixing)
        # A greedy row that ends early is padded by generate; both sides are cut at their end-of-sentence.
        assert [_trimmed(h.tokens, model) for h in mixed] == [_trimmed(row, model) for row in expected]
    assert len({tuple(row) for row in expected}) > 1, "the sources must not all translate alike"


def _trimmed(tokens: list[int], model: Model) -> list[int]:
    assert isinstance(model, TransformersModel)
    while tokens and tokens[-1] == model._pad:
        tokens = tokens[:-1]
    return tokens


@per_family
@per_beam
def test_1_bans_and_penalties_hold_for_what_retrieval_wants_too(
    load: Load, stores: Stores, family: str, beam: int
) -> None:
    """Also at weight 1, where nothing is left of p_knn once its only value is forbidden."""
    model, store = load(family), stores(family)
    pair = STORED[0]
    banned = model.tokenise_targets([pair.target])[0][1]
    mixing = Mixing(1, 1e-3, 1.0, scaled=False)

    def tokens(further: dict[str, object]) -> list[int]:
        decoding = Decoding(beam, max_new_tokens=20, longest_ratio=None, further=further)
        return decode(model, model.tokenise_sources([pair.source]), decoding, store, mixing)[0].tokens

    assert banned in tokens({})
    held = tokens({"suppress_tokens": [banned]})
    assert len(held) > 1
    assert banned not in held
    assert len(tokens({"min_new_tokens": 18})) >= 18


# -- law 2 -------------------------------------------------------------------------------------------------------------


@per_family
@per_beam
@per_engine
def test_2_weight_1_and_one_neighbour_reproduce_a_stored_target(
    load: Load, stores: Stores, family: str, beam: int, reference: bool
) -> None:
    model, decoding = load(family), Decoding(beam, reference=reference)
    translator = Translator(model, stores(family), Mixing(1, 1e-3, 1.0, scaled=False), decoding)
    translations = translator.translate([p.source for p in STORED])
    assert [t.text for t in translations] == [p.target for p in STORED]


# -- law 3 -------------------------------------------------------------------------------------------------------------


@per_family
def test_3_a_query_equal_to_a_stored_key_finds_it_first_with_similarity_1(
    load: Load, family: str, tmp_path: Path
) -> None:
    model = load(family)
    file = tiny.write_tsv(tmp_path / "a.tsv", STORED)
    adaptation.build(tmp_path / "s", [file], model, hold_out=0)
    adaptation.project(tmp_path / "s", model)  # PCA and norm
    with datastore.open_datastore(tmp_path / "s", model) as store:
        keys = torch.from_numpy(np.asarray(store.index.keys, np.float32))
        near = store.neighbours(keys, 1)
        assert near.similarity is not None
        torch.testing.assert_close(near.similarity[:, 0], torch.ones(len(keys)), atol=2e-3, rtol=0)
        # Entries of one key may stand in each other's place; the key found is always the one asked with.
        torch.testing.assert_close(keys[near.ids[:, 0]], keys, atol=2e-2, rtol=0)
        assert (near.ids[:, 0] == torch.arange(len(keys))).float().mean() > 0.95


def test_3_an_identity_adapter_and_full_uncentred_pca_leave_neighbours_unchanged(stores: Stores) -> None:
    states = np.asarray(datastore.array(stores("marian").path, stores("marian").manifest, "states"))
    width = states.shape[1]
    identity = Adapter(width, 4, width, residual=True)
    identity.start_from(torch.zeros(width))
    whole = projection.fit(states, identity, width, centred=False)
    plain = torch.nn.functional.normalize(torch.from_numpy(states.astype(np.float32)), dim=-1)
    turned = whole(torch.from_numpy(states.astype(np.float32)))
    torch.testing.assert_close(turned @ turned.T, plain @ plain.T, atol=1e-4, rtol=0)
    assert (torch.topk(turned @ turned.T, 5).values - torch.topk(plain @ plain.T, 5).values).abs().max() < 1e-4


# -- law 4 -------------------------------------------------------------------------------------------------------------


@per_family
@per_beam
@per_engine
def test_4_a_batch_of_one_equals_a_batch_of_many(
    load: Load, stores: Stores, family: str, beam: int, reference: bool
) -> None:
    decoding = Decoding(beam, max_new_tokens=12, reference=reference)
    translator = Translator(load(family), stores(family), Mixing(4, 5.0, 0.5, scaled=False), decoding)
    texts = [p.source for p in UNSEEN + STORED[:6]]
    together = [t.text for t in translator.translate(texts, batch=len(texts))]
    alone = [t.text for t in translator.translate(texts, batch=1)]
    assert together == alone
    assert len(set(alone)) > 6


@per_family
def test_4_states_do_not_depend_on_the_batch(load: Load, family: str) -> None:
    model, numbered = load(family), list(enumerate(STORED))
    together = force_decode(model, numbered)
    alone = [force_decode(model, [one]) for one in numbered]
    states = np.concatenate([block.states for block in alone])
    np.testing.assert_allclose(together.states.astype(float), states.astype(float), atol=2e-3)


# -- law 5 -------------------------------------------------------------------------------------------------------------


@per_family
@per_beam
@per_engine
def test_5_states_built_equal_states_seen_while_decoding(load: Load, family: str, beam: int, reference: bool) -> None:
    model = load(family)
    sources = model.tokenise_sources([p.source for p in UNSEEN])
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(step: int, states: Tensor, log_p: Tensor) -> Tensor:
        seen[step] = states, log_p.clone()
        return log_p

    generate = model.generate if reference else partial(search, model, batch=5)
    generated = generate(sources, Decoding(beam, max_new_tokens=12), watch)
    for source, hypothesis in zip(sources, generated, strict=True):
        forced = model.force([source], [hypothesis.tokens], with_log_p=True)
        cells = [(i, cell) for i, cell in enumerate(hypothesis.cells) if cell is not None and cell[0] in seen]
        assert len(cells) >= len(hypothesis.cells) - 1  # only an end that was due is not looked up
        for i, (step, row) in cells:
            torch.testing.assert_close(seen[step][0][row], forced.states[i], atol=2e-5, rtol=2e-5)
            assert forced.log_p is not None
            torch.testing.assert_close(seen[step][1][row], forced.log_p[i], atol=2e-4, rtol=2e-4)


@per_family
def test_5_the_last_target_token_does_not_change_earlier_states(load: Load, family: str) -> None:
    model = load(family)
    source = model.tokenise_sources([STORED[0].source])
    target = model.tokenise_targets([STORED[0].target])[0]
    other = [*target[:-2], target[0], target[-1]]
    before, after = model.force(source, [target]).states, model.force(source, [other]).states
    torch.testing.assert_close(before[:-1], after[:-1], atol=1e-6, rtol=0)
    assert target[-2] == target[0] or not torch.allclose(before[-1], after[-1], atol=1e-4)


# -- law 6 -------------------------------------------------------------------------------------------------------------


@per_family
def test_6_every_kept_target_position_is_stored_once(load: Load, stores: Stores, family: str) -> None:
    model, store = load(family), stores(family)
    targets = model.tokenise_targets([p.target for p in STORED])
    assert store.values.tolist() == [token for row in targets for token in row]
    assert store.pair_ids.tolist() == [i for i, row in enumerate(targets) for _ in row]
    assert store.positions.tolist() == [t for row in targets for t in range(len(row))]
    assert isinstance(model, TransformersModel)
    ends = [row[-1] for row in targets]
    assert set(ends) == {model.ends[0]}
    strangers = {model._pad, *model._forced} | ({model._start} - {model.ends[0]})
    assert not strangers & set(store.values.tolist())


@per_family
def test_6_text_that_names_control_tokens_is_text(load: Load, family: str, tmp_path: Path) -> None:
    model = load(family)
    assert isinstance(model, TransformersModel)
    names = {*model._tokenizer.all_special_tokens, *models._language_codes(model._tokenizer), "__fr__", ">>fra<<"}
    ids = {model._tokenizer.convert_tokens_to_ids(name) for name in names} - {model._tokenizer.unk_token_id}
    control = {model._pad, model._start, *model._forced, *model.ends, *ids}
    texts = ["house </s> tree <pad> cat", *(f"{n} house {n}tree{n}" for n in sorted(names)), *sorted(names)]
    around = [token for token in model.tokenise_sources(["house"])[0] if token in control]
    for text, source, target in zip(texts, model.tokenise_sources(texts), model.tokenise_targets(texts), strict=True):
        assert [token for token in source if token in control] == around, text
        assert [token for token in target if token in control] == model.ends[:1], text
    for text in ("house </s> tree <pad> cat", "cat </s>", "<s>cat"):
        back = model.detokenise(model.tokenise_targets([text])[0])
        assert back.replace(" ", "") == text.replace(" ", "")  # FSMT's Moses puts spaces around < and >
    with vanilla_store(tmp_path / "s", [Pair(text, text, STORED[0].origin) for text in texts[:3]], model) as store:
        assert [t for t in store.values.tolist() if t in control] == model.ends[:1] * 3


@pytest.mark.parametrize(("family", "token"), [("t5", "<extra_id_1>"), ("marian", ">>fra<<")])
def test_6_control_tokens_of_the_prefix_are_meant(checkpoints: Callable[[str], Path], family: str, token: str) -> None:
    told, plain = (models.load(str(checkpoints(family)), "de", "en", prefix=p) for p in (f"{token} ", ""))
    assert isinstance(told, TransformersModel)
    meant = told._tokenizer.convert_tokens_to_ids(token)
    for text in ("haus baum", "haus </s> baum", ""):
        assert told.tokenise_sources([text])[0] == [meant, *plain.tokenise_sources([text])[0]]
    for text in (token, f"{token} haus", f"haus {token}"):
        assert told.tokenise_sources([text])[0].count(meant) == 1
        assert plain.tokenise_sources([text])[0].count(meant) == 0


@per_family
@per_beam
@per_engine
def test_6_nothing_is_retrieved_while_a_forced_token_is_due(
    load: Load, family: str, beam: int, reference: bool
) -> None:
    model, steps = load(family), list[int]()
    assert isinstance(model, TransformersModel)

    def watch(step: int, states: Tensor, log_p: Tensor) -> Tensor:  # noqa: ARG001
        steps.append(step)
        return log_p

    generate = model.generate if reference else partial(search, model)
    generate(model.tokenise_sources([UNSEEN[0].source]), Decoding(beam, max_new_tokens=6), watch)
    assert steps == sorted(set(steps))
    assert (0 in steps) == (not model._forced)
    if model._network.generation_config.forced_eos_token_id is not None:
        assert 5 not in steps  # the last of six tokens is the forced end


# -- law 7 -------------------------------------------------------------------------------------------------------------


def random_neighbours(seed: int, rows: int = 6, k: int = 8, vocabulary: int = 20) -> Neighbours:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(0, vocabulary, (rows, k), generator=rng)
    found = torch.rand(rows, k, generator=rng) > 0.3
    found[0] = False  # a row that found nothing
    values[~found] = -1  # what faiss's -1 would become, were it used
    similarity = torch.rand(rows, k, generator=rng) * 2 - 1
    return Neighbours(torch.arange(rows * k).view(rows, k), values, found, similarity=similarity)


@pytest.mark.parametrize("seed", range(5))
def test_7_p_knn_sums_to_1_or_is_nothing(seed: int) -> None:
    near = random_neighbours(seed)
    p = tiny.p_knn(near, 0.01, 20)
    torch.testing.assert_close(p.sum(1), near.found.any(1).float())
    assert (p >= 0).all()
    assert p[0].sum() == 0
    assert weights(near, Mixing(8, 0.01, 0.9, scaled=False))[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_7_the_order_of_neighbours_does_not_matter_and_none_found_leaves_the_model(seed: int) -> None:
    near = random_neighbours(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert near.similarity is not None
    other = Neighbours(
        near.ids[:, order], near.values[:, order], near.found[:, order], similarity=near.similarity[:, order]
    )
    log_p = torch.log_softmax(torch.randn(6, 20, generator=torch.Generator().manual_seed(seed)), -1)
    mixing = Mixing(8, 0.05, 0.6, scaled=True)
    torch.testing.assert_close(tiny.mixed(log_p, near, mixing), tiny.mixed(log_p, other, mixing))
    assert torch.equal(tiny.mixed(log_p, near, mixing)[0], log_p[0])
    torch.testing.assert_close(tiny.mixed(log_p, near, mixing).exp().sum(1), torch.ones(6))
    assert (kernel(near, 0.05)[~near.found] == 0).all()


# -- law 8 -------------------------------------------------------------------------------------------------------------


def contents(store: Datastore) -> tuple[list[tuple[str, str, int, int]], np.ndarray]:
    """Entries as (source, target, value, position), and their keys, whatever the ids."""
    pairs = store.pairs.get(np.unique(store.pair_ids).tolist())
    rows = [
        (pairs[int(p)].source, pairs[int(p)].target, int(v), int(t))
        for p, v, t in zip(store.pair_ids, store.values, store.positions, strict=True)
    ]
    return rows, np.asarray(store.index.keys, np.float32)


@per_family
def test_8_build_then_add_equals_building_both(load: Load, family: str, tmp_path: Path) -> None:
    model = load(family)
    whole = vanilla_store(tmp_path / "whole", STORED, model)
    vanilla_store(tmp_path / "grown", STORED[:25], model).close()
    datastore.add(tmp_path / "grown", STORED[25:], model)
    with datastore.open_datastore(tmp_path / "grown", model) as grown:
        assert contents(grown)[0] == contents(whole)[0]
        np.testing.assert_allclose(contents(grown)[1], contents(whole)[1], atol=2e-3)
        assert not datastore.verify(tmp_path / "grown")


@per_family
def test_8_remove_equals_never_having_had(load: Load, family: str, tmp_path: Path) -> None:
    model = load(family)
    without = [p for i, p in enumerate(STORED) if i not in (0, 7, 39)]
    never = vanilla_store(tmp_path / "never", without, model)
    vanilla_store(tmp_path / "had", STORED, model).close()
    assert datastore.remove(tmp_path / "had", [0, 7, 39]) == 3
    mixing = Mixing(4, 5.0, 0.8, scaled=False)
    with datastore.open_datastore(tmp_path / "had", model) as had:
        assert contents(had)[0] == contents(never)[0]
        np.testing.assert_allclose(contents(had)[1], contents(never)[1], atol=2e-3)
        texts = [p.source for p in STORED]
        a = Translator(model, had, mixing, Decoding(1)).translate(texts)
        b = Translator(model, never, mixing, Decoding(1)).translate(texts)
        assert [t.text for t in a] == [t.text for t in b]


@per_family
def test_8_holds_where_pairs_are_held_out(load: Load, family: str, tmp_path: Path) -> None:
    """The choice of those depends on the pairs alone: with these two among them, it falls on them."""
    model = load(family)
    whole = vanilla_store(tmp_path / "whole", STORED, model, hold_out=1)
    held = {pair for role in ("tune", "test") for _, pair in whole.pairs.each(role)}
    held_out = [p for p in STORED if p.source in {pair.source for pair in held}]
    assert len(held_out) == 2
    others = [p for p in STORED if p not in held_out]
    few = vanilla_store(tmp_path / "few", held_out + others[:20], model, hold_out=1)

    shutil.copytree(few.path, tmp_path / "changed")
    datastore.add(tmp_path / "changed", others[20:], model)
    assert_same(tmp_path / "changed", whole)
    with datastore.open_datastore(tmp_path / "changed") as grown:
        late = [number for number, pair in grown.pairs.each("stored") if pair.source in {p.source for p in others[20:]}]
    datastore.remove(tmp_path / "changed", late)
    assert_same(tmp_path / "changed", few)

    # What was held out and is added is stored, as if nothing had been held out.
    datastore.add(tmp_path / "changed", [*held_out, *others[20:]], model)
    assert_same(tmp_path / "changed", vanilla_store(tmp_path / "all", STORED, model))


def assert_same(path: Path, built: Datastore) -> None:
    """The same entries with the same keys, and the same pairs in every role, whatever their order and ids."""
    with datastore.open_datastore(path) as ours:
        (rows, keys), (rows_built, keys_built) = contents(ours), contents(built)
        order, order_built = (sorted(range(len(r)), key=r.__getitem__) for r in (rows, rows_built))
        assert [rows[i] for i in order] == [rows_built[i] for i in order_built]
        np.testing.assert_allclose(keys[order], keys_built[order_built], atol=2e-3)
        for role in ("stored", "tune", "test"):
            assert {p.source for _, p in ours.pairs.each(role)} == {p.source for _, p in built.pairs.each(role)}
    assert not datastore.verify(path)


# -- law 9 -------------------------------------------------------------------------------------------------------------


@per_family
def test_9_another_model_is_refused_with_both_fingerprints(
    stores: Stores, load: Load, family: str, tmp_path: Path
) -> None:
    store = stores(family)
    other = models.load(str(tiny.save_checkpoint(family, tmp_path / family, seed=1)), "de", "en")
    assert other.fingerprint != load(family).fingerprint
    with pytest.raises(DatastoreError) as caught:
        Translator.open(store.path, other)
    assert other.fingerprint in str(caught.value)
    assert load(family).fingerprint in str(caught.value)


def test_9_a_model_read_again_in_either_precision_has_the_same_fingerprint(
    checkpoints: Callable[[str], Path], load: Load
) -> None:
    for family in tiny.FAMILIES:
        half = models.load(str(checkpoints(family)), "de", "en", dtype="bfloat16")
        assert half.fingerprint == load(family).fingerprint


def test_9_another_layer_or_format_version_is_refused(stores: Stores, load: Load, tmp_path: Path) -> None:
    store, model = stores("t5"), load("t5")
    elsewhere = replace(store.manifest, state="input of the last feed-forward layer")
    with pytest.raises(DatastoreError, match="last feed-forward layer"):
        datastore.check_model(store.path, elsewhere, model)
    (tmp_path / "manifest.json").write_text(
        (store.path / "manifest.json").read_text().replace('"format": 2', '"format": 7')
    )
    with pytest.raises(DatastoreError, match=r"format version 7.*reads versions 1 to 2"):
        datastore.open_datastore(tmp_path, model)


# -- law 10 ------------------------------------------------------------------------------------------------------------


@per_family
@pytest.mark.parametrize("after", [0, 1, 2])
def test_10_a_killed_build_does_not_open_and_a_rerun_ends_with_the_same_entries(
    load: Load, stores: Stores, family: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = load(family), tmp_path / "s"
    file = tiny.write_tsv(tmp_path / "s.tsv", STORED)
    monkeypatch.setattr(adaptation, "write_states", _in_windows_of(11, killed_after=after))
    with pytest.raises(KeyboardInterrupt):
        adaptation.build(path, [file], model, hold_out=0)
    with pytest.raises(DatastoreError, match="half-built"):
        datastore.open_datastore(path, model)
    monkeypatch.setattr(adaptation, "write_states", _in_windows_of(11, killed_after=None))
    adaptation.build(path, [file], model, hold_out=0)
    adaptation.project(path, model, vanilla=True)
    with datastore.open_datastore(path, model) as resumed:
        assert contents(resumed)[0] == contents(stores(family))[0]
        np.testing.assert_allclose(contents(resumed)[1], contents(stores(family))[1], atol=2e-3)
        assert not datastore.verify(path)


def _in_windows_of(size: int, killed_after: int | None) -> Callable[..., object]:
    from clknn.states import write_states

    def write(model, pairs_after, folder, tally, advance):  # type: ignore[no-untyped-def]
        windows = 0

        def pairs(after):  # type: ignore[no-untyped-def]
            nonlocal windows
            for i, row in enumerate(pairs_after(after)):
                if killed_after is not None and i == killed_after * size + 3:
                    raise KeyboardInterrupt
                yield row

        return write_states(model, pairs, folder, tally, advance, window=size)

    return write
