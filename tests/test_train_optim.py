"""The optimizer of a run: AdamW as torch's, Muon, float32 masters, averaged weights; on a GPU, in a CUDA graph."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from whet.step import compile_step
from whet.step_plans import CapturedLoop, LoopWork, Rates, outside_because
from whet.train.muon import COEFFICIENTS, ITERATIONS, hidden_matrices, orthogonalized
from whet.train.optim import Ema, MuonAdamW, OptimOptions, make
from whet.train.schedule import Schedule, set_lr


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, a head: the loss of the tokens themselves."""

    def __init__(self, vocab: int = 11, width: int = 8, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.project = nn.Linear(width, vocab, bias=False)
        self.unused = nn.Parameter(torch.ones(3, 3))
        if tied:
            self.project.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.project(x).float(), tokens)


TOKENS = torch.arange(11)


def train(model, optimizer, steps: int = 4, tokens: torch.Tensor = TOKENS) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_adamw_has_the_bits_of_torch_adamw():
    mine, theirs = Net(), Net()
    train(mine, make(mine, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3))
    matrices, vectors = ([p for p in theirs.parameters() if (p.dim() >= 2) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    train(theirs, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=False))
    assert same_bits(weights(mine), weights(theirs))


def test_the_adamw_part_beside_muon_has_the_bits_of_torch_adamw():
    mine, theirs = Net(), Net()
    optimizer = make(mine, kind="muon", lr=1e-2)
    beside = [name for name in weights(mine) if name not in hidden_matrices(mine)]
    own = dict(theirs.named_parameters())
    adamw, rest = (
        torch.optim.AdamW([own[n] for n in beside if (own[n].dim() >= 2) is wide], lr=1e-2, betas=(0.9, 0.95), weight_decay=d)
        for wide, d in ((True, 0.1), (False, 0.0))
    )
    for _ in range(3):
        mine.zero_grad()
        mine(TOKENS).backward()
        for (name, p), q in zip(mine.named_parameters(), own.values()):
            q.grad = p.grad if name in beside else None
        for o in (optimizer, adamw, rest):
            o.step()
    assert same_bits({n: weights(mine)[n] for n in beside}, {n: weights(theirs)[n] for n in beside})


def test_muon_takes_matrices_but_no_embedding_and_no_head():
    blocks = [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "down")]
    assert hidden_matrices(Net()) == hidden_matrices(Net(tied=True)) == ["unused", *blocks]
    assert hidden_matrices(Net(), ("blocks.0.*", "unused")) == blocks[2:]
    names = ("wte", "lm_head", "head", "overhead", "embedding", "tok_embeddings")
    assert hidden_matrices(nn.ModuleDict({name: nn.Linear(4, 4) for name in names})) == ["overhead.weight"]


def test_groups_keep_their_base_lr_and_decay_matrices_alone():
    optimizer = make(Net(), kind="muon", lr=1e-3, muon_lr=0.05, weight_decay=0.2)
    facts = [(g["rule"], g["base_lr"], g["weight_decay"], {p.dim() for p in g["params"]}) for g in optimizer.param_groups]
    assert facts == [("muon", 0.05, 0.2, {2}), ("adamw", 1e-3, 0.2, {2}), ("adamw", 1e-3, 0.0, {1})]
    set_lr(optimizer, Schedule("constant", lr=1e-3, warmup=1, steps=9), 0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 5e-4, 5e-4]


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (3, 20, 48)], ids=str)
def test_orthogonalized_singular_values_are_the_polynomial_of_the_matrix_own(shape):
    """[0.68, 1.21] is the range of the polynomial, five times, over singular values from 0.002 to 1 of a matrix of norm 1."""
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    a, b, c = COEFFICIENTS

    def polynomial(s):
        for _ in range(ITERATIONS):
            s = a * s + b * s**3 + c * s**5
        return s

    everywhere = polynomial(torch.linspace(0.002, 1, 100_000, dtype=torch.float64))
    assert everywhere.min() > 0.68 and everywhere.max() < 1.21
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    want = polynomial(s / torch.linalg.matrix_norm(x)[..., None])
    assert want.min() > 0.68 and want.max() < 1.21
    torch.testing.assert_close(orthogonalized(x), u @ torch.diag_embed(want) @ v)
    assert torch.linalg.svdvals(orthogonalized(x.float())).min() > 0.68


def test_orthogonalized_zero_is_zero_and_a_batch_has_the_values_of_its_matrices():
    assert not orthogonalized(torch.zeros(4, 6)).any()
    x = torch.randn(3, 8, 8)
    assert torch.equal(orthogonalized(x), torch.stack([orthogonalized(m) for m in x]))


