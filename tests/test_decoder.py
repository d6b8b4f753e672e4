"""Evidence: the shares recovered through beam indices are those that made p_mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from clknn import adaptation, datastore
from clknn.decoder import decode
from clknn.mixing import Mixing
from clknn.model import Decoding, Model


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("reference", [False, True], ids=["search", "generate"])
def test_evidence_adds_up_to_p_mix_along_the_winning_hypothesis(
    load: Callable[[str], Model], family: str, beam: int, reference: bool, tmp_path: Path
) -> None:
    model, path = load(family), tmp_path / "s"
    adaptation.build(path, [tiny.write_tsv(tmp_path / "s.tsv", tiny.pairs(40))], model, hold_out=0)
    adaptation.project(path, model)
    sources = model.tokenise_sources([p.source for p in tiny.pairs(6, seed=5)])
    mixing = Mixing(8, 0.1, 0.7, scaled=True)
    with datastore.open_datastore(path, model) as store:
        decoding = Decoding(beam, max_new_tokens=10, reference=reference)
        hypotheses = decode(model, sources, decoding, store, mixing, evidence=True, batch=4)
        for source, hypothesis in zip(sources, hypotheses, strict=True):
            assert hypothesis.evidence is not None
            assert [e.token for e in hypothesis.evidence] == hypothesis.tokens
            # The same by teacher forcing the hypothesis: no beam, no cache, no indices.
            forced = model.force([source], [hypothesis.tokens], with_log_p=True)
            assert forced.log_p is not None
            near = store.neighbours(store.project(forced.states), mixing.k)
            log_p_mix = tiny.mixed(forced.log_p, near, mixing)
            for t, evidence in enumerate(hypothesis.evidence):
                if evidence.weight == 0:
                    continue  # a forced end: nothing was retrieved
                assert evidence.p_mix == pytest.approx(float(log_p_mix[t, evidence.token].exp()), abs=2e-3)
                assert evidence.p_model == pytest.approx(float(forced.log_p[t, evidence.token].exp()), abs=1e-4)
                for vote in evidence.votes:
                    assert store.values[vote.entry] == evidence.token
                    assert vote.share > 0
                parts = (1 - evidence.weight) * evidence.p_model + sum(v.share for v in evidence.votes)
                assert parts == pytest.approx(evidence.p_mix)


def test_without_a_datastore_it_is_the_base_model(load: Callable[[str], Model]) -> None:
    model = load("marian")
    sources = model.tokenise_sources([p.source for p in tiny.pairs(3)])
    plain = model.generate(sources, Decoding(2, max_new_tokens=8))
    assert [h.tokens for h in decode(model, sources, Decoding(2, max_new_tokens=8))] == [g.tokens for g in plain]
    assert torch.is_inference_mode_enabled() is False
