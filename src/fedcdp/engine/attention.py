"""`nn.MultiheadAttention` written out in products of matrices, so that each use of its weights can be intercepted."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.errors import ModelError


def written_out(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, in_weight: Tensor | None, in_bias: Tensor | None,
    bias_k: Tensor | None, bias_v: Tensor | None, add_zero: bool, dropout: float, out_weight: Tensor,
    out_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
    static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`F.multi_head_attention_forward`; inputs are [tokens, examples, width], or [tokens, width]."""
    if any(each is not None for each in (bias_k, bias_v, static_k, static_v)) or add_zero or (dropout and training):
        raise ModelError("there is no rule for attention with extra keys, given keys or dropout")
    single = query.dim() == 2
    query, key, value = (each[:, None] if single else each for each in (query, key, value))
    if use_separate_proj_weight:
        parts_of = slice(0, width), slice(width, 2 * width), slice(2 * width, None)
        biases = (None,) * 3 if in_bias is None else [in_bias[part] for part in parts_of]
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        parts = [F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]  # type: ignore[arg-type]
    else:
        assert in_weight is not None
        # The whole product for each distinct input: a slice of the weight would be a tensor of its own.
        products: dict[int, Tensor] = {}
        for each in (query, key, value):
            if id(each) not in products:
                products[id(each)] = F.linear(each, in_weight, in_bias)
        parts = [products[id(each)].chunk(3, -1)[place] for place, each in enumerate((query, key, value))]
    tokens, examples, _ = parts[0].shape
    queries, keys, values = (each.reshape(len(each), examples, heads, -1).permute(1, 2, 0, 3) for each in parts)
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(tokens, len(key), dtype=torch.bool, device=query.device).triu(1)
    if attn_mask is not None:
        mask = attn_mask.unflatten(0, (examples, heads)) if attn_mask.dim() == 3 else attn_mask
        scores = _masked(scores, mask)
    if key_padding_mask is not None:
        rows = key_padding_mask[None] if key_padding_mask.dim() == 1 else key_padding_mask
        scores = _masked(scores, rows[:, None, None])
    shares = scores.softmax(-1) if need_weights else _safe_softmax(scores)
    joined = (shares @ values).permute(2, 0, 1, 3).reshape(tokens, examples, width)
    result = F.linear(joined, out_weight, out_bias)
    told = None
    if need_weights:
        told = shares.mean(1) if average_attn_weights else shares
        told = told[0] if single else told
    return (result[:, 0] if single else result), told


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores without the pairs that a mask leaves out: where it is true, or by what it adds."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax, and zeros instead of NaN for a token whose pairs are all left out.

    PyTorch has the same difference: without `need_weights` it uses `scaled_dot_product_attention`, which does this.
    """
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
