"""The tiny Qwen2 policies in compiled code: sampling a whole turn in one call, and layers over whole sequences.

numba compiles these functions on first use and caches the machine code for later processes; no C compiler is needed.
All are in one module, because numba checks only the file of the function that it loads for changes, not the functions
called from there. They take plain tuples: numba would pickle the names of our classes with the machine code, and could
not read its cache after a class was renamed.

In sampling, every row has its own number of tokens, so nothing is padded. A token's slot in its row of the cache is its
position. Whole sequences lie end to end in a stream, as in `models.packing`.

Loops are written for LLVM, which vectorizes the innermost ones: they run over consecutive numbers, from 0 or from an
unsigned start (numba would check at each step whether a signed one is negative), and write to rows that the outer loop
does not change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

VECTOR = 16
"""Number of float32 in the widest vector registers. With narrower registers, LLVM uses several per vector."""

HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
"""Whether there are 32 registers that hold a whole vector."""

TILE_ROWS = 8 if HAS_WIDE_REGISTERS else 4
"""Rows of a matrix product that are computed together: as many as fit into the registers with `TILE_VECTORS`."""

TILE_VECTORS = 2 if HAS_WIDE_REGISTERS else 1
"""Vectors per row that are computed together."""

TILE_COLUMNS = TILE_VECTORS * VECTOR

BLOCK_TOKENS = 64
"""Tokens that run through the network together; a multiple of `TILE_ROWS`."""

LANES = 16
"""Rows that are sampled together: few enough for their keys and values to stay in a core's cache during a turn."""


class DecoderWeights(NamedTuple):
    """The weights of a network with L layers. Matrices are (inputs, outputs), and joined if they have the same input.

    embedding: (V, hidden). qkv: (L, hidden, q + k + v). qkv_bias: (L, q + k + v). output: (L, hidden, hidden).
    gate_up: (L, hidden, 2 * intermediate). down: (L, intermediate, hidden). attention_gain, mlp_gain: (L, hidden).
    final_gain: (hidden,). head: (hidden, V). eps: of the norms. The cache has the sizes of the attention.
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
    """Keys and values of R rows with S slots each (a multiple of VECTOR), and the rotary table of the slots.

    keys: (L, R, kv_heads, head_dim, S), to compute the scores of all slots together. values: (L, R, kv_heads, S,
    head_dim). cosines, sines: (S, head_dim / 2).
    """

    keys: Floats
    values: Floats
    cosines: Floats
    sines: Floats


class DecoderScratch(NamedTuple):
    """Memory of a pass over at most BLOCK_TOKENS tokens. Arrays from `residual` to `logits` have one row per token.

    scores: (2, at least VECTOR more than the slots). mix: (2, head_dim).
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


def _compile(function: Function) -> Function:
    """Compile on first use. Sums may be reordered and products fused with additions; NaN and infinity stay exact.

    Everything is inlined. Otherwise a function would have several copies, one for itself and one per caller, which LLVM
    reorders differently, and the one that runs would depend on what is compiled and what is cached.
    """
    options = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy", "forceinline": True}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # numba can write neither next to this file nor to the user's cache
        return cast(Function, njit(**options)(function))


