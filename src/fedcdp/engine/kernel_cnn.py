"""The GPU side of `engine.kernel`: all local steps of a client in one Triton program, for the paper's CNN.

    input [channels, height, width] – 3×3 convolution – 2×2 max pool – activation – 3×3 convolution – 2×2 max pool –
    activation – dense layer

The activations are monotonic, so pooling before them gives the same result as pooling after them, on a quarter of the
values. A convolution is computed only where a pooling window uses it. Rows of its products are in the order [window,
position in the window], so a window's largest value is found among four neighbouring rows.

A program owns its client's weights and a piece of scratch memory, which it reads repeatedly while they are in the GPU's
caches. A barrier separates writes by one thread from reads by another. Between two barriers, no value is overwritten that
another thread may still have to read: a value is replaced only by one computed from it, or if it is no longer read.

This file is written in the Triton language, whose functions are typed by their callers. Import it only if Triton is
installed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl

# Activations -----------------------------------------------------------------------------------------------------------


@triton.jit
def _activated(values, activation: tl.constexpr):
    if activation == "relu":
        return tl.where(values < 0, 0.0, values)  # a NaN stays NaN
    decayed = tl.exp(-tl.abs(values))
    if activation == "sigmoid":
        return tl.where(values < 0, decayed, 1.0) / (1.0 + decayed)
    squared = decayed * decayed
    size = (1.0 - squared) / (1.0 + squared)
    return tl.where(values < 0, -size, size)


@triton.jit
def _slope(outputs, activation: tl.constexpr):
    """The activation's derivative, as a function of its outputs."""
    if activation == "relu":
        return tl.where(outputs > 0, 1.0, 0.0)
    if activation == "sigmoid":
        return outputs * (1.0 - outputs)
    return 1.0 - outputs * outputs


# Noise -----------------------------------------------------------------------------------------------------------------


@triton.jit
def _normals(blocks, step, client, key_low, key_high):
    """Four standard normal values for each block of coordinates: `randomness.normals`, up to rounding."""
    first, second, third, fourth = philox_impl(
        tl.cast(blocks, tl.uint32), tl.cast(step, tl.uint32), tl.cast(0, tl.uint32), tl.cast(client, tl.uint32),
        tl.cast(key_low, tl.uint32, bitcast=True), tl.cast(key_high, tl.uint32, bitcast=True),
    )  # fmt: skip
    one, two = _box_muller(first, second)
    three, four = _box_muller(third, fourth)
    return one, two, three, four


@triton.jit
def _box_muller(radius_word, angle_word):
    radius = tl.sqrt(-2.0 * tl.log((radius_word.to(tl.float32) + 0.5) * 2.0**-32))
    cosine, sine = _cosine_and_sine(angle_word.to(tl.float32) * (2.0**-32 * 6.283185307179586))
    return radius * cosine, radius * sine


@triton.jit
def _cosine_and_sine(angle):
    """For angles from 0 to 2π, up to rounding: Cephes' polynomials. The library's functions take any angle, at a cost."""
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = angle - quarter * 1.5703125 - quarter * 4.837512969970703125e-4 - quarter * 7.549789948768648e-8
    square = rest * rest
    cosine = ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2) * square * square
    cosine += 1.0 - 0.5 * square
    sine = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * rest + rest
    turns = quarter.to(tl.int32)
    across, up = tl.where(turns % 2 == 0, cosine, sine), tl.where(turns % 2 == 0, sine, cosine)
    return tl.where((turns == 1) | (turns == 2), -across, across), tl.where((turns == 2) | (turns == 3), -up, up)


@triton.jit
def _in_turn(one, two, three, four):
    """Four tensors [..., n] as [..., n, 2, 2], whose last three axes run through the values of a block in order."""
    return tl.join(tl.join(one, three), tl.join(two, four))


