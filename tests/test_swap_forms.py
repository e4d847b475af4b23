"""A site in several forms: each proved for itself, all raced with the module as it is, the chosen one used and shown."""

import pytest
import torch
from odd_sizes import FORMS, ONE, Watched, odd_gpt, odd_mixed, tokens
from torch import nn

from whet.choices import Choices
from whet.measure import Race
from whet.race import FASTEST, NOISY, TIED, Outcome, Ratio, Timing
from whet.swap import Site, _groups, _optimize, gated_mlp
from whet.swap._optimize import optimize, restore
from whet.swap._preview import preview
from whet.tune import Tuned


def raced(winner: str, why: str = FASTEST, lean: str = ""):
    """A race that this one wins; `lean` takes half the memory."""
    def race(runs, keep, **options):
        timings, ratios = {}, {}
        for name, run in runs.items():
            run()
            slow = 1.0 if name == winner or why != FASTEST else 2.0
            timings[name] = Timing(slow, slow, slow, 9, peak_mib=5.0 if name == lean else 10.0)
            ratios[name] = Ratio(slow, slow, slow, 9)
        chosen = winner if winner in runs else list(runs)[-1]
        return Race(timings, Outcome(chosen, why, ratios, True), "", {n: [t.ms] * 9 for n, t in timings.items()})

    return race


def racing(monkeypatch, race) -> None:
    """This race for every group; the whole is the faster one, replaced."""
    monkeypatch.setattr(_groups, "race", race)
    monkeypatch.setattr(_optimize, "race", raced("eager"))


def optimized(monkeypatch, race) -> nn.Module:
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    racing(monkeypatch, race)
    return optimize(odd_mixed(), torch.randn(2, 24, 64), mode="infer", seconds=0.001)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_wins_the_race_is_used_and_shown(monkeypatch, form):
    model = optimized(monkeypatch, raced(form))
    group, = (g for g in model.whet.groups if g.kind == "gated_mlp")
    record = group.to_record()
    assert group.replaced and group.form == form == record["form"] and record["impls"] == {"swiglu": "torch"}
    assert set(record["forms_ms"]) == set(FORMS) and (record["before_ms"], record["after_ms"]) == (2.0, 1.0)
    assert form in " ".join(str(model.whet).split()) or "padded" in str(model.whet)
    with Watched() as seen:
        model(torch.randn(2, 24, 64))
    assert bool(seen.misaligned(torch.float32)) == ("padded" not in form)
    restore(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(("why", "lean", "form"), [
    (FASTEST, ONE, None), (f"{NOISY}: kept before", ONE, None), (TIED, "", None), (TIED, ONE, ONE),
])
def test_the_module_stays_unless_a_form_as_fast_takes_less_memory(monkeypatch, why, lean, form):
    group, = (g for g in optimized(monkeypatch, raced("before", why, lean)).whet.groups if g.kind == "gated_mlp")
    assert group.replaced == (form is not None) and (form is None or group.form == form)
    assert ("less memory" in group.why) == (form is not None)


@pytest.mark.parametrize("where", ["_proof", "_optimize"])
def test_a_form_that_fails_in_its_proof_or_at_full_size_costs_only_itself(monkeypatch, where):
    def product_forms(module, form, call):
        def edits(module, ops):
            fewest = call.args[0].numel()

            def forward(self, x):
                if where == "_proof" or x.numel() > fewest:
                    raise RuntimeError("planted")
                return self._whet_forward(x) + 0 * ops.swiglu(x, None).sum()

            return gated_mlp.new_forward(module, forward)

        return {"broken": edits} | real(module, form, call)

    real = gated_mlp.product_forms
    monkeypatch.setattr(gated_mlp, "product_forms", product_forms)
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    monkeypatch.setattr(_optimize, "recorded", lambda *args: [])
    racing(monkeypatch, raced(FORMS[-1]))
    model = optimize(odd_mixed(), torch.randn(5, 24, 64), mode="infer", seconds=0.001)
    group, = (g for g in model.whet.groups if g.kind == "gated_mlp")
    assert group.replaced and group.form == FORMS[-1] and set(group.forms_ms) == set(FORMS)
    assert [x.why for x in model.whet.replaced.left if "broken: " in x.why] == [
        "SwiGLU between w1, w3, w2, broken: RuntimeError: planted"] * (where == "_proof")


def test_a_group_that_asks_no_op_says_what_it_does(monkeypatch):
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    racing(monkeypatch, raced("the last"))
    model = optimize(odd_gpt(), tokens(), seconds=0.001)
    groups = {g.kind: g for g in model.whet.groups}
    assert not groups["aligned_mlp"].impls and groups["aligned_mlp"].replaced and len(groups["aligned_mlp"].sites) == 2
    assert "padded to 128" in " ".join(str(model.whet).split())
    assert model.whet.to_record()["note"] == ""


def test_a_preview_names_every_form_that_is_right():
    shown = preview(odd_mixed(), torch.randn(2, 24, 64), mode="infer")
    group, = (g for g in shown.groups if g.kind == "gated_mlp")
    assert group.to_record()["form"] == " or ".join(FORMS) and not group.forms_ms


def test_a_site_has_its_own_form_first_and_can_be_cut_to_some():
    def edits(module, ops):
        return []

    site = Site("", nn.Identity(), edits, "words", form="a", forms={"b": edits, "c": edits})
    assert [s.form for s in site.in_each_form()] == ["a", "b", "c"] and not any(s.forms for s in site.in_each_form())
    cut = site.with_forms(["c", "b"])
    assert cut.form == "b" and list(cut.forms) == ["c"]
