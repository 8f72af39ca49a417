"""Whether compressing KV pages would pay: serves prompts, and compresses the pages that the server wrote with zstd and lz4 (their commands' own
benchmarks, one core, each page apart).

    kv_compression.py --target DIR [--threads N] PLAN ...

Prompts are this repository's documentation. `apart`: the first bytes of all elements, then the second bytes, and so on, which compresses
better where exponents are alike. A page that is read compressed takes 1 / (ratio * disk) + 1 / decompression seconds per byte, and
1 / disk as it is: the last column is the rate of the disk below which compressing would pay, if decompressing took no core from anything else."""

import argparse
import glob
import os
import re
import struct
import subprocess
import tempfile
import types

import serving
from workshop import OUT, ROOT

HEADER = 4096
# magic, fingerprint, key and parent of a record come before the payload's bytes (runtime/kv/src/page.rs).
PAYLOAD_BYTES = 104
PROMPTS = 8
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def texts():
    paths = sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))[:PROMPTS]
    for path in paths:
        with open(path, encoding="utf-8") as text:
            yield text.read()


def pages(shop, plan):
    """The payloads of the pages that a server writes for the texts."""
    with tempfile.TemporaryDirectory(dir=OUT) as kv:
        server = serving.Server(shop, plan, "--kv-dir", kv, "--kv-ram", "1G", "--kv-disk", "2G", "--max-sequences", 1)
        try:
            written = 0
            for text in texts():
                tokens = server.post("/tokenize", {"content": text})["tokens"]
                length = min(len(tokens), server.context() - 8)
                server.complete(tokens[:length])
                written += (length - 2) // serving.PAGE
            server.wait_for_pages(written)
        finally:
            server.kill()
        file, = glob.glob(os.path.join(kv, "*", "pages.kv"))
        with open(file, "rb") as records:
            data = records.read()
    payload, = struct.unpack_from("<Q", data, PAYLOAD_BYTES)
    record = HEADER + -(-payload // HEADER) * HEADER
    return payload, [data[at + HEADER:at + HEADER + payload] for at in range(0, len(data) - record + 1, record)]


def apart(page, width):
    return b"".join(page[byte::width] for byte in range(width))


def benchmark(command, level, path, block):
    """Ratio, and bytes per second of compressing and of decompressing."""
    run = subprocess.run([command, f"-b{level}", "-i1", f"-B{block}", path], capture_output=True, text=True, check=True)
    # They write their last line again and again.
    found = re.findall(r"\(x?([0-9.]+)\)[, ]+([0-9.]+) MB/s[, ]+([0-9.]+) MB/s", run.stdout + run.stderr)
    ratio, compress, decompress = map(float, found[-1])
    return ratio, compress * 1e6, decompress * 1e6


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", default="target/release", help="where the binaries are")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("plans", nargs="+", metavar="PLAN")
    asked = arguments.parse_args()
    os.makedirs(OUT, exist_ok=True)
    shop = types.SimpleNamespace(threads=asked.threads, binary=lambda name: os.path.join(ROOT, asked.target, name))
    print("| plan | pages | by | ratio | compress, decompress | pays if the disk reads less than |\n|---|---|---|---|---|---|")
    for plan in asked.plans:
        payload, stored = pages(shop, plan)
        with open(os.path.join(plan, "plan.yaml"), encoding="utf-8") as text:
            width = WIDTHS[re.search(r"^- {past: .* dtype: (\w+)", text.read(), re.MULTILINE)[1]]
        for arranged, change in (("", lambda page: page), (", apart", lambda page: apart(page, width))):
            with tempfile.NamedTemporaryFile() as file:
                for page in stored:
                    file.write(change(page))
                file.flush()
                for command, level in (("lz4", 1), ("zstd", 1), ("zstd", 3)):
                    ratio, compress, decompress = benchmark(command, level, file.name, payload)
                    most = decompress * (1 - 1 / ratio)
                    pays = f"{most / 1e9:.2f} GB/s" if ratio > 1 else "never"
                    print(f"| {os.path.basename(plan)} | {len(stored)} of {payload / 2**20:.2f} MiB | {command} -{level}{arranged} | {ratio:.3f} "
                          f"| {compress / 1e6:.0f}, {decompress / 1e6:.0f} MB/s | {pays} |", flush=True)


if __name__ == "__main__":
    main()