@triton.jit
def _write_normals(
    into, begin, rows: tl.constexpr, values: tl.constexpr, step, client, key_low, key_high, tile: tl.constexpr
):
    """The noise of a tensor [rows, values] whose first coordinate is `begin`, as [values, rows]."""
    for start in range(0, rows * values // 4, tile):
        one, two, three, four = _normals(begin // 4 + start + tl.arange(0, tile), step, client, key_low, key_high)
        place = start * 4 + tl.arange(0, 4 * tile)
        drawn = tl.reshape(_in_turn(one, two, three, four), [4 * tile])
        tl.store(into + place % values * rows + place // values, drawn, mask=place < rows * values)


# Pooling ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _place(window, inside, across: tl.constexpr):
    """The row and column of a position inside a window, in an image with `across` windows in a row."""
    return window // across * 2 + inside // 2, window % across * 2 + inside % 2


@triton.jit
def _pooled(products, windows: tl.constexpr, channels: tl.constexpr):
    """The largest of the products [windows · 4, channels] in each window, and its position there; the first of equals."""
    square = tl.permute(tl.reshape(products, [windows, 2, 2, channels]), [0, 3, 1, 2])
    left, right = tl.split(square)
    upper_left, lower_left = tl.split(left)
    upper_right, lower_right = tl.split(right)
    largest, chosen = upper_left, tl.zeros([windows, channels], dtype=tl.int32)
    largest, chosen = _larger(largest, chosen, upper_right, 1)
    largest, chosen = _larger(largest, chosen, lower_left, 2)
    return _larger(largest, chosen, lower_right, 3)


@triton.jit
def _larger(largest, chosen, value, place: tl.constexpr):
    better = (value > largest) | (value != value)
    return tl.where(better, value, largest), tl.where(better, place, chosen)


# The position chosen in a window is stored in the last two bits of the window's output, below its rounding error.


@triton.jit
def _marked(values, chosen):
    return ((values.to(tl.int32, bitcast=True) & -4) | chosen).to(tl.float32, bitcast=True)


@triton.jit
def _unmarked(values):
    """The values, in which zeros are zero again, and the chosen positions."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits & -4).to(tl.float32, bitcast=True), bits & 3


# The network -----------------------------------------------------------------------------------------------------------


@triton.jit
def _patches(
    image, down, right, real, values: tl.constexpr, channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr
):
    """The inputs of the first convolution at its positions [rows, values]."""
    value = tl.arange(0, values)
    channel, offset = value // 9, value % 9
    source = (down * width + right)[:, None] + (channel * height * width + offset // 3 * width + offset % 3)[None, :]
    return tl.load(image + source, mask=real[:, None] & (value < 9 * channels)[None, :], other=0.0)


@triton.jit
def _first_layer(
    image, weights, into,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, first: tl.constexpr,
    pooled_height: tl.constexpr, pooled_width: tl.constexpr, patch: tl.constexpr, tile: tl.constexpr,
    activation: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """An image's activations after the first pooling [windows, first]."""
    total: tl.constexpr = pooled_height * pooled_width
    value, channel = tl.arange(0, patch)[:, None], tl.arange(0, first)[None, :]
    kernel = tl.load(weights + value * first + channel, mask=value < 9 * channels, other=0.0)  # [patch, first]
    for start in range(0, total, tile):
        row = start * 4 + tl.arange(0, 4 * tile)
        down, right = _place(row // 4, row % 4, pooled_width)
        patches = _patches(image, down, right, row < 4 * total, patch, channels, height, width)
        largest, chosen = _pooled(tl.dot(patches, kernel, input_precision=precision), tile, first)
        window = start + tl.arange(0, tile)[:, None]
        tl.store(into + window * first + channel, _marked(_activated(largest, activation), chosen), mask=window < total)


@triton.jit
def _second_layer(
    values, weights, into,
    first: tl.constexpr, second: tl.constexpr, pooled_width: tl.constexpr,
    out_height: tl.constexpr, out_width: tl.constexpr, windows: tl.constexpr,
    activation: tl.constexpr, precision: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """An image's features after the second pooling, in the order [second, window]."""
    total: tl.constexpr = out_height * out_width
    row, ingoing, outgoing = tl.arange(0, 4 * windows), tl.arange(0, first), tl.arange(0, second)
    down, right = _place(row // 4, row % 4, out_width)
    source = ((down * pooled_width + right) * first)[:, None] + ingoing[None, :]
    kernel_source = ingoing[:, None] + outgoing[None, :] * first  # [first, second], from a tensor [second, first]
    products = tl.zeros([4 * windows, second], dtype=tl.float32)
    for offset in tl.range(9, num_stages=stages):
        step = offset // 3 * pooled_width + offset % 3
        seen = tl.load(values + source + step * first, mask=(row < 4 * total)[:, None], other=0.0)
        kernel = tl.load(weights + offset * first * second + kernel_source)
        products = tl.dot(seen, kernel, products, input_precision=precision)
    largest, chosen = _pooled(products, windows, second)
    window = tl.arange(0, windows)[:, None]
    place = window + outgoing[None, :] * total
    tl.store(into + place, _marked(_activated(largest, activation), chosen), mask=window < total)


@triton.jit
def _dense_layer(
    features, weights, targets, records, deltas_into, back_into, begin, count,
    length: tl.constexpr, classes: tl.constexpr, padded_classes: tl.constexpr, group: tl.constexpr, tile: tl.constexpr,
    precision: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """For the examples from `begin` on: the loss's derivative with respect to the outputs (softmax minus target) and to the
    features."""
    example, label, column = begin + tl.arange(0, group), tl.arange(0, padded_classes), tl.arange(0, tile)
    real = example < count
    outputs = tl.zeros([group, padded_classes], dtype=tl.float32)
    for start in tl.range(0, length, tile, num_stages=stages):
        feature = start + column
        seen = tl.load(
            features + example[:, None] * length + feature[None, :],
            mask=real[:, None] & (feature < length)[None, :], other=0.0,
        )  # fmt: skip
        kernel = tl.load(
            weights + feature[:, None] + label[None, :] * length,
            mask=(feature < length)[:, None] & (label < classes)[None, :], other=0.0,
        )  # fmt: skip
        outputs = tl.dot(seen, kernel, outputs, input_precision=precision)
    outputs = tl.where((label < classes)[None, :], outputs, float("-inf"))
    raised = tl.exp(outputs - tl.max(outputs, axis=1)[:, None])
    target = tl.load(targets + tl.load(records + example, mask=real, other=0), mask=real, other=0).to(tl.int32)
    deltas = raised / tl.sum(raised, axis=1)[:, None] - tl.where(label[None, :] == target[:, None], 1.0, 0.0)
    tl.store(deltas_into + example[:, None] * padded_classes + label[None, :], deltas, mask=real[:, None])
    deltas = tl.where(real[:, None], deltas, 0.0)
    for start in tl.range(0, length, tile, num_stages=stages):
        feature = start + column
        kernel = tl.load(
            weights + label[:, None] * length + feature[None, :],
            mask=(label < classes)[:, None] & (feature < length)[None, :], other=0.0,
        )  # fmt: skip
        back = tl.dot(deltas, kernel, input_precision=precision)
        tl.store(
            back_into + example[:, None] * length + feature[None, :], back,
            mask=real[:, None] & (feature < length)[None, :],
        )  # fmt: skip


@triton.jit
def _second_deltas(
    features, back, into,
    second: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr, windows: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    """One example's derivative with respect to the second convolution's products [2 · out height, 2 · out width, second]."""
    total: tl.constexpr = out_height * out_width
    window, outgoing = tl.arange(0, windows)[:, None], tl.arange(0, second)[None, :]
    own, real = window + outgoing * total, window < total
    feature, chosen = _unmarked(tl.load(features + own, mask=real, other=0.0))
    delta = tl.load(back + own, mask=real, other=0.0) * _slope(feature, activation)
    for inside in range(4):
        down, right = _place(window, inside, out_width)
        into_place = into + (down * (2 * out_width) + right) * second + outgoing
        tl.store(into_place, tl.where(chosen == inside, delta, 0.0), mask=real)


@triton.jit
def _first_gradient(
    image, values, deltas, weights,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, first: tl.constexpr, second: tl.constexpr,
    pooled_height: tl.constexpr, pooled_width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    patch: tl.constexpr, tile: tl.constexpr, activation: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One example's gradient of the first convolution [patch, first]."""
    total: tl.constexpr = pooled_height * pooled_width
    tiles: tl.constexpr = (total + tile - 1) // tile
    ingoing, outgoing = tl.arange(0, first), tl.arange(0, second)
    kernel_source = outgoing[:, None] * first + ingoing[None, :]
    backs = ()
    for _ in tl.static_range(tiles):
        backs = backs + (tl.zeros([tile, first], dtype=tl.float32),)
    following = tl.load(weights + kernel_source)
    for offset in range(9):
        kernel = following  # the next one is loaded while this one is used
        following = tl.load(weights + tl.minimum(offset + 1, 8) * first * second + kernel_source)
        added = ()
        for part in tl.static_range(tiles):
            window = part * tile + tl.arange(0, tile)
            y, x = window // pooled_width - offset // 3, window % pooled_width - offset % 3
            there = (y >= 0) & (y < 2 * out_height) & (x >= 0) & (x < 2 * out_width) & (window < total)
            place = ((y * (2 * out_width) + x) * second)[:, None] + outgoing[None, :]
            seen = tl.load(deltas + place, mask=there[:, None], other=0.0)
            added = added + (tl.dot(seen, kernel, backs[part], input_precision=precision),)
        backs = added
    gradient = tl.zeros([patch, first], dtype=tl.float32)
    for part in tl.static_range(tiles):
        window = part * tile + tl.arange(0, tile)
        own = window[:, None] * first + ingoing[None, :]
        value, chosen = _unmarked(tl.load(values + own, mask=(window < total)[:, None], other=0.0))
        back = backs[part] * _slope(value, activation)
        for inside in range(4):
            down, right = _place(window, inside, pooled_width)
            patches = _patches(image, down, right, window < total, patch, channels, height, width)
            spread = tl.where(chosen == inside, back, 0.0)
            gradient = tl.dot(tl.trans(patches), spread, gradient, input_precision=precision)
    return gradient


@triton.jit
def _second_gradient(
    values, deltas,
    first: tl.constexpr, second: tl.constexpr, pooled_width: tl.constexpr,
    out_height: tl.constexpr, out_width: tl.constexpr, windows: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One example's gradient of the second convolution: [second, first] for each position of its kernel."""
    across: tl.constexpr = 2 * out_width
    row, ingoing, outgoing = tl.arange(0, 4 * windows), tl.arange(0, first), tl.arange(0, second)
    real = (row < 4 * out_height * out_width)[:, None]
    delta = tl.trans(tl.load(deltas + row[:, None] * second + outgoing[None, :], mask=real, other=0.0))
    source = ((row // across * pooled_width + row % across) * first)[:, None] + ingoing[None, :]
    gradients = ()
    for offset in tl.static_range(9):
        step = offset // 3 * pooled_width + offset % 3
        seen = tl.load(values + source + step * first, mask=real, other=0.0)
        gradients = gradients + (tl.dot(delta, seen, input_precision=precision),)
    return gradients


# Clipping --------------------------------------------------------------------------------------------------------------


@triton.jit
def _is_finite(value):
    return (value - value) == 0


@triton.jit
def _factor(squared, bound):
    return bound / tl.maximum(tl.sqrt(squared), bound)


@triton.jit
def _clip_factors(
    first_gradient, second_gradient, features, outputs, bound,
    length: tl.constexpr, padded_classes: tl.constexpr, clipped: tl.constexpr, flat: tl.constexpr,
):  # fmt: skip
    """Whether an example's gradient is finite, and C / max(C, norm) for each layer: `clipping.clip_factors`."""
    column = tl.arange(0, triton.next_power_of_2(length))
    feature = tl.load(features + column, mask=column < length, other=0.0)
    output = tl.load(outputs + tl.arange(0, padded_classes))
    if clipped:
        squares = second_gradient[0] * second_gradient[0]
        for offset in tl.static_range(1, 9):
            squares += second_gradient[offset] * second_gradient[offset]
        second_squared = tl.sum(squares)
        first_squared = tl.sum(first_gradient * first_gradient)
        # An outer product's norm is the product of its factors' norms; in float64 no square overflows or underflows.
        feature_squared = tl.sum(feature.to(tl.float64) * feature.to(tl.float64))
        output_squared = tl.sum(output.to(tl.float64) * output.to(tl.float64))
        dense_squared = (feature_squared * output_squared).to(tl.float32)
        whole = first_squared + second_squared + dense_squared
        if flat:
            factor = _factor(whole, bound)
            return _is_finite(whole), factor, factor, factor
        usable = _is_finite(first_squared) & _is_finite(second_squared) & _is_finite(dense_squared)
        return usable, _factor(first_squared, bound), _factor(second_squared, bound), _factor(dense_squared, bound)
    # Zero times a value is zero only if the value is finite, and a sum of such products is zero only if all are.
    zeros = second_gradient[0] * 0.0
    for offset in tl.static_range(1, 9):
        zeros += second_gradient[offset] * 0.0
    whole = tl.sum(zeros) + tl.sum(first_gradient * 0.0) + tl.sum(feature * 0.0) + tl.sum(output * 0.0)
    return _is_finite(whole), 1.0, 1.0, 1.0


@triton.jit
def _clear(total, size: tl.constexpr, tile: tl.constexpr):
    for start in range(0, size, tile):
        place = start + tl.arange(0, tile)
        tl.store(total + place, tl.zeros([tile], dtype=tl.float32), mask=place < size)


@triton.jit
def _add(total, gradients, usable, factor, first: tl.constexpr, second: tl.constexpr):
    """Add a clipped gradient to the step's sum. Nothing else adds at the same time, so the order is fixed."""
    place = tl.arange(0, second)[:, None] * first + tl.arange(0, first)[None, :]
    for offset in tl.static_range(9):
        added = tl.where(usable, gradients[offset] * factor, 0.0)
        tl.atomic_add(total + offset * first * second + place, added, sem="relaxed", scope="cta")


@triton.jit
def _keep_output(outputs, features, usable, factor, length: tl.constexpr, padded_classes: tl.constexpr):
    """Clip an outer product in place: scale its left factor, or set both factors to zero if it is not usable."""
    label, column = tl.arange(0, padded_classes), tl.arange(0, triton.next_power_of_2(length))
    tl.store(outputs + label, tl.where(usable, tl.load(outputs + label) * factor, 0.0))
    if not usable:
        tl.store(features + column, tl.zeros_like(column).to(tl.float32), mask=column < length)


# Update ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _update_first(
    weights, total, noise, rate, deviation,
    channels: tl.constexpr, first: tl.constexpr, patch: tl.constexpr, noisy: tl.constexpr,
):  # fmt: skip
    value = tl.arange(0, patch)[:, None]
    place, real = value * first + tl.arange(0, first)[None, :], value < 9 * channels
    if noisy:
        total += deviation * tl.load(noise + place, mask=real, other=0.0)
    tl.store(weights + place, tl.load(weights + place, mask=real, other=0.0) - rate * total, mask=real)


@triton.jit
def _update_second(weights, total, noise, rate, deviation, size: tl.constexpr, tile: tl.constexpr, noisy: tl.constexpr):
    for start in range(0, size, tile):
        place = start + tl.arange(0, tile)
        real = place < size
        change = tl.load(total + place, mask=real, other=0.0)
        if noisy:
            change += deviation * tl.load(noise + place, mask=real, other=0.0)
        tl.store(weights + place, tl.load(weights + place, mask=real, other=0.0) - rate * change, mask=real)


@triton.jit
def _update_dense(
    weights, outputs, features, coordinates, rate, deviation, count, step, client, key_low, key_high,
    length: tl.constexpr, classes: tl.constexpr, padded_classes: tl.constexpr, group: tl.constexpr, tile: tl.constexpr,
    noisy: tl.constexpr,
):  # fmt: skip
    """Form the sum of outer products, draw its noise, whose first coordinate is `coordinates`, and update the weights."""
    label = tl.arange(0, padded_classes)[:, None]
    for start in range(0, length, tile):
        feature = start + tl.arange(0, tile)[None, :]
        place, real = weights + label * length + feature, (label < classes) & (feature < length)
        before = tl.load(place, mask=real, other=0.0)
        change = tl.zeros([padded_classes, tile], dtype=tl.float32)
        for begin in range(0, count, group):
            example = begin + tl.arange(0, group)
            left = tl.load(outputs + example[None, :] * padded_classes + label, mask=(example < count)[None, :], other=0.0)
            right = tl.load(
                features + example[:, None] * length + feature,
                mask=(example < count)[:, None] & (feature < length), other=0.0,
            )  # fmt: skip
            change = tl.dot(left, right, change, input_precision="ieee")  # rounded factors could exceed the clip bound
        if noisy:
            block = (coordinates + label * length + start) // 4 + tl.arange(0, tile // 4)[None, :]
            one, two, three, four = _normals(block, step, client, key_low, key_high)
            change += deviation * tl.reshape(_in_turn(one, two, three, four), [padded_classes, tile])
        tl.store(place, before - rate * change, mask=real)


# The program -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["clients", "steps", "slots", "key_low", "key_high"])
def train_cnn(
    weights,  # [clients, size] in the kernel's order: [patch value, first], [offset, second, first], [class, feature]
    inputs,  # [examples, channels, height, width]
    targets,  # [examples]
    records,  # [clients, steps, slots], filled slots first
    counts,  # [clients, steps]: the number of filled slots
    numbers,  # [clients]: the client numbers, which select the noise
    expected,  # [clients]: the divisor of a step's sum
    scratch,  # [programs, scratch size]
    clients, steps, slots, scratch_size, learning_rate, bound, deviation, key_low, key_high,
    channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    first: tl.constexpr, second: tl.constexpr, classes: tl.constexpr,
    activation: tl.constexpr, clipped: tl.constexpr, flat: tl.constexpr, noisy: tl.constexpr, precision: tl.constexpr,
    patch: tl.constexpr, windows: tl.constexpr, padded_classes: tl.constexpr,
    first_tile: tl.constexpr, back_tile: tl.constexpr, dense_tile: tl.constexpr, group: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Train one client after the other in every program, from the given weights to those after the last step."""
    pooled_height: tl.constexpr = (height - 2) // 2
    pooled_width: tl.constexpr = (width - 2) // 2
    out_height: tl.constexpr = (pooled_height - 2) // 2
    out_width: tl.constexpr = (pooled_width - 2) // 2
    pooled: tl.constexpr = pooled_height * pooled_width * first
    length: tl.constexpr = out_height * out_width * second
    first_size: tl.constexpr = 9 * channels * first
    second_size: tl.constexpr = 9 * first * second

    total = scratch + tl.program_id(0).to(tl.int64) * scratch_size  # a step's sum for the second kernel
    deltas = total + second_size  # of one example [2 · out height, 2 · out width, second]
    features = deltas + 4 * length  # [slots, length]
    back = features + slots * length  # [slots, length]
    outputs = back + slots * length  # [slots, padded classes]: deltas, later clipped
    values = outputs + slots * padded_classes  # [slots, windows, first]
    noise = values  # for both convolutions, in the order of their weights, once the activations are no longer needed

    for client in tl.range(tl.program_id(0), clients, tl.num_programs(0), disable_licm=True):
        first_weights = weights + tl.cast(client, tl.int64) * (first_size + second_size + classes * length)
        second_weights = first_weights + first_size
        dense_weights = second_weights + second_size
        number = tl.load(numbers + client)
        rate = learning_rate / tl.load(expected + client).to(tl.float32)

        for step in tl.range(steps, disable_licm=True):
            drawn = records + (tl.cast(client, tl.int64) * steps + step) * slots
            count = tl.load(counts + client * steps + step).to(tl.int32)

            # Forward, then backward through the dense layer
            for example in tl.range(count, disable_licm=True):
                image = inputs + tl.load(drawn + example).to(tl.int64) * (channels * height * width)
                _first_layer(
                    image, first_weights, values + example * pooled,
                    channels, height, width, first, pooled_height, pooled_width, patch, first_tile, activation, precision,
                )  # fmt: skip
            tl.debug_barrier()
            for example in tl.range(count, disable_licm=True):
                _second_layer(
                    values + example * pooled, second_weights, features + example * length,
                    first, second, pooled_width, out_height, out_width, windows, activation, precision, stages,
                )  # fmt: skip
            tl.debug_barrier()
            for begin in range(0, count, group):
                _dense_layer(
                    features, dense_weights, targets, drawn, outputs, back, begin, count,
                    length, classes, padded_classes, group, dense_tile, precision, stages,
                )  # fmt: skip
            tl.debug_barrier()

            # Backward through the convolutions, example by example, clipping each gradient
            first_total = tl.zeros([patch, first], dtype=tl.float32)
            _clear(total, second_size, 1024)
            for example in tl.range(count, disable_licm=True):
                _second_deltas(
                    features + example * length, back + example * length, deltas,
                    second, out_height, out_width, windows, activation,
                )  # fmt: skip
                tl.debug_barrier()
                image = inputs + tl.load(drawn + example).to(tl.int64) * (channels * height * width)
                first_gradient = _first_gradient(
                    image, values + example * pooled, deltas, second_weights,
                    channels, height, width, first, second, pooled_height, pooled_width, out_height, out_width,
                    patch, back_tile, activation, precision,
                )  # fmt: skip
                second_gradient = _second_gradient(
                    values + example * pooled, deltas,
                    first, second, pooled_width, out_height, out_width, windows, precision,
                )  # fmt: skip
                usable, first_factor, second_factor, dense_factor = _clip_factors(
                    first_gradient, second_gradient, features + example * length, outputs + example * padded_classes,
                    bound, length, padded_classes, clipped, flat,
                )  # fmt: skip
                first_total += tl.where(usable, first_gradient * first_factor, 0.0)
                _add(total, second_gradient, usable, second_factor, first, second)
                tl.debug_barrier()
                _keep_output(
                    outputs + example * padded_classes, features + example * length, usable, dense_factor,
                    length, padded_classes,
                )  # fmt: skip

            # W ← W − η (sum + noise) / B
            if noisy:
                _write_normals(noise, 0, first, 9 * channels, step, number, key_low, key_high, 128)
                _write_normals(noise + first_size, first_size, first * second, 9, step, number, key_low, key_high, 512)
            tl.debug_barrier()
            _update_first(first_weights, first_total, noise, rate, deviation, channels, first, patch, noisy)
            _update_second(second_weights, total, noise + first_size, rate, deviation, second_size, 2048, noisy)
            _update_dense(
                dense_weights, outputs, features, first_size + second_size, rate, deviation, count,
                step, number, key_low, key_high,
                length, classes, padded_classes, group, dense_tile, noisy,
            )  # fmt: skip
            tl.debug_barrier()