def test_muon_beats_sgd_on_a_regression_of_the_same_steps():
    """SGD with momentum, at the best of its rates that are powers of 2: at 32 it diverges. The inputs' scales lie 100 apart."""
    def final_loss(make_optimizer):
        torch.manual_seed(3)
        x = torch.randn(64, 16) * torch.logspace(0, -2, 16)
        model, target = nn.Linear(16, 12, bias=False), torch.randn(12, 16)
        optimizer = make_optimizer(model)
        schedule = Schedule("linear", lr=1.0, steps=100, final=0.0)
        for i in range(100):
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])
            set_lr(optimizer, schedule, i)
            optimizer.zero_grad()
            loss = (model(x) - x @ target.T).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    muon = final_loss(lambda m: make(m, kind="muon", muon_lr=1.0, weight_decay=0.0))
    sgd = min(final_loss(lambda m, lr=2.0**k: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9)) for k in range(-4, 5))
    assert muon < sgd


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_losses_fall(kind):
    model = Net()
    losses = train(model, make(model, kind=kind, lr=1e-2), steps=40)
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_parameter_without_a_gradient_is_left_alone(kind):
    model = Net()
    optimizer = make(model, kind=kind)
    before = {k: t.clone() for k, t in optimizer.state[model.unused].items()}
    train(model, optimizer)
    assert torch.equal(model.unused, torch.ones(3, 3)) and same_bits(optimizer.state[model.unused], before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
def test_state_dict_goes_round_bit_for_bit_and_in_place(kind, master):
    dtype = torch.bfloat16 if master else torch.float32
    model = Net().to(dtype)
    optimizer = make(model, kind=kind, master=master)
    train(model, optimizer)
    other = Net().to(dtype)
    other.load_state_dict(model.state_dict())
    resumed = make(other, kind=kind, master=master, lr=9.0)
    places = [t.data_ptr() for s in resumed.state.values() for t in s.values()]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert places == [t.data_ptr() for s in resumed.state.values() for t in s.values()]
    for (_, mine), (_, theirs) in zip(optimizer.state.items(), resumed.state.items()):
        assert same_bits(mine, theirs)
    assert train(model, optimizer) == train(other, resumed) and same_bits(weights(model), weights(other))


def test_state_of_another_kind_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="optimizer: parameter 0 has state momentum .*, and is given exp_avg "):
        make(model, kind="muon", adamw_names=("unused",)).load_state_dict(make(model, kind="adamw").state_dict())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_masters_have_the_bits_of_masters_kept_by_hand(kind):
    model, by_hand = Net().bfloat16(), Net().bfloat16()
    optimizer = make(model, kind=kind, master=True, lr=1e-2)
    assert all(s["master"].dtype == s.get("exp_avg", s["master"]).dtype == torch.float32 for s in optimizer.state.values())
    masters = copy.deepcopy(by_hand).float()
    other = make(masters, kind=kind, lr=1e-2)
    for _ in range(6):
        train(model, optimizer, 1)
        by_hand.zero_grad()
        by_hand(TOKENS).backward()
        with torch.no_grad():
            for p, m in zip(by_hand.parameters(), masters.parameters()):
                m.grad = None if p.grad is None else p.grad.float()
            other.step()
            for p, m in zip(by_hand.parameters(), masters.parameters()):
                p.copy_(m)
    assert same_bits(weights(model), weights(by_hand))
    assert same_bits({n: optimizer.state[p]["master"] for n, p in model.named_parameters()}, weights(masters))


def test_masters_take_in_steps_too_small_for_bfloat16():
    plain, mastered = nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False).bfloat16()
    for model, master in ((plain, False), (mastered, True)):
        nn.init.ones_(model.weight)
        optimizer = make(model, master=master, lr=1e-4, weight_decay=0.0)
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    assert (plain.weight == 1).all() and (mastered.weight < 1).all()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_rate_in_a_tensor_gives_the_losses_of_a_number(kind):
    """0.0078125 and 0.015625 are float32 numbers, so both runs have the same rates."""
    model, other = Net(), Net()
    optimizer, lent = (make(m, kind=kind, lr=2.0**-7, muon_lr=2.0**-6) for m in (model, other))
    losses = train(model, optimizer)
    with Rates(lent).lent():
        assert all(isinstance(g["lr"], torch.Tensor) for g in lent.param_groups)
        assert train(other, lent) == losses


def test_a_deep_copy_trains_as_its_original():
    model = Net().bfloat16()
    optimizer = make(model, kind="muon", master=True)
    train(model, optimizer)
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    assert isinstance(optimizer2, MuonAdamW)
    assert train(model, optimizer) == train(model2, optimizer2) and same_bits(weights(model), weights(model2))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_copy_whose_state_was_cleared_starts_anew_and_compile_step_tries_it(kind):
    model, fresh = Net().bfloat16(), Net().bfloat16()
    model.unused.requires_grad_(False)
    fresh.unused.requires_grad_(False)
    optimizer, other = (make(m, kind=kind, master=True) for m in (model, fresh))
    optimizer.state.clear()
    assert train(model, optimizer) == train(fresh, other)
    step = compile_step(fresh, other, compiled=False, seconds=0.01)
    assert step((TOKENS,)).item() == train(model, optimizer, 1)[0] and "could not be tried" not in str(step.report)