def make_bit_reader() -> Callable[[np.int32], np.float32]:
    """Make a function for compiled code that reinterprets the bits of an int32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    def read(_: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
        return types.float32(types.int32), generate

    return cast(Callable[[np.int32], np.float32], intrinsic(read))


def _point(builder: Any, array: Any, row: Any, column: Any) -> Any:
    """Generate LLVM code for the address of a matrix element."""
    row_stride, column_stride = (builder.extract_value(array.strides, axis) for axis in range(2))
    offset = builder.add(builder.mul(row, row_stride), builder.mul(column, column_stride))
    address = builder.gep(builder.bitcast(array.data, ir.IntType(8).as_pointer()), [offset])
    return builder.bitcast(address, ir.FloatType().as_pointer())


def make_tile_product(rows: int, vectors: int, chains: int) -> Callable[..., None]:
    """Make a function for compiled code that sets y[row : row + rows, column : column + vectors * VECTOR] to
    x[row : row + rows, start : end] @ weight[start : end, column : column + vectors * VECTOR].

    x may have any strides; the rows of `weight` and y are contiguous. end - start must be a multiple of `chains`. Each
    chain sums every chains-th product, because additions to a single sum would wait for each other. Nothing is checked:
    x and y must have all rows of the tile. It is written as LLVM code, so that sums stay in registers, unlike sums of
    loops over arrays, and each loaded number is used in several products.
    """
    floats, indices, size = ir.VectorType(ir.FloatType(), VECTOR), ir.VectorType(ir.IntType(32), VECTOR), ir.IntType(64)
    tile = [(i, vector) for i in range(rows) for vector in range(vectors)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        x, weight, y = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in range(3))
        row, column, start, end = arguments[3:]

        def add(number: Any, constant: int) -> Any:
            return builder.add(number, ir.Constant(size, constant))

        def point_vector(array: Any, row: Any, vector: int) -> Any:
            address = _point(builder, array, row, add(column, vector * VECTOR))
            return builder.bitcast(address, floats.as_pointer())

        def multiply_add(index: Any, sums: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
            """Add the products of one input to the sums."""
            weights = [builder.load(point_vector(weight, index, vector), align=4) for vector in range(vectors)]
            new_sums, nothing = {}, ir.Constant(floats, ir.Undefined)
            for i in range(rows):
                factor = builder.load(_point(builder, x, add(row, i), index))
                first = builder.insert_element(nothing, factor, ir.Constant(ir.IntType(32), 0))
                factors = builder.shuffle_vector(first, nothing, ir.Constant(indices, [0] * VECTOR))
                for vector in range(vectors):
                    product = builder.fmul(factors, weights[vector], flags=["contract"])
                    new_sums[i, vector] = builder.fadd(product, sums[i, vector], flags=["contract"])
            return new_sums

        before = builder.block
        loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("tile")
        builder.cbranch(builder.icmp_signed("<", start, end), loop, after)

        builder.position_at_end(loop)
        index = builder.phi(size)
        sums = [{place: builder.phi(floats) for place in tile} for _ in range(chains)]
        next_sums = [multiply_add(add(index, chain), sums[chain]) for chain in range(chains)]
        next_index = add(index, chains)
        builder.cbranch(builder.icmp_signed("<", next_index, end), loop, after)

        builder.position_at_end(after)
        last_sums = [{place: builder.phi(floats) for place in tile} for _ in range(chains)]
        zeros = ir.Constant(floats, [0.0] * VECTOR)
        index.add_incoming(start, before)
        index.add_incoming(next_index, loop)
        for chain in range(chains):
            for place in tile:
                for number in (sums[chain][place], last_sums[chain][place]):
                    number.add_incoming(zeros, before)
                    number.add_incoming(next_sums[chain][place], loop)
        for i, vector in tile:
            total = last_sums[0][i, vector]
            for chain in range(1, chains):
                total = builder.fadd(total, last_sums[chain][i, vector])
            builder.store(total, point_vector(y, add(row, i), vector), align=4)
        return context.get_dummy_value()

    def multiply_tile(
        _: Any, x: Any, weight: Any, y: Any, row: Any, column: Any, start: Any, end: Any
    ) -> tuple[Any, Callable[..., Any]]:
        return types.void(x, weight, y, types.intp, types.intp, types.intp, types.intp), generate

    return cast(Callable[..., None], intrinsic(multiply_tile))


read_bits = make_bit_reader()
multiply_wide_tile = make_tile_product(TILE_ROWS, TILE_VECTORS, chains=1)
multiply_narrow_tile = make_tile_product(TILE_ROWS, 1, chains=1)
multiply_wide_pair = make_tile_product(2, TILE_VECTORS, chains=2)
multiply_narrow_pair = make_tile_product(2, 1, chains=2)


@_compile
def multiply_rest(
    x: Floats, weight: Floats, y: Floats, rows: tuple[int, int], columns: tuple[int, int], inputs: tuple[int, int]
) -> None:
    """Compute the columns of a product that do not fill a vector. Pairs are (first index, index after the last)."""
    for r in range(rows[0], rows[1]):
        for o in range(columns[0], columns[1]):
            y[r, o] = 0
        for i in range(inputs[0], inputs[1]):
            for o in range(columns[0], columns[1]):
                y[r, o] += x[r, i] * weight[i, o]


@_compile
def multiply_rows(
    x: Floats, weight: Floats, y: Floats, row: int, columns: tuple[int, int], inputs: tuple[int, int]
) -> None:
    """Compute TILE_ROWS rows of a product: y[row:, first:last] = x[row:, start:end] @ weight[start:end, first:last].

    columns: first and last. inputs: start and end.
    """
    column, (start, end) = columns[0], inputs
    while column + TILE_COLUMNS <= columns[1]:
        multiply_wide_tile(x, weight, y, row, column, start, end)
        column += TILE_COLUMNS
    while column + VECTOR <= columns[1]:
        multiply_narrow_tile(x, weight, y, row, column, start, end)
        column += VECTOR
    multiply_rest(x, weight, y, (row, row + TILE_ROWS), (column, columns[1]), inputs)


@_compile
def multiply(x: Floats, weight: Floats, y: Floats, rows: int) -> None:
    """Compute y[:rows] = x[:rows] @ weight. Rows of y up to the next multiple of TILE_ROWS are overwritten."""
    for row in range(0, rows, TILE_ROWS):
        multiply_rows(x, weight, y, row, (0, weight.shape[1]), (0, weight.shape[0]))


@_compile
def multiply_pair(x: Floats, weight: Floats, y: Floats, columns: int, inputs: int) -> None:
    """Compute y[:2, :columns] = x[:2, :inputs] @ weight[:inputs, :columns], for an even number of inputs."""
    column = 0
    while column + TILE_COLUMNS <= columns:
        multiply_wide_pair(x, weight, y, 0, column, 0, inputs)
        column += TILE_COLUMNS
    while column + VECTOR <= columns:
        multiply_narrow_pair(x, weight, y, 0, column, 0, inputs)
        column += VECTOR
    multiply_rest(x, weight, y, (0, 2), (column, columns), (0, inputs))


@_compile
def round_up(number: int, divisor: int) -> int:
    """Round up to a multiple of the divisor."""
    return -(-number // divisor) * divisor


@_compile
def exponentiate(x: Floats, length: int, shift: np.float32) -> np.float32:
    """Set x[:length] = exp(x[:length] - shift), to about one unit in the last place, and return the sum.

    0 below exp(-87), NaN for NaN. Unlike math.exp, this is vectorized. exp(x) = 2^k exp(r) with k = round(x / ln 2),
    and exp(r) by the polynomial of the Cephes library. 2^k is made from the bits of its exponent.
    """
    total = np.float32(0)
    for j in range(length):
        number = x[j] - shift
        quotient = number * np.float32(1.4426950408889634)
        quotient = quotient if quotient > np.float32(-126) else np.float32(-126)  # also for NaN
        quotient = quotient if quotient < np.float32(127) else np.float32(127)
        k = np.floor(quotient + np.float32(0.5))
        # ln 2 in two parts, the first of which times k is exact.
        r = number - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
        polynomial = np.float32(1.9875691500e-4)
        polynomial = polynomial * r + np.float32(1.3981999507e-3)
        polynomial = polynomial * r + np.float32(8.3334519073e-3)
        polynomial = polynomial * r + np.float32(4.1665795894e-2)
        polynomial = polynomial * r + np.float32(1.6666665459e-1)
        polynomial = polynomial * r + np.float32(5.0000001201e-1)
        polynomial = polynomial * r * r + r + np.float32(1)
        power = polynomial * read_bits((np.int32(k) + np.int32(127)) << np.int32(23))
        x[j] = np.float32(0) if number < np.float32(-87) else power
        total += x[j]
    return total


@_compile
def find_maximum(x: Floats, length: int) -> np.float32:
    """Find the largest of x[:length], with eight running maxima that do not wait for each other."""
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
    """Set y[:rows] to x[:rows] over its root mean square, times the gain, and `inverses` to 1 / root mean squares."""
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
    """Compute x[:rows] += y[:rows]."""
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
) -> None:
    """Attend from each token of `qkv` to its row up to its position; write `output` (BLOCK_TOKENS, heads * size).

    all_keys, all_values: of one layer of the cache. scores, mix: see `DecoderScratch`.

    Two query heads of a group are computed together, to read keys and values half as often.
    """
    kv_heads, size = all_keys.shape[1], all_keys.shape[2]
    heads = output.shape[1] // size
    heads_per_group = heads // kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for t in range(tokens):
        row, length = rows[t], positions[t] + 1
        queries = qkv[t].reshape(-1, size)  # followed by keys and values
        for head in range(heads):
            group, place = head // heads_per_group, head % heads_per_group
            if place % 2 == 1:
                continue
            for i in range(size):
                mix[0, i], mix[1, i] = queries[head, i] * scale, queries[head + 1, i] * scale
            # Scores are computed up to the end of a vector, but scores after the token are not read.
            multiply_pair(mix, all_keys[row, group], scores, round_up(length, VECTOR), size)
            first_total = exponentiate(scores[0], length, find_maximum(scores[0], length))
            second_total = exponentiate(scores[1], length, find_maximum(scores[1], length))
            scores[0, length] = scores[1, length] = 0  # for an even number of slots
            multiply_pair(scores, all_values[row, group], mix, size, round_up(length, 2))
            first_factor, second_factor = np.float32(1) / first_total, np.float32(1) / second_total
            for i in range(size):
                output[t, head * size + i] = mix[0, i] * first_factor
            if place + 1 < heads_per_group:  # the last head of a group with an odd number of heads has no partner
                for i in range(size):
                    output[t, (head + 1) * size + i] = mix[1, i] * second_factor


@_compile
def apply_gate(gate_up: Floats, gated: Floats, tokens: int) -> None:
    """Compute silu(gate) * up from `gate_up` (BLOCK_TOKENS, 2 * intermediate); write `gated` (BLOCK_TOKENS, ...)."""
    size = gated.shape[1]
    for t in range(tokens):
        for i in range(size):
            gated[t, i] = -gate_up[t, i]
        exponentiate(gated[t], size, np.float32(0))
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
    """Append N tokens to their rows of the cache; write the hidden states of tokens with `is_last` to `hidden`.

    weights, cache, scratch: the fields of `DecoderWeights`, `DecoderCache` and `DecoderScratch`. token_ids, rows,
    positions, is_last: (N,). The tokens of a row are ordered by position. hidden: (number of last tokens, hidden). In
    the last layer, only keys and values of the other tokens are computed, since nothing else is needed.
    """
    embedding, qkv_weight, bias, output, gate_up_weight, down, attention_gain, mlp_gain, final_gain, _, eps = weights
    keys, values, cosines, sines = cache
    residual, normed, inverses, qkv, attention, product, gate_up, gated, _, scores, mix = scratch
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
            attend(qkv, keys[layer], values[layer], block_rows, block_positions, tokens, attention, scores, mix)
            multiply(attention, output[layer], product, tokens)
            add(residual, product, tokens)
            normalize(residual, mlp_gain[layer], eps, normed, inverses, tokens)
            multiply(normed, gate_up_weight[layer], gate_up, tokens)
            apply_gate(gate_up, gated, tokens)
            multiply(gated, down[layer], product, tokens)
            add(residual, product, tokens)
        normalize(residual, final_gain, eps, normed, inverses, tokens)
        for t in range(tokens):
            hidden[num_outputs + t] = normed[t]
        num_outputs += tokens


@_compile
def draw_token(
    logits: Floats, temperature: np.float32, uniform: np.float32, probs: Floats
) -> tuple[int, np.float32, np.float32]:
    """Draw a token as `torch_sampler.sample_tokens` does; return the token, its log-prob, and the entropy.

    logits: (V,), overwritten. probs: scratch memory of at least V numbers. The entropy is NaN if a logit is NaN or
    +inf, or all are -inf.
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
    exponentiate(probs, size, np.float32(0))
    total, mean_logit = 0.0, 0.0  # float64, like the cumulative distribution
    for j in range(size):
        total += probs[j]
        # Clamped, because the product of a logit of -inf and the probability 0 would be NaN.
        mean_logit += probs[j] * max(logits[j], np.float32(-3e38))
    if temperature != 0:
        # Tokens of probability 0 are never drawn, since they add nothing. If rounding leaves the last sum slightly
        # below `total`, the last token with a positive probability is drawn.
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
    stop_tokens: Integers,
    token_ids: Integers,
    logprobs: Floats,
    entropies: Floats,
    counts: Integers,
) -> None:
    """Sample replies of B rows of the cache, each up to the first of `stop_tokens` or `steps` tokens.

    LANES rows are sampled together. When a row ends, the next one takes its place.

    weights, cache, scratch: as in `extend`. hidden: (B, hidden) of the rows' last tokens, overwritten. rows: (B,) rows
    of the cache. lengths: (R,) tokens of each row in the cache, updated. uniforms: (B, steps). Writes token_ids,
    logprobs, entropies (B, steps), and counts (B,), the tokens of each reply. A reply's last token is not appended to
    the cache.
    """
    head, (_, normed, _, _, _, _, _, _, logits, scores, _) = weights[9], scratch
    num_replies, steps = uniforms.shape
    live, live_count, admitted_count = np.empty(LANES, np.int64), 0, 0
    next_tokens, next_rows = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    next_positions, is_last = np.empty(LANES, np.int64), np.ones(LANES, np.bool_)
    next_hidden = np.empty((LANES, hidden.shape[1]), np.float32)
    while True:
        while live_count < LANES and admitted_count < num_replies:
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
            token, logprob, entropy = draw_token(logits[lane], temperature, uniforms[reply, step], scores[0])
            token_ids[reply, step], logprobs[reply, step], entropies[reply, step] = token, logprob, entropy
            counts[reply] += 1
            is_over = step + 1 == steps
            for stop_token in stop_tokens:
                is_over = is_over or token == stop_token
            if not is_over:
                # Entries of `live` up to here have been read, so they can be replaced.
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
        # Scale before multiplying, so that products of large gradients overflow no earlier than in torch.
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
    """Write the gradient of `apply_gate` to `gate_up_grad` (N, 2 * intermediate)."""
    rows, size = gated_grad.shape
    exponentials, one = np.zeros(size, np.float32), np.float32(1)
    for t in range(rows):
        for i in range(size):
            exponentials[i] = -gate_up[t, i]
        exponentiate(exponentials, size, np.float32(0))
        for i in range(size):
            sigmoid, gate, grad = one / (one + exponentials[i]), gate_up[t, i], gated_grad[t, i]
            gate_up_grad[t, size + i] = grad * gate * sigmoid
            gate_up_grad[t, i] = grad * gate_up[t, size + i] * sigmoid * (one + gate * (one - sigmoid))


