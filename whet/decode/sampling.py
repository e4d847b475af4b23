"""The next token: the likeliest, or one drawn with a temperature, top-k and top-p; every row of a batch has its own.

Nothing is drawn from a generator's state. The noise on a token is a hash of the row's seed, the position and the token, so
that a seed gives the same text whatever else is in the batch, at every replay of a graph, on a CPU and on a GPU. Everything
stays on the device.
"""

import math
from dataclasses import dataclass

import torch

HOTTEST = 2.0**100  # times the largest noise, 22, it is still a float32; every token is as likely long before


@dataclass(frozen=True)
class Sampling:
    """temperature  0 takes the likeliest token, the first of equals
    top_k        draw among the k likeliest; 0: among all
    top_p        draw among the fewest likeliest whose probabilities reach p, after top_k; 1: among all
    seed         the same seed gives the same text
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("temperature", "top_p"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, (int, float)):
                raise ValueError(f"sampling: {name} must be a number, got {value!r}")
        for name in ("top_k", "seed"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise ValueError(f"sampling: {name} must be a whole number, got {value!r}")
        if not 0 <= self.temperature <= HOTTEST:
            raise ValueError(f"sampling: temperature must be from 0 (greedy) to {HOTTEST:g}, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"sampling: top_k must be from 0 (off) to 2**31 - 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p must be above 0 and at most 1 (off), got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"sampling: seed must be from 0 to 2**63 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens are kept out of the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@torch.no_grad()
def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seed: torch.Tensor,
    position: torch.Tensor, filtered: bool = True,
) -> torch.Tensor:
    """Tokens (B,) int64 of logits (B, V); the others are (B,) on the same device. -1 where a row's largest logit is not finite.

    The largest of logits + T * Gumbel has the distribution softmax(logits / T), and T = 0 is the argmax without a branch.
    filtered   False where the caller knows that every row has top_k = 0 and top_p = 1: saves the sort
    """
    check(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position)
    T, logits = temperature.float()[:, None], logits.float()
    peak = logits.amax(1, keepdim=True)
    below = (logits - peak).add_(0.0)  # -0.0 becomes 0.0, which a radix sort may hold apart
    key = row_key(seed, position)
    if filtered:
        below, token = below.sort(dim=1, descending=True, stable=True)
        below.masked_fill_(~kept(below, T, top_k, top_p), -math.inf)
    else:
        token = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    best = gumbel(key, token).mul_(T).add_(below).argmax(1, keepdim=True)
    return torch.where(peak.isfinite(), token.gather(1, best), -1).squeeze(1)


def check(logits: torch.Tensor, **rows: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"sample: logits must be floats of shape (rows, vocabulary), got {tuple(logits.shape)} {logits.dtype}")
    for name, t in rows.items():
        if t.shape != logits.shape[:1] or t.device != logits.device:
            want = f"{tuple(logits.shape[:1])} on {logits.device} to match logits"
            raise ValueError(f"sample: {name} must have shape {want}, got {tuple(t.shape)} on {t.device}")
        if t.is_floating_point() != (name in ("temperature", "top_p")):
            kind = "floats" if name in ("temperature", "top_p") else "integers"
            raise ValueError(f"sample: {name} must hold {kind}, got {t.dtype}")


def kept(below: torch.Tensor, T: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which of the sorted logits, given as their distance from the largest, are drawn among: always the first.

    Probabilities are summed as integers, 2^40 for the largest: a sum of floats on a GPU differs from run to run.
    """
    V = below.shape[1]
    rank = torch.arange(V, device=below.device)
    k = torch.where(top_k > 0, top_k, V).clamp(max=V)[:, None].long()
    mass = (below / torch.where(T > 0, T, 1.0)).exp_().mul_(2.0**40).nan_to_num_(0.0).long()
    reached = mass.cumsum(1)
    wanted = top_p.double()[:, None] * reached.gather(1, k - 1)
    return (rank < k) & ((reached - mass < wanted) | (top_p >= 1)[:, None] | (rank == 0))


def row_key(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Two int32 for each row (B, 2): products modulo 2^64, the same on CPUs and GPUs, and shifts that carry the sign."""
    x = seed.long() * -0x61C8864680B583EB + (position.long() * 0x2545F4914F6CDD1D + 0x5851F42D4C957F2D)
    x = (x ^ (x >> 32)) * 0x369DEA0F31A53F85
    x = (x ^ (x >> 29)) * 0x27BB2EE687B0B0FD
    return (x ^ (x >> 32)).view(torch.int32).view(-1, 2)


def gumbel(key: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """-log(E), E exponential: float32 noise for each row and token.

    E = -log(1 - u) for u in (0, 1) of 31 bits: the large noise, which decides, comes of small u, where float32 is finest.
    The factor keeps u below 1 where the bits round up, and so the logarithm finite.
    """
    u = hashed(key, token).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31 * (1 - 2.0**-23))
    return u.neg_().log1p_().neg_().log_().neg_()


def hashed(key: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """32 bits for each row and token as int32: a mixer of two rounds, half of the key before each."""
    x = token.int() ^ key[:, :1]
    x = (x ^ (x >> 16 & 0xFFFF)).mul_(0x21F0AAAD).bitwise_xor_(key[:, 1:])
    x = (x ^ (x >> 15 & 0x1FFFF)).mul_(0x735A2D97)
    return x ^ (x >> 15 & 0x1FFFF)
