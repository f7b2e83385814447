"""Files that somebody made to do harm: each by name, with who must refuse it.

A manifest protects from damage, not from malice: whoever makes a file can make its manifest. So
most of these have one that is right, and what is behind it is reached.
"""

from __future__ import annotations

import base64
import json
import marshal
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import xxhash
from record_files import framed, masked
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage.checksum import extended
from keras_safe_ckpt.storage.checksum import masked as masked_number
from keras_safe_ckpt.storage.manifest import Manifest

#: Beside the folder with the hostile files: one that is never to be made, one never to be read.
CANARY, SECRET = "canary", "secret"
SECRET_BYTES = b"this is nobody's business " * 40


class Hostile(NamedTuple):
    """``make`` gets the path that the file is to have; all of ``refused_by`` must refuse it.

    ``crashes`` are those that let TensorFlow read, and TensorFlow does not survive it: documented.
    """

    make: Callable[[Path], None]
    name: str
    refused_by: tuple[str, ...]
    crashes: tuple[str, ...] = ()


# Checkpoints of Keras.


def signed_manifest(content: bytes, **fields: Any) -> dict[str, Any]:
    """What describes these bytes, as one piece, and says ``fields`` besides."""
    manifest = Manifest(size=len(content), structure=xxhash.xxh3_128(content).hexdigest())
    body = {**json.loads(manifest.to_json())["manifest"], **fields}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return {"digest": xxhash.xxh3_128(text).hexdigest(), "manifest": body}


def signed_weights(content: bytes, **fields: Any) -> bytes:
    return with_footer(content, json.dumps(signed_manifest(content, **fields)).encode())


def with_footer(content: bytes, manifest: bytes) -> bytes:
    return content + manifest + len(manifest).to_bytes(8, "little") + b"keras_safe_ckpt1"


def signed_archive(
    path: Path, config: str, content: bytes, assets: dict[str, bytes] | None = None, **fields: Any
) -> None:
    members = {"config.json": config.encode(), **(assets or {})}
    digests = {name: xxhash.xxh3_128(data).hexdigest() for name, data in members.items()}
    digests["model.weights.h5"] = f"crc32:{zlib.crc32(content):08x}"
    manifest = signed_manifest(content, **{"members": digests, **fields})
    members["model.weights.h5"] = content
    members["metadata.json"] = json.dumps(
        {"keras_version": "3.15.1", "keras_safe_ckpt": manifest}
    ).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def hdf5_of(make: Callable[[h5py.File], None], folder: Path) -> bytes:
    path = folder / ".made.h5"
    with h5py.File(path, "w") as file:
        make(file)
    content = path.read_bytes()
    path.unlink()
    return content


def sequential(*layers: dict[str, Any]) -> str:
    first = {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": {"batch_shape": [None, 2], "dtype": "float32", "name": "in"},
        "registered_name": None,
    }
    return json.dumps(
        {
            "module": "keras",
            "class_name": "Sequential",
            "config": {"name": "s", "layers": [first, *layers]},
            "registered_name": None,
            "build_config": {"input_shape": [None, 2]},
        }
    )


def layer(class_name: str, module: str = "keras.layers", **config: Any) -> dict[str, Any]:
    return {
        "module": module,
        "class_name": class_name,
        "config": {"name": "evil", "trainable": True, "dtype": "float32", **config},
        "registered_name": None,
    }


def lambda_code(canary: Path) -> dict[str, Any]:
    code = compile(f"lambda x: open({str(canary)!r}, 'w') and x", "evil", "eval").co_consts[0]
    return {
        "class_name": "__lambda__",
        "config": {
            "code": base64.b64encode(marshal.dumps(code)).decode(),
            "defaults": None,
            "closure": None,
        },
    }