@_compile
def multiply_keys(keys: Floats, queries: Floats, firsts: Integers, scores: Floats, rows: int, columns: int) -> None:
    """Compute scores[s, c] = keys[s] . queries[:, c] for s < rows and firsts[s] <= c < columns.

    keys: (rows, size). queries: (size, columns), one column per query and head. rows: a multiple of TILE_ROWS.
    """
    for s in range(0, rows, TILE_ROWS):
        multiply_rows(keys, queries, scores, s, (firsts[s], columns), (0, keys.shape[1]))


@_compile
def mix_values(values: Floats, weights: Floats, firsts: Integers, mix: Floats, rows: int, columns: int) -> None:
    """Compute mix[c] = sum over s < rows of weights[s, c] * values[s], where weights below firsts[s] count as 0.

    values: (rows, size). weights: (rows, columns). mix: (columns, size).
    """
    end = 0
    for c in range(0, columns, TILE_ROWS):
        while end < rows and firsts[end] <= c:
            end += TILE_ROWS
        multiply_rows(weights.T, values, mix, c, (0, values.shape[1]), (0, end))


@_compile
def sum_columns(weights: Floats, vectors: Floats, firsts: Integers, sums: Floats, rows: int, columns: int) -> None:
    """Compute sums[s] = sum over firsts[s] <= c < columns of weights[s, c] * vectors[c], for s < rows.

    weights: (rows, columns). vectors: (columns, size). sums: (rows, size).
    """
    for s in range(0, rows, TILE_ROWS):
        multiply_rows(weights, vectors, sums, s, (0, vectors.shape[1]), (firsts[s], columns))


