#!/usr/bin/env python3
"""Removes the code for other GPUs than Hopper from a CUDA library, so that it packs small.

    for_hopper.py <LIBRARY >SMALLER

In the ELF section .nv_fatbin each fat binary keeps its machine code for sm_90 alone. Zeros fill the
bytes that are left over, so no other byte of the file moves.
"""

import struct
import sys

MAGIC = 0xBA55ED50
HEADER = "<IHHQ"  # of a fat binary: magic, version, size of the header, bytes of the images behind it
IMAGE = "<HHIQ"   # of an image: kind, version, size of the header, bytes behind it; its architecture from byte 28 on
MACHINE_CODE, HOPPER = 2, 90


def section(data, wanted):
    """The offsets of the begin and the end of the section named `wanted` in an ELF file."""
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for header in headers:
        at = headers[names][4] + header[0]
        if data[at:data.index(0, at)] == wanted:
            return header[4], header[4] + header[5]
    raise SystemExit(f"for_hopper.py: standard input: no section {wanted.decode()}")


def hopper_images(data, at, end):
    """The images with machine code for sm_90 in data[at:end], one after the other, with their
    headers."""
    found = []
    while at < end:
        kind, _, header, size = struct.unpack_from(IMAGE, data, at)
        architecture, = struct.unpack_from("<I", data, at + 28)
        if (kind, architecture) == (MACHINE_CODE, HOPPER):
            found.append(bytes(data[at:at + header + size]))
        at += header + size
    return b"".join(found)


def main():
    data = bytearray(sys.stdin.buffer.read())
    at, end = section(data, b".nv_fatbin")
    kept = 0
    while at < end:
        magic, version, header, size = struct.unpack_from(HEADER, data, at)
        if magic != MAGIC:
            at += 8  # fat binaries begin at multiples of 8
            continue
        images = hopper_images(data, at + header, at + header + size)
        struct.pack_into(HEADER, data, at, magic, version, header, len(images))
        data[at + header:at + header + size] = images + bytes(size - len(images))
        at, kept = at + header + size, kept + len(images)
    if kept == 0:
        raise SystemExit("for_hopper.py: standard input: no machine code for sm_90")
    sys.stdout.buffer.write(data)


if __name__ == "__main__":
    main()
