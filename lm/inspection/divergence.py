"""How far two distributions are apart: the Jensen-Shannon divergence, and each outcome's part in it."""

import numpy as np


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence of distributions (Lin, "Divergence measures based on the Shannon entropy", IEEE
    Transactions on Information Theory 37, 1991), in bits.

    Args:
        p, q: (..., V), not negative; each is divided by its sum, so counts will do.

    Returns:
        (...), float64, from 0 (the same) to 1 (nothing in common); NaN where a sum is zero.
    """
    return divergence_parts(p, q).sum(-1)


def divergence_parts(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What each outcome adds to `jensen_shannon`.

    Args:
        p, q: (..., V), not negative.

    Returns:
        (..., V), float64, in bits; none is negative.
    """
    p, q = _shares(p), _shares(q)
    middle = (p + q) / 2
    return np.maximum(0, (_log_ratio(p, middle) + _log_ratio(q, middle)) / 2)


def _shares(counts: np.ndarray) -> np.ndarray:
    counts = np.asarray(counts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return counts / counts.sum(-1, keepdims=True)


def _log_ratio(p: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """`p log2(p / middle)`, which is 0 where p is."""
    ratio = np.divide(p, middle, out=np.ones_like(middle), where=p != 0)
    return p * np.log2(ratio)
