"""The tiny Qwen2 policies in compiled code: sampling of a whole turn in one call, and layers of whole sequences.

numba compiles these functions on first use and stores the machine code, which later processes load; no C compiler is
needed. They are in one module, because numba notices a change only in the file of the function that it
loads, and not in the functions that are called from there. They take plain tuples: numba would pickle the name of a
class of ours beside the machine code, and could not read its file after the class was renamed.

In sampling, every row has its own number of tokens, so nothing is padded. A row's tokens fill the slots of its cache
from 0 on: the slot of a token is its position. Whole sequences lie end to end in a stream, as in `models.packing`.

Loops are written for LLVM, which vectorizes the innermost ones: they run over consecutive numbers, from 0 or
from an unsigned start (a signed one might be negative, which numba would check at each step), and write to rows that
the loop around them does not change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

VECTOR = 16
"""Numbers of float32 in the widest vector registers."""

BLOCK_TOKENS = 64
"""Tokens that pass through the network together, and rows that are sampled together."""


class DecoderWeights(NamedTuple):
    """The weights of a network with L layers; matrices are (inputs, outputs), and those with equal inputs are joined.

    embedding: (V, hidden). qkv: (L, hidden, q + k + v). qkv_bias: (L, q + k + v). output: (L, hidden, hidden).
    gate_up: (L, hidden, 2 * intermediate). down: (L, intermediate, hidden). attention_gain, mlp_gain: (L, hidden).
    final_gain: (hidden,). head: (hidden, V). eps: of the norms. The sizes of the attention are those of the cache.
    """

    embedding: Floats
    qkv: Floats
    qkv_bias: Floats
    output: Floats
    gate_up: Floats
    down: Floats
    attention_gain: Floats
    mlp_gain: Floats
    final_gain: Floats
    head: Floats
    eps: np.float32


class DecoderCache(NamedTuple):
    """Keys and values of R rows with S slots each, and the rotary table of the slots.

    keys: (L, R, kv_heads, head_dim, S), so that the scores of all slots are computed together. values: (L, R, kv_heads,
    S, head_dim). cosines, sines: (S, head_dim / 2).
    """

    keys: Floats
    values: Floats
    cosines: Floats
    sines: Floats


class DecoderScratch(NamedTuple):
    """Memory of a pass over at most BLOCK_TOKENS tokens, one row per token in the arrays from `residual` to `logits`.

    scores: (2, slots or more). mix: (2, head_dim). powers, power_bits: the same memory as numbers and as their bits.
    """

    residual: Floats
    normed: Floats
    inverses: Floats
    qkv: Floats
    attention: Floats
    product: Floats
    gate_up: Floats
    gated: Floats
    logits: Floats
    scores: Floats
    mix: Floats
    powers: Floats
    power_bits: npt.NDArray[np.int32]


def _compile(function: Function) -> Function:
    """Compile on first use. Sums may be reordered, and products added without rounding; NaN and infinity stay exact."""
    options = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # numba can write neither beside this file nor to the user's cache
        return cast(Function, njit(**options)(function))


@_compile
def multiply(x: Floats, weight: Floats, y: Floats, rows: int) -> None:
    """y[:rows] = x[:rows] @ weight. Up to three more rows of y are overwritten."""
    inputs, outputs = weight.shape
    for r in range(0, rows, 4):
        for o in range(outputs):
            y[r, o] = 0
            y[r + 1, o] = 0
            y[r + 2, o] = 0
            y[r + 3, o] = 0
        # Sixteen factors stay in registers, while the loop over outputs is vectorized.
        for i in range(0, inputs, 4):
            x00, x01, x02, x03 = x[r, i], x[r, i + 1], x[r, i + 2], x[r, i + 3]
            x10, x11, x12, x13 = x[r + 1, i], x[r + 1, i + 1], x[r + 1, i + 2], x[r + 1, i + 3]
            x20, x21, x22, x23 = x[r + 2, i], x[r + 2, i + 1], x[r + 2, i + 2], x[r + 2, i + 3]
            x30, x31, x32, x33 = x[r + 3, i], x[r + 3, i + 1], x[r + 3, i + 2], x[r + 3, i + 3]
            for o in range(outputs):
                w0, w1, w2, w3 = weight[i, o], weight[i + 1, o], weight[i + 2, o], weight[i + 3, o]
                y[r, o] += x00 * w0 + x01 * w1 + x02 * w2 + x03 * w3
                y[r + 1, o] += x10 * w0 + x11 * w1 + x12 * w2 + x13 * w3
                y[r + 2, o] += x20 * w0 + x21 * w1 + x22 * w2 + x23 * w3
                y[r + 3, o] += x30 * w0 + x31 * w1 + x32 * w2 + x33 * w3


@_compile
def exponentiate(x: Floats, length: int, powers: Floats, power_bits: npt.NDArray[np.int32]) -> None:
    """x[:length] = exp(x[:length]) to about one unit in the last place; 0 below exp(-87), NaN for NaN.

    math.exp would be called once per number; this is vectorized. exp(x) = 2^k exp(r) with k = round(x / ln 2),
    and exp(r) by the polynomial of the Cephes library. 2^k is made from the bits of its exponent.
    """
    for j in range(length):
        number = x[j]
        quotient = number * np.float32(1.4426950408889634)
        quotient = quotient if quotient > np.float32(-126) else np.float32(-126)  # also for NaN
        quotient = quotient if quotient < np.float32(127) else np.float32(127)
        k = np.floor(quotient + np.float32(0.5))
        power_bits[j] = (np.int32(k) + np.int32(127)) << np.int32(23)
        # ln 2 in two parts: k times the first one is exact.
        r = number - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
        polynomial = np.float32(1.9875691500e-4)
        polynomial = polynomial * r + np.float32(1.3981999507e-3)
        polynomial = polynomial * r + np.float32(8.3334519073e-3)
        polynomial = polynomial * r + np.float32(4.1665795894e-2)
        polynomial = polynomial * r + np.float32(1.6666665459e-1)
        polynomial = polynomial * r + np.float32(5.0000001201e-1)
        polynomial = polynomial * r * r + r + np.float32(1)
        x[j] = np.float32(0) if number < np.float32(-87) else polynomial
    for j in range(length):
        x[j] *= powers[j]


@_compile
def find_maximum(x: Floats, length: int) -> np.float32:
    """The largest of x[:length]. Eight running maxima do not wait for each other."""
    a = b = c = d = e = f = g = h = x[0]
    end = length // 8 * 8
    for j in range(0, end, 8):
        a, b, c, d = max(a, x[j]), max(b, x[j + 1]), max(c, x[j + 2]), max(d, x[j + 3])
        e, f, g, h = max(e, x[j + 4]), max(f, x[j + 5]), max(g, x[j + 6]), max(h, x[j + 7])
    for j in range(end, length):
        a = max(a, x[j])
    return max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h)))


@_compile
def normalize(x: Floats, gain: Floats, eps: np.float32, y: Floats, inverses: Floats, rows: int) -> None:
    """y[:rows] = x[:rows] over its root mean square, times the gain; `inverses` gets one over the root mean squares."""
    size = x.shape[1]
    for r in range(rows):
        squares = np.float32(0)
        for i in range(size):
            squares += x[r, i] * x[r, i]
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        inverses[r] = scale
        for i in range(size):
            y[r, i] = x[r, i] * scale * gain[i]


@_compile
def add(x: Floats, y: Floats, rows: int) -> None:
    """x[:rows] += y[:rows]."""
    for r in range(rows):
        for i in range(x.shape[1]):
            x[r, i] += y[r, i]


@_compile
def rotate_and_store(
    qkv: Floats,
    bias: Floats,
    cosines: Floats,
    sines: Floats,
    keys: Floats,
    values: Floats,
    rows: Integers,
    positions: Integers,
    tokens: int,
) -> None:
    """Add the biases to queries, keys and values, rotate queries and keys, and write keys and values to the cache.

    qkv: (BLOCK_TOKENS, q + k + v). keys, values: of one layer of the cache. rows, positions: of the tokens.
    """
    kv_heads, size = keys.shape[1], keys.shape[2]
    half, heads = size // 2, qkv.shape[1] // size - 2 * kv_heads
    for t in range(tokens):
        row, position = rows[t], positions[t]
        for i in range(qkv.shape[1]):
            qkv[t, i] += bias[i]
        for head in range(heads + kv_heads):
            start = head * size
            for i in range(half):
                low, high = qkv[t, start + i], qkv[t, start + half + i]
                qkv[t, start + i] = low * cosines[position, i] - high * sines[position, i]
                qkv[t, start + half + i] = high * cosines[position, i] + low * sines[position, i]
        for group in range(kv_heads):
            key_start, value_start = (heads + group) * size, (heads + kv_heads + group) * size
            for i in range(size):
                keys[row, group, i, position] = qkv[t, key_start + i]
                values[row, group, position, i] = qkv[t, value_start + i]


@_compile
def compute_softmax(scores: Floats, length: int, powers: Floats, power_bits: npt.NDArray[np.int32]) -> None:
    """scores[:length] = softmax(scores[:length])."""
    largest = find_maximum(scores, length)
    for s in range(length):
        scores[s] -= largest
    exponentiate(scores, length, powers, power_bits)
    total = np.float32(0)
    for s in range(length):
        total += scores[s]
    inverse = np.float32(1) / total
    for s in range(length):
        scores[s] *= inverse


@_compile
def attend(
    qkv: Floats,
    all_keys: Floats,
    all_values: Floats,
    rows: Integers,
    positions: Integers,
    tokens: int,
    output: Floats,
    scores: Floats,
    mix: Floats,
    powers: Floats,
    power_bits: npt.NDArray[np.int32],
) -> None:
    """Attention of each token over its row up to its own position: from `qkv` to `output` (BLOCK_TOKENS, heads * size).

    all_keys, all_values: of one layer of the cache. scores, mix, powers, power_bits: see `DecoderScratch`.

    Two query heads of a group are computed together, so that keys and values are read half as often.
    """
    kv_heads, size = all_keys.shape[1], all_keys.shape[2]
    heads = output.shape[1] // size
    heads_per_group = heads // kv_heads
    first_scores, second_scores = scores[0], scores[1]
    first_mix, second_mix = mix[0], mix[1]
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for t in range(tokens):
        row, length = rows[t], positions[t] + 1
        end = length // 4 * 4
        for first_head in range(heads):
            group, place = first_head // heads_per_group, first_head % heads_per_group
            if place % 2 == 1:
                continue
            # The last head of a group with an odd number of heads is its own partner, whose result is not used.
            second_head = first_head + 1 if place + 1 < heads_per_group else first_head
            keys, values = all_keys[row, group], all_values[row, group]
            first, second = qkv[t, first_head * size :], qkv[t, second_head * size :]
            for s in range(length):
                first_scores[s] = 0
                second_scores[s] = 0
            for i in range(0, size, 4):
                a0, a1, a2, a3 = first[i] * scale, first[i + 1] * scale, first[i + 2] * scale, first[i + 3] * scale
                b0, b1, b2, b3 = second[i] * scale, second[i + 1] * scale, second[i + 2] * scale, second[i + 3] * scale
                for s in range(length):
                    k0, k1, k2, k3 = keys[i, s], keys[i + 1, s], keys[i + 2, s], keys[i + 3, s]
                    first_scores[s] += a0 * k0 + a1 * k1 + a2 * k2 + a3 * k3
                    second_scores[s] += b0 * k0 + b1 * k1 + b2 * k2 + b3 * k3
            compute_softmax(first_scores, length, powers, power_bits)
            compute_softmax(second_scores, length, powers, power_bits)
            for i in range(size):
                first_mix[i] = 0
                second_mix[i] = 0
            for s in range(0, end, 4):
                a0, a1, a2, a3 = first_scores[s], first_scores[s + 1], first_scores[s + 2], first_scores[s + 3]
                b0, b1, b2, b3 = second_scores[s], second_scores[s + 1], second_scores[s + 2], second_scores[s + 3]
                for i in range(size):
                    v0, v1, v2, v3 = values[s, i], values[s + 1, i], values[s + 2, i], values[s + 3, i]
                    first_mix[i] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                    second_mix[i] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
            for s in range(end, length):
                a0, b0 = first_scores[s], second_scores[s]
                for i in range(size):
                    first_mix[i] += a0 * values[s, i]
                    second_mix[i] += b0 * values[s, i]
            for i in range(size):
                output[t, second_head * size + i] = second_mix[i]
                output[t, first_head * size + i] = first_mix[i]


@_compile
def apply_gate(gate_up: Floats, gated: Floats, tokens: int, powers: Floats, power_bits: npt.NDArray[np.int32]) -> None:
    """silu(gate) * up, from `gate_up` (BLOCK_TOKENS, 2 * intermediate) to `gated` (BLOCK_TOKENS, intermediate)."""
    size = gated.shape[1]
    for t in range(tokens):
        for i in range(size):
            gated[t, i] = -gate_up[t, i]
        exponentiate(gated[t], size, powers, power_bits)
        for i in range(size):
            gated[t, i] = gate_up[t, i] / (np.float32(1) + gated[t, i]) * gate_up[t, size + i]


@_compile
def extend(
    weights: tuple[Any, ...],
    cache: tuple[Any, ...],
    scratch: tuple[Any, ...],
    token_ids: Integers,
    rows: Integers,
    positions: Integers,
    is_last: npt.NDArray[np.bool_],
    hidden: Floats,
) -> None:
    """Append N tokens to their rows of the cache; write the hidden states of the tokens with `is_last` to `hidden`.

    weights, cache, scratch: the fields of `DecoderWeights`, `DecoderCache` and `DecoderScratch`. token_ids, rows,
    positions, is_last: (N,). The tokens of a row are in the order of their positions. hidden: (number of last tokens,
    hidden). The last layer of the other tokens ends with their keys and values: nothing else of it is read again.
    """
    embedding, qkv_weight, bias, output, gate_up_weight, down, attention_gain, mlp_gain, final_gain, _, eps = weights
    keys, values, cosines, sines = cache
    residual, normed, inverses, qkv, attention, product, gate_up, gated, _, scores, mix, powers, power_bits = scratch
    layers, num_outputs = len(output), 0
    block_rows, block_positions = np.empty(BLOCK_TOKENS, np.int64), np.empty(BLOCK_TOKENS, np.int64)
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        tokens = min(BLOCK_TOKENS, len(token_ids) - start)
        for t in range(tokens):
            residual[t] = embedding[token_ids[start + t]]
            block_rows[t], block_positions[t] = rows[start + t], positions[start + t]
        for layer in range(layers):
            normalize(residual, attention_gain[layer], eps, normed, inverses, tokens)
            multiply(normed, qkv_weight[layer], qkv, tokens)
            rotate_and_store(
                qkv, bias[layer], cosines, sines, keys[layer], values[layer], block_rows, block_positions, tokens
            )
            if layer == layers - 1:
                last_tokens = 0
                for t in range(tokens):
                    if is_last[start + t]:
                        residual[last_tokens], qkv[last_tokens] = residual[t], qkv[t]
                        block_rows[last_tokens], block_positions[last_tokens] = block_rows[t], block_positions[t]
                        last_tokens += 1
                tokens = last_tokens
            attend(
                qkv,
                keys[layer],
                values[layer],
                block_rows,
                block_positions,
                tokens,
                attention,
                scores,
                mix,
                powers,
                power_bits,
            )
            multiply(attention, output[layer], product, tokens)
            add(residual, product, tokens)
            normalize(residual, mlp_gain[layer], eps, normed, inverses, tokens)
            multiply(normed, gate_up_weight[layer], gate_up, tokens)
            apply_gate(gate_up, gated, tokens, powers, power_bits)
            multiply(gated, down[layer], product, tokens)
            add(residual, product, tokens)
        normalize(residual, final_gain, eps, normed, inverses, tokens)
        for t in range(tokens):
            hidden[num_outputs + t] = normed[t]
        num_outputs += tokens


@_compile
def draw_token(
    logits: Floats,
    temperature: np.float32,
    uniform: np.float32,
    probs: Floats,
    powers: Floats,
    power_bits: npt.NDArray[np.int32],
) -> tuple[int, np.float32, np.float32]:
    """Draw a token as `torch_sampler.sample_tokens` does; return it, its log-prob, and the entropy.

    logits: (V,), overwritten. probs, powers, power_bits: scratch memory of at least V numbers.

    If a logit is NaN or +inf, or all are -inf, the entropy is NaN.
    """
    size = len(logits)
    token = 0
    if temperature == 0:
        for j in range(1, size):
            if logits[j] > logits[token]:
                token = j
    else:
        for j in range(size):
            logits[j] /= temperature
    largest = find_maximum(logits, size)
    for j in range(size):
        logits[j] -= largest
        probs[j] = logits[j]
    exponentiate(probs, size, powers, power_bits)
    total, mean_logit = 0.0, 0.0  # float64, as the distribution function
    for j in range(size):
        total += probs[j]
        # The floor replaces a logit of -inf, whose product with the probability 0 would be NaN.
        mean_logit += probs[j] * max(logits[j], np.float32(-3e38))
    if temperature != 0:
        # A token of probability 0 adds nothing, so that no draw can end with it. Rounding may leave the last sum a
        # little below `total`; the last token with a probability is drawn then.
        remainder = np.float64(uniform) * total
        cumulative = 0.0
        for j in range(size):
            cumulative += probs[j]
            if probs[j] > 0:
                token = j
            if cumulative > remainder:
                break
    log_total = np.log(total)
    return token, np.float32(logits[token] - log_total), np.float32(log_total - mean_logit / total)


@_compile
def sample_turn(
    weights: tuple[Any, ...],
    cache: tuple[Any, ...],
    scratch: tuple[Any, ...],
    hidden: Floats,
    rows: Integers,
    lengths: Integers,
    uniforms: Floats,
    temperature: np.float32,
    stop_token: int,
    token_ids: Integers,
    logprobs: Floats,
    entropies: Floats,
    counts: Integers,
) -> None:
    """Sample a reply of at most `steps` tokens of B rows of the cache, each until its stop token.

    BLOCK_TOKENS rows are sampled together; the next row takes the place of one that has ended.

    weights, cache, scratch: as in `extend`. hidden: (B, hidden) of the last tokens of the rows, overwritten. rows: (B,)
    rows of the cache. lengths: (R,) tokens in the cache of each row, updated. uniforms: (B, steps). Writes token_ids,
    logprobs, entropies (B, steps), and counts (B,), the number of tokens of each reply. The last token of a reply is
    not appended to the cache.
    """
    head, (_, normed, _, _, _, _, _, _, logits, scores, _, powers, power_bits) = weights[9], scratch
    num_replies, steps = uniforms.shape
    live, live_count, admitted_count = np.empty(BLOCK_TOKENS, np.int64), 0, 0
    next_tokens, next_rows = np.empty(BLOCK_TOKENS, np.int64), np.empty(BLOCK_TOKENS, np.int64)
    next_positions, is_last = np.empty(BLOCK_TOKENS, np.int64), np.ones(BLOCK_TOKENS, np.bool_)
    next_hidden = np.empty((BLOCK_TOKENS, hidden.shape[1]), np.float32)
    while True:
        while live_count < BLOCK_TOKENS and admitted_count < num_replies:
            live[live_count] = admitted_count
            live_count += 1
            admitted_count += 1
        if live_count == 0:
            break
        for lane in range(live_count):
            normed[lane] = hidden[live[lane]]
        multiply(normed, head, logits, live_count)
        next_count = 0
        for lane in range(live_count):
            reply = live[lane]
            step = counts[reply]
            token, logprob, entropy = draw_token(
                logits[lane], temperature, uniforms[reply, step], scores[0], powers, power_bits
            )
            token_ids[reply, step], logprobs[reply, step], entropies[reply, step] = token, logprob, entropy
            counts[reply] += 1
            if token != stop_token and step + 1 < steps:
                # Entries of `live` up to here have been read already, so they can be replaced.
                live[next_count], next_tokens[next_count] = reply, token
                next_rows[next_count], next_positions[next_count] = rows[reply], lengths[rows[reply]]
                next_count += 1
        live_count = next_count
        extend(
            weights,
            cache,
            scratch,
            next_tokens[:live_count],
            next_rows[:live_count],
            next_positions[:live_count],
            is_last[:live_count],
            next_hidden,
        )
        for lane in range(live_count):
            hidden[live[lane]] = next_hidden[lane]
            lengths[next_rows[lane]] += 1


# ---------------------------------------------------------------------------- layers of whole sequences


@_compile
def normalize_backward(
    y_grad: Floats, x: Floats, gain: Floats, inverses: Floats, x_grad: Floats, gain_grad: Floats
) -> None:
    """Add the gradients of `normalize` to `x_grad` (N, size) and `gain_grad` (size,)."""
    rows, size = x.shape
    for r in range(rows):
        # Scaled before they are multiplied: products of large gradients stay finite as long as in torch.
        scale, product = inverses[r], np.float32(0)
        for i in range(size):
            product += y_grad[r, i] * gain[i] * (x[r, i] * scale)
        product /= np.float32(size)
        for i in range(size):
            normed = x[r, i] * scale
            gain_grad[i] += y_grad[r, i] * normed
            x_grad[r, i] += (y_grad[r, i] * gain[i] - normed * product) * scale


@_compile
def rotate(
    qkv: Floats, cosines: Floats, sines: Floats, positions: Integers, heads: int, size: int, direction: np.float32
) -> None:
    """Rotate the first `heads` heads of `size` channels of every row of `qkv` in place.

    direction: 1 for the forward pass, -1 for gradients, which are rotated back.
    """
    half = size // 2
    for t in range(len(qkv)):
        position = positions[t]
        for head in range(heads):
            start = head * size
            for i in range(half):
                cosine, sine = cosines[position, i], sines[position, i] * direction
                low, high = qkv[t, start + i], qkv[t, start + half + i]
                qkv[t, start + i] = low * cosine - high * sine
                qkv[t, start + half + i] = high * cosine + low * sine


@_compile
def apply_gate_backward(gate_up: Floats, gated_grad: Floats, gate_up_grad: Floats) -> None:
    """The gradient of `apply_gate`, written to `gate_up_grad` (N, 2 * intermediate)."""
    rows, size = gated_grad.shape
    exponentials, powers, one = np.zeros(size, np.float32), np.zeros(size, np.float32), np.float32(1)
    power_bits = powers.view(np.int32)
    for t in range(rows):
        for i in range(size):
            exponentials[i] = -gate_up[t, i]
        exponentiate(exponentials, size, powers, power_bits)
        for i in range(size):
            sigmoid, gate, grad = one / (one + exponentials[i]), gate_up[t, i], gated_grad[t, i]
            gate_up_grad[t, size + i] = grad * gate * sigmoid
            gate_up_grad[t, i] = grad * gate_up[t, size + i] * sigmoid * (one + gate * (one - sigmoid))


@_compile
def multiply_keys(keys: Floats, queries: Floats, firsts: Integers, scores: Floats, rows: int, columns: int) -> None:
    """scores[s, c] = keys[s] . queries[:, c] for s < rows and firsts[s] <= c < columns.

    keys: (rows, size). queries: (size, columns), one column per query and head. rows is a multiple of 4.
    """
    end = np.uintp(columns)
    for s in range(0, rows, 4):
        start = np.uintp(firsts[s])
        for c in range(start, end):
            scores[s, c] = 0
            scores[s + 1, c] = 0
            scores[s + 2, c] = 0
            scores[s + 3, c] = 0
        for i in range(0, keys.shape[1], 4):
            x00, x01, x02, x03 = keys[s, i], keys[s, i + 1], keys[s, i + 2], keys[s, i + 3]
            x10, x11, x12, x13 = keys[s + 1, i], keys[s + 1, i + 1], keys[s + 1, i + 2], keys[s + 1, i + 3]
            x20, x21, x22, x23 = keys[s + 2, i], keys[s + 2, i + 1], keys[s + 2, i + 2], keys[s + 2, i + 3]
            x30, x31, x32, x33 = keys[s + 3, i], keys[s + 3, i + 1], keys[s + 3, i + 2], keys[s + 3, i + 3]
            for c in range(start, end):
                w0, w1, w2, w3 = queries[i, c], queries[i + 1, c], queries[i + 2, c], queries[i + 3, c]
                scores[s, c] += x00 * w0 + x01 * w1 + x02 * w2 + x03 * w3
                scores[s + 1, c] += x10 * w0 + x11 * w1 + x12 * w2 + x13 * w3
                scores[s + 2, c] += x20 * w0 + x21 * w1 + x22 * w2 + x23 * w3
                scores[s + 3, c] += x30 * w0 + x31 * w1 + x32 * w2 + x33 * w3


@_compile
def mix_values(values: Floats, weights: Floats, firsts: Integers, mix: Floats, rows: int, columns: int) -> None:
    """mix[i, c] = sum over s < rows of values[s, i] * weights[s, c], where weights below firsts[s] count as 0.

    values: (rows, size). weights: (rows, columns). mix: (size, columns).
    """
    end = np.uintp(columns)
    for i in range(0, values.shape[1], 4):
        for c in range(end):
            mix[i, c] = 0
            mix[i + 1, c] = 0
            mix[i + 2, c] = 0
            mix[i + 3, c] = 0
        for s in range(0, rows, 4):
            x00, x01, x02, x03 = values[s, i], values[s, i + 1], values[s, i + 2], values[s, i + 3]
            x10, x11, x12, x13 = values[s + 1, i], values[s + 1, i + 1], values[s + 1, i + 2], values[s + 1, i + 3]
            x20, x21, x22, x23 = values[s + 2, i], values[s + 2, i + 1], values[s + 2, i + 2], values[s + 2, i + 3]
            x30, x31, x32, x33 = values[s + 3, i], values[s + 3, i + 1], values[s + 3, i + 2], values[s + 3, i + 3]
            for c in range(np.uintp(firsts[s]), end):
                w0, w1, w2, w3 = weights[s, c], weights[s + 1, c], weights[s + 2, c], weights[s + 3, c]
                mix[i, c] += x00 * w0 + x10 * w1 + x20 * w2 + x30 * w3
                mix[i + 1, c] += x01 * w0 + x11 * w1 + x21 * w2 + x31 * w3
                mix[i + 2, c] += x02 * w0 + x12 * w1 + x22 * w2 + x32 * w3
                mix[i + 3, c] += x03 * w0 + x13 * w1 + x23 * w2 + x33 * w3


@_compile
def sum_columns(weights: Floats, columns_t: Floats, firsts: Integers, sums: Floats, rows: int, columns: int) -> None:
    """sums[s, i] = sum over firsts[s] <= c < columns of weights[s, c] * columns_t[i, c], for s < rows.

    weights: (rows, columns). columns_t: (size, columns). sums: (rows, size).
    """
    end = np.uintp(columns)
    for s in range(0, rows, 4):
        start = np.uintp(firsts[s])
        for i in range(0, columns_t.shape[0], 4):
            y00 = y01 = y02 = y03 = y10 = y11 = y12 = y13 = np.float32(0)
            y20 = y21 = y22 = y23 = y30 = y31 = y32 = y33 = np.float32(0)
            for c in range(start, end):
                w0, w1, w2, w3 = columns_t[i, c], columns_t[i + 1, c], columns_t[i + 2, c], columns_t[i + 3, c]
                x0, x1, x2, x3 = weights[s, c], weights[s + 1, c], weights[s + 2, c], weights[s + 3, c]
                y00, y01, y02, y03 = y00 + x0 * w0, y01 + x0 * w1, y02 + x0 * w2, y03 + x0 * w3
                y10, y11, y12, y13 = y10 + x1 * w0, y11 + x1 * w1, y12 + x1 * w2, y13 + x1 * w3
                y20, y21, y22, y23 = y20 + x2 * w0, y21 + x2 * w1, y22 + x2 * w2, y23 + x2 * w3
                y30, y31, y32, y33 = y30 + x3 * w0, y31 + x3 * w1, y32 + x3 * w2, y33 + x3 * w3
            sums[s, i], sums[s, i + 1], sums[s, i + 2], sums[s, i + 3] = y00, y01, y02, y03
            sums[s + 1, i], sums[s + 1, i + 1], sums[s + 1, i + 2], sums[s + 1, i + 3] = y10, y11, y12, y13
            sums[s + 2, i], sums[s + 2, i + 1], sums[s + 2, i + 2], sums[s + 2, i + 3] = y20, y21, y22, y23
            sums[s + 3, i], sums[s + 3, i + 1], sums[s + 3, i + 2], sums[s + 3, i + 3] = y30, y31, y32, y33


@_compile
def find_firsts(positions: Integers, heads: int, rows: int, firsts: Integers) -> None:
    """For each group of four keys, the first column, a multiple of VECTOR, with a query at or after them.

    positions: (M,) ascending positions of queries, which have `heads` columns each. firsts: (rows or more,), written.
    """
    query = 0
    for s in range(0, rows, 4):
        while query < len(positions) and positions[query] < s:
            query += 1
        for i in range(4):
            firsts[s + i] = query * heads // VECTOR * VECTOR


@_compile
def mask_row(
    row: Floats, key: int, length: int, positions: Integers, heads: int, first: int, columns: int, value: np.float32
) -> None:
    """Write `value` to the columns of a key from `first` on whose queries do not see it; to all for a key of padding.

    length: keys of the sequence. positions: (M,) ascending positions of its queries.
    """
    if key >= length:
        for c in range(first, columns):
            row[c] = value
        return
    query = first // heads
    while query < len(positions) and positions[query] < key:
        for head in range(heads):
            row[query * heads + head] = value
        query += 1


@_compile
def find_longest(starts: Integers) -> int:
    """The tokens of the longest sequence."""
    longest = 0
    for sequence in range(len(starts) - 1):
        longest = max(longest, starts[sequence + 1] - starts[sequence])
    return longest


@_compile
def load_keys_values(
    qkv: Floats, start: int, length: int, group: int, heads: int, keys: Floats, values: Floats
) -> None:
    """Copy the keys and values of a group of heads of a sequence, followed by zeros up to a multiple of four rows."""
    size = keys.shape[1]
    kv_heads = (qkv.shape[1] // size - heads) // 2
    key_start, value_start = (heads + group) * size, (heads + kv_heads + group) * size
    for t in range(length):
        for i in range(size):
            keys[t, i], values[t, i] = qkv[start + t, key_start + i], qkv[start + t, value_start + i]
    for t in range(length, -(-length // 4) * 4):
        for i in range(size):
            keys[t, i] = values[t, i] = 0


@_compile
def attend_stream(
    qkv: Floats,
    starts: Integers,
    positions: Integers,
    query_starts: Integers,
    heads: int,
    kv_heads: int,
    output: Floats,
    log_totals: Floats,
) -> None:
    """Causal attention of M queries over their own sequences.

    qkv: (N, (heads + 2 * kv_heads) * size), rotated. starts: (R + 1,), the sequences of the stream. positions: (M,)
    ascending positions of the queries within each sequence. query_starts: (R + 1,), the queries of the sequences.
    Writes output (M, heads * size), and log_totals (M, heads), the logarithm of the sum of the exponentials of all
    scores, which `attend_stream_backward` needs.

    The queries of all heads of a group are columns of one matrix of scores, and the keys are its rows: so all loops run
    over columns, of which there are many, and keys and values are read once per group.
    """
    size = output.shape[1] // heads
    group_heads = heads // kv_heads
    longest = find_longest(starts)
    most_rows, most_columns = -(-longest // 4) * 4, -(-longest * group_heads // VECTOR) * VECTOR
    keys, values = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    queries, mix = np.zeros((size, most_columns), np.float32), np.zeros((size, most_columns), np.float32)
    weights, firsts = np.empty((most_rows, most_columns), np.float32), np.zeros(most_rows, np.int64)
    largest, totals = np.zeros(most_columns, np.float32), np.zeros(most_columns, np.float32)
    powers = np.zeros(most_columns, np.float32)
    power_bits = powers.view(np.int32)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for sequence in range(len(starts) - 1):
        start, length = starts[sequence], starts[sequence + 1] - starts[sequence]
        first_query, num_queries = query_starts[sequence], query_starts[sequence + 1] - query_starts[sequence]
        own_positions = positions[first_query : first_query + num_queries]
        rows, columns = -(-length // 4) * 4, -(-num_queries * group_heads // VECTOR) * VECTOR
        find_firsts(own_positions, group_heads, rows, firsts)
        for group in range(kv_heads):
            load_keys_values(qkv, start, length, group, heads, keys, values)
            for query in range(num_queries):
                token = start + own_positions[query]
                for head in range(group_heads):
                    channel = (group * group_heads + head) * size
                    for i in range(size):
                        queries[i, query * group_heads + head] = qkv[token, channel + i] * scale
            for c in range(num_queries * group_heads, columns):
                for i in range(size):
                    queries[i, c] = 0
            multiply_keys(keys, queries, firsts, weights, rows, columns)
            for c in range(columns):
                largest[c], totals[c] = np.float32(-1e30), 0
            for s in range(rows):
                mask_row(weights[s], s, length, own_positions, group_heads, firsts[s], columns, np.float32(-1e30))
                row, row_largest = weights[s, firsts[s] : columns], largest[firsts[s] : columns]
                for c in range(len(row)):
                    row_largest[c] = row_largest[c] if row_largest[c] > row[c] else row[c]
            for s in range(rows):
                row, row_largest = weights[s, firsts[s] : columns], largest[firsts[s] : columns]
                row_totals = totals[firsts[s] : columns]
                for c in range(len(row)):
                    row[c] -= row_largest[c]
                exponentiate(row, len(row), powers, power_bits)
                for c in range(len(row)):
                    row_totals[c] += row[c]
            mix_values(values, weights, firsts, mix, rows, columns)
            for query in range(num_queries):
                for head in range(group_heads):
                    c, channel = query * group_heads + head, (group * group_heads + head) * size
                    log_totals[first_query + query, group * group_heads + head] = largest[c] + np.log(totals[c])
                    inverse = np.float32(1) / totals[c]
                    for i in range(size):
                        output[first_query + query, channel + i] = mix[i, c] * inverse


@_compile
def attend_stream_backward(
    qkv: Floats,
    starts: Integers,
    positions: Integers,
    query_starts: Integers,
    heads: int,
    kv_heads: int,
    output: Floats,
    log_totals: Floats,
    output_grad: Floats,
    qkv_grad: Floats,
) -> None:
    """The gradient of `attend_stream`; the arguments before `output_grad` (M, heads * size) are its arguments.

    Writes qkv_grad (N, ...), except at the queries of tokens that have none, where it must be 0 before.
    """
    size = output.shape[1] // heads
    group_heads = heads // kv_heads
    longest = find_longest(starts)
    most_rows, most_columns = -(-longest // 4) * 4, -(-longest * group_heads // VECTOR) * VECTOR
    keys, values = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    keys_grad, values_grad = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    queries, queries_grad = np.zeros((size, most_columns), np.float32), np.zeros((size, most_columns), np.float32)
    mix_grad, firsts = np.zeros((size, most_columns), np.float32), np.zeros(most_rows, np.int64)
    weights = np.empty((most_rows, most_columns), np.float32)
    scores_grad = np.empty((most_rows, most_columns), np.float32)
    norms, products = np.zeros(most_columns, np.float32), np.zeros(most_columns, np.float32)
    powers = np.zeros(most_columns, np.float32)
    power_bits = powers.view(np.int32)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for sequence in range(len(starts) - 1):
        start, length = starts[sequence], starts[sequence + 1] - starts[sequence]
        first_query, num_queries = query_starts[sequence], query_starts[sequence + 1] - query_starts[sequence]
        own_positions = positions[first_query : first_query + num_queries]
        rows, columns = -(-length // 4) * 4, -(-num_queries * group_heads // VECTOR) * VECTOR
        find_firsts(own_positions, group_heads, rows, firsts)
        for group in range(kv_heads):
            load_keys_values(qkv, start, length, group, heads, keys, values)
            for query in range(num_queries):
                token, row_index = start + own_positions[query], first_query + query
                for head in range(group_heads):
                    c, channel = query * group_heads + head, (group * group_heads + head) * size
                    product = np.float32(0)
                    for i in range(size):
                        queries[i, c] = qkv[token, channel + i] * scale
                        mix_grad[i, c] = output_grad[row_index, channel + i]
                        product += output_grad[row_index, channel + i] * output[row_index, channel + i]
                    products[c], norms[c] = product, log_totals[row_index, group * group_heads + head]
            for c in range(num_queries * group_heads, columns):
                products[c] = norms[c] = 0
                for i in range(size):
                    queries[i, c] = mix_grad[i, c] = 0
            multiply_keys(keys, queries, firsts, weights, rows, columns)
            multiply_keys(values, mix_grad, firsts, scores_grad, rows, columns)
            for s in range(rows):
                row, row_grad = weights[s, firsts[s] : columns], scores_grad[s, firsts[s] : columns]
                row_norms, row_products = norms[firsts[s] : columns], products[firsts[s] : columns]
                for c in range(len(row)):
                    row[c] -= row_norms[c]
                exponentiate(row, len(row), powers, power_bits)
                mask_row(weights[s], s, length, own_positions, group_heads, firsts[s], columns, np.float32(0))
                for c in range(len(row)):
                    row_grad[c] = row[c] * (row_grad[c] - row_products[c])
            mix_values(keys, scores_grad, firsts, queries_grad, rows, columns)
            sum_columns(scores_grad, queries, firsts, keys_grad, rows, columns)
            sum_columns(weights, mix_grad, firsts, values_grad, rows, columns)
            for query in range(num_queries):
                token = start + own_positions[query]
                for head in range(group_heads):
                    c, channel = query * group_heads + head, (group * group_heads + head) * size
                    for i in range(size):
                        qkv_grad[token, channel + i] = queries_grad[i, c] * scale
            key_start, value_start = (heads + group) * size, (heads + kv_heads + group) * size
            for t in range(length):
                for i in range(size):
                    qkv_grad[start + t, key_start + i] = keys_grad[t, i]
                    qkv_grad[start + t, value_start + i] = values_grad[t, i]
