"""Reads Jane Austen's six novels from the Debian package r-cran-janeaustenr, without R.

The package keeps each novel as a character vector in a lazy-load database: Rdata.rdx is an index (a
compressed R object: name -> offset, length), Rdata.rdb the values (per value: a 4-byte big-endian size,
then zlib). Both hold R's XDR serialisation, of which the few types needed are parsed here.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb package
    python3 text.py package --out austen.npz --excerpt ../model/heldout.txt

writes train (five novels), heldout (the whole sixth) as uint8, and the excerpt: the first EXCERPT_BYTES
of the sixth. Lines of a paragraph are joined by spaces and runs of spaces become one, since printed line
breaks carry no language and the six were typed by different hands; paragraphs end in a blank line. UTF-8.
"""

import argparse
import pathlib
import struct
import zlib

import numpy as np

EXCERPT_BYTES = 245760  # 480 segments of 512; the rest of the novel serves as validation text


class RReader:
    """R serialisation, format "X" (XDR), versions 2 and 3; the types that a character vector needs."""

    def __init__(self, data):
        self.data, self.pos, self.refs = data, 0, []
        if self.take(2) != b"X\n":
            raise ValueError("not an XDR serialisation")
        version = self.int()
        self.int(), self.int()  # the R that wrote it, the oldest R that can read it
        if version == 3:
            self.take(self.int())  # native encoding

    def take(self, n):
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def int(self):
        return struct.unpack(">i", self.take(4))[0]

    def item(self):
        flags = self.int()
        kind, has_attributes, levels = flags & 0xFF, flags & 0x200, flags >> 12
        if kind == 0xFE:  # NULL
            return None
        if kind == 0xFF:  # a symbol seen before
            return self.refs[(flags >> 8 or self.int()) - 1]
        if kind == 1:  # symbol
            self.refs.append(self.item())
            return self.refs[-1]
        if kind == 2:  # pairlist, as attributes are
            out = {}
            while kind == 2:
                if flags & 0x200:
                    self.item()
                tag = self.item() if flags & 0x400 else None
                out[tag] = self.item()
                flags = self.int()
                kind = flags & 0xFF
            return out
        if kind == 9:  # one string; levels say its encoding
            n = self.int()
            return None if n == -1 else self.take(n).decode("latin-1" if levels & 4 else "utf-8")
        if kind in (10, 13):  # logical, integer
            n = self.int()
            value = list(struct.unpack(f">{n}i", self.take(4 * n)))
        elif kind == 14:  # double
            n = self.int()
            value = list(struct.unpack(f">{n}d", self.take(8 * n)))
        elif kind in (16, 19):  # character vector, list
            value = [self.item() for _ in range(self.int())]
        else:
            raise ValueError(f"R type {kind} at byte {self.pos} is not handled")
        if has_attributes:
            attributes = self.item()
            if kind == 19 and attributes and "names" in attributes:
                return dict(zip(attributes["names"], value))
        return value


def read_novels(package):
    """{name: list of lines} from an unpacked package."""
    found = sorted(pathlib.Path(package).rglob("janeaustenr/data/Rdata.rdx"))
    if not found:
        raise SystemExit(f"no janeaustenr/data/Rdata.rdx under {package}")
    index = RReader(zlib.decompress(found[0].read_bytes(), 47)).item()["variables"]
    values = found[0].with_suffix(".rdb").read_bytes()
    novels = {}
    for name, (offset, length) in index.items():
        record = values[offset : offset + length]
        raw = zlib.decompress(record[4:])
        if len(raw) != struct.unpack(">I", record[:4])[0]:
            raise ValueError(f"{name}: size differs from the record's")
        novels[name] = RReader(raw).item()
    return novels


def reflow(lines):
    """Paragraphs on one line each, a blank line after each, as UTF-8 bytes."""
    paragraphs, current = [], []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line.strip())
        elif current:
            paragraphs.append(" ".join(" ".join(current).split()))
            current = []
    return ("\n\n".join(paragraphs) + "\n\n").encode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="folder of the unpacked Debian package")
    parser.add_argument("--held-out", default="persuasion", help="the novel that is not trained on")
    parser.add_argument("--out", required=True, help="the .npz for train.py")
    parser.add_argument("--excerpt", help="where to write the excerpt of the held-out novel")
    args = parser.parse_args()

    novels = {name: reflow(lines) for name, lines in read_novels(args.package).items()}
    for name, text in novels.items():
        print(f"{name:18}{len(text):9} bytes{'   held out' if name == args.held_out else ''}")
    heldout = novels.pop(args.held_out)
    train = b"".join(novels.values())
    np.savez_compressed(args.out, train=np.frombuffer(train, np.uint8), heldout=np.frombuffer(heldout, np.uint8))
    if args.excerpt:
        pathlib.Path(args.excerpt).write_bytes(heldout[:EXCERPT_BYTES])
    print(f"train {len(train)} bytes, held out {len(heldout)} bytes, excerpt its first {EXCERPT_BYTES}")


if __name__ == "__main__":
    main()
