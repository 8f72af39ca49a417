"""Makes ONNX Runtime's CUDA library compress to a fifth, to carry it to a machine without a network.

    shrink_cuda.py LIBRARY OUT --arch 90 [--shared-only] [--without REGEX]

Overwrites with zeros the machine code for GPUs of other compute capabilities; addresses and sizes stay. `--shared-only` also drops
code that exists for one capability alone, `--without` that of which all kernels' mangled names match (needs the Python package
zstandard). A kernel that was dropped fails when it is launched. 1.31.1 with `--arch 90 --without
'float_e2m1|Fp4|deep_gemm|bfloat16|BF16'`, which leaves what float32, float16 and int4 models use: 284 MB, 35 MB after `xz -9`.
"""

import argparse
import re
import struct

# A container ("fat binary") of one source file: this number, version, header size, and bytes of the entries after the header.
CONTAINER = struct.Struct("<IHHQ")
MAGIC = 0xBA55ED50
# An entry: kind (2: machine code), version, header size, bytes; further on the compressed bytes and the compute capability times 10.
ENTRY = struct.Struct("<HHIQ")
MACHINE_CODE, COMPRESSED_AT, ARCH_AT = 2, 16, 28
ZSTD = bytes.fromhex("28b52ffd")


def containers(data):
    """The entries of each container, as (kind, arch, offset, bytes, compressed bytes)."""
    at = data.find(struct.pack("<I", MAGIC))
    while at >= 0:
        _, _, header, length = CONTAINER.unpack_from(data, at)
        entry, end = at + header, at + header + length
        entries = []
        while entry < end:
            kind, _, skip, size = ENTRY.unpack_from(data, entry)
            (compressed,), (arch,) = struct.unpack_from("<I", data, entry + COMPRESSED_AT), struct.unpack_from("<I", data, entry + ARCH_AT)
            entries.append((kind, arch, entry + skip, size, compressed))
            entry += skip + size
        yield entries
        at = data.find(struct.pack("<I", MAGIC), end)


def kernels(data, offset, size, compressed):
    """Mangled names of the kernels in an entry of machine code."""
    code = bytes(data[offset:offset + (compressed or size)])
    if code.startswith(ZSTD):
        import zstandard
        code = zstandard.ZstdDecompressor().decompressobj().decompress(code)
    return [name.decode() for name in re.findall(rb"\.text\.(\w+)", code)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("out")
    parser.add_argument("--arch", type=int, required=True, help="compute capability to keep, times 10: 90 for an H100 or H200")
    parser.add_argument("--shared-only", action="store_true")
    parser.add_argument("--without", metavar="REGEX")
    asked = parser.parse_args()
    with open(asked.library, "rb") as file:
        data = bytearray(file.read())
    kept = 0
    for entries in list(containers(data)):
        keep = not (asked.shared_only and len({arch for _, arch, *_ in entries}) == 1)
        for kind, arch, offset, size, compressed in entries:
            wanted = keep and kind == MACHINE_CODE and arch == asked.arch
            if wanted and asked.without:
                names = kernels(data, offset, size, compressed)
                wanted = not names or not all(re.search(asked.without, name) for name in names)
            if wanted:
                kept += size
            else:
                data[offset:offset + size] = bytes(size)
    if not kept:
        raise SystemExit(f"shrink_cuda: {asked.library} has no machine code for compute capability {asked.arch / 10}")
    with open(asked.out, "wb") as file:
        file.write(data)
    print(f"{kept / 1e6:.1f} MB of machine code kept")


main()
