"""Find the records of an event file, which are TFRecords, and check each against its two checksums.

A record is the length of its data, the checksum of the length, the data, and their checksum. Checksums are CRC-32C of
Castagnoli, masked because a checksum of data that end with their own checksum would be a constant.
"""

import struct
from array import array

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]

_LENGTH = struct.Struct("<Q")
CHECKSUM_BYTES = 4
HEADER_BYTES = _LENGTH.size + CHECKSUM_BYTES
"""Bytes before the data of a record."""
MAX_CHECKED_BYTES = 2**16
"""Of longer data, such as images, only the length is checked: a checksum takes a step of numpy per byte of the longest
record, and a scalar has fewer than a hundred."""
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with the lowest bit first."""
_MASK_DELTA = 0xA282EAD8


def find_records(content: bytes) -> list[tuple[int, int]]:
    """Find start and end of the data of each record, in bytes, up to the first record that is cut or damaged."""
    starts, lengths, position = array("q"), array("q"), 0
    while position + HEADER_BYTES <= len(content):
        (length,) = _LENGTH.unpack_from(content, position)
        start = position + HEADER_BYTES
        position = start + length + CHECKSUM_BYTES
        if position > len(content):
            break
        starts.append(start)
        lengths.append(length)
    codes, data_starts, data_lengths = np.frombuffer(content, np.uint8), np.array(starts), np.array(lengths)
    is_intact = _match_checksums(codes, data_starts - HEADER_BYTES, np.full_like(data_starts, _LENGTH.size))
    checked = np.flatnonzero(data_lengths <= MAX_CHECKED_BYTES)
    is_intact[checked] &= _match_checksums(codes, data_starts[checked], data_lengths[checked])
    count = len(is_intact) if is_intact.all() else int(is_intact.argmin())
    ends = data_starts + data_lengths
    return list(zip(data_starts[:count].tolist(), ends[:count].tolist(), strict=True))


def _match_checksums(codes: Bytes, starts: Positions, lengths: Positions) -> npt.NDArray[np.bool_]:
    """Compare the checksum of each piece of `codes` with the four bytes that follow it.

    All pieces advance by a byte at a time, the longest first, since a loop over bytes takes seconds in Python.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_starts, falling_lengths = starts[order], lengths[order]
    table, checksums = _make_table(), np.full(len(starts), 0xFFFFFFFF, np.uint32)
    for offset in range(falling_lengths.max(initial=0)):
        count = int(np.searchsorted(-falling_lengths, -offset))  # pieces that are longer than `offset`
        states = checksums[:count]
        checksums[:count] = table[(states ^ codes[sorted_starts[:count] + offset]) & 0xFF] ^ (states >> 8)
    checksums = ~checksums
    masked = ((checksums >> 15) | (checksums << 17)) + np.uint32(_MASK_DELTA)
    stored_bytes = codes[(sorted_starts + falling_lengths)[:, None] + np.arange(CHECKSUM_BYTES)]
    is_equal = np.empty(len(starts), np.bool_)
    is_equal[order] = masked == stored_bytes.view("<u4")[:, 0]
    return is_equal


def _make_table() -> Checksums:
    """Make the table of what each byte does to a checksum."""
    values: Checksums = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_POLYNOMIAL), values >> 1)
    return values