@_compile
def find_firsts(positions: Integers, heads: int, rows: int, firsts: Integers) -> None:
    """Find for the keys of each tile the first column, a multiple of TILE_COLUMNS, with a query that may see one.

    positions: (M,) ascending positions of queries, with `heads` columns each. firsts: (at least rows,), written.
    """
    query = 0
    for s in range(0, rows, TILE_ROWS):
        while query < len(positions) and positions[query] < s:
            query += 1
        for i in range(TILE_ROWS):
            firsts[s + i] = query * heads // TILE_COLUMNS * TILE_COLUMNS


@_compile
def mask_row(
    row: Floats, key: int, length: int, positions: Integers, heads: int, first: int, columns: int, value: np.float32
) -> None:
    """Write `value` to a key's columns from `first` on whose queries do not see it; to all columns for padding.

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
    """Find the length of the longest sequence."""
    longest = 0
    for sequence in range(len(starts) - 1):
        longest = max(longest, starts[sequence + 1] - starts[sequence])
    return longest


@_compile
def load_keys_values(
    qkv: Floats, start: int, length: int, group: int, heads: int, keys: Floats, values: Floats
) -> None:
    """Copy a sequence's keys and values for a group of heads, and fill the rest of the last tile with zeros."""
    size = keys.shape[1]
    kv_heads = (qkv.shape[1] // size - heads) // 2
    key_start, value_start = (heads + group) * size, (heads + kv_heads + group) * size
    for t in range(length):
        for i in range(size):
            keys[t, i], values[t, i] = qkv[start + t, key_start + i], qkv[start + t, value_start + i]
    for t in range(length, round_up(length, TILE_ROWS)):
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
    """Compute causal attention of M queries over their sequences.

    qkv: (N, (heads + 2 * kv_heads) * size), rotated. starts: (R + 1,), bounds of the sequences in the stream.
    positions: (M,) positions of the queries, ascending within each sequence. query_starts: (R + 1,), bounds of each
    sequence's queries. Writes output (M, heads * size), and log_totals (M, heads), the log-sum-exp of all scores, for
    `attend_stream_backward`.

    The queries of all heads of a group are the columns of one matrix of scores, and the keys its rows. So loops run
    over many columns, and keys and values are read once per group.
    """
    size = output.shape[1] // heads
    group_heads = heads // kv_heads
    longest = find_longest(starts)
    most_rows, most_columns = round_up(longest, TILE_ROWS), round_up(longest * group_heads, TILE_COLUMNS)
    keys, values = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    queries, mix = np.zeros((size, most_columns), np.float32), np.zeros((most_columns, size), np.float32)
    weights, firsts = np.empty((most_rows, most_columns), np.float32), np.zeros(most_rows, np.int64)
    largest, totals = np.zeros(most_columns, np.float32), np.zeros(most_columns, np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for sequence in range(len(starts) - 1):
        start, length = starts[sequence], starts[sequence + 1] - starts[sequence]
        first_query, num_queries = query_starts[sequence], query_starts[sequence + 1] - query_starts[sequence]
        own_positions = positions[first_query : first_query + num_queries]
        rows, columns = round_up(length, TILE_ROWS), round_up(num_queries * group_heads, TILE_COLUMNS)
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
                exponentiate(row, len(row), np.float32(0))
                for c in range(len(row)):
                    row_totals[c] += row[c]
            mix_values(values, weights, firsts, mix, rows, columns)
            for query in range(num_queries):
                for head in range(group_heads):
                    c, channel = query * group_heads + head, (group * group_heads + head) * size
                    log_totals[first_query + query, group * group_heads + head] = largest[c] + np.log(totals[c])
                    inverse = np.float32(1) / totals[c]
                    for i in range(size):
                        output[first_query + query, channel + i] = mix[c, i] * inverse


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
    """Compute the gradient of `attend_stream`, given its arguments and `output_grad` (M, heads * size).

    Writes qkv_grad (N, ...). Query entries of tokens without a query are not written and must be 0.
    """
    size = output.shape[1] // heads
    group_heads = heads // kv_heads
    longest = find_longest(starts)
    most_rows, most_columns = round_up(longest, TILE_ROWS), round_up(longest * group_heads, TILE_COLUMNS)
    keys, values = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    keys_grad, values_grad = np.zeros((most_rows, size), np.float32), np.zeros((most_rows, size), np.float32)
    queries, queries_grad = np.zeros((most_columns, size), np.float32), np.zeros((most_columns, size), np.float32)
    mix_grad, firsts = np.zeros((most_columns, size), np.float32), np.zeros(most_rows, np.int64)
    queries_t, mix_grad_t = np.zeros((size, most_columns), np.float32), np.zeros((size, most_columns), np.float32)
    weights = np.empty((most_rows, most_columns), np.float32)
    scores_grad = np.empty((most_rows, most_columns), np.float32)
    norms, products = np.zeros(most_columns, np.float32), np.zeros(most_columns, np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(size))
    for sequence in range(len(starts) - 1):
        start, length = starts[sequence], starts[sequence + 1] - starts[sequence]
        first_query, num_queries = query_starts[sequence], query_starts[sequence + 1] - query_starts[sequence]
        own_positions = positions[first_query : first_query + num_queries]
        rows, columns = round_up(length, TILE_ROWS), round_up(num_queries * group_heads, TILE_COLUMNS)
        find_firsts(own_positions, group_heads, rows, firsts)
        for group in range(kv_heads):
            load_keys_values(qkv, start, length, group, heads, keys, values)
            for query in range(num_queries):
                token, row_index = start + own_positions[query], first_query + query
                for head in range(group_heads):
                    c, channel = query * group_heads + head, (group * group_heads + head) * size
                    product = np.float32(0)
                    for i in range(size):
                        queries[c, i] = qkv[token, channel + i] * scale
                        mix_grad[c, i] = output_grad[row_index, channel + i]
                        product += output_grad[row_index, channel + i] * output[row_index, channel + i]
                    products[c], norms[c] = product, log_totals[row_index, group * group_heads + head]
            for c in range(num_queries * group_heads, columns):
                products[c] = norms[c] = 0
                for i in range(size):
                    queries[c, i] = mix_grad[c, i] = 0
            for i in range(size):
                for c in range(columns):
                    queries_t[i, c], mix_grad_t[i, c] = queries[c, i], mix_grad[c, i]
            multiply_keys(keys, queries_t, firsts, weights, rows, columns)
            multiply_keys(values, mix_grad_t, firsts, scores_grad, rows, columns)
            for s in range(rows):
                row, row_grad = weights[s, firsts[s] : columns], scores_grad[s, firsts[s] : columns]
                row_norms, row_products = norms[firsts[s] : columns], products[firsts[s] : columns]
                for c in range(len(row)):
                    row[c] -= row_norms[c]
                exponentiate(row, len(row), np.float32(0))
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
                        qkv_grad[token, channel + i] = queries_grad[c, i] * scale
            key_start, value_start = (heads + group) * size, (heads + kv_heads + group) * size
            for t in range(length):
                for i in range(size):
                    qkv_grad[start + t, key_start + i] = keys_grad[t, i]
                    qkv_grad[start + t, value_start + i] = values_grad[t, i]