def _configured(*layers: Callable[[Path], dict[str, Any]]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        made = [one(path.parent.parent) for one in layers]
        signed_archive(path, sequential(*made), hdf5_of(lambda file: None, path.parent))

    return make


def _structured(make: Callable[[h5py.File, Path], None], suffix: str) -> Callable[[Path], None]:
    """A model of one layer whose weights are something else than weights."""

    def build(path: Path) -> None:
        def fill(file: h5py.File) -> None:
            make(file.create_group("layers/dense/vars"), path.parent.parent)

        content = hdf5_of(fill, path.parent)
        if suffix == "keras":
            dense = layer("Dense", units=2, name="dense")
            dense["build_config"] = {"input_shape": [None, 2]}
            signed_archive(path, sequential(dense), content)
        else:
            path.write_bytes(signed_weights(content))

    return build


def _external_link(group: h5py.Group, outside: Path) -> None:
    group["0"] = h5py.ExternalLink(str(outside / SECRET), "/x")


def _soft_link(group: h5py.Group, outside: Path) -> None:
    group["0"] = h5py.SoftLink("/layers")


def _external_storage(group: h5py.Group, outside: Path) -> None:
    group.create_dataset("0", (2, 2), "f4", external=[(str(outside / SECRET), 0, 16)])


def _virtual(group: h5py.Group, outside: Path) -> None:
    layout = h5py.VirtualLayout((2, 2), "f4")
    layout[:] = h5py.VirtualSource(str(outside / SECRET), "x", (2, 2))
    group.create_virtual_dataset("0", layout)


def _shape_bomb(group: h5py.Group, outside: Path) -> None:
    group.create_dataset("0", (1 << 36,), "f4", chunks=(1 << 20,))


def _legacy(config: Callable[[Path], str]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        def fill(file: h5py.File) -> None:
            file.attrs["keras_version"] = "3.15.1"
            file.attrs["backend"] = "tensorflow"
            file.attrs["model_config"] = config(path.parent.parent)
            file.create_group("model_weights").attrs["layer_names"] = np.array([], "S1")

        path.write_bytes(signed_weights(hdf5_of(fill, path.parent)))

    return make


def _manifest_of(**fields: Any) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(signed_weights(b"x" * 1000, **fields)) and None


def _raw_manifest(manifest: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(with_footer(b"x" * 1000, manifest())) and None


def _array(**fields: Any) -> dict[str, Any]:
    record = {"shape": [3], "dtype": "|u1", "digest": "", "offset": 0, **fields}
    return {"arrays": {"a": record}}


def _many_values(path: Path) -> None:
    """Thirty megabytes of JSON, most of a gigabyte as Python's objects, and packed quite small."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", b"")
        archive.writestr("metadata.json", b"[" + b"[],{}," * 5_000_000 + b"0]")


def _stored_values(path: Path) -> None:
    path.write_bytes(with_footer(b"", b"[" + b"[],{}," * 5_000_000 + b"0]"))


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("metadata.json", "{}")
        with archive.open("model.weights.h5", "w", force_zip64=True) as member:
            for _ in range(500):
                member.write(bytes(1 << 20))


def _sparse_directory(path: Path) -> None:
    """Four gigabytes of which nothing is on the disk, and all of it is said to be the list."""
    size = 4 << 30
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1, 1, size, 0))
        file.write(struct.pack("<IIQI", 0x07064B50, 0, size, 1))
        file.write(struct.pack("<IHHHHIIH", 0x06054B50, *[0xFFFF] * 4, *[0xFFFFFFFF] * 2, 0))


def _overlapping(path: Path) -> None:
    """Hundreds of members that are all the same megabyte, and the headers of the others."""
    members = [f"assets/{number:04d}" for number in range(300)]
    body, places = b"", []
    for name in members:
        places.append(len(body))
        body += struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0)
        body += name.encode()
    body += bytes(1 << 20)
    digests, crcs = {}, {}
    for name, place in zip(members, places, strict=True):
        data = body[place + 30 + len(name) :]
        digests[name], crcs[name] = xxhash.xxh3_128(data).hexdigest(), zlib.crc32(data)
    honest = path.with_suffix(".part")
    weights = hdf5_of(lambda file: None, path.parent)
    signed_archive(honest, "{}", weights, members={
        "config.json": xxhash.xxh3_128(b"{}").hexdigest(),
        "model.weights.h5": f"crc32:{zlib.crc32(weights):08x}",
        **digests,
    })  # fmt: skip
    data = honest.read_bytes()
    honest.unlink()
    start, size = struct.unpack_from("<I", data, len(data) - 6)[0], 0
    listed = bytearray(data[start:-22])
    offset = start
    for name, place in zip(members, places, strict=True):
        length = len(body) - place - 30 - len(name)
        listed += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, crcs[name], length, length,
            len(name), 0, 0, 0, 0, 0, offset + place,
        ) + name.encode()  # fmt: skip
    size = len(listed)
    count = 3 + len(members)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, start + len(body), 0)
    path.write_bytes(data[:start] + body + listed + end)


def _traversal(path: Path) -> None:
    signed_archive(
        path,
        sequential(),
        hdf5_of(lambda file: None, path.parent),
        assets={f"../../{CANARY}": b"x", f"{path.parent.parent / CANARY}": b"x"},
    )


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _terminal(path: Path) -> None:
    """Whole, with names that would write on the screen of whoever lists it."""
    store = CheckpointStore(path.parent)
    snapshot = make_snapshot(size=3)
    store.publish(
        snapshot, step=1, name=path.name, metrics={"\x1b[2Jloss": 1.0},
        extra_arrays={"\x1b]0;owned\x07": np.zeros(2)},
    )  # fmt: skip


_READ = ("verify", "look", "show")
_LOADED = ("load_model",)

CHECKPOINTS: dict[str, Hostile] = {
    "lambda": Hostile(
        _configured(lambda out: layer("Lambda", function=lambda_code(out / CANARY))),
        "a.keras",
        _LOADED,
    ),
    "nested lambda": Hostile(
        _configured(
            lambda out: layer(
                "TimeDistributed", layer=layer("Lambda", function=lambda_code(out / CANARY))
            )
        ),
        "a.keras",
        _LOADED,
    ),
    "os.system": Hostile(
        _configured(lambda out: layer("system", "os", command=f"touch {out / CANARY}")),
        "a.keras",
        _LOADED,
    ),
    "function of os": Hostile(
        _configured(
            lambda out: layer(
                "Dense",
                units=1,
                activation={
                    "module": "os",
                    "class_name": "function",
                    "config": "system",
                    "registered_name": "function",
                },
            )
        ),
        "a.keras",
        _LOADED,
    ),
    "foreign class": Hostile(
        _configured(lambda out: layer("Popen", "subprocess", args=["touch", str(out / CANARY)])),
        "a.keras",
        _LOADED,
    ),
    "saved model": Hostile(
        _configured(lambda out: layer("TFSMLayer", filepath=str(out))), "a.keras", _LOADED
    ),
    "pickled module": Hostile(
        _configured(
            lambda out: layer(
                "TorchModuleWrapper",
                module={
                    "class_name": "__bytes__",
                    "config": base64.b64encode(b"cos\nsystem\n(S'true'\ntR.").decode(),
                },
            )
        ),
        "a.keras",
        _LOADED,
    ),
    "vocabulary of elsewhere": Hostile(
        _configured(lambda out: layer("StringLookup", vocabulary=str(out / SECRET))),
        "a.keras",
        _LOADED,
    ),
    "deep configuration": Hostile(
        lambda path: signed_archive(
            path, "[" * 5000 + "]" * 5000, hdf5_of(lambda file: None, path.parent)
        ),
        "a.keras",
        _LOADED,
    ),
    "no configuration": Hostile(
        lambda path: signed_archive(path, "7", hdf5_of(lambda file: None, path.parent)),
        "a.keras",
        _LOADED,
    ),
    "lambda, Keras 2": Hostile(
        _legacy(lambda out: sequential(layer("Lambda", function=lambda_code(out / CANARY)))),
        "a.h5",
        _LOADED,
    ),
    "configuration of Keras 2 that is none": Hostile(_legacy(lambda out: "]"), "a.h5", _LOADED),
    "no HDF5 at all, Keras 2": Hostile(
        lambda path: path.write_bytes(signed_weights(b"x" * 1000)) and None, "a.h5", _LOADED
    ),
    **{
        f"{make.__name__.strip('_')}, {suffix}": Hostile(
            _structured(make, suffix),
            f"a.{suffix}",
            _LOADED if suffix == "keras" else ("load_weights",),
        )
        for make in (_external_link, _soft_link, _external_storage, _virtual, _shape_bomb)
        for suffix in ("keras", "weights.h5")
    },
    "terminal": Hostile(_terminal, "a.weights.h5", ()),
    "zip bomb": Hostile(_zip_bomb, "a.keras", (*_READ, *_LOADED)),
    "sparse directory": Hostile(_sparse_directory, "a.keras", (*_READ, *_LOADED)),
    "overlapping members": Hostile(_overlapping, "a.keras", ("verify", *_LOADED)),
    "traversal": Hostile(_traversal, "a.keras", ()),
    "many values, packed": Hostile(_many_values, "a.keras", (*_READ, *_LOADED)),
    "many values": Hostile(_stored_values, "a.weights.h5", _READ),
    "deep manifest": Hostile(_raw_manifest(lambda: b"[" * 1_000_000), "a.weights.h5", _READ),
    "deep extra": Hostile(
        _raw_manifest(
            lambda: (
                b'{"digest":"","manifest":{"format_version":1,"extra":'
                + b'{"a":' * 900
                + b"1"
                + b"}" * 900
                + b"}}"
            )
        ),
        "a.weights.h5",
        _READ,
    ),
    "long number": Hostile(
        _raw_manifest(
            lambda: b'{"digest":"","manifest":{"format_version":' + b"9" * 100_000 + b"}}"
        ),
        "a.weights.h5",
        _READ,
    ),
    "manifest longer than the file": Hostile(
        lambda path: (
            path.write_bytes(b"x" * 100 + b"\xff" * 7 + b"\x7f" + b"keras_safe_ckpt1") and None
        ),
        "a.weights.h5",
        _READ,
    ),
    "array beyond the file": Hostile(
        _manifest_of(**_array(shape=[1 << 40])), "a.weights.h5", _READ
    ),
    "array of too many dimensions": Hostile(
        _manifest_of(**_array(shape=[2] * 500_000)), "a.weights.h5", _READ
    ),
    "array of objects": Hostile(_manifest_of(**_array(dtype="|O")), "a.weights.h5", _READ),
    "dtype without end": Hostile(
        _manifest_of(**_array(dtype="f4," * 1_000_000)), "a.weights.h5", _READ
    ),
    "dtype of a terabyte": Hostile(
        _manifest_of(**_array(dtype=f"({1 << 30},)f8")), "a.weights.h5", _READ
    ),
    "arrays in each other": Hostile(
        _manifest_of(
            arrays={
                str(number): {"shape": [900], "dtype": "|u1", "digest": "", "offset": number % 90}
                for number in range(20_000)
            }
        ),
        "a.weights.h5",
        _READ,
    ),
    "time without end": Hostile(_manifest_of(wall_time=1e300), "a.weights.h5", _READ),
    "sequence beyond numbers": Hostile(_manifest_of(sequence=1 << 70), "a.weights.h5", _READ),
    "pipe": Hostile(_fifo, "a.weights.h5", ("verify", "show")),
    "pipe, archive": Hostile(_fifo, "a.keras", ("verify", "show")),
    "link to elsewhere": Hostile(
        lambda path: path.symlink_to(path.parent.parent / SECRET), "a.weights.h5", ("verify",)
    ),
}


# HDF5 files for a merge, or left by a writer.


def _texts_of_one(count: int, *, attribute: bool, shape: tuple[int, ...] | None = None) -> Any:
    """So many references to one text of a megabyte."""

    def make(path: Path) -> None:
        marker = b"the only text " * 75_000
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset("x", (1,), "f8")
            texts = np.array([marker, *[b"."] * (count - 1)], object).reshape(shape or (count,))
            if attribute:
                dataset.attrs.create("a", texts, dtype=h5py.string_dtype())
            else:
                file.create_dataset("t", data=texts, dtype=h5py.string_dtype())
        data = path.read_bytes()
        first = data.index(struct.pack("<I", len(marker)))
        one = data[first : first + 16]
        path.write_bytes(data[:first] + one * count + data[first + 16 * count :])

    return make


def _late_texts(path: Path) -> None:
    """First short ones, so that many are read at once, then the long one again and again."""
    _texts_of_one(60_000, attribute=False)(path)
    data = path.read_bytes()
    with h5py.File(path) as file:
        start = file["t"].id.get_offset()
    nothing = bytes(16)
    path.write_bytes(data[:start] + nothing * 30_000 + data[start + 16 * 30_000 :])


def _records_of_texts(path: Path) -> None:
    marker = b"the only text " * 75_000
    kind = np.dtype([("a", h5py.string_dtype()), ("n", "i8")])
    rows = np.zeros(20_000, kind)
    rows["a"] = b"."
    rows[0]["a"] = marker
    with h5py.File(path, "w") as file:
        offset = file.create_dataset("t", data=rows).id.get_offset()
    data = path.read_bytes()
    path.write_bytes(data[:offset] + data[offset : offset + 24] * 20_000 + data[offset + 480_000 :])


def _packed_chunk(times: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        packer = zlib.compressobj(1)
        data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(350)) + packer.flush()
        with h5py.File(path, "w") as file:
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_chunk((1_000_000,))
            for _ in range(times):
                creation.set_deflate(9)
                data = data if times == 1 else zlib.compress(data, 9)
            space = h5py.h5s.create_simple((1_000_000,))
            made = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, creation)
            made.write_direct_chunk((0,), data)

    return make


def _deep_groups(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(3000):
            group = group.create_group("g")
        group["x"] = [1.0]


def _group_of_itself(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name in "abcdefgh":
            file[name] = file["/"]


def _large_single(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (), "S500000000")
        file["room"] = np.random.default_rng(0).integers(0, 256, 1_000_000, "u1")


_MERGED = ("merge", "merge virtual", "merge sorted")

HDF5: dict[str, Hostile] = {
    "attribute of one text": Hostile(
        _texts_of_one(2000, attribute=True), "worker-00000.h5", _MERGED
    ),
    "rows of one text": Hostile(
        _texts_of_one(20_000, attribute=False), "worker-00000.h5", ("merge",)
    ),
    "one row of one text": Hostile(
        _texts_of_one(20_000, attribute=False, shape=(1, 20_000)), "worker-00000.h5", ("merge",)
    ),
    "rows of one text, later": Hostile(_late_texts, "worker-00000.h5", ("merge",)),
    "records of one text": Hostile(_records_of_texts, "worker-00000.h5", ("merge",)),
    "packed chunk": Hostile(_packed_chunk(1), "worker-00000.h5", _MERGED),
    "chunk packed twice": Hostile(_packed_chunk(2), "worker-00000.h5", _MERGED),
    "deep groups": Hostile(_deep_groups, "worker-00000.h5", (*_MERGED, "recover")),
    "group of itself": Hostile(_group_of_itself, "worker-00000.h5", (*_MERGED, "recover")),
    "large single value": Hostile(_large_single, "worker-00000.h5", (*_MERGED, "recover")),
    "no HDF5": Hostile(
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\xff" * 3000) and None,
        "worker-00000.h5",
        (*_MERGED, "recover"),
    ),
    "pipe": Hostile(_fifo, "worker-00000.h5", _MERGED),
}


# What a writer has left: a file and its journal.


def _journal(size: int, note: bytes, pages: bytes) -> bytes:
    sizes = b"".join(one.to_bytes(8, "little") for one in (size, len(note), len(pages)))
    return b"kscj0001" + sizes + xxhash.xxh3_64_digest(sizes + note + pages) + note + pages


def _journaled(size: int, *pages: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(bytes(10_000))
        content = b"".join(page.to_bytes(8, "little") + bytes(4096) for page in pages)
        path.with_name(f"{path.name}.journal").write_bytes(_journal(size, b"", content))

    return make


def _sparse_journal(path: Path) -> None:
    path.write_bytes(bytes(10_000))
    with open(path.with_name(f"{path.name}.journal"), "wb") as file:
        file.write(b"kscj0001")
        file.truncate(4 << 30)


_LEFT = ".worker-00000.h5.unfinished"

JOURNALS: dict[str, Hostile] = {
    "page beyond numbers": Hostile(_journaled(10_000, (1 << 64) - 1), _LEFT, ("recover", "rescue")),
    "page far behind": Hostile(_journaled(10_000, 1 << 40), _LEFT, ("recover", "rescue")),
    "size beyond numbers": Hostile(_journaled((1 << 64) - 1, 0), _LEFT, ("recover", "rescue")),
    "size of a petabyte": Hostile(_journaled(1 << 50, 0), _LEFT, ("recover", "rescue")),
    "sparse": Hostile(_sparse_journal, _LEFT, ("recover", "rescue")),
}


# TFRecord files.


def head(length: int) -> bytes:
    encoded = struct.pack("<Q", length)
    return encoded + masked(encoded)


def _lengths_in_each_other(path: Path) -> None:
    """Each says that it reaches to the end, so that each is read up to there to be refused."""
    size, step = 3_000_000, 24
    data = bytearray(size)
    for place in range(1, size - 100, step):
        data[place : place + 12] = head(size - place - 16)
    path.write_bytes(bytes(data))


def _good_and_endless(path: Path) -> None:
    """A good record, one that reaches to the end and is bad, a good one, ..."""
    size = 3_000_000
    data, good = bytearray(), framed(b"good")
    while len(data) < size - 1000:
        data += good
        data += head(size - len(data) - 16 - 5)
    path.write_bytes(bytes(data.ljust(size, b"\0")))


def _good_and_bad(path: Path) -> None:
    path.write_bytes((framed(b"a") + b"x") * 3000)


def _packed_zeros(path: Path) -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    data = b"".join(packer.compress(bytes(1 << 20)) for _ in range(350))
    path.write_bytes(data + packer.flush())


def _packed_claim(path: Path) -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    data = packer.compress(head((1 << 31) - 1))
    data += b"".join(packer.compress(bytes(1 << 20)) for _ in range(60))
    path.write_bytes(data + packer.flush())


def _empty_members(path: Path) -> None:
    path.write_bytes(zlib.compressobj(9, zlib.DEFLATED, 31).flush() * 10_000)


_CHECKED = ("verify_tfrecord", "split")

RECORDS: dict[str, Hostile] = {
    "lengths in each other": Hostile(_lengths_in_each_other, "r", (*_CHECKED, "repair")),
    "good and endless": Hostile(_good_and_endless, "r", (*_CHECKED, "repair")),
    "good and bad": Hostile(_good_and_bad, "r", _CHECKED),
    "packed zeros": Hostile(_packed_zeros, "r", _CHECKED),
    "packed claim": Hostile(_packed_claim, "r", ("verify_tfrecord",)),
    "empty members": Hostile(_empty_members, "r", ()),
    "length of an exabyte": Hostile(
        lambda path: path.write_bytes(head(1 << 60) + bytes(100)) and None,
        "r",
        _CHECKED,
        ("locked dataset",),
    ),
    "length beyond offsets": Hostile(
        lambda path: path.write_bytes(head((1 << 63) - 16) + bytes(100)) and None,
        "r",
        _CHECKED,
        ("locked dataset",),
    ),
    "length of two gigabytes": Hostile(
        lambda path: path.write_bytes(head((1 << 31) - 1) + bytes(100)) and None, "r", _CHECKED
    ),
    "pipe": Hostile(_fifo, "r", _CHECKED),
}


# Checkpoints of TensorFlow.


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def entry(shared: int, rest: bytes, value: bytes) -> bytes:
    return varint(shared) + varint(len(rest)) + varint(len(value)) + rest + value


def block_of(entries: bytes) -> bytes:
    data = entries + struct.pack("<II", 0, 1)
    return data + b"\0" + struct.pack("<I", masked_number(extended(0, data + b"\0")))


def table(entries: bytes, handles: int = 1) -> bytes:
    """A block of these entries, to which so many handles lead."""
    block = block_of(entries)
    handle = varint(0) + varint(len(block) - 5)
    outer = block_of(b"".join(entry(0, b"k", handle) for _ in range(handles)))
    footer = (varint(0) * 2 + varint(len(block)) + varint(len(outer) - 5)).ljust(40, b"\0")
    return block + outer + footer + struct.pack("<Q", 0xDB4775248B80FB57)


_ONE_SHARD = entry(0, b"", b"\x08\x01")


def _bundle(index: Callable[[], bytes], data: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(index())
        path.with_name("ckpt-1.data-00000-of-00001").write_bytes(data)

    return make


def _tensor(size: int, dtype: int = 1, shape: bytes = b"") -> bytes:
    return b"\x08" + varint(dtype) + b"\x12" + varint(len(shape)) + shape + b"\x28" + varint(size)


def _same_tensors(path: Path) -> None:
    """Each is all of the data file, with the right checksum."""
    data = bytes(1 << 20)
    checksum = struct.pack("<BI", 6 << 3 | 5, masked_number(extended(0, data)))
    tensors = (
        entry(0, f"{number:05d}".encode(), _tensor(len(data)) + checksum)
        for number in range(20_000)
    )
    _bundle(lambda: table(_ONE_SHARD + b"".join(tensors)), data)(path)


def _piped_data(path: Path) -> None:
    path.write_bytes(table(_ONE_SHARD))
    os.mkfifo(path.with_name("ckpt-1.data-00000-of-00001"))


_SHOWN = ("verify bundle", "show bundle")

BUNDLES: dict[str, Hostile] = {
    "one block many times": Hostile(
        _bundle(lambda: table(_ONE_SHARD + entry(0, b"t", _tensor(0)) * 20_000, 20_000)),
        "ckpt-1.index",
        _SHOWN,
    ),
    "keys without end": Hostile(
        _bundle(
            lambda: table(
                _ONE_SHARD
                + entry(0, b"k" * 200_000, _tensor(0))
                + entry(200_000, b"", _tensor(0)) * 20_000
            )
        ),
        "ckpt-1.index",
        _SHOWN,
    ),
    "all tensors are the same": Hostile(_same_tensors, "ckpt-1.index", _SHOWN),
    "dimensions without end": Hostile(
        _bundle(
            lambda: table(
                _ONE_SHARD
                + entry(0, b"t", _tensor(3, 7, (b"\x12\x0a\x08" + varint((1 << 63) - 1)) * 20_000))
            ),
            bytes(3),
        ),
        "ckpt-1.index",
        _SHOWN,
    ),
    "texts without end": Hostile(
        _bundle(
            lambda: table(
                _ONE_SHARD
                + entry(0, b"t", _tensor(1000, 7, b"\x12\x0a\x08" + varint((1 << 63) - 1)))
            ),
            bytes(1000),
        ),
        "ckpt-1.index",
        ("verify bundle",),
    ),
    "a hundred thousand files": Hostile(
        _bundle(lambda: table(entry(0, b"", b"\x08" + varint(99_999)))), "ckpt-1.index", _SHOWN
    ),
    "pipe": Hostile(_fifo, "ckpt-1.index", ("verify bundle",)),
    "pipe with data": Hostile(_piped_data, "ckpt-1.index", ("verify bundle",)),
    "long state": Hostile(
        lambda path: (
            path.write_bytes(b'model_checkpoint_path: "' + b"a" * (60 << 20) + b'"\n') and None
        ),
        "checkpoint",
        (),
    ),
    "piped state": Hostile(_fifo, "checkpoint", ()),
}


# Logs, locks and feeds.


def _event(**facts: Any) -> bytes:
    return json.dumps({"event": "save", "time": 1.0, "host": "h", "pid": 1, **facts}).encode()


OTHERS: dict[str, Hostile] = {
    "deep event": Hostile(
        lambda path: path.write_bytes(_event() + b"\n" + b"[" * 500_000) and None,
        "events.jsonl",
        (),
    ),
    "event without end": Hostile(
        lambda path: path.write_bytes(_event() + b"\n" + b'{"a":"' + b"x" * (30 << 20)) and None,
        "events.jsonl",
        (),
    ),
    "events of nonsense": Hostile(
        lambda path: (
            path.write_bytes(
                b"\n".join(
                    _event(**{key: value})
                    for key in ("time", "pid", "step", "bytes", "file", "error", "started", "host")
                    for value in (-1, 1e308, 10**400, None, [], {}, "\ud800", "\x1b[2J", True)
                )
            )
            and None
        ),
        "events.jsonl",
        (),
    ),
    "piped events": Hostile(_fifo, "events.jsonl", ("report",)),
    "lock of nonsense": Hostile(
        lambda path: (
            path.write_bytes(
                b'{"host": "\\u001b[2J", "pid": 1, "worker": "0", "since": "x", "mode": "y"}'
            )
            and None
        ),
        ".a.weights.h5.lock",
        (),
    ),
    "lock of a number": Hostile(
        lambda path: (
            path.write_bytes(
                b'{"host": "%s", "pid": %s, "worker": null, "since": "x", "mode": "y"}'
                % (os.uname().nodename.encode(), b"9" * 300)
            )
            and None
        ),
        ".a.weights.h5.lock",
        (),
    ),
    "deep lock": Hostile(
        lambda path: path.write_bytes(b"[" * (30 << 20)) and None, ".a.weights.h5.lock", ()
    ),
}
