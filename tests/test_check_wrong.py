"""The checks for results that are wrong: gradients that do not arrive, times that leave work out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.checks import severed_gradients, unsynchronised_timing
from whet.diagnose.doctor import open_target
from whet.diagnose.run import Run
from whet.diagnose.target import target_of


class Backwardless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).contiguous() + 0

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def without_grad(m, x):
    with torch.no_grad():
        h = m.a(x)
        return m.b(h.relu())


def one_hot(m, x):
    return m.b(F.one_hot(m.a(x).argmax(-1), 8).float())


class Two(nn.Module):
    def __init__(self, through):
        super().__init__()
        self.a, self.b, self.head, self.through = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3), through

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.through(self, x)), labels)


def severed(through, prepare=lambda model: None, optimizer=None):
    model = Two(through)
    prepare(model)
    given = (model, (torch.randn(16, 8), torch.randint(3, (16,))), *([optimizer(model)] if optimizer else []))
    return list(severed_gradients.find(Run(target_of("two", given), seconds=0.01)))


CUTS = {
    "detach": (lambda m, x: m.b(m.a(x).detach()), "a detach"),
    "data": (lambda m, x: m.b(m.a(x).data), "a detach"),
    "no_grad": (without_grad, "torch.no_grad()"),
    "argmax": (one_hot, "aten::argmax"),
    "function": (lambda m, x: m.b(Backwardless.apply(m.a(x))), "BackwardlessBackward"),
    "dead relu": (lambda m, x: m.b((m.a(x) - 100).relu()), "aten::relu"),
    "nan": (lambda m, x: m.b((m.a(x) - 100).sqrt()), "aten::sqrt"),
    "infinite slope": (lambda m, x: m.b(x) + (m.a(x) * 0).sqrt(), "SqrtBackward0"),
    "item": (lambda m, x: m.b(x) * m.a(x).sum().item(), "leaving torch"),
    "numpy": (lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy() + 1)), "leaving torch"),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_op_that_cut_the_graph_is_named_with_its_line(name):
    through, what = CUTS[name]
    (finding,) = severed(through)
    assert finding.wrong and finding.cause.startswith(what)
    first = through.__code__.co_firstlineno
    assert finding.line.startswith("test_check_wrong.py:") and first <= int(finding.line.split(":")[1]) <= first + 3
    assert any("a.weight" in line for line in finding.evidence)


def test_one_no_grad_is_one_finding_however_many_parameters_it_cuts():
    (finding,) = severed(without_grad)
    assert "4 parameters" in finding.cause and "a, b" in finding.evidence[1]


@pytest.mark.parametrize(
    "through, prepare, optimizer",
    [
        pytest.param(lambda m, x: m.b(m.a(x).relu()), lambda m: None, None, id="whole"),
        pytest.param(lambda m, x: Doubled.apply(m.b(m.a(x))), lambda m: None, None, id="autograd-function"),
        pytest.param(lambda m, x: x + m.b(m.a(x)), lambda m: nn.init.zeros_(m.b.weight), None, id="starts-from-zeros"),
        pytest.param(lambda m, x: m.b(m.a(x).detach()), lambda m: m.a.requires_grad_(False), None, id="frozen"),
        pytest.param(
            lambda m, x: m.b(m.a(x).detach()), lambda m: None,
            lambda m: torch.optim.SGD([*m.b.parameters(), *m.head.parameters()], lr=0.1), id="not-in-the-optimizer",
        ),
        pytest.param(lambda m, x: m.b(m.a(x)) + m.a(x).detach(), lambda m: None, None, id="detached-beside"),
    ],
)
def test_gradients_missing_by_design_are_left_alone(through, prepare, optimizer):
    assert not severed(through, prepare, optimizer)


def test_a_parameter_that_is_not_used_is_reported_but_is_not_wrong():
    (finding,) = severed(lambda m, x: m.b(x))
    assert "a.weight, a.bias" in finding.cause and "never used" in finding.cause and not finding.wrong


def test_experts_to_which_nothing_went_are_left_alone():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.experts[1](x).square().mean()

    target = target_of("experts", (Experts(), torch.randn(4, 8)))
    assert not list(severed_gradients.find(Run(target, seconds=0.01)))


def test_a_loss_that_asks_for_no_gradient_is_reported_though_only_a_forward_is_left():
    class Cut(Two):
        def forward(self, x, labels):
            return super().forward(x, labels).detach()

    model = Cut(lambda m, x: m.b(m.a(x)))
    target = target_of("cut", (model, (torch.randn(4, 8), torch.randint(3, (4,)))))
    (finding,) = severed_gradients.find(Run(target, seconds=0.01))
    assert target.kind == "forward" and finding.wrong and "6 parameters" in finding.cause


HEAD = unsynchronised_timing.HEAD
SYNC = "if device == 'cuda':\n    torch.cuda.synchronize()"
LOOP = "t = time.time()\nfor _ in range(3):\n    loss = step()"
YIELDS = """import contextlib
@contextlib.contextmanager
def timed():
    t = time.time()
    yield
    print(time.time() - t)"""
CLASS = """class T:
    def __enter__(self):
        self.t = time.time()
    def __exit__(self, *_):
        print(time.time() - self.t)"""
BENCH = "from time import perf_counter as clock\ndef bench(f):\n    t = clock()\n    f()\n    return clock() - t"
END = "print(time.time() - t)"
TIMED = {
    "total": f"{LOOP}\n{END}",
    "parts": "a = time.time()\nloss = model(x).sum()\nb = time.time()\nloss.backward()\nc = time.time()\nprint(b - a, c - b)",
    "waits outside": f"{SYNC}\nt = time.time()\nstep()\n{END}\n{SYNC}",
    "handed on": f"{LOOP}\n    now = time.time()\n    print(now - t)\n    t = now",
    "bench": f"{BENCH}\nprint(bench(step))",
    "class": f"{CLASS}\nwith T():\n    step()",
    "yields": f"{YIELDS}\nwith timed():\n    step()",
}
SOUND = {
    "reads the loss": f"{LOOP}.item()\n{END}",
    "prints the loss": f"{LOOP}\n    print(loss)\n{END}",
    "loss read behind": f"{LOOP}\n    now = time.time()\n    print(now - t)\n    t = now\n    print(loss.item())",
    "waits": f"{LOOP}\n{SYNC}\n{END}",
    "class put around a loss that is read": f"{CLASS}\nwith T():\n    step().item()",
    "yields around a loss that is read": f"{YIELDS}\nwith timed():\n    step().item()",
    "data only": f"import random\nt = time.time()\ndata = [random.random() for _ in range(9)]\n{END}\nstep()",
    "one reading": "print(time.time())\nstep()",
    "stopwatch": "from whet.measure import Stopwatch\nwatch = Stopwatch(device)\nwith watch('step'):\n    step()",
}


def timing(text: str) -> list:
    path = unsynchronised_timing.script_of(f"{HEAD}\n{text}\n")
    return list(unsynchronised_timing.find(Run(open_target(str(path)))))


@pytest.mark.parametrize("name", TIMED)
def test_a_time_taken_without_waiting_is_reported(name):
    (finding,) = timing(TIMED[name])
    assert finding.wrong and finding.line.startswith("timed.py:") and finding.line in finding.evidence[1]


@pytest.mark.parametrize("name", SOUND)
def test_a_time_that_waits_is_left_alone(name):
    assert not timing(SOUND[name])


def test_a_script_that_cannot_use_a_gpu_is_left_alone():
    text = f"import time\nimport torch\nmodel = torch.nn.Linear(4, 4)\nt = time.time()\nmodel(torch.randn(2, 4))\n{END}\n"
    path = unsynchronised_timing.script_of(text)
    assert not list(unsynchronised_timing.find(Run(open_target(str(path)))))


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.activation = nn.Linear(8, 8), nn.Tanh()

    def forward(self, x):
        return self.activation(self.dense(x))


def test_a_branch_that_is_computed_and_not_used_is_named_as_such_and_is_not_wrong():
    """BERT's pooler: tanh keeps its own output, which autograd detaches; nothing of the user's cuts the graph."""
    def prepare(model):
        model.pooler = Pooler()

    def through(m, x):
        m.pooler(x)
        return m.b(m.a(x))

    (finding,) = severed(through, prepare)
    assert "pooler" in finding.cause and "loss" in finding.cause and not finding.wrong
    assert not any("item" in text for text in (finding.cause, finding.fix, *finding.evidence))


def poisoned(model):
    with torch.no_grad():
        model.a.weight[1, 2] = float("nan")


def test_the_parameter_that_is_not_finite_is_named_with_its_module_and_the_users_line():
    through = lambda m, x: m.b(m.a(x))  # noqa: E731
    findings = severed(through, poisoned)
    assert all(part in findings[0].cause for part in ("a.weight", "1 of its 64", findings[0].line, " in a: ", "6 parameters"))
    assert findings[0].wrong and len(findings) == 1
    assert findings[0].line == f"test_check_wrong.py:{through.__code__.co_firstlineno}" and findings[0].module == "a"


def test_the_input_that_is_not_finite_is_named():
    x = torch.randn(16, 8)
    x[3] = float("nan")
    model = Two(lambda m, x: m.b(m.a(x)))
    target = target_of("two", (model, dict(x=x, labels=torch.randint(3, (16,)))))
    (finding,) = severed_gradients.find(Run(target, seconds=0.01))
    assert all(part in finding.cause for part in ("input x", "8 of its 128", "test_check_wrong.py:"))


def test_the_first_infinity_is_named_before_the_nan_that_comes_of_it():
    def through(m, x):
        h = (m.a(x) * 1e4).exp()
        return m.b(h - h)

    (finding,) = severed(through)
    assert finding.cause.startswith("aten::exp at test_check_wrong.py:") and "an infinity" in finding.cause


def test_minus_infinity_in_a_mask_is_no_cause():
    def through(m, x):
        mask = torch.zeros(8).masked_fill(torch.arange(8) > 3, float("-inf"))
        return m.b((m.a(x) + mask).softmax(-1) + (m.a(x) * 0).sqrt())

    (finding,) = severed(through)
    assert finding.cause.startswith("SqrtBackward0")


OUTSIDE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
with torch.no_grad():
    model[2].weight[0, 0] = float("nan")
out = model(torch.randn(4, 8))
nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.int64)).backward()
"""


def test_a_nan_in_a_scripts_weight_is_not_blamed_on_whets_own_function(tmp_path):
    (tmp_path / "nan.py").write_text(OUTSIDE)
    findings = list(severed_gradients.find(Run(open_target(str(tmp_path / "nan.py")), seconds=0.01)))
    assert findings and all("parameter 2.weight" in f.cause and "1 of its 24" in f.cause for f in findings)
    assert not any("main.py" in f.cause or "LossOutside" in f.cause for f in findings)
