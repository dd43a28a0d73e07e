"""Quality of one teacher-forced answer against the full prefill of the same prompt.

All metrics look at the positions that predict the answer's tokens, from the prompt's last position on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from blendstore.bench.answering import Ids


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics of one answer.

    ``kl`` is the mean of KL(full ‖ method) in nats over ``n`` positions, ``agree`` counts those where both would say
    the same token, ``nll`` is the mean negative log-probability of the answer's tokens in nats, ``exact`` tells for
    each span whether every token of it would have been said."""

    kl: float
    agree: int
    n: int
    nll: float
    exact: tuple[bool, ...]


def measure(
    logits: torch.Tensor, reference: torch.Tensor, answer: Ids, spans: Sequence[tuple[int, int]] = ()
) -> Measured:
    """Compare ``logits`` with the full prefill's ``reference``, both float ``[len(answer), vocab]``.

    Raises ``ValueError`` when a shape does not fit, or when the method's logits are not finite.
    """
    import torch

    if logits.shape != reference.shape or logits.shape[0] != len(answer):
        raise ValueError(
            f"logits {tuple(logits.shape)} and reference {tuple(reference.shape)} must both have one row for each of "
            f"the {len(answer)} answer tokens"
        )
    mine = logits.float().log_softmax(-1)
    said, expected = mine.argmax(-1), reference.argmax(-1)
    target = torch.tensor(answer, device=said.device)
    right = said == target
    return Measured(
        kl=max(0.0, divergence(logits, reference).mean().item()),
        agree=int((said == expected).sum()),
        n=len(answer),
        nll=-mine.gather(-1, target[:, None]).mean().item(),
        exact=tuple(bool(right[start:stop].all()) for start, stop in spans),
    )


def divergence(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ logits) in nats of each row, float32 ``[rows]``, from logits ``[rows, vocab]``.

    Raises ``ValueError`` when the method's logits are not finite.
    """
    import torch

    mine, full = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    if not torch.isfinite(mine).all():
        raise ValueError("the method's logits are not finite: its KV holds NaN or infinity")
    # xlogy's convention: a token that the full prefill rules out (probability 0) adds nothing.
    return torch.where(full.exp() > 0, full.exp() * (full - mine), torch.zeros_like(full)).sum(-1)


def log_probability(logits: torch.Tensor, answer: Ids) -> float:
    """Log-probability in nats of the whole answer, from its logits ``[len(answer), vocab]``."""
    import torch

    target = torch.tensor(answer, device=logits.device)
    return float(logits.float().log_softmax(-1).gather(-1, target[:, None]).sum())


def says(logits: torch.Tensor, answer: Ids) -> bool:
    """Whether greedy decoding would have said exactly this answer."""
    return bool(logits.argmax(-1).tolist() == list(answer))