def test_a_scheduler_of_torch_and_a_closure_work():
    model = Net()
    optimizer = make(model, kind="muon", lr=1.0, muon_lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = model(TOKENS)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("changes, words", [
    (dict(kind="sgd"), "kind must be one of adamw, muon, got 'sgd'"),
    (dict(lr=0), "lr must be a number above 0, got 0"),
    (dict(betas=(0.9, 1.0)), r"betas must be two numbers from 0 to below 1, got \(0.9, 1.0\)"),
    (dict(weight_decay=-1.0), "weight_decay must be a number of at least 0, got -1.0"),
    (dict(momentum=1.0), "momentum must be a number from 0 to below 1, got 1.0"),
    (dict(adamw_names="head"), "adamw_names must be a list of patterns, got 'head'"),
    (dict(rate=1.0), "there is no option rate; there are kind, lr, muon_lr, betas, "),
    (dict(master=True), r"master=True wants weights in 16 bits, got none; call model.to\(torch.bfloat16\) first"),
    (dict(kind="muon", adamw_names=("*",)), "kind='muon' found no matrix that is no embedding and no head; use kind='adamw'"),
])
def test_refusal_names_the_option(changes, words):
    with pytest.raises(ValueError, match=f"^optimizer: {words}"):
        make(Net(), OptimOptions(), **changes)


def test_ema_is_the_average_and_swaps_it_in_for_a_while():
    model = Net()
    optimizer, ema = make(model, lr=1e-2), Ema(model, 0.75)
    want = weights(model)
    for _ in range(3):
        train(model, optimizer, 1)
        ema.update()
        want = {name: w.lerp(p, 0.25) for (name, w), p in zip(want.items(), model.parameters())}
    own = weights(model)
    assert same_bits(ema.tensors, want)
    with pytest.raises(RuntimeError, match="evaluation"), ema.swapped():
        assert same_bits(weights(model), want)
        raise RuntimeError("of the evaluation")
    assert same_bits(weights(model), own) and same_bits(ema.tensors, want)


def test_ema_averages_float32_masters_of_tied_weights_once():
    model = Net(tied=True).bfloat16()
    optimizer = make(model, master=True, lr=1e-2)
    ema = Ema(model, 0.5, optimizer)
    masters = [optimizer.state[p]["master"] for p in model.parameters()]
    want = [m.clone() for m in masters]
    train(model, optimizer, 1)
    ema.update()
    assert "project.weight" not in ema.tensors
    assert all(torch.equal(t, w.lerp(m, 0.5)) for t, w, m in zip(ema.tensors.values(), want, masters))
    with ema.swapped():
        assert all(torch.equal(p, t.bfloat16()) for p, t in zip(model.parameters(), ema.tensors.values()))
    with pytest.raises(ValueError, match="^ema: decay must be a number from 0 to below 1, got 1.0"):
        Ema(model, 1.0)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
def test_nothing_in_a_step_on_cuda_reads_a_value_of_the_device(kind, master):
    """Tensors of the device cuda without values, of which none can be read. AdamW is not fused here: that is one kernel."""
    with FakeTensorMode():
        model = nn.Module()
        for name, shape in dict(a=(8, 8), b=(8, 8), c=(16, 8), d=(8,), head=(11, 8)).items():
            dtype = torch.bfloat16 if master else torch.float32
            model.register_parameter(name, nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype)))
        optimizer = make(model, kind=kind, master=master)
        assert outside_because(optimizer) == ""
        for group in optimizer.param_groups:
            assert group["fused"]
            group["fused"], group["lr"] = False, torch.empty((), device="cuda")
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        with pytest.raises(DataDependentOutputException):
            optimizer.param_groups[0]["lr"].item()
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
def test_a_cuda_graph_holds_the_step_and_nothing_waits_for_the_device(kind, master):
    dtype, tokens = torch.bfloat16 if master else torch.float32, TOKENS.cuda()
    models = [Net().cuda().to(dtype) for _ in range(2)]
    eager, captured = (make(m, kind=kind, master=master, lr=2.0**-7, muon_lr=2.0**-6) for m in models)
    assert outside_because(captured) == ""
    train(models[0], eager, 3, tokens)  # as many steps as the warm-up of a capture makes
    loop = CapturedLoop(LoopWork(models[1], (tokens,), optimizer=captured))
    assert not loop.outside
    for scale in (1.0, 0.5, 0.25):
        for group in (*eager.param_groups, *captured.param_groups):
            group["lr"] = group["base_lr"] * scale
        eager.zero_grad()
        models[0](tokens).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.step()
            loop()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert same_bits(weights(models[0]), weights(models[1]))
