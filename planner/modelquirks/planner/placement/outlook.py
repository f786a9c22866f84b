"""What a prediction says, in a sentence."""

from __future__ import annotations

from modelquirks.planner.placement.counts import EXACT
from modelquirks.planner.placement.machine import ASSUMED
from modelquirks.planner.placement.placement import Prediction
from modelquirks.planner.wording import show_seconds

__all__ = ["predicted"]


def predicted(prediction: Prediction) -> str:
    """Return what a step takes, and how far that is from the best, in one sentence.

    >>> predicted(Prediction(0.02, 0.02, "latency", 1, "24gb+64gb"))
    'Predicted: 20 ms a token by the rates of 24gb+64gb; no placement takes less.'
    """
    seconds, bound, objective, batch, machine = prediction
    what = "to the first token" if objective == "startup" else "a token"
    if batch > 1:
        rate = prediction.tokens_per_second
        what = f"a step of {batch} sequences ({rate:.3g} tokens a second)"
    whose = "assumed rates" if machine == ASSUMED else f"the rates of {machine}"
    text = f"Predicted: {show_seconds(seconds)} {what} by {whose}"
    if bound is None or prediction.gap is None:
        return f"{text}."
    if prediction.gap <= EXACT:
        return f"{text}; no placement takes less."
    less = prediction.gap / (1 + prediction.gap)  # of what it takes, not of the bound
    return f"{text}; the best there is takes at most {less:.1%} less."
